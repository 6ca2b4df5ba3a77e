"""Converts text to token files, and provides each rank with microbatches from token files."""
