"""Detects that another rank of the job has exited, and stops this rank if its main thread hangs.

If a rank is lost, the main threads of the other ranks may wait forever in a collective with that
rank. To detect this, two additional threads watch the ranks:

::

    ranks on this machine    pidfd of each ──> poll(); stopped? ──────┐
                                                                      ├──> line on stderr,
    ranks elsewhere          the store, every 2 s: a notice of ───────┘    on_lost(), and after
                             a loss, and a beat per machine                grace_s, _exit(1)

A pidfd is a file descriptor for a process, which becomes readable when the process exits. The store
is the key-value store of the job. This module does not determine why a process exited, and does not
restart anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.adaptive.errors import PeerLostError

_Answer = TypeVar("_Answer")
_PERIOD_S = 2.0
# Interval in seconds at which the states of this machine's ranks are read from /proc.
_LOOK_S = 1.0
# Additional time in seconds before a silent rank is considered lost. During this time, a channel
# may notice the silence first and raise an error with a better message.
_MARGIN_S = 1.0
# Maximum time in seconds to wait for a reply from the store. If a busy store takes longer, a rank
# that has left normally is considered lost. With a much larger value, the launcher would kill a
# surviving rank before that rank has written its error line.
_ASK_S = 2.0
_LEAVE_S = 5.0
_LOST = "lost"
# Value to use instead of a set of silent ranks if the store does not reply. The store runs on rank
# 0 or in the launcher.
_STORE = frozenset({-1})
# Prefix of notices that the user has already seen and that are not shown again.
_SHOWN = "told: "


def here(pp_rank: int) -> dict[str, Any]:
    """Returns the host, process ID and machine of this process, and its pipeline rank ``pp_rank``.

    Ranks that can see each other's process IDs and sockets have the same value of ``machine``.
    Containers on the same host may share a host name, but cannot see each other's processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = Path("/proc/self/ns")
    host = socket.gethostname()
    machine = host
    with contextlib.suppress(OSError):
        namespaces = [os.readlink(spaces / kind) for kind in ("pid", "net")]
        machine = " ".join([boot.read_text().strip(), *namespaces])
    return {"host": host, "pid": os.getpid(), "pp_rank": pp_rank, "machine": machine}


def describe(places: Sequence[Mapping[str, Any]], rank: int) -> str:
    """Returns the name of the global rank ``rank`` for messages.

    Args:
        places: Location of each global rank, as returned by :func:`here` on that rank.
        rank: Global rank.
    """
    location = places[rank]
    return (
        f"rank {rank} (stage {location['pp_rank']}, pid {location['pid']} on host "
        f"{location['host']})"
    )


