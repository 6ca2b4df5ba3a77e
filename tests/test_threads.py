"""Tests that each thread that uses a GPU first makes the GPU of its process current.

In a new thread, GPU 0 is current. If the thread did not change this, its first CUDA call would
create a context of about half a gigabyte on GPU 0, for each process of the node.
"""

from __future__ import annotations

import ast
import os
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.adaptive.engine import hang_guard
from megatron.adaptive.engine.hang_guard import HangGuard

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


def test_the_thread_of_the_hang_guard_makes_the_processs_gpu_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the hang guard's thread selects the GPU before it reads the rank's state."""
    events: list[str] = []
    was_read = threading.Event()

    def read_state() -> dict[str, str]:
        events.append("read")
        was_read.set()
        return {}

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(HangGuard, "_start", lambda *_: None)
    monkeypatch.setattr(hang_guard.os, "access", lambda *_: False)
    monkeypatch.setattr(hang_guard.tempfile, "gettempdir", lambda: str(tmp_path))
    # Let the thread wait for ``ready``, so that it reads only after ``guard.snapshot`` is set.
    ready = threading.Event()
    accelerator = types.SimpleNamespace(
        is_cuda=True,
        make_current=lambda: (events.append(threading.current_thread().name), ready.wait(60)),
    )
    machine = {"machine": "m", "host": "m", "pid": os.getpid()}
    job: Any = types.SimpleNamespace(rank=1, places=[machine] * 2, accelerator=accelerator)
    guard = HangGuard(job, after_s=None, on_hang="report", page_folder=None)
    try:
        guard.snapshot = read_state
        ready.set()
        assert was_read.wait(60)
    finally:
        guard.close()
    assert events[:2] == ["hang-guard", "read"]
