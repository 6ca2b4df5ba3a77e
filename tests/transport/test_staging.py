"""Tests which streams wait when tensors are copied between a simulated GPU and the host.

The tests copy real tensors. Streams and events are replaced by objects that record calls.
``tests/gpu/test_transport.py`` runs the same tests on a real GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive import extension
from megatron.adaptive.errors import TransportError
from megatron.adaptive.transport.native import NativeTransport
from megatron.adaptive.transport.staging import Staging

from .ends import CPU, LIMIT_S, close_all, label, open_transports, take

pytestmark = pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing()))


class Device:
    """Replaces the streams, events and memory functions of ``torch.cuda``.

    Attributes:
        said: Descriptions of all calls of streams and events, in order.
        copied: Event to set when all copies are complete.
        registered: Address and size of each memory region that is pinned in place.
        locks: Whether the device is able to pin memory in place.
        pinned: Shape of each tensor that was created in pinned memory.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self.copied = threading.Event()
        self.copied.set()
        self.registered: list[tuple[int, int]] = []
        self.pinned: list[tuple[int, ...]] = []
        self.locks = True
        self.current = self.stream("compute")
        self._streams = 0

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            cuda_stream=0,
            wait_stream=lambda other: self.said.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.said.append(f"{name} waits for {event.name}"),
        )

    def make_stream(self, device: Any) -> Any:
        self._streams += 1
        return self.stream(("out", "in")[(self._streams - 1) % 2])

    @contextlib.contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        former, self.current = self.current, stream
        yield
        self.current = former

    def make_event(self, *, blocking: bool) -> Any:
        assert blocking, "a waiting thread must sleep"
        event = SimpleNamespace(name="")

        def record() -> None:
            event.name = f"copy on {self.current.name}"

        event.record = record
        event.synchronize = lambda: self.copied.wait(LIMIT_S)
        return event

    def register(self, address: int, size: int, flags: int) -> int:
        if self.locks:
            self.registered.append((address, size))
        return int(not self.locks)

    def unregister(self, address: int) -> int:
        self.registered = [entry for entry in self.registered if entry[0] != address]
        return 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", made.make_event)
    monkeypatch.setattr(torch.cuda, "stream", made.within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    runtime = SimpleNamespace(cudaHostRegister=made.register, cudaHostUnregister=made.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda self, stream: made.said.append(f"memory kept for {stream.name}"),
    )
    empty = torch.empty

    def make_empty(*sizes: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        tensor = empty(*sizes, **more)
        if pin_memory:
            made.pinned.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(torch, "empty", make_empty)
    return made


Ends = tuple[NativeTransport, NativeTransport]


@pytest.fixture
def ends(device: Device) -> Iterator[Ends]:
    made = open_transports(staged=True, reservable=2)
    yield made
    device.copied.set()
    assert close_all(made) == []
    assert device.registered == []


def test_copies_wait_for_the_computation_and_are_waited_for(ends: Ends, device: Device) -> None:
    low, high = ends
    sent = torch.arange(100.0)
    low.send(1, label(0), sent)
    received = take(high).take()
    assert torch.equal(received, sent)
    assert device.said == [
        "out waits for compute",
        "memory kept for out",
        "compute waits for copy on in",
        "memory kept for compute",
    ]


def test_a_message_leaves_when_its_copy_is_there(ends: Ends, device: Device) -> None:
    low, high = ends
    device.copied.clear()
    low.send(1, label(0), torch.ones(10))
    assert high.completions.wait(time.monotonic() + 0.1) is None
    device.copied.set()
    assert take(high).label == label(0)


def test_a_slot_goes_back_when_its_copy_is_there(ends: Ends, device: Device) -> None:
    low, high = ends
    node = low._node
    low.send(1, label(0), torch.ones(10))
    arrival = take(high)
    device.copied.clear()
    received = arrival.take()
    # The worker thread holds this message back until the copy is complete.
    low.send(1, label(1), torch.ones(10))
    device.copied.set()
    low.flush(LIMIT_S)
    high.flush(LIMIT_S)
    second = take(high)
    # Only this message uses a slot. The slot of ``received`` is free, because its content was
    # copied.
    assert second._native.free_slots == 7
    assert received.sum() == 10.0
    assert node.pending(1) == 0


def test_order_is_kept_with_and_without_a_slot(ends: Ends) -> None:
    """Checks that messages keep their order if some tensors are strided or larger than a slot."""
    low, high = ends
    tensors = []
    for number in range(40):
        size = (10, 2000, 600, 900)[number % 4]
        tensor = torch.arange(2.0 * size).view(size, 2)[:, number % 2]
        tensors.append(tensor + number if number % 3 else tensor)
        low.send(1, label(number), tensors[-1])
    for number, tensor in enumerate(tensors):
        arrival = take(high)
        assert arrival.label == label(number)
        assert torch.equal(arrival.take(), tensor)
    low.flush(LIMIT_S)


def test_reserved_memory_is_the_devices(ends: Ends) -> None:
    low, high = ends
    tensor = low.reserve(1, (4, 4), torch.bfloat16).fill_(2.0)
    low.send(1, label(0), tensor)
    assert take(high).take().sum() == 32.0


def test_slots_are_pinned_where_a_channel_tells_them(device: Device) -> None:
    info = {"send_address": 4096, "send_bytes": 100, "receive_address": 8192, "receive_bytes": 50}
    node = SimpleNamespace(info=lambda peer: info if peer == 1 else {})
    staging = Staging(node, CPU, [0, 1], lambda *_: None)
    assert device.registered == [(4096, 100), (8192, 50)]
    staging.close()
    assert device.registered == []


def test_what_is_not_pinned_is_no_target_of_a_copy(device: Device) -> None:
    """Checks that tensors are copied through pinned memory if slots cannot be pinned."""
    device.locks = False
    low, high = made = open_transports(staged=True, reservable=2)
    low.send(1, label(0), torch.arange(5.0))
    assert device.pinned == [(5,)]
    assert take(high).take().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    device.locks = True
    assert close_all(made) == []


def test_a_pinned_slot_is_the_target_of_a_copy(ends: Ends, device: Device) -> None:
    low, high = ends
    low.send(1, label(0), torch.arange(5.0))
    assert device.pinned == []
    assert take(high).take().sum() == 10.0


def test_workers_make_the_gpu_current(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the worker threads select their GPU. Otherwise, they would use GPU 0."""
    current: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: current.append((threading.current_thread().name, gpu))
    )
    gpu = torch.device("cuda", 1)
    Staging(SimpleNamespace(), gpu, [], lambda *_: None).close()
    assert sorted(current) == [("device-to-host", gpu), ("host-to-device", gpu)]


def test_the_thread_that_hands_arrivals_on_makes_the_gpu_current(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the thread that passes on arrivals selects its GPU before it copies payloads."""
    current: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: current.append((threading.current_thread().name, gpu))
    )
    low, high = ends
    gpu = torch.device("cuda", 1)
    staging: Any = high._staging
    monkeypatch.setattr(staging, "_device", gpu)
    heard = threading.Event()
    high.completions.listen(lambda item: heard.set())
    low.send(1, label(0), torch.ones(1))
    assert heard.wait(LIMIT_S)
    assert current == [("arrivals", gpu)]


def test_a_refusal_to_pin_is_no_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that an error is cleared if memory cannot be pinned.

    Otherwise, the next kernel would report the error.
    """
    kernels = []

    def launch(*sizes: int, device: torch.device) -> torch.Tensor:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", launch)
    device.locks = False
    node = SimpleNamespace(info=lambda peer: {"send_address": 4096, "send_bytes": 100})
    Staging(node, CPU, [0], lambda *_: None).close()
    assert kernels == [CPU]


def test_an_error_of_a_worker_comes_out_of_the_queue(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    low, _ = ends
    staging: Any = low._staging
    low.flush(LIMIT_S)

    def fail() -> None:
        raise TransportError("the device is lost")

    staging._committing.do(fail)
    with pytest.raises(TransportError, match="the device is lost"):
        low.completions.wait(time.monotonic() + LIMIT_S)
    assert staging.flush(LIMIT_S)


def test_flush_ends_at_its_deadline(ends: Ends, device: Device) -> None:
    low, high = ends
    device.copied.clear()
    low.send(1, label(0), torch.ones(10))
    with pytest.raises(TransportError, match=r"within 0.05 s by the device"):
        low.flush(0.05)
    device.copied.set()
    take(high).take()
