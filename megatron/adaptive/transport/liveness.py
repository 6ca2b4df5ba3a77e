"""Notices that another rank of the job is gone, and ends this one if its main thread cannot.

The main thread may be inside a collective that never returns, so two threads of their own watch:

::

    ranks on this machine    pidfd of each ──> poll(); stopped? ──────┐
                                                                      ├──> line on stderr,
    ranks elsewhere          the store, every 2 s: a notice that ─────┘    on_lost(), and after
                             somebody left, and a beat per machine         the grace _exit(1)

It owns the threads, the pidfds and its keys in the store. It deliberately does not say why a
process ended (a pidfd shows only that it did), and does not restart anything.
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
from typing import Any

import torch.distributed as dist

from megatron.adaptive.errors import PeerLostError

_PERIOD_S = 2.0
_LOOK_S = 1.0  # at what /proc says of the ranks of this machine
# A channel that notices the silence first says more about it.
_MARGIN_S = 1.0
# Long enough for a store under load, else a rank that left well counts as lost; short enough for
# a survivor's line to be out before its launcher ends it, even if the store never answers.
_ASK_S = 2.0
_LEAVE_S = 5.0
_LOST = "lost"
# Stands for the store in a set of silent ranks; rank 0 or the launcher serves it.
_STORE = frozenset({-1})
_KNOWN = "told: "  # before a notice that the user has read


def here(pp_rank: int) -> dict[str, Any]:
    """Return what the :class:`Watcher` of other ranks must know about this process.

    ``machine`` shows whether two ranks can see each other's process ids and sockets: containers on
    one host may share its name but not these.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = Path("/proc/self/ns")
    host = socket.gethostname()
    machine = host
    with contextlib.suppress(OSError):
        seen = [os.readlink(spaces / kind) for kind in ("pid", "net")]
        machine = " ".join([boot.read_text().strip(), *seen])
    return {"host": host, "pid": os.getpid(), "pp_rank": pp_rank, "machine": machine}


def describe(places: Sequence[Mapping[str, Any]], rank: int) -> str:
    """Return the text for a rank in messages; ``places`` are all ranks' :func:`here`."""
    at = places[rank]
    return f"rank {rank} (stage {at['pp_rank']}, pid {at['pid']} on host {at['host']})"


