"""Parts of ``benchmarks/planner.py``, one module each."""
