"""Checks a machine with a GPU; docs/gpu_check.md describes how to run the check.

Only the module ``steps`` needs installed packages; the other modules need only Python.
"""
