"""Parts of ``benchmarks/trace.py``."""
