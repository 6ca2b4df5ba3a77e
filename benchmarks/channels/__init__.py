"""Parts of ``benchmarks/transport.py``: two processes, the links between them, copies, a step."""
