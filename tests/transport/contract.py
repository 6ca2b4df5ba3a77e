"""Programs of the contract suite; see ``test_contract.py`` for what each of them shows.

A program gets a :class:`Rank` and its arguments and returns what the test looks at, as plain
values. Rank 0 sends and rank 1 receives, unless said otherwise.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from typing import Any

import psutil
import torch

from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.transport.header import CODE_OF, Label
from megatron.adaptive.transport.interface import Transport

from .contract_rank import (
    LIMIT_S,
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
    """Messages of every type and many shapes, from nothing to many times the channel's memory."""
    messages = []
    for number, dtype in enumerate(CODE_OF):
        for place, shape in enumerate(SHAPES):
            seed = 1 + sender * 100_000 + number * 100 + place
            kind = (ActionKind.F, ActionKind.B)[seed % 2]
            tensor = make_tensor(seed, shape, dtype)
            messages.append((label(seed, kind, step=10**10 + seed, chunk=number), tensor))
    matrix = numbers(6 * 700, sender).reshape(6, 700)
    odd = [matrix.t(), matrix[:, 3], matrix[::2, ::3], torch.ones(1, 1).expand(7, 300)]
    odd += [torch.complex(matrix, -matrix).conj(), torch.complex(matrix, -matrix).conj().imag]
    odd += [matrix[3], matrix[5:, 699:].conj(), torch.nn.Parameter(matrix)]
    return messages + [(label(number), tensor) for number, tensor in enumerate(odd)]


def exchange(rank: Rank, kind: str, crc: bool = False) -> int:
    """Both sides send all kinds of messages at the same time and take what comes."""
    transport, peer = rank.open(kind, transport_crc=crc)
    for tag, tensor in everything(rank.rank):
        transport.send(peer, tag, tensor)
    count = 0
    for tag, tensor in everything(peer):
        arrival = wait(transport)
        assert (arrival.label, arrival.peer, arrival.nbytes) == (tag, peer, tensor.nbytes)
        require_equal(arrival.take(), tensor.detach())
        count += 1
    transport.flush(LIMIT_S)
    transport.close()
    return count


def wrap_around(rank: Rank, kind: str) -> int:
    """Sizes around the ends of slots, many times around, views let go in any order."""
    transport, peer = rank.open(kind)
    rng = random.Random(5)
    around = [SLOT_BYTES * k + d for k in (1, 2, SLOTS, SLOTS + 1) for d in (-1, 0, 1)]
    sizes = [rng.choice([*around, 0, 1, rng.randrange(3000)]) for _ in range(300)]
    if rank.rank == 0:
        for number, size in enumerate(sizes):
            transport.send(peer, label(number), make_tensor(number, (size,), torch.uint8))
    held: list[tuple[int, torch.Tensor]] = []
    if rank.rank == 1:
        for number, size in enumerate(sizes):
            arrival = wait(transport)
            assert (arrival.label, arrival.nbytes) == (label(number), size)
            held.append((number, arrival.take()))
            while len(held) > rng.randrange(SLOTS + 2):
                which, tensor = held.pop(rng.randrange(len(held)))
                require_equal(tensor, make_tensor(which, (sizes[which],), torch.uint8))
    transport.close()
    return len(sizes)


def far_ahead(rank: Rank, kind: str, count: int, nbytes: int) -> list[float]:
    """The receiver takes nothing before everything is sent.

    Returns:
        Seconds of the longest send on the sender; growth in MiB and a checksum on the receiver.
    """
    transport, peer = rank.open(kind, transport_slot_bytes=max(nbytes, SLOT_BYTES))
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    seen = []
    if rank.rank == 0:
        longest_s = 0.0
        for number in range(count):
            begin_s = time.monotonic()
            transport.send(peer, label(number), tensor)
            longest_s = max(longest_s, time.monotonic() - begin_s)
        rank.mark("sent")
        seen = [longest_s]
    if rank.rank == 1:
        before = psutil.Process().memory_info().rss
        rank.await_mark("sent")
        time.sleep(0.3)
        grown = (psutil.Process().memory_info().rss - before) / 2**20
        total = 0
        for number in range(count):
            arrival = wait(transport)
            assert arrival.label.action.microbatch == number
            total += int(arrival.take()[-1])
        seen = [*seen, grown, total]
    transport.close()
    return seen


