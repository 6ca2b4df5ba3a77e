"""Two processes that take commands; see ``worker.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from .machine import Cores

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0


class PairError(RuntimeError):
    """A process of a pair failed, or did not answer in time."""


class Pair:
    """Two processes of one library.

    Args:
        name: for messages.
        family: ``torch`` or ``mpi``.
        cores: their processors.
        copies: compiled ``copies.c``, if there is one.
        pool_bytes: least size of a pool of cold memory.
        launcher: command that starts the two processes; without one they are started here.
        environment: variables on top of this process's.
    """

    def __init__(
        self,
        name: str,
        family: str,
        *,
        cores: Cores,
        copies: Path | None,
        pool_bytes: int,
        launcher: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="transport-benchmark-")
        address = f"{self._folder.name}/socket"
        self._log = Path(self._folder.name, "log")
        command = [
            *(sys.executable, "-m", "benchmarks.channels.worker", "--address", address),
            *("--family", family, "--cpus", str(cores.first), str(cores.second)),
            *("--pool-bytes", str(pool_bytes)),
            *(("--copies", str(copies)) if copies else ()),
        ]
        jobs = [[*launcher, *command]] if launcher else [[*command, "--rank", r] for r in "01"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._members: list[Connection] = []
        self.pids: list[int] = []
        with (
            Listener(address, family="AF_UNIX", backlog=2) as listener,
            self._log.open("wb") as log,
        ):
            self._processes = [
                subprocess.Popen(
                    job,
                    cwd=ROOT,
                    env={**variables, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for job in jobs
            ]
            try:
                self._accept(listener)
            except BaseException:
                self.kill()
                raise

    def call(
        self, module: str, function: str, *, limit_s: float = 120.0, **arguments: Any
    ) -> list[Any]:
        """Run a function in both processes; returns what each returned.

        Raises:
            PairError: it failed in one, or took too long; the pair is gone then.
        """
        try:
            for member in self._members:
                member.send((module, function, arguments))
        except OSError as error:
            raise self._failed(f"a process is gone ({error})") from error
        return self._answers(f"{module}.{function}", limit_s)

    def close(self) -> None:
        """End the processes in order.

        Raises:
            PairError: they did not end.
        """
        if not self._members:
            return
        for member in self._members:
            member.send(None)
        self._answers("close", 60.0)
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                raise self._failed("a process did not end") from None
        self.kill()

    def kill(self) -> None:
        """End the processes now."""
        for member in self._members:
            member.close()
        self._members = []
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._folder.cleanup()

    def _accept(self, listener: Listener) -> None:
        found: dict[int, tuple[Connection, int]] = {}
        end = time.monotonic() + START_S
        # Listener has no deadline of its own.
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while len(found) < 2:
            try:
                connection = listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise self._failed("a process ended at once") from None
                if time.monotonic() > end:
                    raise self._failed(f"no answer within {START_S:g} s") from None
                continue
            found[len(found)] = connection, 0
            self._members.append(connection)
        members: dict[int, Connection] = {}
        pids: dict[int, int] = {}
        for connection in self._members:
            if not connection.poll(max(0.0, end - time.monotonic())):
                raise self._failed(f"no answer within {START_S:g} s")
            rank, pid, error = connection.recv()
            if error is not None:
                raise self._failed(error.strip().splitlines()[-1])
            members[rank], pids[rank] = connection, pid
        self._members = [members[0], members[1]]
        self.pids = [pids[0], pids[1]]

    def _answers(self, what: str, limit_s: float) -> list[Any]:
        end = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        while len(answers) < 2:
            waiting = [m for rank, m in enumerate(self._members) if rank not in answers]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failed(f"{what} took more than {limit_s:g} s")
            for connection in ready:
                rank = self._members.index(connection)  # type: ignore[arg-type]
                try:
                    fine, answer = self._members[rank].recv()
                except (EOFError, OSError):
                    raise self._failed(f"rank {rank} ended in {what}") from None
                if not fine:
                    raise self._failed(f"{what} failed on rank {rank}: {answer}")
                answers[rank] = answer
        return [answers[0], answers[1]]

    def _failed(self, reason: str) -> PairError:
        """Kill what is left; returns the error to raise."""
        said = self._log.read_text(errors="replace")[-2000:].strip() if self._log.exists() else ""
        self.kill()
        return PairError(f"{self.name}: {reason}" + (f"; it said: {said}" if said else ""))
