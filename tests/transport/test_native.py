"""The queue and the channels of the extension, by themselves: loopback within one process."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.adaptive import extension
from megatron.adaptive.errors import DeadlineError, PeerLostError, TransportError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport import native_queue
from megatron.adaptive.transport.completions import Arrival, HeldArrival, Notice
from megatron.adaptive.transport.header import CODE_OF, Label, code_of
from megatron.adaptive.transport.native import NativeTransport

pytestmark = pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing()))

LIMIT_S = 20.0
CPU = torch.device("cpu")
LABEL = Label(4, Action(ActionKind.B, 2, 9))
SLOTS = 8


def make(**options: Any) -> NativeTransport:
    node = extension.require("a test").Node(0, bytes(16), 1, 1)
    node.open("loopback", 0, "", LIMIT_S, **{"slot_bytes": 4096, "slots": SLOTS, **options})
    return NativeTransport(
        node, {0: "loopback"}, device=CPU, describe=lambda rank: f"rank {rank}", least_free=4
    )


@pytest.fixture(params=[True, False], ids=["exchange", "capsules"])
def transport(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NativeTransport]:
    """Tensors made by the extension itself, and through capsules as under an older torch."""
    if not request.param:
        monkeypatch.setattr(native_queue, "uses_torch", lambda module: False)
        monkeypatch.setattr("megatron.adaptive.transport.native.uses_torch", lambda module: False)
    made = make()
    yield made
    made.close()


def take(transport: NativeTransport) -> Arrival:
    item = transport.completions.wait(time.monotonic() + LIMIT_S)
    assert isinstance(item, Arrival)
    return item


@pytest.mark.parametrize("dtype", CODE_OF, ids=str)
def test_every_type_comes_back(transport: NativeTransport, dtype: torch.dtype) -> None:
    sent = torch.ones(4, 32, dtype=torch.uint8).view(dtype)
    transport.send(0, LABEL, sent)
    received = take(transport).take()
    assert (received.dtype, received.shape) == (dtype, sent.shape)
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


def test_an_arrival_says_what_it_is(transport: NativeTransport) -> None:
    transport.send(0, LABEL, torch.zeros(3, 2))
    arrival = take(transport)
    assert (arrival.label, arrival.peer, arrival.nbytes) == (LABEL, 0, 24)
    assert arrival.label is arrival.label
    arrival.take()
    with pytest.raises(RuntimeError, match="once"):
        arrival.take()


def test_other_items_keep_their_place(transport: NativeTransport) -> None:
    """Notices, arrivals of other transports and errors come through the same queue."""
    queue = transport.completions
    notice = Notice(LABEL, 3)
    foreign = HeldArrival(LABEL, 7, 4, lambda: torch.ones(1))
    transport.send(0, LABEL, torch.zeros(2))
    queue.put(notice)
    queue.put(PeerLostError("rank 5 is gone"))
    queue.put(foreign)
    assert isinstance(queue.poll(), Arrival)
    assert queue.poll() is notice
    with pytest.raises(PeerLostError, match="rank 5 is gone"):
        queue.poll()
    assert queue.wait(time.monotonic() + LIMIT_S) is foreign
    assert queue.poll() is None
    assert queue.wait(time.monotonic() - 1.0) is None
    assert queue.wait(float("-inf")) is None


def test_a_waiter_is_woken(transport: NativeTransport) -> None:
    seen: list[Any] = []
    thread = threading.Thread(
        target=lambda: seen.append(transport.completions.wait(float("inf"))), daemon=True
    )
    thread.start()
    time.sleep(0.05)
    transport.send(0, LABEL, torch.zeros(2))
    thread.join(LIMIT_S)
    assert [item.label for item in seen] == [LABEL]


def test_a_full_channel_is_copied_out_of(transport: NativeTransport) -> None:
    """All but four slots are given out as views: what comes next has memory of its own."""
    node = transport._node
    held = []
    for number in range(3 * SLOTS):
        transport.send(0, LABEL, torch.full((600,), float(number)))
        held.append(take(transport).take())
    slots = {tensor.data_ptr() for tensor in held[: SLOTS - 4]}
    assert len(slots) == SLOTS - 4
    transport.send(0, LABEL, torch.zeros(600))
    probe = take(transport)
    assert probe.take().data_ptr() not in slots
    assert node.pending(0) == 0
    for number, tensor in enumerate(held):
        assert tensor.unique().tolist() == [float(number)]
    held.clear()
    gc.collect()


def test_a_listener_leaves_room_too(transport: NativeTransport) -> None:
    """Nobody takes what a follower's thread has heard of: slots must not run out meanwhile."""
    heard = threading.Semaphore(0)
    transport.completions.listen(lambda item: heard.release())
    for number in range(4 * SLOTS):
        transport.send(0, LABEL, torch.full((600,), float(number)))
    for _ in range(4 * SLOTS):
        assert heard.acquire(timeout=LIMIT_S)
    values = [float(take(transport).take()[0]) for _ in range(4 * SLOTS)]
    assert values == [float(number) for number in range(4 * SLOTS)]
    transport.completions.put(PeerLostError("rank 5 is gone"))
    with pytest.raises(PeerLostError):
        transport.completions.wait(time.monotonic() + LIMIT_S)
    assert transport.completions.poll() is None


