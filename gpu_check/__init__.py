"""Checks whether this project works on a machine with a GPU. See ``docs/gpu_check.md``.

The module ``steps`` needs installed packages. The other modules need only Python.
"""
