"""Contains benchmarks. The docstring of each program explains how to run it."""
