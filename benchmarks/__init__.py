"""Benchmarks. The docstring of each program says how to run it."""
