"""Processes that run the programs of the contract suite one after the other.

To start a process takes longer than most programs: a pool keeps some alive for a whole module. A
worker that is killed, hangs or fails ends its pool.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

WORKER = Path(__file__).with_name("contract_worker.py")
WATCHDOG_S = 60.0


class Pool:
    """Some worker processes and the store that they meet in.

    Args:
        size: number of workers.
    """

    def __init__(self, size: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch.testing"])
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=runpy.run_path,
                args=(str(WORKER),),
                kwargs={
                    "init_globals": {"WORKER": (theirs, self._store.port)},
                    "run_name": "__main__",
                },
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    @property
    def is_whole(self) -> bool:
        """Whether all workers live."""
        return all(process.is_alive() for process in self._processes)

    def run(self, program: str, num_ranks: int, **arguments: Any) -> list[Any]:
        """Run a program on the first workers and return what each rank returned."""
        self.start(program, list(range(num_ranks)), **arguments)
        return [self.result(rank) for rank in range(num_ranks)]

    def start(self, program: str, workers: list[int], **arguments: Any) -> None:
        """Let some workers begin a program; they are its ranks, in this order."""
        self._calls += 1
        for rank, worker in enumerate(workers):
            job = (program, rank, len(workers), f"call-{self._calls}", arguments)
            self._connections[worker].send(job)

    def result(self, worker: int, limit_s: float = WATCHDOG_S) -> Any:
        """Wait for the end of the program on a worker and return what it returned."""
        connection = self._connections[worker]
        if not connection.poll(limit_s):
            self.stop()
            raise AssertionError(f"worker {worker} did not answer within {limit_s:g} s")
        try:
            kind, value = connection.recv()
        except EOFError:
            self.stop()
            raise AssertionError(f"worker {worker} ended") from None
        if kind == "failed":
            self.stop()  # its peers wait for it
            raise AssertionError(f"worker {worker} failed:\n{value}")
        return value

    def await_mark(self, name: str) -> None:
        """Wait until a program of the latest call has set this mark."""
        key = f"call-{self._calls}/{name}"
        end_s = time.monotonic() + WATCHDOG_S
        while not self._store.check([key]):
            assert time.monotonic() < end_s, f"nobody set the mark {name}"
            time.sleep(0.005)

    def mark(self, name: str) -> None:
        """Set a mark for the programs of the latest call."""
        self._store.set(f"call-{self._calls}/{name}", "set")

    def signal(self, worker: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker."""
        pid = self._processes[worker].pid
        assert pid is not None
        os.kill(pid, number)

    def stop(self) -> None:
        """Kill the workers."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10)
