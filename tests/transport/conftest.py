"""Starts the programs in ``programs.py`` as ranks: real processes that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs.py")
WATCHDOG_S = 60.0


class Job:
    """Some ranks of one program; nothing outlives the test that started them.

    Args:
        folder: where the ranks write what they print.
        program: name of a function in ``programs.py``.
        num_ranks: how many processes run it.
        arguments: further keyword arguments of the program.
    """

    def __init__(self, folder: Path, program: str, num_ranks: int, arguments: dict[str, Any]):
        self._folder = folder
        # Forked from a server that has torch loaded: a rank starts in a moment.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch.testing"])
        folder.mkdir()
        self._processes = []
        for rank in range(num_ranks):
            job = {
                "program": program,
                "folder": str(folder),
                "rank": rank,
                "num_ranks": num_ranks,
                "arguments": arguments,
            }
            process = context.Process(
                target=runpy.run_path,
                args=(str(PROGRAMS),),
                kwargs={"init_globals": {"JOB": job}, "run_name": "__main__"},
            )
            process.start()
            self._processes.append(process)

    def await_mark(self, rank: int, mark: str) -> None:
        """Wait until the rank has called ``mark(text)``."""
        end = time.monotonic() + WATCHDOG_S
        path = self._folder / f"{rank}.mark.{mark}"
        while not path.exists():
            assert time.monotonic() < end, f"rank {rank} did not get to {mark}: {self.text(rank)}"
            assert self._processes[rank].is_alive(), f"rank {rank} ended: {self.text(rank)}"
            time.sleep(0.02)

    def mark(self, rank: int, mark: str) -> None:
        """Set a mark in the place of a rank."""
        (self._folder / f"{rank}.mark.{mark}").touch()

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.pid(rank), number)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def text(self, rank: int) -> str:
        """Return what a rank wrote to stdout and stderr."""
        return (self._folder / f"{rank}.txt").read_text()

    def status(self, rank: int, limit_s: float = WATCHDOG_S) -> int:
        """Wait for the end of a rank and return its exit status, negative for a signal."""
        process = self._processes[rank]
        process.join(limit_s)
        status = process.exitcode
        assert status is not None, f"rank {rank} runs on after {limit_s:g} s: {self.text(rank)}"
        return status

    def results(self) -> list[Any]:
        """Wait until all ranks succeeded and return what their programs returned."""
        for rank in range(len(self._processes)):
            status = self.status(rank)
            assert status == 0, f"rank {rank} ended with {status}: {self.text(rank)}"
        return [self.result(rank) for rank in range(len(self._processes))]

    def result(self, rank: int) -> Any:
        """Return what the program of one rank returned."""
        return json.loads((self._folder / f"{rank}.json").read_text())

    def stop(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """A function ``(program, num_ranks, **arguments)`` that starts a job."""
    jobs: list[Job] = []

    def start_job(program: str, num_ranks: int, **arguments: Any) -> Job:
        job = Job(tmp_path / f"job{len(jobs)}", program, num_ranks, arguments)
        jobs.append(job)
        return job

    yield start_job
    for job in jobs:
        job.stop()