class Watcher:
    """Watches all other ranks until :meth:`leave`, :meth:`report` or :meth:`close` is called.

    All methods are thread-safe.

    A rank that exits without calling :meth:`leave` is considered lost. When a rank is lost, the
    watcher immediately writes a line ``error: rank ...`` to stderr, calls ``on_lost`` once with the
    error, and exits this process with status 1 after ``grace_s`` seconds. Neither :meth:`close` nor
    a SIGTERM handler can prevent this exit.

    A rank on this machine that stays stopped by SIGSTOP for ``silent_s`` seconds is also considered
    lost. When this process exits because of a lost rank, it kills the stopped ranks, because they
    would not react to the launcher's request to exit.

    Args:
        places: Location of each global rank, as returned by :func:`here`. It contains ``host``,
            ``pid`` and ``pp_rank``, and ``machine`` if known.
        rank: Global rank of this process.
        store: Key-value store that all ranks of the job share. With ``None``, only the ranks on
            this machine are watched, and a rank is considered lost if it exits before this rank has
            called :meth:`leave`.
        on_lost: Function that a thread of the watcher calls when a rank is lost. It must not block,
            and should notify the main thread, which can react if it is still running.
        grace_s: Time in seconds between calling ``on_lost`` and exiting the process.
        silent_s: Time in seconds without a heartbeat after which a machine is considered lost. A
            process that stays stopped for this long is also considered lost.
        is_launchers_store: Whether the store is served by the launcher instead of rank 0.

    Attributes:
        on_lost: Function that is called when a rank is lost. It can be replaced at any time.
        position: Description of this rank's progress for error messages, such as ``iteration 7``.
    """

    def __init__(
        self,
        places: Sequence[Mapping[str, Any]],
        rank: int,
        store: dist.Store | None,
        on_lost: Callable[[PeerLostError], None],
        grace_s: float = 5.0,
        *,
        silent_s: float = 60.0,
        is_launchers_store: bool = False,
    ) -> None:
        self.position = ""
        self._is_launchers_store = is_launchers_store
        self._places = places
        self._rank = rank
        self.on_lost = on_lost
        self._grace_s = grace_s
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._quiet = False
        self._lost: PeerLostError | None = None
        self._decided = threading.Event()
        machines = [str(location.get("machine", location["host"])) for location in places]
        others = [peer for peer in range(len(places)) if peer != rank]
        local = [peer for peer in others if machines[peer] == machines[rank]]
        self._board: _Board | None = None
        if store is not None and others:
            self._board = _Board(store, machines, rank, silent_s, self._hear)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        pids = {peer: int(places[peer]["pid"]) for peer in local}
        self._local = _Local(pids, self._wake, silent_s + _MARGIN_S)
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self._thread.start()

    def verdict(self, timeout_s: float) -> PeerLostError | None:
        """Waits up to ``timeout_s`` seconds until a rank is lost. Returns the error, or ``None``.

        When a connection breaks, the main thread calls this method to find out which rank was lost.
        The message of the returned error has already been written to stderr.
        """
        self._decided.wait(timeout_s)
        return self._lost

    def report(self, reason: str, *, is_shown: bool = False) -> None:
        """Informs the other ranks that this rank exits because of ``reason``. Takes at most 2 s.

        The job keeps only the first notice, and ignores notices from ranks that fail as a
        consequence. After this call, this rank no longer watches other ranks.

        Args:
            reason: Reason for the exit. Only its first line is sent.
            is_shown: Whether the user has already seen the reason. If True, other ranks exit
                without printing the reason.
        """
        if self._silence() and self._board is not None:
            line = (reason.splitlines() or [""])[0]
            mark = _SHOWN if is_shown else ""
            self._board.publish(f"{mark}{describe(self._places, self._rank)} failed: {line}")
        self._local.kill_stopped()

    def leave(self) -> None:
        """Marks this rank as finished, so that it may exit. Call this method after all barriers.

        The method returns after the store has recorded that this rank is finished. Rank 0 may run
        the store in its process, so it also waits up to 5 s until all ranks have left.
        """
        if self._silence() and self._board is not None:
            self._board.leave(wait_for_all=self._rank == 0)

    def close(self) -> None:
        """Stops watching and ends the threads, unless the process is already exiting."""
        self._silence()
        if self._lost is not None:
            return
        if self._board is not None:
            self._board.close()
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)
            self._thread.join(1.0)

    def _silence(self) -> bool:
        """Ignores all later losses of ranks. Returns False if a rank has already been lost."""
        with self._lock:
            self._quiet = True
            return self._lost is None

    def _watch(self) -> None:
        """Watches the processes on this machine. Runs in a thread."""
        local = self._local
        try:
            while (changes := local.look()) is not None:
                gone, stopped = changes
                if gone:
                    self._judge(gone)
                if stopped:
                    event = (
                        f"is stopped, and did not run for {local.stopped_s:g} s"
                        f" (limit {self._silent_s:g} s, --transport-silence-s)"
                    )
                    self._lose(self._fact(stopped, event), publish=True)
                if self._board is not None and self._board.busy_for_s() > self._silent_s:
                    self._hear(_STORE, f"the job's store did not respond for {self._silent_s:g} s")
        finally:
            local.close()

    def _judge(self, gone: set[int]) -> None:
        """Reports the ranks in ``gone`` as lost, except those that have called :meth:`leave`."""
        answer = self._board.ask(gone) if self._board is not None else None
        left, notice = answer if answer is not None else (set(), None)
        if gone - left:
            self._lose(notice or self._fact(gone - left), publish=notice is None)

    def _hear(self, ranks: AbstractSet[int], news: str) -> None:
        """Handles a notice from the store, or ranks that have become silent.

        Args:
            ranks: Silent ranks, an empty set for a notice, or ``_STORE`` if the store does not
                reply.
            news: Text of the notice, or the reason why the ranks are considered lost.
        """
        if ranks == _STORE and self._is_launchers_store:
            self._lose(f"the launcher that serves the job's store is gone: {news}", publish=False)
        elif ranks == _STORE:
            self._lose(f"{self._fact({0}, 'cannot be reached')}, {news}", publish=False)
        elif ranks:
            self._lose(f"{self._fact(ranks, 'cannot be reached')}, {news}", publish=False)
        else:
            self._lose(news, publish=False)

    def _lose(self, fact: str, *, publish: bool) -> None:
        """Announces that a rank is lost, and exits this process after the grace period.

        Args:
            fact: Message that says which rank was lost, and how.
            publish: Whether to inform the other ranks through the store.
        """
        is_shown = fact.startswith(_SHOWN)
        fact = fact.removeprefix(_SHOWN)
        with self._lock:
            if self._quiet or self._lost is not None:
                return
            self._lost = PeerLostError(
                f"{fact}; this is rank {self._rank} (stage "
                f"{self._places[self._rank]['pp_rank']})"
                f"{f' in {self.position}' if self.position else ''}; "
                "the job cannot continue without the lost rank; restart the job from the last "
                "checkpoint"
            )
        # This thread may never run again if another thread keeps the GIL, or if the interpreter
        # hangs at exit. In both cases, the C thread of faulthandler ends the process.
        faulthandler.dump_traceback_later(self._grace_s + 5.0, exit=True, file=2)
        if not is_shown:
            _write_line(f"error: {self._lost}")
        if publish and self._board is not None:
            self._board.publish(fact)
        self._decided.set()
        try:
            self.on_lost(self._lost)
        except Exception:
            traceback.print_exc()
        time.sleep(self._grace_s)
        self._local.kill_stopped()
        _flush_output()
        os._exit(1)

    def _fact(self, ranks: AbstractSet[int], event: str = "ended unexpectedly") -> str:
        return f"{' and '.join(describe(self._places, rank) for rank in sorted(ranks))} {event}"


