"""Tests the C++ class Node from Python; tests/transport tests what transports guarantee."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.adaptive import extension
from megatron.adaptive.errors import PeerLostError, TransportError
from megatron.adaptive.transport.interface import CODE_OF
from megatron.adaptive.transport.native import make_tensors_with

TOKEN = b"0123456789abcdef"
# Timeout in seconds that is longer than any wait that succeeds.
PATIENT_S = 60.0
SOON_S = 0.02


@pytest.fixture(scope="module")
def native() -> ModuleType:
    module = extension.load()
    if module is None:
        pytest.skip(str(extension.why_missing()))
    make_tensors_with(module, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    return module


def make_node(native: ModuleType, rank: int = 0, **options: Any) -> Any:
    return native.Node(rank, TOKEN, 7, 2, **options)


@pytest.fixture
def alone(native: ModuleType) -> Iterator[Any]:
    """Yields a node that has no channels."""
    node = make_node(native)
    yield node
    node.close(PATIENT_S)


def open_pair(native: ModuleType, **options: Any) -> tuple[Any, Any]:
    """Returns two connected nodes in this process. ``options`` are the options of their channel."""
    low, high = make_node(native, 0), make_node(native, 1)
    address = high.listen("unix")
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(low.open, "shm", 1, address, PATIENT_S, **options)
        high.open("shm", 0, "", PATIENT_S, **options)
        opened.result()
    return low, high


@pytest.fixture
def pair(native: ModuleType) -> Iterator[tuple[Any, Any]]:
    """Yields two nodes that share a channel with three slots of 64 KiB."""
    low, high = open_pair(native, slots=3, slot_bytes=1 << 16)
    yield low, high
    low.close(PATIENT_S)
    high.close(PATIENT_S)


def send(node: Any, peer: int, tensor: torch.Tensor, microbatch: int = 0) -> None:
    code = CODE_OF[tensor.dtype][0]
    memory = tensor.data_ptr(), tensor.nbytes, tensor
    node.send(peer, 5, 1, 2, microbatch, code, 0, tuple(tensor.shape), *memory)


def wait(node: Any, limit_s: float = PATIENT_S) -> Any:
    return node.wait_until(time.monotonic() + limit_s)


def take(node: Any) -> torch.Tensor:
    return wait(node).tensor()  # type: ignore[no-any-return]


class TestMessages:
    def test_what_an_arrival_says(self, pair: tuple[Any, Any]) -> None:
        low, high = pair
        tensor = torch.ones(2, 3)
        send(low, 1, tensor, microbatch=9)
        send(low, 1, tensor, microbatch=10)
        arrival = wait(high)
        assert (arrival.peer, arrival.step, arrival.kind) == (0, 5, 1)
        assert (arrival.chunk, arrival.microbatch, arrival.sequence) == (2, 9, 0)
        assert (arrival.dtype, arrival.variant, arrival.nbytes) == (0, 0, 24)
        assert arrival.shape == (2, 3)
        arrival.tensor()
        with pytest.raises(RuntimeError, match="once"):
            arrival.tensor()
        with pytest.raises(RuntimeError, match=r"use tensor\(\)"):
            wait(high).tensor_on(0, 1, 0)

    def test_memory_is_kept_until_it_is_sent_and_no_longer(self, pair: tuple[Any, Any]) -> None:
        low, high = pair
        tensors = [torch.full((100,), float(i)) for i in range(8)]
        alive = [weakref.ref(tensor) for tensor in tensors]
        for i, tensor in enumerate(tensors):
            send(low, 1, tensor, i)
        del tensors, tensor
        gc.collect()
        assert [ref() is not None for ref in alive] == [False] * 3 + [True] * 5
        for i in range(8):
            assert take(high)[0] == i
        assert low.flush(PATIENT_S)
        assert [ref() for ref in alive] == [None] * 8

    @pytest.mark.parametrize("taken", [False, True])
    def test_slots_come_back_when_views_are_gone(self, pair: tuple[Any, Any], taken: bool) -> None:
        low, high = pair
        for i in range(4):
            send(low, 1, torch.full((10,), float(i)))
        held = [wait(high) for _ in range(3)]
        if taken:
            held = [arrival.tensor() for arrival in held]
        assert wait(high, SOON_S) is None
        del held[1]
        assert take(high)[0] == 3

    def test_arrivals_of_a_class_of_the_caller(
        self, native: ModuleType, pair: tuple[Any, Any]
    ) -> None:
        """Checks that arrivals can be of a caller's subclass, and that they free attached data."""

        class Mine(native.Arrival):  # type: ignore[misc, name-defined]
            __slots__ = ()

            def _take(self) -> torch.Tensor:
                raise AssertionError("_take is only for special dtypes and for devices")

        low, high = pair
        with pytest.raises(TypeError, match="a subclass of Arrival"):
            high.deliver_as(str, 1)
        high.deliver_as(Mine, 2)
        for number in range(3):
            send(low, 1, torch.full((4,), float(number)))
        first, second, third = (wait(high) for _ in range(3))
        assert {type(arrival) for arrival in (first, second, third)} == {Mine}
        kept = torch.ones(1)
        gone = weakref.ref(kept)
        first._label, third._settled = kept, kept
        assert (first._label is kept, second._label, first._settled) == (True, None, None)
        assert third.take() is kept
        # All three slots of the channel are in use. Therefore, take() copies the payload, which
        # frees its slot.
        assert second.take().tolist() == [1.0] * 4
        assert wait(high, 0.0) is None
        assert first.free_slots == 1
        del first, second, third, kept
        gc.collect()
        assert gone() is None

    def test_wrong_arguments(self, pair: tuple[Any, Any]) -> None:
        low, high = pair
        arguments = [1, 5, 1, 2, 3, 0, 0, (1,), torch.ones(1).data_ptr(), 4, None]
        for index, value, error in (
            (1, "x", TypeError),
            (2, 256, ValueError),
            (2, 255, ValueError),
            (3, 1 << 40, ValueError),
            (5, 13, ValueError),
            (6, -1, ValueError),
            (7, [1], TypeError),
            (7, (2,), ValueError),
            (7, (-1,), ValueError),
            (7, (1,) * 8, ValueError),
            (7, (1 << 62, 1 << 62), ValueError),
            (8, 0, ValueError),
            (9, 5, ValueError),
            (0, 2, TransportError),
        ):
            wrong = [*arguments[:index], value, *arguments[index + 1 :]]
            with pytest.raises(error):
                low.send(*wrong)
        with pytest.raises(TypeError, match="keep"):
            low.send(*arguments[:-1])
        assert high.poll() is None