def test_what_was_reserved_is_sent_once(transport: NativeTransport) -> None:
    channel = transport.channel(0)
    tensor = channel.reserve(LABEL, (5, 7), torch.float8_e4m3fn)
    tensor.view(torch.uint8).fill_(3)
    channel.send(LABEL, tensor)
    assert take(transport).take().view(torch.uint8).unique().tolist() == [3]
    channel.send(LABEL, tensor)  # by now a tensor like any other
    assert take(transport).take().shape == (5, 7)


def test_views_of_what_was_reserved_arrive_as_they_look(transport: NativeTransport) -> None:
    channel = transport.channel(0)
    expected = torch.arange(35.0).view(5, 7)
    for view in (lambda t: t.t(), lambda t: t[:, :3], lambda t: t[:2], lambda t: t[0, 0]):
        tensor = channel.reserve(LABEL, (5, 7), torch.float32).copy_(expected)
        channel.send(LABEL, view(tensor))
        del tensor
        assert torch.equal(take(transport).take(), view(expected))


def test_close_says_who_takes_nothing(
    transport: NativeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2 * SLOTS):
        transport.send(0, LABEL, torch.zeros(600))
    with pytest.raises(DeadlineError, match=r"8 messages were not taken within 0.05 s by rank 0;"):
        transport.flush(0.05)
    for _ in range(2 * SLOTS):
        take(transport).take()
    transport.flush(LIMIT_S)
    assert transport.describe_links()[0]["slots"] == SLOTS


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_ranks_that_all_close_do_not_wait_for_each_other(kind: str) -> None:
    module = extension.require("a test")
    first, second = (module.Node(rank, bytes(16), 1, 2) for rank in range(2))
    place = second.listen("unix") if kind == "shm" else second.listen("tcp", "127.0.0.1")
    size: dict[str, Any] = {"slot_bytes": 4096, "slots": SLOTS}
    opening = threading.Thread(target=second.open, args=(kind, 0, "", LIMIT_S), kwargs=size)
    opening.start()
    first.open(kind, 1, place, LIMIT_S, **size)
    opening.join()
    pair = [
        NativeTransport(node, {1 - at: kind}, device=CPU) for at, node in enumerate((first, second))
    ]
    for at, transport in enumerate(pair):
        for _ in range(4 * SLOTS):
            transport.send(1 - at, LABEL, torch.zeros(1000))
    raised: list[BaseException] = []

    def close(transport: NativeTransport) -> None:
        try:
            transport.close()
        except TransportError as error:
            raised.append(error)

    threads = [threading.Thread(target=close, args=(one,)) for one in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Who is last may have nobody left to send to; nobody waits until the deadline.
    assert not any(isinstance(error, DeadlineError) for error in raised)
    assert len(raised) < 2


def test_what_cannot_be_sent_is_named(transport: NativeTransport) -> None:
    with pytest.raises(TransportError, match="torch.bits8 cannot be sent"):
        transport.send(0, LABEL, torch.empty(2, dtype=torch.bits8))
    with pytest.raises(TransportError, match="8 dimensions"):
        transport.send(0, LABEL, torch.ones((2,) * 8))
    with pytest.raises(TransportError, match="is on meta"):
        transport.send(0, LABEL, torch.ones(2, device="meta"))
    assert code_of(torch.float32, 7) == (0, 0)


def test_closing_twice_is_closing_once() -> None:
    transport = make()
    transport.completions.listen(lambda item: None)
    transport.close()
    transport.close()
    names = {thread.name for thread in threading.enumerate()}
    assert "arrivals" not in names
    with pytest.raises(TransportError, match="closed"):
        transport.send(0, LABEL, torch.ones(2))