def hold(rank: Rank, kind: str, count: int) -> int:
    """Every payload is kept until all have come, more than there are slots, then let go anyhow."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for number in range(count):
            transport.send(peer, label(number), numbers(500, number))
    if rank.rank == 1:
        held = {number: wait(transport).take() for number in range(count)}
        order = random.Random(1).sample(sorted(held), count)
        threads = []
        for number in order:
            require_equal(held[number], numbers(500, number))
            tensor = held.pop(number)
            if number % 2:
                # The last reference ends in another thread.
                threads.append(threading.Thread(target=lambda *_: None, args=([tensor],)))
                threads[-1].start()
            del tensor
        for thread in threads:
            thread.join()
    transport.close()
    return count


def train(rank: Rank, kind: str, count: int) -> float:
    """The receiver computes on what it gets as the pipeline does: leaves, graphs, ``.data``."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for number in range(count):
            transport.send(peer, label(number), numbers(64, number))
        total = 0.0
        for number in range(count):
            gradient = wait(transport).take()
            require_equal(gradient, torch.full((64,), 2.0 * number))
            total += float(gradient.sum())
        transport.close()
        return total
    graphs: list[tuple[torch.Tensor, torch.Tensor]] = []
    total = 0.0
    for number in range(count):
        received = wait(transport).take()
        assert received.is_leaf
        assert received._base is None
        received.requires_grad_()
        output = (received * 2.0 * number).sum()
        graphs.append((received, output))
        if len(graphs) == 3:
            total += _backward(graphs, transport, peer)
    total += _backward(graphs, transport, peer)
    transport.close()
    return total


def _backward(
    graphs: list[tuple[torch.Tensor, torch.Tensor]], transport: Transport, peer: int
) -> float:
    """Run the backwards of some microbatches and send their gradients; frees memory as we do."""
    total = 0.0
    for received, output in graphs:
        value = output.detach().clone()
        output.data = torch.empty(1)  # as deallocate_output_tensor and custom_backward do it
        torch.autograd.Variable._execution_engine.run_backward(
            (output,), (torch.ones_like(value),), False, False, (), True, True
        )
        gradient = received.grad
        assert gradient is not None
        total += float(gradient.sum())
        transport.send(peer, label(0, ActionKind.B), gradient)
        received.data = torch.empty(0)
    graphs.clear()
    return total


def deadline(rank: Rank, kind: str) -> list[Any]:
    """Nothing is sent; then something is."""
    transport, peer = rank.open(kind)
    seen: list[Any] = []
    if rank.rank == 1:
        seen.append(transport.completions.poll() is None)
        begin_s = time.monotonic()
        seen.append(transport.completions.wait(begin_s + 0.2) is None)
        seen.append(0.19 <= time.monotonic() - begin_s < 2.0)
        seen.append(transport.completions.wait(begin_s - 1.0) is None)
        rank.mark("waited")
    if rank.rank == 0:
        rank.await_mark("waited")
        transport.send(peer, label(7), torch.ones(2))
    if rank.rank == 1:
        seen.append(wait(transport).label.action.microbatch)
    transport.close()
    return seen


def slow_flush(rank: Rank, kind: str) -> list[str]:
    """The receiver takes nothing for a while: what it has no room for cannot be flushed."""
    transport, peer = rank.open(kind)
    seen = ["none", ""]
    if rank.rank == 0:
        for number in range(3 * SLOTS):
            transport.send(peer, label(number), numbers(1000, number))
        seen = error_of(lambda: transport.flush(0.2))
        rank.mark("flushed")
    if rank.rank == 1:
        rank.await_mark("flushed")
        for number in range(3 * SLOTS):
            require_equal(wait(transport).take(), numbers(1000, number))
    transport.close()
    return seen


