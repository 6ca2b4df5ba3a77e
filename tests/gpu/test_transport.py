"""Tests sending GPU tensors through channels: contents, order, and that no call waits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch

from megatron.adaptive import extension
from megatron.adaptive.transport.interface import CODE_OF, Transport

from ..transport.ends import close_all, label, names_within, open_transports, take

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing())),
]

Ends = tuple[Transport, Transport]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["shm", "tcp"])
def ends(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Ends]:
    """Yields both ends of a channel through host memory: a sender and a receiver."""
    options = {"slot_bytes": 1 << 20, "reservable": 2}
    made = open_transports(request.param, device=device, **options)
    yield made
    assert not close_all(made)


@pytest.mark.parametrize("dtype", CODE_OF, ids=str)
def test_every_type_arrives(ends: Ends, device: torch.device, dtype: torch.dtype) -> None:
    sender, receiver = ends
    sent = torch.ones(4, 32, dtype=torch.uint8, device=device).view(dtype)
    sender.send(1, label(0), sent)
    received = take(receiver).take()
    assert (received.dtype, received.shape, received.device) == (dtype, sent.shape, device)
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


def test_copies_follow_the_computation(ends: Ends, device: torch.device) -> None:
    """Checks that messages are correct if kernels run for random times and memory is reused."""
    sender, receiver = ends
    rng = random.Random(3)
    for number in range(60):
        size = rng.choice([1, 1000, 1 << 18, 3 << 18])
        torch.cuda._sleep(rng.randrange(1_000_000))
        tensor = torch.full((size,), float(number), device=device)
        sender.send(1, label(number), tensor)
        tensor.data = torch.empty(1, device=device)
        # If the memory of the sent tensor has been freed, this tensor overwrites it.
        torch.full((size,), -1.0, device=device)
        if number >= 4:
            check(receiver, number - 4)
    for number in range(56, 60):
        check(receiver, number)


def check(receiver: Transport, number: int) -> None:
    arrival = take(receiver)
    assert arrival.label == label(number)
    received = arrival.take()
    torch.cuda._sleep(100_000)
    low, high = (received * 2).aminmax()
    assert (float(low), float(high)) == (2.0 * number,) * 2


def test_nothing_waits_for_the_device(ends: Ends, device: torch.device) -> None:
    """Checks that sends and receives return while the GPU is still computing."""
    sender, receiver = ends
    tensor = torch.ones(1 << 18, device=device)
    sender.send(1, label(0), tensor)
    take(receiver).take()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    begin_s = time.monotonic()
    sender.send(1, label(1), tensor)
    sent_s = time.monotonic() - begin_s
    assert not torch.cuda.current_stream().query()
    assert sent_s < 0.1
    arrival = take(receiver)
    torch.cuda._sleep(1_000_000_000)
    begin_s = time.monotonic()
    received = arrival.take()
    assert time.monotonic() - begin_s < 0.1
    assert not torch.cuda.current_stream().query()
    assert float(received.sum()) == 1 << 18


def test_no_call_of_a_step_synchronizes(ends: Ends, device: torch.device) -> None:
    sender, receiver = ends
    tensor = torch.ones(1 << 16, device=device)
    sender.send(1, label(0), tensor)
    take(receiver).take()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        torch.profiler.profile(activities=activities) as profile,
        torch.profiler.record_function("step"),
    ):
        for number in range(1, 5):
            sender.send(1, label(number), tensor)
            take(receiver).take()
    assert not {"cudaDeviceSynchronize", "cudaStreamSynchronize"} & names_within(profile, "step")
