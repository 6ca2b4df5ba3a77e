"""Sends numbers one way between the members of a decision group.

A channel has one writer and one or more readers. Every reader gets every number, in order. There
are two kinds with the same contract: shared memory for members on one node, small messages
otherwise.

::

    writer   publish(n) ──┬──> reader 1   next() -> n
                          └──> reader 2   next() -> n

The numbers are not negative; ``agreement`` defines their meaning.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron.adaptive.engine.process_context import gather
from megatron.adaptive.errors import DeadlineError, PeerLostError, TransportError

Describe = Callable[[int], str]
"""Text for a global rank, such as ``rank 4 (stage 1, pid 17 on node-2)``."""

_CLOSE_S = 30.0
# The slowest reader in shared memory may be this many numbers behind.
_CAPACITY = 256
# The slowest reader of messages may be this many numbers behind.
_BEHIND = 8
_CLOSED = -1
# gloo counts whole milliseconds, treats 0 as no limit, and overflows at large limits.
_SHORTEST_S = 0.001
_LONGEST_S = 20 * 86400.0


class Writer:
    """Writes numbers into a channel, as small gloo messages.

    Args:
        group: Gloo group of the members. Only channels of this kind use it, at most one in each
            direction between two members.
        readers: Global ranks of the readers.
        describe: Function that returns how error messages name a rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, readers: Sequence[int], describe: Describe
    ) -> None:
        self._group = group
        self._readers = [(describe(rank), dist.get_group_rank(group, rank)) for rank in readers]
        # gloo requires a wait for each ``Work`` before it is dropped, and its tensor until then.
        self._sent: deque[tuple[str, Any, torch.Tensor]] = deque()

    def publish(self, value: int, timeout_s: float) -> None:
        """Appends a number; returns at once unless a reader is far behind. One thread at a time.

        Raises:
            DeadlineError: The slowest reader did not make room within ``timeout_s``.
            PeerLostError: A member of the group is gone, or gave up.
        """
        message = torch.tensor([value], dtype=torch.int64)
        for name, index in self._readers:
            with _lost(f"{name}, of the same decision group, took no word", timeout_s):
                self._sent.append((name, self._group.send([message], index, 0), message))
        self._wait(_BEHIND * len(self._readers), timeout_s)

    def close(self) -> None:
        """Closes the channel; readers still get earlier numbers.

        Raises:
            DeadlineError: A reader did not make room within 30 s.
            PeerLostError: A member of the group is gone, or gave up.
        """
        self.publish(_CLOSED, _CLOSE_S)
        self._wait(0, _CLOSE_S)

    def _wait(self, most: int, timeout_s: float) -> None:
        """Waits for the oldest messages until at most ``most`` are under way."""
        while len(self._sent) > most:
            name, work, _ = self._sent.popleft()
            with _lost(f"{name}, of the same decision group, took no word", timeout_s):
                work.wait(_limit(timeout_s))


class Reader:
    """Reads the numbers of a :class:`Writer`; a receive is always posted ahead."""

    def __init__(self, group: dist.ProcessGroup, writer: int, describe: Describe) -> None:
        self._group = group
        self._index = dist.get_group_rank(group, writer)
        self._name = describe(writer)
        self._is_open = True
        self._post()

    def next(self, timeout_s: float) -> int | None:
        """Returns the next number; waits for it without the GIL. One thread at a time.

        Returns:
            ``None`` after the last number of a closed channel.

        Raises:
            DeadlineError: No number arrived within ``timeout_s``.
            PeerLostError: A member of the group is gone, or gave up.
        """
        if not self._is_open:
            return None
        with _lost(f"no word of {self._name}, of the same decision group,", timeout_s):
            self._work.wait(_limit(timeout_s))
        value = int(self._message)
        self._is_open = value != _CLOSED
        if not self._is_open:
            return None
        self._post()
        return value

    def give_up(self) -> None:
        """Ends the channel for all its users, if it is in shared memory. Any thread may call it.

        A channel of messages ends only with the processes.
        """

    def close(self) -> None:
        """Closes this end after the writer has closed its end.

        Raises:
            PeerLostError: The writer did not close within 30 s.
        """
        while self.next(_CLOSE_S) is not None:
            pass

    def _post(self) -> None:
        self._message = torch.empty(1, dtype=torch.int64)
        self._work = self._group.recv([self._message], self._index, 0)


