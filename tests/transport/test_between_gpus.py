"""Tests native transports whose channel connects the memories of two GPUs.

The library ``csrc/tests/standin_cuda.cc`` replaces the CUDA driver, and treats host memory as GPU
memory. Streams are simulated as in ``test_staging.py``. ``tests/gpu/test_cuda_ipc.py`` runs the
same tests on a real GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.adaptive import extension
from megatron.adaptive.transport.interface import CODE_OF
from megatron.adaptive.transport.native import NativeTransport
from megatron.adaptive.transport.native_kinds import NativeChannels, ShmKind

from ..cpp_tests import ROOT, CppTests, compiler_or_skip
from .ends import LIMIT_S, SLOTS, close_all, label, open_nodes, open_transports, take
from .test_connect import ROW, connect_all
from .test_staging import Device, device

__all__ = ["device"]  # The tests of this module use this fixture of another module.

pytestmark = pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing()))


@pytest.fixture(scope="module")
def library() -> str:
    programs = CppTests(
        compiler_or_skip(), flags=("-O1",), folder=ROOT / "build" / "cpp-tests-plain"
    )
    return str(programs.library("standin_cuda"))


@pytest.fixture
def pair(
    device: Device, library: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[NativeTransport, NativeTransport]]:
    monkeypatch.setenv("STANDIN_CUDA_SAME_PROCESS", "1")
    monkeypatch.setenv("STANDIN_CUDA_ANY_MEMORY", "1")
    ends = open_transports(staged=True, cuda_device=0, cuda_driver=library)
    yield ends
    assert close_all(ends) == []
    assert device.registered == []


@pytest.mark.parametrize("dtype", CODE_OF, ids=str)
def test_every_type_comes_back(
    pair: tuple[NativeTransport, NativeTransport], dtype: torch.dtype
) -> None:
    low, high = pair
    assert low.describe_links()[1]["gpu_path"] == "cuda-ipc"
    sent = torch.ones(4, 32, dtype=torch.uint8).view(dtype)
    low.send(1, label(0), sent)
    arrival = take(high)
    assert arrival._native.on_device  # type: ignore[attr-defined]
    received = arrival.take()
    assert (received.dtype, received.shape) == (dtype, sent.shape)
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


def test_order_is_kept_with_and_without_a_slot(
    pair: tuple[NativeTransport, NativeTransport],
) -> None:
    """Checks that tensors keep their order if some are empty, strided, or larger than a slot."""
    low, high = pair
    tensors = []
    for number in range(40):
        size = (10, 2000, 600, 0)[number % 4]
        tensors.append(torch.arange(2.0 * size).view(size, 2)[:, number % 2] + number)
        low.send(1, label(number), tensors[-1])
    for number, tensor in enumerate(tensors):
        arrival = take(high)
        assert arrival.label == label(number)
        assert torch.equal(arrival.take(), tensor)
    low.flush(LIMIT_S)


def test_slots_are_not_pinned_and_the_streams_see_no_copy(
    pair: tuple[NativeTransport, NativeTransport], device: Device
) -> None:
    low, high = pair
    assert device.registered == []
    low.send(1, label(0), torch.ones(10))
    take(high).take()
    assert device.said == []


def test_a_full_channel_is_copied_out_of(pair: tuple[NativeTransport, NativeTransport]) -> None:
    low, high = pair
    held = []
    for number in range(3 * SLOTS):
        low.send(1, label(number), torch.full((600,), float(number)))
        held.append(take(high).take())
    assert len({tensor.data_ptr() for tensor in held[: SLOTS - 4]}) == SLOTS - 4
    for number, tensor in enumerate(held):
        assert tensor.tolist() == [float(number)] * 600
    low.flush(LIMIT_S)


def test_arrivals_of_a_listener_are_copied_out_of_a_full_channel(
    pair: tuple[NativeTransport, NativeTransport], device: Device
) -> None:
    low, high = pair
    high.completions.listen(lambda item: None)
    for number in range(2 * SLOTS):
        low.send(1, label(number), torch.full((600,), float(number)))
    low.flush(LIMIT_S)
    arrivals = [take(high) for _ in range(2 * SLOTS)]
    for number, arrival in enumerate(arrivals):
        assert arrival.take().tolist() == [float(number)] * 600
    assert "compute waits for copy on in" in device.said


def test_a_job_is_told_which_way_its_tensors_go(
    device: Device, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the log line about tensors in GPU memory. The ranks pretend to have a GPU."""
    monkeypatch.setenv("STANDIN_CUDA_SAME_PROCESS", "1")
    monkeypatch.setenv("STANDIN_CUDA_ANY_MEMORY", "1")
    offered: list[Any] = []
    options_of = ShmKind.channel_options

    def with_library(kind: ShmKind, channels: NativeChannels) -> dict[str, Any]:
        options = options_of(kind, replace(channels, device=torch.device("cuda", 0)))
        offered.append(dict(options))
        return {**options, "cuda_driver": library}

    monkeypatch.setattr(ShmKind, "channel_options", with_library)
    outcome = connect_all(ROW)
    shared = "transport: shm for ranks 0-1 1-2 (same machine; tensors "
    assert outcome.log == [shared + "stay in GPU memory, through CUDA IPC)"]
    close_all(outcome.made)
    assert {offer["cuda_device"] for offer in offered} == {0}
    assert not any("cuda_refusal" in offer for offer in offered)
    outcome = connect_all(ROW, transport_gpu="pinned")
    why = "pass through pinned memory, without CUDA IPC: rank "
    assert outcome.log == [
        f"transport: shm for ranks {low}-{low + 1} (same machine; tensors {why}{low}: "
        "--transport-gpu pinned)"
        for low in range(2)
    ]
    close_all(outcome.made)


def test_a_pair_without_a_way_says_why(device: Device) -> None:
    low, high = open_nodes(cuda_device=0, cuda_driver="libcuda-that-is-not-there.so")
    info = low.info(1)
    assert info["gpu_path"] == "pinned"
    assert "the CUDA driver cannot be opened" in info["gpu_reason"]
    assert "libcuda-that-is-not-there.so" in info["gpu_reason"]
    low.close(LIMIT_S)
    high.close(LIMIT_S)


def test_without_a_device_nothing_is_said() -> None:
    low, high = open_nodes(cuda_device=-1)
    assert "gpu_path" not in low.info(1)
    low.close(LIMIT_S)
    high.close(LIMIT_S)
