"""Signals and the time limit stop all ranks at the same iteration."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.engine.stop import StopRequest

WATCHDOG_S = 60.0
RANKS = """
import json, os, random, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from megatron.adaptive.errors import PeerLostError
from megatron.adaptive.engine.stop import StopRequest

how, folder, rank, num_ranks, minutes = JOB
folder = Path(folder)
output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
os.dup2(output, 1)
os.dup2(output, 2)
store = dist.FileStore(str(folder / "store"), num_ranks)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=40)
)

def mark(name):
    (folder / f"{name}.{rank}").touch()

def await_mark(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def loop(stop):
    # Ranks of very different pace, which meet nowhere but in agreed().
    rng = random.Random(rank)
    for iteration in range(100_000):
        if stop.agreed(dist.group.WORLD):
            return [iteration, stop.reason]
        if iteration == 3:
            mark("runs")
        time.sleep(0.02 * rng.random() * rank)
    return None

def lost(stop):
    try:
        return loop(stop)
    except PeerLostError as error:
        return str(error)

def late(stop):
    # Rank 0 asks and goes on though nobody else has asked yet.
    seen = []
    for iteration in range(3):
        if rank == 1:
            await_mark(f"asked{iteration}.0")
        seen.append(stop.agreed(dist.group.WORLD))
        mark(f"asked{iteration}")
        if rank == 0:
            await_mark(f"asked{iteration}.1")
    return [*seen, stop.finish(), stop.reason]

def last(stop):
    # Asked for before the last boundary: nobody stops there, but the end tells.
    if rank == 1:
        os.kill(os.getpid(), 15)
    seen = [stop.agreed(dist.group.WORLD), stop.reason]
    dist.barrier()
    return [*seen, stop.finish(), stop.finish(), stop.reason]

with StopRequest(minutes) as stop:
    result = globals()[how](stop)
(folder / f"{rank}.json").write_text(json.dumps(result))
if how == "lost":
    os._exit(0)  # a broken group cannot be taken down
dist.destroy_process_group()
"""


class Ranks:
    """Processes that run one function of the script above."""

    def __init__(self, folder: Path, how: str, minutes: Sequence[float]) -> None:
        self.folder = folder
        script = folder / "ranks.py"
        script.write_text(RANKS)
        # Forked from a server that has torch loaded: a rank starts in a moment.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch.testing"])
        self.processes = []
        for rank, limit in enumerate(minutes):
            job = (how, str(folder), rank, len(minutes), limit)
            process = context.Process(
                target=runpy.run_path, args=(str(script),), kwargs={"init_globals": {"JOB": job}}
            )
            process.start()
            self.processes.append(process)

    def await_all_running(self) -> None:
        end = time.monotonic() + WATCHDOG_S
        marks = [self.folder / f"runs.{rank}" for rank in range(len(self.processes))]
        while not all(mark.exists() for mark in marks):
            assert time.monotonic() < end
            time.sleep(0.02)

    def result(self, rank: int) -> Any:
        self.processes[rank].join(WATCHDOG_S)
        text = (self.folder / f"{rank}.txt").read_text()
        assert self.processes[rank].exitcode == 0, text
        return json.loads((self.folder / f"{rank}.json").read_text())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """A function ``(how, *minutes)`` that starts a rank for each time limit."""
    jobs: list[Ranks] = []

    def start_ranks(how: str, *minutes: float) -> Ranks:
        jobs.append(Ranks(tmp_path, how, minutes))
        return jobs[-1]

    yield start_ranks
    for job in jobs:
        for process in job.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_is_only_noted(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.agreed(None)
        assert not stop.requested_locally
        os.kill(os.getpid(), number)
        assert stop.requested_locally
        assert stop.reason is None
        assert stop.agreed(None)
        assert stop.agreed(None)
        assert stop.reason == f"signal {number.name}"
        assert stop.finish()


def test_second_interrupt_ends_at_once() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested_locally
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_given_back() -> None:
    def mine(*_: object) -> None:
        pass

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, mine)
    try:
        handlers = [signal.getsignal(number) for number in numbers]
        stop = StopRequest()
        assert signal.getsignal(signal.SIGUSR1) is not mine
        stop.close()
        stop.close()
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("minutes", "reason"), [(None, None), (30, None), (0, "time limit of 0 minutes")]
)
def test_time_limit_of_one_process(minutes: float | None, reason: str | None) -> None:
    with StopRequest(minutes) as stop:
        assert stop.agreed(None) == (reason is not None)
        assert stop.reason == reason
        assert stop.finish() == (reason is not None)


@pytest.mark.multiprocess
def test_signal_to_one_rank_stops_all_at_one_iteration(start: Callable[..., Ranks]) -> None:
    ranks = start("loop", 30, 30, 30)
    ranks.await_all_running()
    pid = ranks.processes[2].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    results = [ranks.result(rank) for rank in range(3)]
    assert results[1:] == results[:1] * 2
    assert results[0][1] == "signal SIGTERM"


@pytest.mark.multiprocess
def test_clock_that_is_first_stops_all(start: Callable[..., Ranks]) -> None:
    """Ranks open their requests at different times; a limit of 0 here stands for the earliest."""
    ranks = start("loop", 30, 0, 30)
    results = [ranks.result(rank) for rank in range(3)]
    assert [iteration for iteration, _ in results] == [1, 1, 1]


@pytest.mark.multiprocess
def test_asking_waits_for_no_rank_that_is_one_boundary_behind(
    start: Callable[..., Ranks],
) -> None:
    ranks = start("late", 30, 30)
    assert [ranks.result(rank) for rank in range(2)] == [[False, False, False, False, None]] * 2


@pytest.mark.multiprocess
def test_request_before_the_last_boundary_is_told_at_the_end(start: Callable[..., Ranks]) -> None:
    ranks = start("last", 30, 30)
    expected = [False, None, True, True, "signal SIGTERM"]
    assert [ranks.result(rank) for rank in range(2)] == [expected] * 2


@pytest.mark.multiprocess
def test_killed_rank_is_an_error_of_the_others(start: Callable[..., Ranks]) -> None:
    ranks = start("lost", 30, 30)
    ranks.await_all_running()
    ranks.processes[1].kill()
    result = ranks.result(0)
    assert result.startswith("a rank went away while all agreed whether to stop: ")
    assert "\n" not in result
