"""Contains the programs with which ``test_contract.py`` checks the guarantees of transports.

A program takes a :class:`Rank` and other arguments. It contains assertions, and may return results
for the test to check. Unless a program says otherwise, rank 0 sends and rank 1 receives. Channels
that a program leaves open are closed when it returns.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil
import torch

from megatron.adaptive import extension
from megatron.adaptive.errors import AdaptiveError
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.transport.interface import CODE_OF, Arrival, Label, Transport

from .contract_rank import (
    LIMIT_S,
    OVER_TORCH,
    SLOT_BYTES,
    SLOTS,
    Rank,
    error_of,
    label,
    make_tensor,
    numbers,
    require_equal,
    wait,
)

SHAPES = (
    *((), (0,), (1,), (3, 0, 2), (7,), (2, 3, 5), (1, 2, 1, 2, 1, 2, 1), (64, 16), (1000,)),
    *((1024,), (1025,), (4096, 3), (5, 4096)),
)


def everything(sender: int) -> list[tuple[Label, torch.Tensor]]:
    """Returns messages from rank ``sender`` with all dtypes and many different shapes.

    Some messages are much larger than the channel.
    """
    messages = []
    for number, dtype in enumerate(CODE_OF):
        for index, shape in enumerate(SHAPES):
            seed = 1 + sender * 100_000 + number * 100 + index
            kind = (ActionKind.F, ActionKind.B)[seed % 2]
            tensor = make_tensor(seed, shape, dtype)
            messages.append((label(seed, kind, step=10**10 + seed, chunk=number), tensor))
    matrix = numbers(6 * 700, sender).reshape(6, 700)
    odd = [matrix.t(), matrix[:, 3], matrix[::2, ::3], torch.ones(1, 1).expand(7, 300)]
    odd += [torch.complex(matrix, -matrix).conj(), torch.complex(matrix, -matrix).conj().imag]
    odd += [matrix[3], matrix[5:, 699:].conj(), torch.nn.Parameter(matrix)]
    return messages + [(label(number), tensor) for number, tensor in enumerate(odd)]


def alike(sender: int, shape: Sequence[int]) -> list[tuple[Label, torch.Tensor]]:
    """Returns 30 messages of shape ``shape``. Their content depends on the rank ``sender``."""
    kinds = (ActionKind.F, ActionKind.B)
    return [
        (
            label(number, kinds[(number + sender) % 2], chunk=number % 3),
            make_tensor(100 * sender + number, tuple(shape), torch.bfloat16),
        )
        for number in range(30)
    ]


def exchange(
    rank: Rank, kind: str, crc: bool = False, shape: tuple[int, ...] | None = None
) -> None:
    """Checks that messages of all dtypes and sizes arrive in order if both sides send at once.

    If ``crc`` is true, checksums are used. If ``shape`` is given, all messages have this shape.
    """
    dtype = torch.float32 if shape is None else torch.bfloat16
    transport, peer = rank.open(kind, transport_crc=crc, shape=shape, dtype=dtype)
    sent, due = (
        everything(sender) if shape is None else alike(sender, shape)
        for sender in (rank.rank, peer)
    )
    for tag, tensor in sent:
        transport.send(peer, tag, tensor)
    for tag, tensor in due:
        arrival = wait(transport)
        assert (arrival.label, arrival.peer, arrival.nbytes) == (tag, peer, tensor.nbytes)
        require_equal(arrival.take(), tensor.detach())
    transport.flush(LIMIT_S)


def wrap_around(rank: Rank, kind: str) -> None:
    """Checks that messages arrive intact if their sizes are close to multiples of the slot size.

    The receiver releases the received tensors in a random order.
    """
    transport, peer = rank.open(kind)
    rng = random.Random(5)
    around = [SLOT_BYTES * k + d for k in (1, 2, SLOTS, SLOTS + 1) for d in (-1, 0, 1)]
    sizes = [rng.choice([*around, 0, 1, rng.randrange(3000)]) for _ in range(300)]
    if rank.rank == 0:
        for number, size in enumerate(sizes):
            transport.send(peer, label(number), make_tensor(number, (size,), torch.uint8))
        return
    held: list[tuple[int, torch.Tensor]] = []
    for number, size in enumerate(sizes):
        arrival = wait(transport)
        assert (arrival.label, arrival.nbytes) == (label(number), size)
        held.append((number, arrival.take()))
        while len(held) > rng.randrange(SLOTS + 2):
            which, tensor = held.pop(rng.randrange(len(held)))
            require_equal(tensor, make_tensor(which, (sizes[which],), torch.uint8))


def far_ahead(
    rank: Rank, kind: str, count: int, nbytes: int, is_bounded: bool = False, fixed: bool = False
) -> None:
    """Checks that sends do not block if the receiver takes the first message after the last send.

    Rank 0 sends ``count`` messages of ``nbytes`` bytes.

    If ``is_bounded`` is true, waiting messages must not use the receiver's memory. If ``fixed`` is
    true, the channel is opened for messages of this shape.
    """
    transport, peer = rank.open(
        kind,
        transport_slot_bytes=max(nbytes, SLOT_BYTES),
        shape=(nbytes,) if fixed else None,
        dtype=torch.uint8,
    )
    if rank.rank == 0:
        tensor = torch.ones(nbytes, dtype=torch.uint8)
        for number in range(count):
            begin_s = time.monotonic()
            transport.send(peer, label(number), tensor)
            assert time.monotonic() - begin_s < 5.0  # The call must not wait for the receiver.
        rank.mark("sent")
        return
    before = psutil.Process().memory_info().rss
    rank.await_mark("sent")
    time.sleep(0.3)
    grown_mib = (psutil.Process().memory_info().rss - before) / 2**20
    assert grown_mib < 16 or not is_bounded
    for number in range(count):
        arrival = wait(transport)
        assert arrival.label.action.microbatch == number
        assert int(arrival.take()[-1]) == 1


def hold(rank: Rank, kind: str) -> None:
    """Checks that a receiver can keep more payloads than the channel has slots."""
    transport, peer = rank.open(kind)
    count = 6 * SLOTS
    if rank.rank == 0:
        for number in range(count):
            transport.send(peer, label(number), numbers(500, number))
        return
    held = {number: wait(transport).take() for number in range(count)}
    threads = []
    for number in random.Random(1).sample(sorted(held), count):
        require_equal(held[number], numbers(500, number))
        tensor = held.pop(number)
        if number % 2:
            # The thread releases the last reference to the tensor.
            threads.append(threading.Thread(target=lambda *_: None, args=([tensor],)))
            threads[-1].start()
        del tensor
    for thread in threads:
        thread.join()


def train(rank: Rank, kind: str) -> None:
    """Checks that received tensors can be leaves of autograd, and that their data can be freed."""
    transport, peer = rank.open(kind)
    count = 60
    if rank.rank == 0:
        for number in range(count):
            transport.send(peer, label(number), numbers(64, number))
        for number in range(count):
            require_equal(wait(transport).take(), torch.full((64,), 2.0 * number))
        return
    graphs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(count):
        received = wait(transport).take()
        assert received.is_leaf
        assert received._base is None
        received.requires_grad_()
        graphs.append((received, (received * 2.0 * number).sum()))
        if len(graphs) == 3 or number == count - 1:
            _backward(graphs, transport, peer)


def _backward(
    graphs: list[tuple[torch.Tensor, torch.Tensor]], transport: Transport, peer: int
) -> None:
    """Runs the backward passes of ``graphs``, and sends the gradients to ``peer``.

    Clears the list ``graphs`` at the end.
    """
    for received, output in graphs:
        value = output.detach().clone()
        # Do the same as megatron-core's deallocate_output_tensor and custom_backward.
        output.data = torch.empty(1)
        torch.autograd.Variable._execution_engine.run_backward(
            (output,), (torch.ones_like(value),), False, False, (), True, True
        )
        gradient = received.grad
        assert gradient is not None
        transport.send(peer, label(0, ActionKind.B), gradient)
        received.data = torch.empty(0)
    graphs.clear()


def deadline(rank: Rank, kind: str) -> None:
    """Checks that waits time out if no message arrives, and that a later message is received."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        rank.await_mark("waited")
        transport.send(peer, label(7), torch.ones(2))
        return
    assert transport.completions.poll() is None
    begin_s = time.monotonic()
    assert transport.completions.wait(begin_s + 0.2) is None
    assert 0.19 <= time.monotonic() - begin_s < 2.0
    assert transport.completions.wait(begin_s - 1.0) is None
    rank.mark("waited")
    assert wait(transport).label.action.microbatch == 7


