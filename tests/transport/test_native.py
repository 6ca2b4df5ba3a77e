"""Tests the queue and the channels of the C++ extension, with both ends in one process."""

from __future__ import annotations

import datetime
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import extension
from megatron.adaptive.errors import DeadlineError, PeerLostError, TransportError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.trace.machine_counters import MachineCounters
from megatron.adaptive.transport.interface import CODE_OF, HeldArrival, Label, Notice, code_of
from megatron.adaptive.transport.native import NativeTransport, make_tensors_with

from .ends import LIMIT_S, SLOTS, close_all, open_transports, take

pytestmark = pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing()))

LABEL = Label(4, Action(ActionKind.B, 2, 9))


Ends = tuple[NativeTransport, NativeTransport]


@pytest.fixture(params=[True, False], ids=["exchange", "capsules"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Yields a channel. Its tensors are created with torch's function table or DLPack capsules."""
    made = open_transports()
    module = extension.require("a test")
    if not request.param:
        make_tensors_with(module, None)
    yield made
    assert close_all(made) == []
    make_tensors_with(module, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


@pytest.mark.parametrize("dtype", CODE_OF, ids=str)
def test_every_type_comes_back(ends: Ends, dtype: torch.dtype) -> None:
    low, high = ends
    sent = torch.ones(4, 32, dtype=torch.uint8).view(dtype)
    low.send(1, LABEL, sent)
    received = take(high).take()
    assert (received.dtype, received.shape) == (dtype, sent.shape)
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


def test_other_items_keep_their_place(ends: Ends) -> None:
    """Checks that notices, errors and other transports' messages keep their order in the queue."""
    low, high = ends
    queue = high.completions
    notice = Notice(LABEL, 3)
    foreign = HeldArrival(LABEL, 7, 4, lambda: torch.ones(1))
    low.send(1, LABEL, torch.zeros(2))
    assert take(high).peer == 0
    queue.put(notice)
    queue.put(PeerLostError("rank 5 is gone"))
    queue.put(foreign)
    assert queue.poll() is notice
    with pytest.raises(PeerLostError, match="rank 5 is gone"):
        queue.poll()
    assert queue.wait(time.monotonic() + LIMIT_S) is foreign
    assert queue.poll() is None
    assert queue.wait(time.monotonic() - 1.0) is None
    assert queue.wait(float("-inf")) is None


def test_a_full_channel_is_copied_out_of(ends: Ends) -> None:
    """Checks that received tensors are copied if all but four slots are in use by other tensors."""
    low, high = ends
    node = low._node
    held = []
    for number in range(3 * SLOTS):
        low.send(1, LABEL, torch.full((600,), float(number)))
        held.append(take(high).take())
    slots = {tensor.data_ptr() for tensor in held[: SLOTS - 4]}
    assert len(slots) == SLOTS - 4
    low.send(1, LABEL, torch.zeros(600))
    probe = take(high)
    assert probe.take().data_ptr() not in slots
    assert node.pending(1) == 0
    for number, tensor in enumerate(held):
        assert tensor.unique().tolist() == [float(number)]
    held.clear()
    gc.collect()


def test_a_listener_leaves_room_too(ends: Ends) -> None:
    """Checks that slots do not run out if a listener is set and no messages are taken."""
    low, high = ends
    heard = threading.Semaphore(0)
    high.completions.listen(lambda item: heard.release())
    for number in range(4 * SLOTS):
        low.send(1, LABEL, torch.full((600,), float(number)))
    for _ in range(4 * SLOTS):
        assert heard.acquire(timeout=LIMIT_S)
    values = [float(take(high).take()[0]) for _ in range(4 * SLOTS)]
    assert values == [float(number) for number in range(4 * SLOTS)]
    high.completions.put(PeerLostError("rank 5 is gone"))
    with pytest.raises(PeerLostError):
        high.completions.wait(time.monotonic() + LIMIT_S)
    assert high.completions.poll() is None


def test_what_was_reserved_is_sent_once(ends: Ends) -> None:
    low, high = ends
    tensor = low.reserve(1, (5, 7), torch.float8_e4m3fn)
    tensor.view(torch.uint8).fill_(3)
    low.send(1, LABEL, tensor)
    assert take(high).take().view(torch.uint8).unique().tolist() == [3]
    # The tensor has been sent, so the channel must not treat it as reserved again.
    low.send(1, LABEL, tensor)
    assert take(high).take().shape == (5, 7)


def test_views_of_what_was_reserved_arrive_as_they_look(ends: Ends) -> None:
    low, high = ends
    expected = torch.arange(35.0).view(5, 7)
    for view in (lambda t: t.t(), lambda t: t[:, :3], lambda t: t[:2], lambda t: t[0, 0]):
        tensor = low.reserve(1, (5, 7), torch.float32).copy_(expected)
        low.send(1, LABEL, view(tensor))
        del tensor
        assert torch.equal(take(high).take(), view(expected))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_ranks_that_all_close_do_not_wait_for_each_other(kind: str) -> None:
    pair = open_transports(kind)
    for index, transport in enumerate(pair):
        for _ in range(4 * SLOTS):
            transport.send(1 - index, LABEL, torch.zeros(1000))
    raised = close_all(pair)
    # The rank that closes last may get an error because its peer is gone. However, no rank may wait
    # until the deadline.
    assert not any(isinstance(error, DeadlineError) for error in raised)
    assert len(raised) < 2


def test_a_tensor_elsewhere_is_refused(ends: Ends) -> None:
    low, _ = ends
    with pytest.raises(TransportError, match="is on meta"):
        low.send(1, LABEL, torch.ones(2, device="meta"))
    assert code_of(torch.float32, 7) == (0, 0)


def test_closing_twice_is_closing_once() -> None:
    low, high = open_transports()
    high.completions.listen(lambda item: None)
    close_all([low, high])
    high.close()
    assert "arrivals" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(TransportError, match="closed"):
        high.send(0, LABEL, torch.ones(2))


def threads_of_messages(begin: Callable[[], None], number: int) -> tuple[set[str], set[str]]:
    """Starts threads, and returns those that exist and those that the machine counters know.

    Args:
        begin: Function that opens channels, which start threads.
        number: Minimum number of threads to wait for.
    """
    before = set(os.listdir("/proc/self/task"))
    begin()
    end_s = time.monotonic() + LIMIT_S
    # A new thread has a default name at first, so the counters may not know it immediately.
    while True:
        begun = set(os.listdir("/proc/self/task")) - before
        counters = MachineCounters()
        counters.close()
        counted_threads = counters.message_threads & begun
        if (counted_threads == begun and len(begun) >= number) or time.monotonic() > end_s:
            return begun, counted_threads
        time.sleep(0.01)


def test_counters_know_the_threads_of_channels() -> None:
    opened: list[NativeTransport] = []

    def begin() -> None:
        opened.extend(open_transports("tcp"))
        for transport in opened:
            transport.completions.listen(lambda item: None)

    try:
        begun, counted_threads = threads_of_messages(begin, 4)
    finally:
        close_all(opened)
    assert counted_threads == begun
    assert len(begun) >= 4


def test_counters_know_the_threads_of_gloo() -> None:
    store = dist.HashStore()
    limit = datetime.timedelta(seconds=LIMIT_S)
    groups: list[dist.ProcessGroupGloo] = []
    begun, counted_threads = threads_of_messages(
        lambda: groups.append(dist.ProcessGroupGloo(store, 0, 1, limit)), 2
    )
    tasks = Path("/proc/self/task")
    process_name = Path("/proc/self/comm").read_text()
    names = {(tasks / thread / "comm").read_text() for thread in begun - counted_threads}
    if names == {process_name}:
        pytest.skip("this version of torch does not name gloo's threads")
    assert names == set()
    assert len(begun) >= 2