class Watcher:
    """Watches every other rank of the job until :meth:`leave`, :meth:`report` or :meth:`close`.

    All methods may be called from any thread.

    A rank of this machine that is stopped for ``silent_s`` counts as lost too. When this process
    ends by itself those that are stopped are killed: no signal of a launcher would end them.

    When one ends before it left, the line ``error: rank ...`` goes to stderr at once, ``on_lost``
    is called once with the same text, and the process ends with status 1 if it still lives
    ``grace_s`` later. A loss cannot be taken back: neither :meth:`close` nor a handler of SIGTERM
    keeps the process alive.

    Args:
        places: of each global rank ``host``, ``pid`` and ``pp_rank``, and ``machine`` where known;
            :func:`here` makes one.
        rank: global rank of this process.
        store: the job's store, shared by all ranks; ``None`` watches this machine only, where the
            end of any peer before :meth:`leave` then counts as a loss.
        on_lost: called from a thread of the watcher, so that a main thread that can still act does
            so; it must not block.
        grace_s: time from ``on_lost`` to the end of the process.
        silent_s: a machine whose ranks all stay silent for this long counts as lost, as does a
            process that is stopped.
        is_launchers_store: Whether the launcher serves the store; otherwise rank 0 does.

    Attributes:
        on_lost: the callback; may be replaced at any time.
        position: where this rank is, such as ``iteration 7``; the line says so.
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
        machines = [str(place.get("machine", place["host"])) for place in places]
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
        """Wait up to ``timeout_s`` for a loss to be noticed; ``None`` if none was.

        For a main thread that saw a connection break: this names the rank behind it. The line is
        on stderr already.
        """
        self._decided.wait(timeout_s)
        return self._lost

    def report(self, reason: str, *, known: bool = False) -> None:
        """Inform the other ranks that this one ends because of ``reason``; waits at most 2 s.

        The first notice of a job stays: a rank that fails because another one did, changes nothing.
        From here on this rank no longer watches.

        Args:
            reason: why, one line.
            known: the user has read it; the other ranks end without saying it again.
        """
        if self._silence() and self._board is not None:
            line = (reason.splitlines() or [""])[0]
            mark = _KNOWN if known else ""
            self._board.publish(f"{mark}{describe(self._places, self._rank)} failed: {line}")
        self._local.kill_stopped()

    def leave(self) -> None:
        """Say that this rank is done; call it on every rank after the last barrier.

        Returns when the store has it, on rank 0 when all ranks have left or after 5 s, because its
        process may be the one that serves the store.
        """
        if self._silence() and self._board is not None:
            self._board.leave(wait_for_all=self._rank == 0)

    def close(self) -> None:
        """Stop watching and free the threads, unless a loss is already ending the process."""
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
        """Accept no further loss; false if there was one."""
        with self._lock:
            self._quiet = True
            return self._lost is None

    def _watch(self) -> None:
        """Body of the thread for this machine."""
        local = self._local
        try:
            while (seen := local.look()) is not None:
                gone, stopped = seen
                if gone:
                    self._judge(gone)
                if stopped:
                    what = (
                        f"is stopped: nothing came from it for {local.stopped_s:g} s"
                        f" (limit {self._silent_s:g} s, --transport-silence-s)"
                    )
                    self._lose(self._fact(stopped, what), publish=True)
                if self._board is not None and self._board.busy_for_s() > self._silent_s:
                    self._hear(_STORE, f"the job's store gave no answer for {self._silent_s:g} s")
        finally:
            local.close()

    def _judge(self, gone: set[int]) -> None:
        """Decide whether processes that ended have left or are lost."""
        answer = self._board.ask(gone) if self._board is not None else None
        left, notice = answer if answer is not None else (set(), None)
        if gone - left:
            self._lose(notice or self._fact(gone - left), publish=notice is None)

    def _hear(self, ranks: AbstractSet[int], news: str) -> None:
        """Take what the store said: a notice as it is (no ``ranks``), or why ``ranks`` are lost."""
        if ranks == _STORE and self._is_launchers_store:
            self._lose(f"the launcher that serves the job's store is gone: {news}", publish=False)
        elif ranks == _STORE:
            self._lose(f"{self._fact({0}, 'cannot be reached')}, {news}", publish=False)
        elif ranks:
            self._lose(f"{self._fact(ranks, 'cannot be reached')}, {news}", publish=False)
        else:
            self._lose(news, publish=False)

    def _lose(self, fact: str, *, publish: bool) -> None:
        known = fact.startswith(_KNOWN)
        fact = fact.removeprefix(_KNOWN)
        with self._lock:
            if self._quiet or self._lost is not None:
                return
            self._lost = PeerLostError(
                f"{fact}; this is rank {self._rank}"
                f" (stage {self._places[self._rank]['pp_rank']})"
                f"{f' in {self.position}' if self.position else ''}; the job cannot go on without "
                "it, start again from the last checkpoint"
            )
        # If this thread cannot run again (the GIL is held, the interpreter hangs at its end), the
        # interpreter's own C thread ends the process.
        faulthandler.dump_traceback_later(self._grace_s + 5.0, exit=True, file=2)
        if not known:
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

    def _fact(self, ranks: AbstractSet[int], what: str = "ended unexpectedly") -> str:
        return f"{' and '.join(describe(self._places, rank) for rank in sorted(ranks))} {what}"


class _Local:
    """The processes of this machine, by global rank; used by one thread but for `kill_stopped`.

    Args:
        pids: of the processes.
        wake: a descriptor that ends a wait.
        stopped_s: a process that is stopped for this long counts as gone.

    Attributes:
        stopped_s: the same, in whole looks.
    """

    def __init__(self, pids: Mapping[int, int], wake: int, stopped_s: float) -> None:
        self._wake = wake
        self._pids = {rank: (pid, _started(pid)) for rank, pid in pids.items()}
        # Looks, not time: if this process was stopped, others need not have been.
        self.stopped_s = math.ceil(stopped_s / _LOOK_S) * _LOOK_S
        self._looks = dict.fromkeys(pids, 0)
        self._look_s = time.monotonic()
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._watched: dict[int, int] = {}
        for rank, pid in pids.items():
            # Else an old kernel, a sandbox, or it has ended: looks at /proc show its end.
            with contextlib.suppress(AttributeError, OSError):
                fd = os.pidfd_open(pid)
                self._watched[fd] = rank
                self._poll.register(fd, select.POLLIN)

    def look(self) -> tuple[set[int], set[int]] | None:
        """Wait for an end or some time.

        Returns:
            The ranks that ended meanwhile, also those without a pidfd, and the ranks that have been
            stopped for too long; ``None`` if the watcher is closed.
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
        """Kill the processes that are stopped: a request to end would not reach them."""
        for rank, (pid, _) in self._pids.items():
            if self._is_stopped(rank):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _is_stopped(self, rank: int) -> bool:
        pid, started = self._pids[rank]
        fields = _status(pid)
        return fields[0] == "T" and fields[19] == started

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (*self._watched, self._wake):
            os.close(fd)
        self._watched.clear()