def slow_flush(rank: Rank, kind: str) -> None:
    """Checks that a flush times out if the receiver takes no messages, and names this receiver."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for number in range(3 * SLOTS):
            transport.send(peer, label(number), numbers(1000, number))
        name, text = error_of(lambda: transport.flush(0.2))
        assert name == "DeadlineError"
        assert "within 0.2 s by rank 1 (stage 1 on host-1)" in text
        rank.mark("flushed")
        return
    rank.await_mark("flushed")
    for number in range(3 * SLOTS):
        require_equal(wait(transport).take(), numbers(1000, number))


def reuse(rank: Rank, kind: str) -> None:
    """Checks that the sender may overwrite a tensor after sending it, even if it is queued."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for number in range(4 * SLOTS):
            tensor = numbers(1000, number)
            transport.send(peer, label(number), tensor)
            tensor.data = torch.empty(1)
            del tensor
            # If the memory of the sent tensor has been freed, this tensor overwrites it.
            torch.full((1000,), -1.0)
        rank.mark("sent")
        return
    rank.await_mark("sent")
    for number in range(4 * SLOTS):
        require_equal(wait(transport).take(), numbers(1000, number))


def reserve(rank: Rank, kind: str) -> None:
    """Checks that payloads can be reserved, sent and dropped, even if no slot is free."""
    transport, peer = rank.open(kind)
    shapes = [(1000,), (10, 20), (), (0, 3), (SLOT_BYTES,), (64, 3)]
    if rank.rank == 0:
        for number, shape in enumerate(shapes):
            tensor = transport.reserve(peer, shape, torch.float32)
            assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float32)
            tensor.fill_(float(number))
            transport.send(peer, label(number), tensor)
        dropped = transport.reserve(peer, (8,), torch.float32)
        del dropped
        several = [transport.reserve(peer, (8,), torch.bfloat16) for _ in range(2 * SLOTS)]
        for number, tensor in enumerate(several):
            tensor.fill_(number)
        for number in reversed(range(2 * SLOTS)):
            transport.send(peer, label(number), several[number].view(4, 2))
        several.clear()
        part = transport.reserve(peer, (100,), torch.float32).fill_(5.0)
        transport.send(peer, label(0), part[:10])
        transport.send(peer, label(1), part[10:20])
        return
    for number, shape in enumerate(shapes):
        require_equal(wait(transport).take(), torch.full(shape, float(number)))
    for number in reversed(range(2 * SLOTS)):
        require_equal(wait(transport).take(), torch.full((4, 2), number, dtype=torch.bfloat16))
    for _ in range(2):
        require_equal(wait(transport).take(), torch.full((10,), 5.0))


