"""Tests what a rank reports to the hang detector about waits for its GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.adaptive.engine.hang_guard import HangGuard


def inside(module: str) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that calls its argument, and seems to be defined in ``module``."""
    content: dict[str, Any] = {"__name__": module}
    exec("def run(call):\n    return call()", content)
    run: Callable[[Callable[[], Any]], Any] = content["run"]
    return run


def read_value(call: Callable[[], Any]) -> Any:
    return SimpleNamespace(item=call).item()


def compute(call: Callable[[], Any]) -> Any:
    return call()


@pytest.mark.parametrize(
    ("run", "is_cuda", "iterations", "spins"),
    [
        (inside("torch.cuda"), True, 4, True),
        (inside("torch.cuda.streams"), True, 4, True),
        (inside("torch.distributed.distributed_c10d"), True, 4, True),
        (read_value, True, 4, True),
        (inside("torch.distributed.fsdp"), True, 4, False),
        (compute, True, 4, False),
        # These waits do not count as spinning: those in the first iterations may be long, and those
        # without a GPU use no processor time.
        (inside("torch.cuda"), True, 2, False),
        (inside("torch.cuda"), False, 4, False),
    ],
)
def test_a_rank_says_that_it_waits_for_its_gpu(
    run: Callable[[Callable[[], Any]], Any],
    is_cuda: bool,
    iterations: int,
    spins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    job: Any = SimpleNamespace(
        rank=0, places=[{"machine": "m", "pid": 1}], accelerator=SimpleNamespace(is_cuda=is_cuda)
    )
    guard = HangGuard(job, after_s=None, on_hang="report", page_folder=None)
    # The numbers do not begin with 1, as after a resumed run.
    for number in range(iterations):
        guard.snapshot = lambda number=number: {"iteration": 812 + number}  # type: ignore[misc]
        guard._read()
    lock = threading.Lock()
    lock.acquire()
    reports: list[dict[str, Any]] = []

    def report() -> None:
        reports.append(guard._read())
        lock.release()

    # The main thread blocks in C code, while another thread calls the function.
    timer = threading.Timer(0.2, report)
    timer.start()
    run(lock.acquire)
    timer.join()
    assert reports[0]["spins"] is spins
