"""Parts of ``studies/planner.py``, one module each."""