def reuse(rank: Rank, kind: str) -> int:
    """The sender replaces its tensors right after sending, also while they wait for room."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        for number in range(4 * SLOTS):
            tensor = numbers(1000, number)
            transport.send(peer, label(number), tensor)
            tensor.data = torch.empty(1)
            del tensor
            torch.full((1000,), -1.0)  # takes the memory, if it is free
        rank.mark("sent")
    if rank.rank == 1:
        rank.await_mark("sent")
        for number in range(4 * SLOTS):
            require_equal(wait(transport).take(), numbers(1000, number))
    transport.close()
    return 4 * SLOTS


def reserve(rank: Rank, kind: str) -> int:
    """Payloads are computed in the channel's memory: used, dropped, more than there are slots."""
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
    if rank.rank == 1:
        for number, shape in enumerate(shapes):
            require_equal(wait(transport).take(), torch.full(shape, float(number)))
        for number in reversed(range(2 * SLOTS)):
            expected = torch.full((4, 2), number, dtype=torch.bfloat16)
            require_equal(wait(transport).take(), expected)
        for _ in range(2):
            require_equal(wait(transport).take(), torch.full((10,), 5.0))
    transport.close()
    return len(shapes)


def reserved_is_shared(rank: Rank, kind: str) -> list[bool]:
    """A reserved tensor is sent without a copy: both sides then read the same memory."""
    transport, peer = rank.open(kind)
    seen = []
    if rank.rank == 0:
        tensor = transport.reserve(peer, (256,), torch.float32).fill_(1.0)
        transport.send(peer, label(0), tensor)
        rank.await_mark("arrived")
        tensor.fill_(2.0)  # forbidden, but that is how it shows
        rank.mark("changed")
    elif rank.rank == 1:
        tensor = wait(transport).take()
        seen.append(bool(tensor[0] == 1.0))
        rank.mark("arrived")
        rank.await_mark("changed")
        seen.append(bool(tensor[0] == 2.0))
    transport.close()
    return seen


def drain(rank: Rank, kind: str) -> list[int]:
    """The sender closes at once; the receiver still gets everything, and nothing is an error."""
    transport, peer = rank.open(kind)
    taken = []
    if rank.rank == 0:
        for number in range(4 * SLOTS):
            transport.send(peer, label(number), numbers(900, number))
        transport.close()
        transport.close()
        rank.mark("closed")
        return []
    time.sleep(0.2)
    kept = []
    for number in range(4 * SLOTS):
        kept.append(wait(transport).take())
        taken.append(number)
    if kind != "gloo":  # gloo's close waits for the peer's
        rank.await_mark("closed")
        assert transport.completions.wait(time.monotonic() + 0.3) is None
    transport.close()
    gc.collect()
    for number, tensor in enumerate(kept):
        require_equal(tensor, numbers(900, number))  # also after the end of the channel
    return taken


def child(rank: Rank, kind: str) -> int:
    """A forked process lets go of what it inherited; the slot stays taken here."""
    transport, peer = rank.open(kind)
    if rank.rank == 0:
        transport.send(peer, label(0), numbers(1000, 0))
    if rank.rank == 1:
        held = wait(transport).take()
        pid = os.fork()
        if pid == 0:
            del held
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        rank.mark("forked")
    if rank.rank == 0:
        rank.await_mark("forked")
        for number in range(1, 20):
            transport.send(peer, label(number), numbers(1000, number))
    if rank.rank == 1:
        for number in range(1, 20):
            require_equal(wait(transport).take(), numbers(1000, number))
        require_equal(held, numbers(1000, 0))
    transport.close()
    return 20


def refused(rank: Rank, kind: str) -> list[str]:
    """What no message can carry is refused where it is sent; the channel works on."""
    transport, peer = rank.open(kind)
    seen: list[str] = []
    if rank.rank == 0:
        odd = (torch.empty(2, dtype=torch.bits8), torch.ones((1,) * 8))
        for tensor in odd:
            name, text = error_of(lambda t=tensor: transport.send(peer, label(0), t))
            assert name == "TransportError", (name, text)
            seen.append(text)
        transport.send(peer, label(6), torch.ones(5))
    if rank.rank == 1:
        assert wait(transport).label == label(6)
    transport.close()
    return seen
