"""Parts of ``tests/soak/faults.py``: damaged checkpoints, strangers, lost nodes, full disks."""