class _Local:
    """Watches the processes on this machine. Only `kill_stopped` is thread-safe.

    Args:
        pids: Process IDs of the ranks to watch, keyed by global rank.
        wake: File descriptor that becomes readable to interrupt a wait.
        stopped_s: Time in seconds after which a stopped process is considered lost.

    Attributes:
        stopped_s: Value of the argument ``stopped_s``, rounded up to a multiple of the polling
            interval.
    """

    def __init__(self, pids: Mapping[int, int], wake: int, stopped_s: float) -> None:
        self._wake = wake
        self._pids = {rank: (pid, _started(pid)) for rank, pid in pids.items()}
        # Count polls instead of measuring time, because time also passes while this process itself
        # is stopped and cannot observe the others.
        self.stopped_s = math.ceil(stopped_s / _LOOK_S) * _LOOK_S
        self._looks = dict.fromkeys(pids, 0)
        self._look_s = time.monotonic()
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._watched: dict[int, int] = {}
        for rank, pid in pids.items():
            # pidfd_open() fails on an old kernel, in a sandbox, or if the process has exited. In
            # these cases, the exit is detected by polling /proc.
            with contextlib.suppress(AttributeError, OSError):
                fd = os.pidfd_open(pid)
                self._watched[fd] = rank
                self._poll.register(fd, select.POLLIN)

    def look(self) -> tuple[set[int], set[int]] | None:
        """Waits until a watched process exits, for at most one polling interval.

        Returns:
            Two sets of ranks: those whose processes have exited, and those that have been stopped
            for too long. If the watcher was closed, returns ``None``.
        """
        gone: set[int] = set()
        for fd, _ in self._poll.poll(1000 * _LOOK_S):
            if fd == self._wake:
                return None
            rank = self._watched.pop(fd)
            if self._looks.pop(rank, None) is not None:
                gone.add(rank)
            self._poll.unregister(fd)
            os.close(fd)
        if time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + _LOOK_S
            for rank, looks in list(self._looks.items()):
                pid, started = self._pids[rank]
                if started is None or _started(pid) != started:
                    gone.add(rank)
                    del self._looks[rank]
                else:
                    self._looks[rank] = looks + 1 if self._is_stopped(rank) else 0
        return gone, {
            rank for rank, looks in self._looks.items() if (looks - 1) * _LOOK_S >= self.stopped_s
        }

    def kill_stopped(self) -> None:
        """Kills stopped processes, because they do not react when they are asked to exit."""
        for rank, (pid, _) in self._pids.items():
            if self._is_stopped(rank):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _is_stopped(self, rank: int) -> bool:
        pid, started = self._pids[rank]
        fields = _status(pid)
        return fields[0] == "T" and fields[19] == started

    def close(self) -> None:
        """Closes all file descriptors."""
        for fd in (*self._watched, self._wake):
            os.close(fd)
        self._watched.clear()


