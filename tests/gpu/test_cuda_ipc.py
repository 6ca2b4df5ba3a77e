"""Tests CUDA IPC between two processes on one GPU: contents, order, and that no call waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megatron.adaptive import extension
from megatron.adaptive.transport.interface import Arrival
from megatron.adaptive.transport.native import NativeTransport

from ..transport.ends import label, names_within, take

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing())),
]

LIMIT_S = 60.0
SLOT_BYTES = 1 << 20
SYNCHRONIZE = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"}


def open_channel(rank: int, addresses: Any, device: torch.device, **options: Any) -> Any:
    node = extension.require("a test").Node(rank, bytes(16), 1, 2)
    address = ""
    if rank == 1:
        addresses.put(node.listen("unix"))
    else:
        address = addresses.get(timeout=LIMIT_S)
    options = {"slot_bytes": SLOT_BYTES, "slots": 8, "reservable": 2, **options}
    node.open("shm", 1 - rank, address, LIMIT_S, cuda_device=device.index, **options)
    return node


def run_rank(rank: int, addresses: Any, body: Callable[..., None], options: Any) -> None:
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    node = open_channel(rank, addresses, device, **options)
    transport = NativeTransport(node, {1 - rank: "shm"}, device=device, least_free=4)
    try:
        body(rank, transport, device)
    finally:
        transport.close()


def both(body: Callable[..., None], **options: Any) -> None:
    """Runs ``body`` in two processes on GPU 0. ``options`` are the options of their channel."""
    context = torch.multiprocessing.get_context("spawn")
    arguments = (context.Queue(), body, options)
    torch.multiprocessing.start_processes(run_rank, arguments, nprocs=2, start_method="spawn")


def check_contents(rank: int, transport: NativeTransport, device: torch.device) -> None:
    link = transport.describe_links()[1 - rank]
    assert (link["gpu_path"], link["gpu_reason"]) == ("cuda-ipc", "")
    rng = random.Random(rank)
    held = []
    for number in range(200):
        torch.cuda._sleep(rng.randrange(300_000))
        # A tensor of the last size needs more than SLOT_BYTES.
        size = (1, 1000, 1 << 18, 3 << 18)[number % 4]
        tensor = torch.full((size,), float(number), device=device)
        transport.send(1 - rank, label(number), tensor)
        tensor.data = torch.empty(1, device=device)
        # If the memory of the sent tensor has been freed, this tensor overwrites it.
        torch.full((size,), -1.0, device=device)
        if number >= 4:
            held.append((number - 4, take(transport)))
        if len(held) == 3:
            check(held.pop(rng.randrange(3)))
    for number in range(196, 200):
        held.append((number, take(transport)))
    for numbered in held:
        check(numbered)
    transport.flush(LIMIT_S)


def check(numbered: tuple[int, Arrival]) -> None:
    number, arrival = numbered
    assert arrival.label == label(number)
    received = arrival.take()
    torch.cuda._sleep(100_000)
    low, high = (received * 2).aminmax()
    assert (float(low), float(high)) == (2.0 * number,) * 2


def check_no_waits(rank: int, transport: NativeTransport, device: torch.device) -> None:
    tensor = torch.ones(1 << 16, device=device)
    transport.send(1 - rank, label(0), tensor)
    take(transport).take()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        torch.profiler.profile(activities=activities) as profile,
        torch.profiler.record_function("step"),
    ):
        for number in range(1, 30):
            transport.send(1 - rank, label(number), tensor)
            take(transport).take().mul_(2.0)
        transport.flush(LIMIT_S)
    within = names_within(profile, "step")
    assert "aten::mul_" in within
    assert not SYNCHRONIZE & within
    assert not [name for name in within if name.startswith(("Memcpy DtoH", "Memcpy HtoD"))]


def check_that_sending_returns(rank: int, transport: NativeTransport, device: torch.device) -> None:
    """Checks that a send returns while the GPU is still computing."""
    tensor = torch.ones(1 << 16, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    transport.send(1 - rank, label(0), tensor)
    assert not torch.cuda.current_stream().query()
    assert float(take(transport).take().sum()) == 1 << 16


def check_pinned(rank: int, transport: NativeTransport, device: torch.device) -> None:
    link = transport.describe_links()[1 - rank]
    assert link["gpu_path"] == "pinned"
    assert link["gpu_reason"].endswith("not wanted")
    transport.send(1 - rank, label(0), torch.full((100,), 3.0, device=device))
    assert float(take(transport).take().sum()) == 300.0


def test_two_processes_on_one_gpu() -> None:
    both(check_contents)


def test_no_call_of_a_step_synchronizes_or_goes_through_the_host() -> None:
    both(check_no_waits)


def test_sending_does_not_wait_for_the_device() -> None:
    both(check_that_sending_returns)


def test_pinned_memory_where_it_is_asked_for() -> None:
    both(check_pinned, cuda_refusal="not wanted")
