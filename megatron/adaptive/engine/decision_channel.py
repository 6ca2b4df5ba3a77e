"""One-way channels for numbers between the members of a tensor-parallel group.

A channel has one writer and one or more readers; every reader gets every number, in order. Two
kinds, with the same contract: shared memory for members on one node, small messages for all others.

::

    writer   publish(n) ──┬──> reader 1   next() -> n
                          └──> reader 2   next() -> n

What the numbers mean is ``agreement``'s business; they are not negative.
"""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.adaptive.errors import DeadlineError, PeerLostError, TransportError

Describe = Callable[[int], str]
"""Text for a global rank, such as ``rank 4 (stage 1, pid 17 on node-2)``."""

_CLOSE_S = 30.0
_SETUP_TIMEOUT_S = 120.0
# Numbers that the slowest reader in shared memory may be behind.
_CAPACITY = 256
# gloo matches messages of two ranks by tag and order; so many receives are posted ahead.
_SLOTS = 8
_CLOSED = -1
# gloo counts whole milliseconds, takes 0 for no limit and overflows at large ones.
_SHORTEST_S = 0.001
_LONGEST_S = 20 * 86400.0


class Writer(Protocol):
    """The end that numbers go into."""

    def publish(self, value: int, timeout_s: float) -> None:
        """Append a number; returns at once unless a reader is far behind. One thread at a time.

        Raises:
            DeadlineError: the slowest reader did not make room within ``timeout_s``.
            PeerLostError: a member of the group is gone, or gave up.
        """

    def close(self) -> None:
        """Let go of the channel; readers still get what was published.

        Raises:
            DeadlineError, PeerLostError: as of :meth:`publish`, after 30 s.
        """


class Reader(Protocol):
    """The end that numbers come out of."""

    def next(self, timeout_s: float) -> int | None:
        """Return the next number, waiting for it without the GIL. One thread at a time.

        Returns:
            ``None`` once the writer has closed and everything was read.

        Raises:
            DeadlineError: there was none within ``timeout_s``.
            PeerLostError: a member of the group is gone, or gave up.
        """

    def give_up(self) -> None:
        """End the channel for all its users, where the kind of channel can. From any thread."""

    def close(self) -> None:
        """Let go of the channel, which the writer must have closed or close soon.

        Raises:
            PeerLostError: it did not within 30 s.
        """


class MemoryWriter:
    """A writer in shared memory; needs the C++ extension.

    Args:
        log: the extension's writer.
        readers: global ranks of its readers, in the order of their index.
        describe: names a rank in errors.
    """

    def __init__(self, log: Any, readers: Sequence[int], describe: Describe) -> None:
        self._log = log
        self._readers = ", ".join(describe(rank) for rank in readers)
        self._describe = describe

    def publish(self, value: int, timeout_s: float) -> None:
        """Implements :class:`Writer`."""
        try:
            self._log.publish(value, timeout_s)
        except DeadlineError as error:
            raise DeadlineError(f"no room for a word to {self._readers}: {error}") from error
        except TransportError as error:
            _name_who_gave_up(self._log, self._describe, error)
            raise

    def close(self) -> None:
        """Implements :class:`Writer`."""
        self.publish(_CLOSED, _CLOSE_S)
        self._log.close()


class MemoryReader:
    """A reader in shared memory; needs the C++ extension.

    Args:
        log: the extension's reader.
        rank: global rank of this process.
        writer: that of the writer.
        describe: names a rank in errors.
    """

    def __init__(self, log: Any, rank: int, writer: int, describe: Describe) -> None:
        self._log = log
        self._rank = rank
        self._writer = writer
        self._describe = describe

    def next(self, timeout_s: float) -> int | None:
        """Implements :class:`Reader`."""
        try:
            value = int(self._log.next(timeout_s))
        except DeadlineError as error:
            raise DeadlineError(f"no word of {self._describe(self._writer)}: {error}") from error
        except TransportError as error:
            _name_who_gave_up(self._log, self._describe, error)
            raise
        return None if value == _CLOSED else value

    def give_up(self) -> None:
        """Implements :class:`Reader`; whoever waits is woken."""
        self._log.abort(self._rank)

    def close(self) -> None:
        """Implements :class:`Reader`."""


