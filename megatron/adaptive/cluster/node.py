"""Runs one node's processes: their output into the job's folder, their use sampled.

::

    <LOG_DIR>/<job>/run.json      the settings and who takes part
    <LOG_DIR>/<job>/<node>.out    what the node's processes print
    <LOG_DIR>/<job>/<node>.err    their errors and warnings
    <LOG_DIR>/<job>/<node>.gpu    what they use, sampled
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import psutil

from megatron.adaptive.cluster.command import (
    ROOT,
    NodePlace,
    in_container,
    node_command,
    run_record,
)
from megatron.adaptive.cluster.conf import LaunchConf
from megatron.adaptive.cluster.preflight import make_folder
from megatron.adaptive.cluster.sampler import Sampler

__all__ = ["EXIT_STOPPED_EARLY", "run_node"]

EXIT_STOPPED_EARLY = 75
"""A run that SIGUSR1 stopped in good order, as its time was nearly over: start it again."""

_STOPPED = re.compile(rb"^training ends: signal SIGUSR1")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 1.0
_ASK_S = 3.0
_KILL_S = 5.0
_EXIT_UNREACHED = 2


def run_node(
    conf: LaunchConf,
    place: NodePlace,
    run_dir: Path,
    *,
    name: str,
    variables: Mapping[str, str],
    echo: bool,
    reach_s: float | None = None,
) -> int:
    """Start a node's processes and wait for their end.

    Signals that end a program are passed on to them, SIGUSR1 to the ranks among them.

    Args:
        conf: the configuration.
        place: this node's part.
        run_dir: folder of the job's logs.
        name: of the node, for its files.
        variables: environment of the processes besides this one's.
        echo: whether to print their output here as well.
        reach_s: end the node if its first connection to the first node does not come about within
            this time, ``None`` where it is known that it does.

    Returns:
        Exit status: :data:`EXIT_STOPPED_EARLY` if the run was stopped in good order.

    Raises:
        ConfigError: the folder cannot be written.
    """
    make_folder(run_dir, "LOG_DIR")
    if place.node_rank == 0:
        (run_dir / "run.json").write_text(run_record(conf, place, run_dir))
    command = in_container(conf, node_command(conf, place, run_dir), run_dir)
    environment = _environment(conf, variables)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the processes too, until they heed it
    with (run_dir / f"{name}.out").open("ab") as out, (run_dir / f"{name}.err").open("ab") as err:
        begin = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} node {place.node_rank} starts\n".encode()
        for file in (out, err):
            file.write(begin)
            file.flush()
        # A session of its own: signals reach it once, from here.
        job = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        way = None if reach_s is None else _Way(job, place, name, reach_s, err)
        with _signals_to(job), _sampled(run_dir / f"{name}.gpu"):
            assert job.stdout is not None
            assert job.stderr is not None
            writers = [
                _Copy(job.stdout, out, sys.stdout if echo else None),
                _Copy(job.stderr, err, sys.stderr if echo else None),
            ]
            status = job.wait()
            if way is not None:
                way.close()
            for writer in writers:
                writer.join(10.0)
    if way is not None and way.is_cut:
        return _EXIT_UNREACHED
    if status == 0 and writers[0].stopped:
        # Nodes that end a moment later must not be taken for those left behind.
        time.sleep(_GRACE_S)
        return EXIT_STOPPED_EARLY
    return 128 - status if status < 0 else status


def _environment(conf: LaunchConf, variables: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **conf.environment, **variables}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ROOT}:{path}" if path else str(ROOT)
    if conf["DEVICE"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


@contextlib.contextmanager
def _signals_to(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the processes, and leave none of them behind."""
    former = {number: signal.signal(number, lambda n, _: job.send_signal(n)) for number in _SIGNALS}
    former[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda n, _: _tell_ranks(job.pid, n))
    try:
        yield
    finally:
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        for number, handler in former.items():
            signal.signal(number, handler)


def _tell_ranks(pid: int, number: int) -> None:
    """Send a signal to the ranks below ``pid``, not to what they or torchrun started besides."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if _is_rank(process) and parent is not None and not _is_rank(parent):
                    process.send_signal(number)


def _is_rank(process: psutil.Process) -> bool:
    return "LOCAL_RANK" in process.environ()


@contextlib.contextmanager
def _sampled(path: Path) -> Iterator[None]:
    sampler = Sampler(os.getpid(), path)
    try:
        yield
    finally:
        sampler.close()


class _Way(threading.Thread):
    """Sees whether the first node listens; if not, says so and ends the node's processes.

    torchrun itself waits for a quarter of an hour and then does not say what for.
    """

    def __init__(
        self,
        job: subprocess.Popen[bytes],
        place: NodePlace,
        name: str,
        limit_s: float,
        err: IO[bytes],
    ) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._target = (place.master_addr, place.master_port)
        self._name = name
        self._limit_s = limit_s
        self._err = err
        self._over = threading.Event()
        self.is_cut = False
        self.start()

    def run(self) -> None:
        end_s = time.monotonic() + self._limit_s
        why = ""
        while time.monotonic() < end_s:
            try:
                with socket.create_connection(self._target, timeout=_ASK_S):
                    return
            except OSError as error:
                why = error.strerror or str(error)
            if self._over.wait(0.5):
                return
        self.is_cut = True
        host, port = self._target
        line = (
            f"error: {self._name} did not reach the first node at {host}:{port} within "
            f"{self._limit_s:g} s ({why}): let this port, and all above 1023 between the nodes, "
            f"through the firewall; python -m megatron.adaptive doctor --master-addr {host} on "
            "both nodes checks the way\n"
        )
        print(line, end="", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self._err.write(line.encode())
            self._err.flush()
        self._job.terminate()
        if not self._over.wait(_KILL_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._job.pid, signal.SIGKILL)

    def close(self) -> None:
        """The processes have ended; wait for a line that is being written."""
        self._over.set()
        self.join(_ASK_S + 1.0)


class _Copy(threading.Thread):
    """Copies lines into a file, and to the terminal if there is one; sees how the run ended."""

    def __init__(self, source: IO[bytes], target: IO[bytes], terminal: IO[str] | None) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._target = target
        self._terminal = terminal
        self.stopped = False
        self.start()

    def run(self) -> None:
        for line in self._source:
            if _STOPPED.match(line):
                self.stopped = True
            with contextlib.suppress(OSError):  # a full disk must not stop the run
                self._target.write(line)
                self._target.flush()
            if self._terminal is not None:
                with contextlib.suppress(OSError):
                    self._terminal.write(line.decode(errors="replace"))
                    self._terminal.flush()