class _Board:
    """Exchanges notices between ranks through the store, in a thread that owns the connection.

    ::

        adaptive/lost       message that says which rank was lost first, and how
        adaptive/left/<r>   exists if rank r has left
        adaptive/beat/<m>   counter that each rank of machine m increments every 2 s

    As long as a rank may be lost, this class makes only calls to which the store replies
    immediately. It uses the blocking ``wait`` only at the end, when all ranks leave.

    Args:
        store: Key-value store of the job.
        machines: Identifier of the machine of each global rank.
        rank: Global rank of this process.
        silent_s: Time in seconds without a heartbeat after which a machine is considered lost.
        hear: Function to call for silent ranks and for notices (``Watcher._hear``).
    """

    def __init__(
        self,
        store: dist.Store,
        machines: Sequence[str],
        rank: int,
        silent_s: float,
        hear: Callable[[AbstractSet[int], str], None],
    ) -> None:
        self._hear = hear
        self._rank = rank
        self._world_size = len(machines)
        names = list(dict.fromkeys(machines))
        self._own_machine = names.index(machines[rank])
        self._ranks = [{r for r, m in enumerate(machines) if m == name} for name in names]
        self._beats = [0] * len(names)
        self._still = [0] * len(names)
        self._silent_ticks = math.ceil(silent_s / _PERIOD_S)
        self._silent_s = silent_s
        # Before Python 3.13, SimpleQueue.get() may block forever if its timeout is short.
        self._jobs: queue.Queue[Callable[[dist.Store], None] | None] = queue.Queue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="liveness-store", daemon=True
        )
        self._thread.start()

    def busy_for_s(self) -> float:
        """Returns the seconds since the current call to the store began, or 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def ask(self, ranks: Iterable[int]) -> tuple[set[int], str | None] | None:
        """Returns those of ``ranks`` that have left, and the notice about a lost rank, if any.

        Returns ``None`` if the store does not reply.
        """

        def look(store: dist.Store) -> tuple[set[int], str | None]:
            return {r for r in ranks if store.check([f"left/{r}"])}, _notice(store)

        return self._call(look, _ASK_S)

    def publish(self, fact: str) -> None:
        """Publishes ``fact``, a notice that a rank is lost, unless a notice already exists."""

        def put(store: dist.Store) -> None:
            if not store.check([_LOST]):
                store.set(_LOST, fact)

        self._call(put, _ASK_S)

    def leave(self, *, wait_for_all: bool) -> None:
        """Marks this rank as finished. If ``wait_for_all``, also waits for all other ranks."""

        def mark(store: dist.Store) -> None:
            # Unlike set(), add() only returns after the store has recorded the value.
            store.add(f"left/{self._rank}", 1)
            if wait_for_all:
                keys = [f"left/{rank}" for rank in range(self._world_size)]
                store.wait(keys, timedelta(seconds=_LEAVE_S))

        self._call(mark, _LEAVE_S + 1.0)

    def close(self) -> None:
        """Stops the thread that communicates with the store."""
        self._jobs.put(None)
        self._thread.join(1.0)

    def _call(self, job: Callable[[dist.Store], _Answer], limit_s: float) -> _Answer | None:
        """Calls the function ``job`` in the store's thread and returns the result.

        Returns ``None`` if ``job`` fails or takes longer than ``limit_s`` seconds.
        """
        answers: queue.Queue[_Answer | None] = queue.Queue()

        def run(store: dist.Store) -> None:
            answer = None
            try:
                answer = job(store)
            finally:
                answers.put(answer)

        self._jobs.put(run)
        try:
            return answers.get(timeout=limit_s)
        except queue.Empty:
            return None

    def _run(self, store: dist.Store) -> None:
        """Calls queued functions, and :meth:`_tick` once per interval. Runs in a thread."""
        try:
            # Use a separate connection, because other callers may block the connection of ``store``
            # for a long time.
            if hasattr(store, "clone"):
                store = store.clone()
            store = dist.PrefixStore("adaptive", store)
            due_s = time.monotonic()
            while True:
                job: Callable[[dist.Store], None] | None = self._tick
                try:
                    job = self._jobs.get(timeout=max(0.0, due_s - time.monotonic()))
                except queue.Empty:
                    due_s = time.monotonic() + _PERIOD_S
                if job is None:
                    return
                self._busy_since = time.monotonic()
                job(store)
                self._busy_since = None
        except RuntimeError as error:
            self._busy_since = None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._hear(_STORE, f"the job's store does not respond: {reason}")

    def _tick(self, store: dist.Store) -> None:
        """Sends a heartbeat to ``store``, and reads the notice and other machines' heartbeats."""
        store.add(f"beat/{self._own_machine}", 1)
        notice = _notice(store)
        if notice is not None:
            self._busy_since = None
            self._hear(set(), notice)
        # Measure silence in heartbeats of this rank instead of seconds. Otherwise, after this
        # process was stopped for a while, the other machines would appear to have been silent.
        for machine, ranks in enumerate(self._ranks):
            if machine == self._own_machine:
                continue
            beat = store.add(f"beat/{machine}", 0)
            self._still[machine] = (
                self._still[machine] + 1 if 0 < beat == self._beats[machine] else 0
            )
            self._beats[machine] = beat
            if self._still[machine] >= self._silent_ticks:
                lost = {rank for rank in ranks if not store.check([f"left/{rank}"])}
                self._busy_since = None
                if lost:
                    self._hear(
                        lost, f"no heartbeat from its machine arrived for {self._silent_s:g} s"
                    )


def _notice(store: dist.Store) -> str | None:
    return store.get(_LOST).decode() if store.check([_LOST]) else None


def _started(pid: int) -> str | None:
    """Returns the start time of process ``pid`` from /proc, or ``None`` if it has exited."""
    fields = _status(pid)
    return None if fields[0] in "ZX" else fields[19]


def _status(pid: int) -> list[str]:
    """Returns the fields after the name in /proc/PID/stat, or ``["X"]`` if ``pid`` has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def _write_line(line: str) -> None:
    """Writes ``line`` to file descriptor 2, because another thread may hold the lock of stderr."""
    with contextlib.suppress(OSError):
        # Begin a new line on a terminal, because the cursor may be at the end of a progress bar.
        prefix = "\n" if os.isatty(2) else ""
        os.write(2, f"{prefix}{line}\n".encode())


def _flush_output() -> None:
    """Flushes stdout and stderr in a thread, because the main thread may hold their locks."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(1.0)
