"""One-way channels for numbers between the members of a decision group.

A channel has one writer and one or more readers; every reader gets every number, in order. Two
kinds, with the same contract: shared memory for members on one node, small messages for all others.

::

    writer   publish(n) ──┬──> reader 1   next() -> n
                          └──> reader 2   next() -> n

What the numbers mean is ``agreement``'s business; they are not negative.
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
# Numbers that the slowest reader in shared memory may be behind.
_CAPACITY = 256
# The same of messages.
_BEHIND = 8
_CLOSED = -1
# gloo counts whole milliseconds, takes 0 for no limit and overflows at large ones.
_SHORTEST_S = 0.001
_LONGEST_S = 20 * 86400.0


class Writer:
    """The end that numbers go into, as small gloo messages.

    Args:
        group: a gloo group of the members, used by channels of this kind alone, at most one in
            each direction between two members.
        readers: global ranks of the readers.
        describe: names a rank in errors.
    """

    def __init__(
        self, group: dist.ProcessGroup, readers: Sequence[int], describe: Describe
    ) -> None:
        self._group = group
        self._readers = [(describe(rank), dist.get_group_rank(group, rank)) for rank in readers]
        # gloo's ``Work`` must be waited for before it is dropped, and its tensor kept until then.
        self._sent: deque[tuple[str, Any, torch.Tensor]] = deque()

    def publish(self, value: int, timeout_s: float) -> None:
        """Append a number; returns at once unless a reader is far behind. One thread at a time.

        Raises:
            DeadlineError: the slowest reader did not make room within ``timeout_s``.
            PeerLostError: a member of the group is gone, or gave up.
        """
        message = torch.tensor([value], dtype=torch.int64)
        for name, index in self._readers:
            with _lost(f"{name}, of the same decision group, took no word", timeout_s):
                self._sent.append((name, self._group.send([message], index, 0), message))
        self._wait(_BEHIND * len(self._readers), timeout_s)

    def close(self) -> None:
        """Let go of the channel; readers still get what was published.

        Raises:
            DeadlineError, PeerLostError: as of :meth:`publish`, after 30 s.
        """
        self.publish(_CLOSED, _CLOSE_S)
        self._wait(0, _CLOSE_S)

    def _wait(self, most: int, timeout_s: float) -> None:
        """Waits for the oldest messages until at most so many are under way."""
        while len(self._sent) > most:
            name, work, _ = self._sent.popleft()
            with _lost(f"{name}, of the same decision group, took no word", timeout_s):
                work.wait(_limit(timeout_s))


class Reader:
    """The end that numbers of a :class:`Writer` come out of; a receive is posted ahead."""

    def __init__(self, group: dist.ProcessGroup, writer: int, describe: Describe) -> None:
        self._group = group
        self._index = dist.get_group_rank(group, writer)
        self._name = describe(writer)
        self._is_open = True
        self._post()

    def next(self, timeout_s: float) -> int | None:
        """Return the next number, waiting for it without the GIL. One thread at a time.

        Returns:
            ``None`` once the writer has closed and everything was read.

        Raises:
            DeadlineError: there was none within ``timeout_s``.
            PeerLostError: a member of the group is gone, or gave up.
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
        """End the channel for all its users, where the kind of channel can. From any thread.

        Messages cannot: users end with the processes.
        """

    def close(self) -> None:
        """Let go of the channel, which the writer must have closed or close soon.

        Raises:
            PeerLostError: it did not within 30 s.
        """
        while self.next(_CLOSE_S) is not None:
            pass

    def _post(self) -> None:
        self._message = torch.empty(1, dtype=torch.int64)
        self._work = self._group.recv([self._message], self._index, 0)


class _MemoryEnd:
    """An end in shared memory; needs the C++ extension.

    Args:
        log: the extension's end.
        peers: text for those at the other end.
        describe: names a rank in errors.
    """

    def __init__(self, log: Any, peers: str, describe: Describe) -> None:
        self._log = log
        self._peers = peers
        self._describe = describe

    def _raise(self, lack: str, error: TransportError) -> NoReturn:
        """Name ranks in an error of the extension: who is silent, or who gave up."""
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
    """Makes a member's ends: the first member writes to all others, and each of them to it.

    Collective over the members.

    Args:
        group: a gloo group of the members, used by nothing else.
        members: their global ranks, ascending.
        rank: this one.
        describe: names a rank in errors.
        module: the extension, for channels in the memory of the members' node.

    Returns:
        The writing end, and the reading ends by rank of the writer.

    Raises:
        TransportError: another member's memory cannot be opened.
    """
    first, *rest = members
    others = rest if rank == first else [first]
    if module is None:
        writer = Writer(group, others, describe)
        return writer, {peer: Reader(group, peer, describe) for peer in others}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    log = module.DecisionLog.create(len(others), _CAPACITY, local)
    places = dict(zip(members, gather((os.getpid(), log.fd), group), strict=True))
    readers: dict[int, Reader] = {}
    for peer in others:
        process, number = places[peer]
        try:
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)  # memory without a name
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
    dist.barrier(group=group)  # all have opened what the writers keep open until then
    return _MemoryWriter(log, ", ".join(map(describe, others)), describe), readers


def _limit(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=min(max(timeout_s, _SHORTEST_S), _LONGEST_S))


@contextlib.contextmanager
def _lost(lack: str, timeout_s: float) -> Iterator[None]:
    """Turn gloo's errors into one of a lost peer."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerLostError(f"{lack} within {timeout_s:g} s: {reason}") from error
