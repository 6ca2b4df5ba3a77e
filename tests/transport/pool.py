"""Runs the programs of the transport tests in pools of worker processes.

Starting a process takes longer than most programs, so the processes of a pool stay alive for a
whole test module. A pool cannot be used again after a worker has failed, hung, or been killed. If a
pool has a folder, each worker runs only one program, and tests can read its output and exit status.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .contract_rank import Rank

WATCHDOG_S = 60.0


class Pool:
    """Holds worker processes and the store that connects them.

    Args:
        size: Number of workers.
        folder: Folder for the output of the workers, or ``None``. With a folder, each worker runs
            only one program.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = folder
        self._calls = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.testing", "tests.transport.contract"])
        self._connections: list[Connection] = []
        self._processes = []
        for worker in range(size):
            connection, worker_end = context.Pipe()
            output = None if folder is None else folder / f"{worker}.txt"
            arguments = (worker_end, self._store.port, output)
            process = context.Process(target=run_calls, args=arguments, daemon=True)
            process.start()
            worker_end.close()
            self._connections.append(connection)
            self._processes.append(process)

    @property
    def is_whole(self) -> bool:
        """Returns whether all worker processes are alive."""
        return all(process.is_alive() for process in self._processes)

    def run(self, program: str, num_ranks: int, **arguments: Any) -> list[Any]:
        """Runs ``program`` on the first ``num_ranks`` workers, and returns their results."""
        self.start(program, range(num_ranks), **arguments)
        return [self.result(rank) for rank in range(num_ranks)]

    def start(self, program: str, workers: Sequence[int], **arguments: Any) -> None:
        """Starts ``program`` on ``workers``. The first worker becomes rank 0, and so on.

        Args:
            program: Module in this folder and function, as ``module.function``.
            workers: Indices of the workers.
            arguments: Arguments of the program after its :class:`Rank`.
        """
        self._calls += 1
        for rank, worker in enumerate(workers):
            job = (program, rank, len(workers), f"call-{self._calls}", arguments)
            self._connections[worker].send(job)

    def result(self, worker: int, limit_s: float = WATCHDOG_S) -> Any:
        """Waits up to ``limit_s`` seconds for the program on ``worker``, and returns its result."""
        connection = self._connections[worker]
        if not connection.poll(limit_s):
            self.stop()
            raise AssertionError(f"worker {worker} did not reply within {limit_s:g} s")
        try:
            kind, value = connection.recv()
        except EOFError:
            self.stop()
            raise AssertionError(f"worker {worker} exited: {self.text(worker)}") from None
        if kind == "failed":
            self.stop()  # The peers of the failed worker may wait for it, so kill all workers.
            raise AssertionError(f"worker {worker} failed:\n{value}")
        return value

    def status(self, worker: int, limit_s: float = WATCHDOG_S) -> int:
        """Waits up to ``limit_s`` seconds until ``worker`` exits, and returns its exit status.

        If a signal killed the worker, the status is the negative number of the signal.
        """
        process = self._processes[worker]
        process.join(limit_s)
        status = process.exitcode
        assert status is not None, f"worker {worker} is still running: {self.text(worker)}"
        return status

    def text(self, worker: int) -> str:
        """Returns the output of ``worker``, or an empty string if the pool has no folder."""
        path = None if self._folder is None else self._folder / f"{worker}.txt"
        return path.read_text() if path is not None and path.exists() else ""

    def await_mark(self, name: str) -> None:
        """Waits until a program of the latest :meth:`start` has set the mark ``name``."""
        key = f"call-{self._calls}/{name}"
        end_s = time.monotonic() + WATCHDOG_S
        while not self._store.check([key]):
            assert time.monotonic() < end_s, f"no rank set the mark {name}"
            time.sleep(0.005)

    def mark(self, name: str) -> None:
        """Sets the mark ``name``, for which programs of the latest :meth:`start` may wait."""
        self._store.set(f"call-{self._calls}/{name}", "set")

    def pid(self, worker: int) -> int:
        """Returns the process ID of ``worker``."""
        pid = self._processes[worker].pid
        assert pid is not None
        return pid

    def signal(self, worker: int, number: int = signal.SIGKILL) -> None:
        """Sends the signal ``number`` to ``worker``."""
        os.kill(self.pid(worker), number)

    def stop(self) -> None:
        """Kills all workers that are still alive."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10)


def run_calls(connection: Connection, port: int, output: Path | None) -> None:
    """Runs the programs that ``connection`` requests, and sends back their results.

    If ``output`` is a path, the output is written there, and only one program is run. The ranks of
    programs connect through the store on ``port``.
    """
    torch.set_num_threads(1)
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            program, rank, num_ranks, call, arguments = connection.recv()
        except EOFError:
            return
        try:
            module, _, function = program.rpartition(".")
            me = Rank(store, rank, num_ranks, call, connection)
            value = getattr(importlib.import_module(f"tests.transport.{module}"), function)(
                me, **arguments
            )
            me.finish()
            connection.send(("done", value))
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            raise SystemExit(1) from None
        if output is not None:
            return