def reserved_is_shared(rank: Rank, kind: str) -> None:
    """Checks that a reserved tensor is sent without a copy, so that both sides share its memory."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        tensor = transport.reserve(peer, (256,), torch.float32).fill_(1.0)
        transport.send(peer, label(0), tensor)
        rank.await_mark("arrived")
        # Real senders must not change a sent tensor. This test does, to show that the receiver
        # shares its memory.
        tensor.fill_(2.0)
        rank.mark("changed")
        return
    tensor = wait(transport).take()
    assert tensor[0] == 1.0
    rank.mark("arrived")
    rank.await_mark("changed")
    assert tensor[0] == 2.0


def drain(rank: Rank, kind: str) -> None:
    """Checks that the receiver gets all messages even if the sender closes right after sending."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        assert not transport.describe_links()[peer].get("peer_closed")
        for number in range(4 * SLOTS):
            transport.send(peer, label(number), numbers(900, number))
        transport.close()
        transport.close()
        rank.mark("closed")
        return
    time.sleep(0.2)
    kept = [wait(transport).take() for _ in range(4 * SLOTS)]
    # Skip this for transports over torch. There, ``close`` on rank 0 waits for ``close`` on this
    # rank, so waiting for the mark would be a deadlock.
    if kind not in OVER_TORCH:
        rank.await_mark("closed")
        assert transport.completions.wait(time.monotonic() + 0.3) is None
        link = transport.describe_links()[peer]
        # User-defined transports (``module:Class``) need not report ``peer_closed``.
        assert link["peer_closed"] if ":" not in kind else "peer_closed" not in link
    transport.close()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("receive-from")
    ]
    gc.collect()
    for number, tensor in enumerate(kept):
        # The received payloads must stay intact after the channel is closed.
        require_equal(tensor, numbers(900, number))


