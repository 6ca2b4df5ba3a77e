"""Checks a machine with a GPU; ``scripts/gpu_check.sh`` runs it, docs/gpu_check.md describes it.

Only the module ``steps`` needs installed packages; the other modules need only Python.
"""
