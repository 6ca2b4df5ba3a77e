"""Parts of ``benchmarks/transport.py``: two processes, links between them, memory copies, steps."""