def child(rank: Rank, kind: str) -> None:
    """Checks that a forked child cannot free the slots of received tensors that it inherits.

    The child must not be able to send messages either.
    """
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        transport.send(peer, label(0), numbers(1000, 0))
        rank.await_mark("forked")
        for number in range(1, 20):
            transport.send(peer, label(number), numbers(1000, number))
        return
    held = wait(transport).take()
    # Free the process groups of earlier programs before the fork. Freeing them in the child would
    # hang, because it waits for threads that the child does not have.
    gc.collect()
    pid = os.fork()
    if pid == 0:
        said = error_of(lambda: transport.send(peer, label(0), held))
        del held
        gc.collect()
        os._exit(int("belong to the process that made them" not in said[1]))
    assert os.waitpid(pid, 0)[1] == 0
    rank.mark("forked")
    for number in range(1, 20):
        require_equal(wait(transport).take(), numbers(1000, number))
    require_equal(held, numbers(1000, 0))


def refused(rank: Rank, kind: str) -> None:
    """Checks that unsupported tensors are rejected, and that the channel works afterwards."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for tensor, message in (
            (torch.empty(2, dtype=torch.bits8), "torch.bits8"),
            (torch.ones((1,) * 8), "8 dimensions"),
        ):
            name, text = error_of(partial(transport.send, peer, label(0), tensor))
            assert (name, message in text) == ("TransportError", True), text
        transport.send(peer, label(6), torch.ones(5))
        return
    assert wait(transport).label == label(6)


def pieces(rank: Rank, kind: str) -> None:
    """Checks that messages in many pieces arrive completely, even after a receive has timed out."""
    transport, peer = rank.open(kind)
    for number in range(20):
        message = numbers(3 * SLOTS * SLOT_BYTES // 4, number)
        if rank.rank == 1:
            assert transport.completions.wait(time.monotonic() + 0.01) is None
            rank.mark(f"waited {number}")
            rank.await_mark(f"sent {number}")
            require_equal(wait(transport).take(), message)
        else:
            rank.await_mark(f"waited {number}")
            transport.send(peer, label(number), message)
            transport.flush(LIMIT_S / 3)
            rank.mark(f"sent {number}")


def listen(rank: Rank, kind: str) -> None:
    """Checks that a listener is called for each arrival while the main thread takes no messages."""
    transport, peer = rank.open(kind)
    count = 20
    if rank.rank == 0:
        rank.await_mark("listens")
        for number in range(count):
            transport.send(peer, label(number), torch.full((8,), float(number)))
        return
    heard: list[tuple[int, bool]] = []
    done = threading.Event()
    main = threading.get_ident()

    def hear(item: Any) -> None:
        if isinstance(item, Exception):
            return
        heard.append((item.label.action.microbatch, threading.get_ident() != main))
        if len(heard) == count:
            done.set()

    transport.completions.listen(hear)
    rank.mark("listens")
    assert done.wait(LIMIT_S)
    assert heard == [(number, True) for number in range(count)]
    assert [wait(transport).take()[0] for _ in range(count)] == list(range(count))
    transport.completions.put(AdaptiveError("from here"))
    assert error_of(lambda: wait(transport)) == ["AdaptiveError", "from here"]


def arrivals(rank: Rank, kind: str) -> None:
    """Checks that network transports record the time of an arrival before the message is taken."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for number in range(8):
            transport.send(peer, label(number), torch.full((8,), float(number)))
        rank.mark("sent")
        return
    rank.await_mark("sent")
    time.sleep(0.3)  # All messages arrive before this sleep ends.
    looked_ns = time.monotonic_ns()
    for number in range(8):
        arrival = wait(transport)
        if kind not in ("shm", "rdma"):
            assert arrival.arrived_ns is not None
            assert 0 < arrival.arrived_ns < (time.monotonic_ns() if number else looked_ns)
        else:
            assert arrival.arrived_ns is None
        arrival.take()


