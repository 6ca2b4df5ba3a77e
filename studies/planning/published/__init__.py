"""Reads published profiles, clusters and measured runs, each from a folder of files."""
