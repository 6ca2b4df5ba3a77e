"""Contains parts of ``benchmarks/transport.py``: processes, links, memory copies, and steps."""