def all_to_all(rank: Rank, kind: str) -> None:
    """Checks that each rank can send to all other ranks, and that the senders are known."""
    transport, _ = rank.open(kind)
    peers = [peer for peer in range(rank.num_ranks) if peer != rank.rank]
    count = 40
    for number in range(count):
        for peer in peers:
            tensor = numbers(10 + number * 13 % 2000, number + 7 * rank.rank)
            transport.send(peer, label(number, chunk=rank.rank), tensor)
    came = dict.fromkeys(peers, 0)
    for _ in range(count * len(peers)):
        arrival = wait(transport)
        number = came[arrival.peer]
        assert arrival.label == label(number, chunk=arrival.peer)
        expected = numbers(10 + number * 13 % 2000, number + 7 * arrival.peer)
        require_equal(arrival.take(), expected)
        came[arrival.peer] += 1
    assert set(came.values()) == {count}


def meet_stopped(rank: Rank, kind: str, limit_s: float) -> list[Any]:
    """Checks what rank 1 does while the test suspends rank 0, first briefly and then permanently.

    A rank is considered lost if nothing is heard from it for ``limit_s`` seconds.

    Returns:
        Class and text of the error on rank 1 after rank 0 was suspended permanently.
    """
    transport, peer = rank.open(kind, transport_silence_s=limit_s)
    if rank.rank == 0:
        rank.mark("ready")
        for microbatch in range(2):
            wait(transport).take()
            transport.send(peer, label(microbatch), torch.ones(3))
        time.sleep(LIMIT_S)
    rank.await_mark("stopped")
    for microbatch in range(2):  # While the first message is sent, the test suspends rank 0.
        transport.send(peer, label(microbatch), torch.ones(SLOT_BYTES * SLOTS * 2))
        wait(transport).take()
    rank.mark("went on")
    if kind in OVER_TORCH:
        rank.exit_with(["none", ""])
    rank.exit_with(error_of(lambda: _take(transport, LIMIT_S)))