class TestQueue:
    def test_objects_are_not_leaked(self, native: ModuleType) -> None:
        class Item:
            pass

        item = Item()
        alive = weakref.ref(item)
        node = make_node(native)
        node.put(item)
        del item, node
        gc.collect()
        assert alive() is None

    def test_wait_until_a_time(self, alone: Any) -> None:
        deadline_s = time.monotonic() + 0.05
        assert alone.wait_until(deadline_s) is None
        assert time.monotonic() >= deadline_s
        for past in (0.0, -1.0, float("-inf"), float("nan")):
            assert alone.wait_until(past) is None
        for far in (1e300, float("inf")):
            alone.put("there")
            assert alone.wait_until(far) == "there"
        alone.put("there")
        assert alone.wait_until(0.0) == "there"
        with pytest.raises(TypeError):
            alone.wait_until("soon")

    def test_signal_handlers_run_during_a_wait(self, alone: Any) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGUSR1, interrupt)
        try:
            threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
            with pytest.raises(KeyboardInterrupt):
                wait(alone)
        finally:
            signal.signal(signal.SIGUSR1, previous)

    def test_second_thread_is_refused(self, alone: Any) -> None:
        thread = threading.Thread(target=alone.wait_until, args=(float("inf"),))
        thread.start()
        time.sleep(0.05)
        with pytest.raises(RuntimeError, match="two threads"):
            alone.poll()
        alone.put(1)
        thread.join()


class TestEnds:
    def test_close_says_what_was_left(self, native: ModuleType) -> None:
        low, high = open_pair(native, slots=1)
        for _ in range(3):
            send(low, 1, torch.ones(1))
        assert low.pending(1) == 2
        assert not low.close(SOON_S)
        assert take(high) == 1
        with pytest.raises(PeerLostError, match="rank 0 is gone"):
            wait(high)
        high.close(PATIENT_S)


class TestOpen:
    def test_wrong_options(self, native: ModuleType) -> None:
        node = make_node(native)
        for kind, peer, options, error in (
            ("pigeon", 1, {}, ValueError),
            ("shm", 0, {}, ValueError),
            ("shm", 1, {"slotz": 1}, TypeError),
            ("shm", 1, {"slots": "x"}, TypeError),
            ("shm", 1, {"slots": -1}, TypeError),
            ("shm", 1, {"device": "mlx5_0"}, TypeError),
            ("shm", 1, {"silent_limit_s": 0.0}, ValueError),
        ):
            with pytest.raises(error):
                node.open(kind, peer, "@x", SOON_S, **options)
        with pytest.raises(ValueError, match="16 bytes"):
            native.Node(0, b"short", 7, 1)
        with pytest.raises(ValueError, match="'unix' or 'tcp'"):
            node.listen("ipx")

    def test_twice(self, pair: tuple[Any, Any]) -> None:
        with pytest.raises(TransportError, match="already has a channel"):
            pair[0].open("shm", 1, "@x", SOON_S)

    def test_higher_ranks_listen(self, native: ModuleType) -> None:
        with pytest.raises(TransportError, match="listen"):
            make_node(native, 1).open("shm", 0, "", SOON_S)
