"""Turns text into token files, and token files into the microbatches of every rank."""