def meet_killed(rank: Rank, kind: str, doing: str) -> list[Any]:
    """Checks the errors that rank 1 gets if the test kills rank 0.

    ``doing`` says what rank 1 does at this time: ``sending``, ``receiving``, or otherwise waiting.

    Returns:
        First error, error of a further send, error and duration of ``close``, and the time at which
        rank 1 noticed the loss.
    """
    transport, _ = rank.open(kind)
    if rank.rank == 0:
        transport.send(1, label(5, chunk=2), torch.ones(3))
        rank.await_mark("going")
        rank.mark("ready")
        number = 0
        while True:
            if doing == "receiving":
                transport.send(1, label(number), torch.ones(SLOT_BYTES * 8))
                number += 1
                transport.flush(LIMIT_S)
            elif doing == "sending":
                wait(transport).take()
            else:
                time.sleep(LIMIT_S)
    wait(transport).take()
    rank.mark("going")
    end_s = time.monotonic() + LIMIT_S
    first = ["none", ""]
    while first[0] == "none" and time.monotonic() < end_s:
        if doing == "sending":
            first = error_of(lambda: transport.send(0, label(1), torch.ones(SLOT_BYTES)))
            if first[0] == "none":
                first = error_of(lambda: _take(transport, 0.0))
        else:
            first = error_of(lambda: _take(transport, 1.0))
    noticed_s = time.time()
    if kind not in OVER_TORCH and "of step" not in first[1]:
        # For these transports, the error in the queue may contain more details than the error that
        # the send raised.
        error = error_of(lambda: _take(transport, 5.0))
        first = error if error[0] != "none" else first
    sending = ["none", ""]
    while sending[0] == "none" and time.monotonic() < end_s:
        sending = error_of(lambda: transport.send(0, label(1), torch.ones(SLOT_BYTES)))
        if kind in OVER_TORCH and sending[0] == "none":
            sending = error_of(lambda: transport.flush(1.0))
    begin_s = time.monotonic()
    closing = error_of(transport.close)
    seen = [first, sending, closing, time.monotonic() - begin_s, noticed_s]
    assert error_of(transport.close) == ["none", ""]
    return seen


def _take(transport: Transport, limit_s: float) -> None:
    arrival = transport.completions.wait(time.monotonic() + limit_s)
    if isinstance(arrival, Arrival):
        arrival.take()


def survive(rank: Rank, kind: str) -> None:
    """Keeps the channels of an old job open during a new job. The test kills the process."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        transport.send(peer, label(0), torch.ones(10))
    else:
        wait(transport).take()
    rank.mark(f"open-{rank.rank}")
    time.sleep(LIMIT_S)
    raise AssertionError("the test did not kill this process")


def ping_pong(rank: Rank, kind: str, rounds: int, value: float) -> None:
    """Sends ``value`` back and forth ``rounds`` times. The value identifies the job."""
    transport, peer = rank.open(kind)
    for number in range(rounds):
        transport.send(peer, label(number), torch.full((200,), value))
        assert wait(transport).take().unique().tolist() == [value]


def mixed(rank: Rank) -> None:
    """Checks that a rank can use shm with one peer and gloo with another peer.

    Each of three ranks has channels to its neighbours. Only rank 2 lacks the extension, so only its
    channel uses gloo. Rank 1 gets the messages of both channels from one queue.
    """
    peers = {0: [1], 1: [0, 2], 2: [1]}[rank.rank]
    rank.join_group()
    original = extension._attempt
    if rank.rank == 2:
        extension._attempt = lambda: (None, "not built here")  # type: ignore[assignment]
    try:
        transport, _ = rank.open("auto", peers)
    finally:
        extension._attempt = original
    assert transport.name == ("shm", "shm+gloo", "gloo")[rank.rank]
    kinds = {peer: link["kind"] for peer, link in transport.describe_links().items()}
    assert kinds == ({1: "shm"}, {0: "shm", 2: "gloo"}, {1: "gloo"})[rank.rank]
    if rank.rank == 1:
        came = sorted((a.peer, float(a.take()[0])) for a in (wait(transport) for _ in range(6)))
        assert came == [(peer, float(number)) for peer in peers for number in range(3)]
        for peer in peers:
            transport.send(peer, label(9), torch.full((4,), 10.0 + peer))
        transport.flush(LIMIT_S)
    else:
        for number in range(3):
            transport.send(1, label(number), torch.full((4,), float(number)))
        assert wait(transport).take()[0] == 10.0 + rank.rank