class _MemoryEnd:
    """Wraps one end of a channel in shared memory, which needs the C++ extension.

    Args:
        log: End of the channel in the extension.
        peers: Text for the ranks at the other end.
        describe: Function that returns how error messages name a rank.
    """

    def __init__(self, log: Any, peers: str, describe: Describe) -> None:
        self._log = log
        self._peers = peers
        self._describe = describe

    def _raise(self, lack: str, error: TransportError) -> NoReturn:
        """Raises an error of the extension again, with the rank that is silent or that gave up."""
        if isinstance(error, DeadlineError):
            raise DeadlineError(f"{lack} {self._peers}: {error}") from error
        if (rank := self._log.abort_reason) is not None:
            raise PeerLostError(
                f"{self._describe(rank)} ended the step of its decision group: it lost another rank"
            ) from error
        raise error


class _MemoryWriter(_MemoryEnd, Writer):
    def publish(self, value: int, timeout_s: float) -> None:
        try:
            self._log.publish(value, timeout_s)
        except TransportError as error:
            self._raise("no room for a word to", error)

    def close(self) -> None:
        self.publish(_CLOSED, _CLOSE_S)
        self._log.close()


class _MemoryReader(_MemoryEnd, Reader):
    def next(self, timeout_s: float) -> int | None:
        try:
            value = int(self._log.next(timeout_s))
        except TransportError as error:
            self._raise("no word of", error)
        return None if value == _CLOSED else value

    def give_up(self) -> None:
        self._log.abort(dist.get_rank())

    def close(self) -> None:
        pass


def make_channels(
    group: dist.ProcessGroup,
    members: Sequence[int],
    rank: int,
    describe: Describe,
    module: Any = None,
) -> tuple[Writer, dict[int, Reader]]:
    """Returns a member's ends: the first member writes to all others, and each of them to it.

    Collective over the members.

    Args:
        group: Gloo group of the members, used for nothing else.
        members: Global ranks of the members, ascending.
        rank: Global rank of this process.
        describe: Function that returns how error messages name a rank.
        module: C++ extension for channels in shared memory, if all members are on one node.

    Returns:
        Writing end, and reading ends by rank of the writer.

    Raises:
        TransportError: The memory of another member cannot be opened.
    """
    first, *rest = members
    others = rest if rank == first else [first]
    if module is None:
        writer = Writer(group, others, describe)
        return writer, {peer: Reader(group, peer, describe) for peer in others}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    log = module.DecisionLog.create(len(others), _CAPACITY, local)
    handles = dict(zip(members, gather((os.getpid(), log.fd), group), strict=True))
    readers: dict[int, Reader] = {}
    for peer in others:
        process, number = handles[peer]
        try:
            fd = os.open(
                f"/proc/{process}/fd/{number}", os.O_RDWR
            )  # the memory has no name in the file system
        except OSError as error:
            raise TransportError(
                f"the decisions of {describe(peer)} cannot be read ({error}): let ranks of one"
                " machine run as the same user and see each other in /proc"
            ) from error
        try:
            end = module.DecisionLog.attach(fd, 0 if rank == first else rest.index(rank), local)
        finally:
            os.close(fd)
        readers[peer] = _MemoryReader(end, describe(peer), describe)
    dist.barrier(group=group)  # writers keep their memory open until all readers have opened it
    return _MemoryWriter(log, ", ".join(map(describe, others)), describe), readers


def _limit(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=min(max(timeout_s, _SHORTEST_S), _LONGEST_S))


@contextlib.contextmanager
def _lost(lack: str, timeout_s: float) -> Iterator[None]:
    """Turns an error of gloo into a :class:`PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerLostError(f"{lack} within {timeout_s:g} s: {reason}") from error
