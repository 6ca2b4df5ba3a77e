"""Tests the threads of the NCCL transport between real processes, without a GPU.

In the channels, gloo replaces NCCL. Host streams replace GPU streams, and their work finishes when
a test allows it. ``test_contract.py`` also tests this transport.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.transport.nccl import CudaStreams

from .pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]


def test_a_channel_holds_what_is_under_way(pool: Pool) -> None:
    """Checks that tensors are freed after they were sent, so that memory use is limited."""
    excess, _ = pool.run("programs.many_sends", 2, count=3000, ahead=25)
    assert len(excess) >= 15
    assert max(excess) <= 2


def test_a_message_leaves_when_it_is_computed(pool: Pool) -> None:
    """Checks that messages are not announced too early, which would occupy the receiver's GPU."""
    sender, receiver = pool.run("programs.late_computation", 2)
    assert sender == ["receive-from-1", "send-to-1"]
    assert receiver == ["receive-from-0", "send-to-0"]


def test_an_arrival_is_announced_when_its_data_is_there(pool: Pool) -> None:
    """Checks that a message is delivered with its data, and is kept for the stream that uses it."""
    assert pool.run("programs.late_data", 2) == [[], ["MainThread"]]


def test_who_takes_nothing_holds_up_nobody_else(pool: Pool) -> None:
    name, text = pool.run("programs.one_takes_nothing", 3)[0]
    assert name == "DeadlineError"
    assert "were not received within 0.3 s by rank 1 (stage 1 on host-1)" in text


def test_a_rank_opens_its_own_channels_alone(pool: Pool) -> None:
    """Checks that a rank is not involved in opening the channels of other ranks."""
    assert pool.run("programs.row", 4) == [2, 4, 4, 2]


def test_a_channel_that_cannot_be_opened_is_an_error_on_all_ranks(pool: Pool) -> None:
    (name, text), *others = pool.run("programs.broken_row", 4)
    assert others == [[name, text]] * 3
    assert name == "TransportError"
    assert re.match("rank [123]: a channel over NCCL cannot be opened: .* with --transport", text)


class Cuda:
    """Replaces functions of ``torch.cuda``, and records their calls with the current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._local = threading.local()
        for name in ("set_device", "Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"{device} is current")

    def Stream(self, device: torch.device, priority: int) -> str:  # noqa: N802
        return f"stream of {device}, priority {priority}"

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802
        assert blocking, "a waiting thread must sleep"
        return SimpleNamespace(record=lambda stream: self.calls.append(f"event on {stream}"))

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.calls.append(f"enters {stream}")
        former, self._local.stream = self.current_stream(None), stream
        yield
        self._local.stream = former

    def current_stream(self, device: Any) -> str:
        return getattr(self._local, "stream", "the computing stream")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def in_thread(body: Callable[[], None]) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def test_a_thread_makes_its_gpu_current_before_its_stream(cuda: Cuda) -> None:
    """Checks that a thread selects its GPU first. Otherwise, its stream would be on GPU 0."""
    streams = CudaStreams(torch.device("cuda", 3))

    def body() -> None:
        with streams.private():
            streams.mark()

    in_thread(body)
    stream = "stream of cuda:3, priority -1"
    assert cuda.calls == ["cuda:3 is current", f"enters {stream}", f"event on {stream}"]


def test_a_finished_tensor_is_kept_for_the_stream_that_uses_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(stream))
    tensor = torch.ones(1)
    streams = CudaStreams(torch.device("cuda", 0))
    assert streams.use(tensor) is tensor
    streams.mark()
    assert kept == ["the computing stream"]
    assert cuda.calls == ["event on the computing stream"]


@pytest.mark.parametrize("schedule", ["1f1b", "adaptive"])
def test_a_late_tensor_parallel_rank_holds_up_nobody_for_ever(pool: Pool, schedule: str) -> None:
    """Checks that ranks do not deadlock if one of the tensor-parallel ranks is late."""
    first, late, *others = pool.run(
        "late_rank.train", 4, schedule=schedule, steps=6, microbatches=6, seed=1
    )
    # The gradient of a microbatch has three elements, which start as the number of the microbatch.
    # The all-reduce in each of the two backward passes doubles them.
    assert first == late == [[3.0 * 2 * 2 * number for number in range(6)]] * 6
    assert others == [[[]] * 6] * 2