def _name_who_gave_up(log: Any, describe: Describe, error: TransportError) -> None:
    if (rank := log.abort_reason) is not None:
        raise PeerLostError(
            f"{describe(rank)} ended the step of its tensor-parallel group: it lost another rank"
        ) from error


class MessageWriter:
    """A writer of small gloo messages, for members on several nodes or without the extension.

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
        self._readers = [(rank, dist.get_group_rank(group, rank)) for rank in readers]
        self._describe = describe
        self._count = 0
        # gloo's ``Work`` must be waited for before it is dropped, and its tensor kept until then.
        self._sent: deque[list[tuple[int, Any, torch.Tensor]]] = deque()

    def publish(self, value: int, timeout_s: float) -> None:
        """Implements :class:`Writer`."""
        message = torch.tensor([value], dtype=torch.int64)
        tag = self._count % _SLOTS
        self._count += 1
        sent = []
        for rank, index in self._readers:
            try:
                sent.append((rank, self._group.send([message], index, tag), message))
            except RuntimeError as error:
                raise self._lost(rank, timeout_s, error) from error
        self._sent.append(sent)
        if len(self._sent) == _SLOTS:
            self._wait_for_oldest(timeout_s)

    def close(self) -> None:
        """Implements :class:`Writer`."""
        # One for each receive that a reader has posted, so that none stays behind in gloo.
        for _ in range(_SLOTS):
            self.publish(_CLOSED, _CLOSE_S)
        while self._sent:
            self._wait_for_oldest(_CLOSE_S)

    def _wait_for_oldest(self, timeout_s: float) -> None:
        for rank, work, _ in self._sent.popleft():
            try:
                work.wait(_limit(timeout_s))
            except RuntimeError as error:
                raise self._lost(rank, timeout_s, error) from error

    def _lost(self, rank: int, timeout_s: float, error: RuntimeError) -> PeerLostError:
        return PeerLostError(
            f"{self._describe(rank)}, of the same tensor-parallel group, took no word within "
            f"{timeout_s:g} s: {_first_line(error)}"
        )


class MessageReader:
    """The reader of a :class:`MessageWriter`; receives are posted ahead.

    Args:
        group: the writer's group.
        writer: global rank of the writer.
        describe: names a rank in errors.
    """

    def __init__(self, group: dist.ProcessGroup, writer: int, describe: Describe) -> None:
        self._group = group
        self._index = dist.get_group_rank(group, writer)
        self._name = describe(writer)
        self._count = 0
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        for _ in range(_SLOTS):
            self._post()

    def next(self, timeout_s: float) -> int | None:
        """Implements :class:`Reader`."""
        value = self._take(timeout_s)
        if value == _CLOSED:
            return None
        self._post()
        return value

    def give_up(self) -> None:
        """Implements :class:`Reader`, which messages cannot: users end with the processes."""

    def close(self) -> None:
        """Implements :class:`Reader`."""
        while self._posted:
            if self._take(_CLOSE_S) != _CLOSED:
                self._post()

    def _post(self) -> None:
        message = torch.empty(1, dtype=torch.int64)
        work = self._group.recv([message], self._index, self._count % _SLOTS)
        self._posted.append((work, message))
        self._count += 1

    def _take(self, timeout_s: float) -> int:
        if not self._posted:
            return _CLOSED
        work, message = self._posted.popleft()
        try:
            work.wait(_limit(timeout_s))
        except RuntimeError as error:
            raise PeerLostError(
                f"no word of {self._name}, of the same tensor-parallel group, within "
                f"{timeout_s:g} s: {_first_line(error)}"
            ) from error
        return int(message)


class Links:
    """Makes channels of gloo messages between the members of a group.

    Every member makes its ends in one order.

    Args:
        group: a gloo group of the members, used by nothing else.
        describe: names a rank in errors.
    """

    def __init__(self, group: dist.ProcessGroup, describe: Describe) -> None:
        self._group = group
        self.describe = describe

    def writer(self, name: str, readers: Sequence[int]) -> Writer:
        """Return the writing end of a channel to the global ranks ``readers``."""
        return MessageWriter(self._group, readers, self.describe)

    def reader(self, name: str, writer: int, index: int) -> Reader:
        """Return end number ``index`` of a channel from global rank ``writer``."""
        return MessageReader(self._group, writer, self.describe)

    def close(self) -> None:
        """Remove what was needed for setting up; the channels stay. Collective."""


class MemoryLinks(Links):
    """Makes channels in shared memory between the members of a group on one node.

    Collective: all members make this object together. An end waits for the other one to be made.

    Args:
        module: the extension.
        group: a gloo group of the members, for setting up.
        describe: names a rank in errors.
    """

    def __init__(self, module: Any, group: dist.ProcessGroup, describe: Describe) -> None:
        super().__init__(group, describe)
        self._module = module
        self._local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        message: list[Any] = [None]
        if dist.get_rank(group) == 0:
            self._folder = tempfile.TemporaryDirectory(prefix="megatron-adaptive-")
            message = [self._folder.name]
        first = dist.get_process_group_ranks(group)[0]
        dist.broadcast_object_list(message, src=first, group=group)
        self._place = Path(message[0])

    def writer(self, name: str, readers: Sequence[int]) -> Writer:
        """Implements :class:`Links`."""
        log = self._module.DecisionLog.create(len(readers), _CAPACITY, self._local)
        _hand_out(log.fd, self._place / name, len(readers))
        return MemoryWriter(log, readers, self.describe)

    def reader(self, name: str, writer: int, index: int) -> Reader:
        """Implements :class:`Links`."""
        fd = _fetch(self._place / name, self.describe(writer))
        try:
            log = self._module.DecisionLog.attach(fd, index, self._local)
        finally:
            os.close(fd)
        return MemoryReader(log, dist.get_rank(), writer, self.describe)

    def close(self) -> None:
        """Implements :class:`Links`."""
        dist.barrier(group=self._group)
        if self._folder is not None:
            self._folder.cleanup()


def _hand_out(fd: int, place: Path, count: int) -> None:
    """Hand a descriptor to ``count`` processes that call :func:`_fetch` with the same path."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(count)
        end_s = time.monotonic() + _SETUP_TIMEOUT_S
        for served in range(count):
            listener.settimeout(max(_SHORTEST_S, end_s - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                raise DeadlineError(
                    f"{served} of {count} members of a tensor-parallel group took their end of "
                    f"{place.name} within {_SETUP_TIMEOUT_S:g} s"
                ) from None
            with peer:
                socket.send_fds(peer, [b"+"], [fd])


def _fetch(place: Path, writer: str) -> int:
    """Return the descriptor that ``writer`` hands out at ``place``, waiting for it to begin."""
    end_s = time.monotonic() + _SETUP_TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as peer:
        while True:
            try:
                peer.settimeout(max(_SHORTEST_S, end_s - time.monotonic()))
                peer.connect(str(place))
                found = socket.recv_fds(peer, 1, 1)[1]
                if not found:
                    raise PeerLostError(f"{writer} ended while it handed out {place.name}")
                return found[0]
            except (FileNotFoundError, ConnectionRefusedError, TimeoutError):
                if time.monotonic() >= end_s:
                    raise DeadlineError(
                        f"{writer} did not hand out its end of {place.name} within "
                        f"{_SETUP_TIMEOUT_S:g} s"
                    ) from None
            time.sleep(0.002)


def _limit(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=min(max(timeout_s, _SHORTEST_S), _LONGEST_S))


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
