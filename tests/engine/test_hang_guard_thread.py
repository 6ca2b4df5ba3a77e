"""Tests the thread that reports what a rank is doing to the hang detector."""

from __future__ import annotations

import os
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.adaptive.engine import hang_guard
from megatron.adaptive.engine.hang_guard import HangGuard


def test_the_reporting_thread_makes_the_processs_gpu_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the thread does this before it asks the GPU which actions have finished."""
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
    # Read only after the test has set the function.
    ready = threading.Event()
    accelerator = types.SimpleNamespace(
        make_current=lambda: (events.append(threading.current_thread().name), ready.wait(60))
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
