"""Parts of ``benchmarks/faults.py``: damaged checkpoints, strangers, lost nodes, full disks."""