class _Board:
    """Exchanges notices of the ranks through the store; one thread owns the connection.

    ::

        adaptive/lost       text about the first rank that was lost
        adaptive/left/<r>   rank r is done
        adaptive/beat/<m>   counter, moved on every 2 s by each rank of machine m

    Only calls that the store answers at once are used while ranks may die, ``wait`` when all leave.
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
        self._mine = names.index(machines[rank])
        self._ranks = [{r for r, m in enumerate(machines) if m == name} for name in names]
        self._beats = [0] * len(names)
        self._still = [0] * len(names)
        self._silent_ticks = math.ceil(silent_s / _PERIOD_S)
        self._silent_s = silent_s
        self._jobs: queue.SimpleQueue[Callable[[dist.Store], None] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="liveness-store", daemon=True
        )
        self._thread.start()

    def busy_for_s(self) -> float:
        """Return how long the store has owed an answer."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def ask(self, ranks: Iterable[int]) -> tuple[set[int], str | None] | None:
        """Return who of ``ranks`` has left, and the notice of a loss; ``None`` without answer."""

        def look(store: dist.Store) -> tuple[set[int], str | None]:
            return {r for r in ranks if store.check([f"left/{r}"])}, _notice(store)

        return self._call(look, _ASK_S)

    def publish(self, fact: str) -> None:
        """Put up the notice that a rank is lost, unless there is one."""

        def put(store: dist.Store) -> None:
            if not store.check([_LOST]):
                store.set(_LOST, fact)

        self._call(put, _ASK_S)

    def leave(self, *, wait_for_all: bool) -> None:
        """Mark this rank as done; with ``wait_for_all`` see to it that all others are."""

        def mark(store: dist.Store) -> None:
            store.add(f"left/{self._rank}", 1)  # unlike set, returns after the store has it
            if wait_for_all:
                keys = [f"left/{rank}" for rank in range(self._world_size)]
                store.wait(keys, timedelta(seconds=_LEAVE_S))

        self._call(mark, _LEAVE_S + 1.0)

    def close(self) -> None:
        """Stop the thread."""
        self._jobs.put(None)
        self._thread.join(1.0)

    def _call(self, job: Callable[[dist.Store], Any], limit_s: float) -> Any:
        """Run ``job`` on the store's thread; ``None`` if it takes longer or fails."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

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
        try:
            # A connection of its own: a call that waits on the job's would hold this one up.
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
            self._hear(_STORE, f"the job's store does not answer: {reason}")

    def _tick(self, store: dist.Store) -> None:
        store.add(f"beat/{self._mine}", 1)
        notice = _notice(store)
        if notice is not None:
            self._busy_since = None
            self._hear(set(), notice)
        # Silence is counted in our own beats: if this process was stopped, nobody else was silent.
        for machine, ranks in enumerate(self._ranks):
            if machine == self._mine:
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
                    self._hear(lost, f"nothing was heard from there for {self._silent_s:g} s")


def _notice(store: dist.Store) -> str | None:
    return store.get(_LOST).decode() if store.check([_LOST]) else None


def _started(pid: int) -> str | None:
    """Return the start time of a process that runs, ``None`` if it does not."""
    fields = _status(pid)
    return None if fields[0] in "ZX" else fields[19]


def _status(pid: int) -> list[str]:
    """Return what proc(5) says of a process from its state on; of one that is gone, ``X``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def _write_line(line: str) -> None:
    """Write to stderr in one piece, past the locks of a main thread that may be stuck in it."""
    with contextlib.suppress(OSError):
        lead = "\n" if os.isatty(2) else ""  # a progress bar may stand on the line
        os.write(2, f"{lead}{line}\n".encode())


def _flush_output() -> None:
    """Save what was printed, without being caught by a lock that the main thread holds."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(1.0)
