"""Check of a machine with a GPU; ``scripts/gpu_check.sh`` runs it, docs/gpu_check.md describes it.

Everything but ``steps`` needs nothing but Python itself.
"""
