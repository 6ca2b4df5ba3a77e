"""Command line programs, one file each."""
