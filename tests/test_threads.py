"""Tests that each thread that uses a GPU first makes the GPU of its process current.

In a new thread, GPU 0 is current. If the thread did not change this, its first CUDA call would
create a context of about half a gigabyte on GPU 0, for each process of the node.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron" / "adaptive"
THREADS = ("Thread", "Worker", "ThreadPoolExecutor")

# These are all files that start threads, grouped by how their threads avoid using GPU 0.
MAKES_CURRENT = (
    "checkpoint/snapshots.py",
    "engine/hang_guard.py",
    "transport/native.py",
    "transport/nccl.py",
    "transport/staging.py",
)
TOUCHES_NO_DEVICE = {
    "checkpoint/snapshot_keeper.py": "bytes of sockets and files",
    "cluster/inventory.py": "figures of the node",
    "cluster/node_processes.py": "text of programs",
    "data/preprocess.py": "waits for a process",
    "engine/agreement.py": "decisions over gloo, on the host",
    "engine/folder_lease.py": "a counter in a file",
    "engine/rendezvous.py": "sockets and the store",
    "handshake.py": "bytes of sockets",
    "rebalance/time_limit.py": "simulates from numbers",
    "trace/clock.py": "times of sockets",
    "trace/otlp.py": "text for sockets",
    "training/loggers/prometheus_logger.py": "numbers of curves",
    "transport/gloo.py": "receives on the host; the executor copies to the device",
    "transport/liveness.py": "processes and the store",
    "transport/worker.py": "its callers give it a context",
}
OTHERWISE = {
    "engine/lanes.py": "sets a stream, which sets the stream's device",
    "trace/recorder.py": "calls a function that makes the GPU current",
}


def test_every_file_that_starts_threads_is_known() -> None:
    starting = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in THREADS:
                starting.add(path.relative_to(PACKAGE).as_posix())
    assert starting == {*MAKES_CURRENT, *TOUCHES_NO_DEVICE, *OTHERWISE}


def test_files_whose_threads_touch_a_device_make_it_current() -> None:
    for name in MAKES_CURRENT:
        assert "make_current" in (PACKAGE / name).read_text(), name


def test_files_whose_threads_touch_no_device_name_none() -> None:
    for name in TOUCHES_NO_DEVICE:
        assert "torch.cuda" not in (PACKAGE / name).read_text(), name
