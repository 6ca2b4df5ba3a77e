"""Sends integers from one rank of a decision group to other ranks of the group.

A channel has one writer and one or more readers. Every reader receives all numbers in the order in
which they were written. There are two implementations with the same behaviour: shared memory if all
members of the group are on one node, and small messages otherwise.

::

    writer   publish(n) ──┬──> reader 1   next() -> n
                          └──> reader 2   next() -> n

The numbers are non-negative integers; ``agreement`` defines their meaning.
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
"""Function that takes a global rank and returns a name for that rank in error messages.

An example of such a name is ``rank 4 (stage 1, pid 17 on node-2)``.
"""

_CLOSE_S = 30.0
# Number of integers that fit into the shared memory. The writer waits while the slowest reader has
# this many integers left to read.
_CAPACITY = 256
# Average number of messages in flight per reader above which the writer waits.
_BEHIND = 8
_CLOSED = -1
# Limit timeouts to this range, because gloo counts whole milliseconds, treats 0 as no limit, and
# overflows at large values.
_SHORTEST_S = 0.001
_LONGEST_S = 20 * 86400.0


class Writer:
    """Writes numbers to a channel, as small gloo messages to each reader.

    Args:
        group: Gloo group of the members, which must not be used for anything else. Two members can
            have at most one channel in each direction.
        readers: Global ranks that read from this channel.
        describe: Function that maps a global rank to its name in error messages.
    """

    def __init__(
        self, group: dist.ProcessGroup, readers: Sequence[int], describe: Describe
    ) -> None:
        self._group = group
        self._readers = [(describe(rank), dist.get_group_rank(group, rank)) for rank in readers]
        # Keep each gloo ``Work`` object and its tensor alive until ``wait`` has been called on the
        # object.
        self._sent: deque[tuple[str, Any, torch.Tensor]] = deque()

    def publish(self, value: int, timeout_s: float) -> None:
        """Sends ``value`` to all readers. Must not be called by several threads at the same time.

        This method only blocks if a reader has many unread numbers.

        Raises:
            DeadlineError: The slowest reader did not read anything within ``timeout_s``.
            PeerLostError: A rank of the group has exited or aborted.
        """
        message = torch.tensor([value], dtype=torch.int64)
        for name, index in self._readers:
            with _lost(f"{name}, of the same decision group, did not receive a message", timeout_s):
                self._sent.append((name, self._group.send([message], index, 0), message))
        self._wait(_BEHIND * len(self._readers), timeout_s)

    def close(self) -> None:
        """Closes the channel. Readers can still read the numbers that were sent earlier.

        Raises:
            DeadlineError: A reader did not read anything for 30 s.
            PeerLostError: A rank of the group has exited or aborted.
        """
        self.publish(_CLOSED, _CLOSE_S)
        self._wait(0, _CLOSE_S)

    def _wait(self, most: int, timeout_s: float) -> None:
        """Waits until at most ``most`` messages are in flight.

        ``timeout_s`` limits the wait for each message, in seconds.
        """
        while len(self._sent) > most:
            name, work, _ = self._sent.popleft()
            with _lost(f"{name}, of the same decision group, did not receive a message", timeout_s):
                work.wait(_limit(timeout_s))


class Reader:
    """Reads the numbers that a :class:`Writer` sends to this rank.

    The next receive operation is always posted in advance, so that messages never wait for the
    reader.
    """

    def __init__(self, group: dist.ProcessGroup, writer: int, describe: Describe) -> None:
        self._group = group
        self._index = dist.get_group_rank(group, writer)
        self._name = describe(writer)
        self._is_open = True
        self._post()

    def next(self, timeout_s: float) -> int | None:
        """Returns the next number, or ``None`` if the writer has closed the channel.

        Blocks until a number arrives. This method releases the GIL while it waits, so that other
        threads can run. It must not be called by several threads at the same time.

        Returns:
            The number, or ``None`` after the last number.

        Raises:
            DeadlineError: No number arrived within ``timeout_s``.
            PeerLostError: A rank of the group has exited or aborted.
        """
        if not self._is_open:
            return None
        with _lost(f"no message from {self._name}, of the same decision group,", timeout_s):
            self._work.wait(_limit(timeout_s))
        value = int(self._message)
        self._is_open = value != _CLOSED
        if not self._is_open:
            return None
        self._post()
        return value

    def give_up(self) -> None:
        """Interrupts all calls that wait at either end of a shared-memory channel.

        The interrupted calls raise an error. This method can be called from any thread. It does
        nothing for a channel that uses messages, because such a channel fails by itself when a
        process exits.
        """

    def close(self) -> None:
        """Reads and ignores numbers until the writer has closed the channel.

        Raises:
            PeerLostError: The writer did not close the channel within 30 s.
        """
        while self.next(_CLOSE_S) is not None:
            pass

    def _post(self) -> None:
        self._message = torch.empty(1, dtype=torch.int64)
        self._work = self._group.recv([self._message], self._index, 0)


class _MemoryEnd:
    """One end of a shared-memory channel, which is implemented in C++.

    Args:
        log: Object of the C++ extension for this end of the channel.
        peers: Names of the ranks at the other end, for error messages.
        describe: Function that maps a global rank to its name in error messages.
    """

    def __init__(self, log: Any, peers: str, describe: Describe) -> None:
        self._log = log
        self._peers = peers
        self._describe = describe

    def _raise(self, lack: str, error: TransportError) -> NoReturn:
        """Raises ``error`` with the name of the rank that has aborted or does not respond.

        If the deadline has passed, the message starts with ``lack``, a text that says what did not
        happen.
        """
        if isinstance(error, DeadlineError):
            raise DeadlineError(f"{lack} {self._peers}: {error}") from error
        if (rank := self._log.abort_reason) is not None:
            raise PeerLostError(
                f"{self._describe(rank)} stopped the step of its decision group, because it lost "
                "the connection to another rank"
            ) from error
        raise error


class _MemoryWriter(_MemoryEnd, Writer):
    def publish(self, value: int, timeout_s: float) -> None:
        try:
            self._log.publish(value, timeout_s)
        except TransportError as error:
            self._raise("no message could be sent to", error)

    def close(self) -> None:
        self.publish(_CLOSED, _CLOSE_S)
        self._log.close()


class _MemoryReader(_MemoryEnd, Reader):
    def next(self, timeout_s: float) -> int | None:
        try:
            value = int(self._log.next(timeout_s))
        except TransportError as error:
            self._raise("no message from", error)
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
    """Creates the channels of a decision group, and returns this member's writer and readers.

    The first member writes to all other members, and all other members write to the first member.

    All members must call this function.

    Args:
        group: Gloo group of the members, which must not be used for anything else.
        members: Global ranks of the members, in ascending order.
        rank: Global rank of this process.
        describe: Function that maps a global rank to its name in error messages.
        module: C++ extension that provides the shared memory if all members are on one node,
            otherwise ``None``.

    Returns:
        Writer of this member, and its readers, keyed by the global rank of the member that writes.

    Raises:
        TransportError: The shared memory of another member cannot be opened.
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
            # The shared memory has no name in the file system, so open it through a file descriptor
            # of the process that created it.
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise TransportError(
                f"cannot read the decisions of {describe(peer)} ({error}); run all ranks of a "
                "machine as the same user, and let them see each other in /proc"
            ) from error
        try:
            end = module.DecisionLog.attach(fd, 0 if rank == first else rest.index(rank), local)
        finally:
            os.close(fd)
        readers[peer] = _MemoryReader(end, describe(peer), describe)
    # Writers must keep their shared memory open until all readers have opened it.
    dist.barrier(group=group)
    return _MemoryWriter(log, ", ".join(map(describe, others)), describe), readers


def _limit(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=min(max(timeout_s, _SHORTEST_S), _LONGEST_S))


@contextlib.contextmanager
def _lost(lack: str, timeout_s: float) -> Iterator[None]:
    """Makes a ``with`` block raise :class:`PeerLostError` instead of gloo's errors.

    The message starts with ``lack``, which says what did not happen within ``timeout_s``.
    """
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerLostError(f"{lack} within {timeout_s:g} s: {reason}") from error
