"""Two processes that take commands, see ``worker.py``, and the libraries that can start such."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from benchmarks.ranks import environment
from benchmarks.report import ROOT

START_S = 120.0
INSTALL = "bash prerequisite.sh --benchmarks"
# `any`: by itself Open MPI takes UCX only where there is an RDMA device.
_UCX = "--mca opal_common_ucx_tls any --mca opal_common_ucx_devices any"
PEERS = {"mpi": "--mca pml ob1 --mca btl self,vader", "ucx": f"--mca pml ucx {_UCX}"}
"""Open MPI's ways through shared memory, by the options that choose them."""


class PairError(RuntimeError):
    """A process of a pair failed, or did not answer in time."""


def find_peers() -> tuple[dict[str, list[str]], str]:
    """Return commands that start two processes of each peer, and why others cannot."""
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        return {}, f"no mpiexec: {INSTALL}"
    if importlib.util.find_spec("mpi4py") is None:
        return {}, f"no mpi4py: {INSTALL}"
    said = subprocess.run(
        [mpiexec, "--version"], capture_output=True, text=True, check=False, timeout=30
    ).stdout
    if "Open MPI" not in said and "OpenRTE" not in said:
        return {}, f"{mpiexec} is not Open MPI, which this benchmark knows: {INSTALL}"
    start = [mpiexec, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    start += "--oversubscribe --bind-to none -n 2".split()
    start += "--mca btl_base_warn_component_unused 0".split()
    return {name: [*start, *words.split()] for name, words in PEERS.items()}, ""


class Pair:
    """Two processes of one library.

    Args:
        name: for messages.
        cores: their processors.
        copies: compiled ``copies.c``, if there is one.
        pool_bytes: least size of a pool of cold memory.
        launcher: command that starts the two processes with MPI; without one they are started here
            with torch.
    """

    def __init__(
        self,
        name: str,
        *,
        cores: tuple[int, int],
        copies: Path | None,
        pool_bytes: int,
        launcher: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="transport-benchmark-")
        address = f"{self._folder.name}/socket"
        self._log = Path(self._folder.name, "log")
        command = [
            *(sys.executable, "-m", "benchmarks.channels.worker", "--address", address),
            *("--family", "mpi" if launcher else "torch", "--cpus", *map(str, cores)),
            *("--pool-bytes", str(pool_bytes)),
            *(("--copies", str(copies)) if copies else ()),
        ]
        jobs = [[*launcher, *command]] if launcher else [[*command, "--rank", r] for r in "01"]
        self._members: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        with (
            Listener(address, family="AF_UNIX", backlog=2) as listener,
            self._log.open("wb") as log,
        ):
            self._processes = [
                subprocess.Popen(
                    job,
                    cwd=ROOT,
                    env=environment(),
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

    @property
    def is_gone(self) -> bool:
        """Whether the processes have ended."""
        return not self._members

    def call(
        self, module: str, function: str, *, limit_s: float = 120.0, **arguments: Any
    ) -> list[Any]:
        """Run a function in both processes; returns what each returned.

        Raises:
            PairError: it failed in one, or took too long; the pair is gone then.
        """
        try:
            for member in self._members.values():
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
        for member in self._members.values():
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
        for member in self._members.values():
            member.close()
        self._members = {}
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._folder.cleanup()

    def _accept(self, listener: Listener) -> None:
        """Wait for both; a process that has connected answers when the other one has, too."""
        end = time.monotonic() + START_S
        while len(self._members) < 2:
            # Listener has no deadline of its own.
            if not wait([listener._listener._socket], 1.0):  # type: ignore[attr-defined]
                if any(process.poll() is not None for process in self._processes):
                    raise self._failed("a process ended at once")
                if time.monotonic() > end:
                    raise self._failed(f"no answer within {START_S:g} s")
                continue
            connection = listener.accept()
            if not connection.poll(max(0.0, end - time.monotonic())):
                raise self._failed(f"no answer within {START_S:g} s")
            try:
                rank, pid, error = connection.recv()
            except EOFError:
                raise self._failed("a process ended at once") from None
            if error is not None:
                raise self._failed(error.strip().splitlines()[-1])
            self._members[rank], self.pids[rank] = connection, pid

    def _answers(self, what: str, limit_s: float) -> list[Any]:
        end = time.monotonic() + limit_s
        waiting = {connection: rank for rank, connection in self._members.items()}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failed(f"{what} took more than {limit_s:g} s")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    fine, answer = self._members[rank].recv()
                except (EOFError, OSError):
                    raise self._failed(f"rank {rank} ended in {what}") from None
                if not fine:
                    print(answer, file=sys.stderr)
                    why = answer.strip().splitlines()[-1]
                    raise self._failed(f"{what} failed on rank {rank}: {why}")
                answers[rank] = answer
        return [answers[0], answers[1]]

    def _failed(self, reason: str) -> PairError:
        """Kill what is left; returns the error to raise."""
        said = self._log.read_text(errors="replace")[-2000:].strip() if self._log.exists() else ""
        self.kill()
        return PairError(f"{self.name}: {reason}" + (f"; it said: {said}" if said else ""))
