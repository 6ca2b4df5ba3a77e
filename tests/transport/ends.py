"""Opens both ends of a native channel in one process, for tests of native transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron.adaptive import extension
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.interface import Arrival, Label, Transport
from megatron.adaptive.transport.native import NativeTransport
from megatron.adaptive.transport.staging import Staging

LIMIT_S = 20.0
CPU = torch.device("cpu")
SLOTS = 8


def open_nodes(kind: str = "shm", **options: Any) -> tuple[Any, Any]:
    """Opens a channel of kind ``kind`` between ranks 0 and 1, and returns their nodes."""
    module = extension.require("a test")
    low, high = (module.Node(rank, bytes(16), 1, 2) for rank in range(2))
    address = high.listen("unix") if kind == "shm" else high.listen("tcp", "127.0.0.1")
    options = {"slot_bytes": 4096, "slots": SLOTS, **options}
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(low.open, kind, 1, address, LIMIT_S, **options)
        high.open(kind, 0, "", LIMIT_S, **options)
        opened.result()
    return low, high


def open_transports(
    kind: str = "shm", *, device: torch.device = CPU, staged: bool = False, **options: Any
) -> tuple[NativeTransport, NativeTransport]:
    """Opens a channel, and returns the transports of both ends. They keep four slots free.

    Args:
        kind: Kind of the channel, ``shm`` or ``tcp``.
        device: Device of the tensors.
        staged: Whether tensors are copied through host memory, as for a GPU. The CPU simulates the
            GPU.
        options: Options of the channel.
    """

    def make(node: Any, peer: int) -> NativeTransport:
        def make_staging(send: Any) -> Staging:
            return Staging(node, CPU, [peer], send)

        part: Callable[[Any], Staging] | None = make_staging if staged else None
        return NativeTransport(node, {peer: kind}, device=device, least_free=4, make_staging=part)

    low, high = open_nodes(kind, **options)
    return make(low, 1), make(high, 0)


def close_all(transports: Sequence[Any]) -> list[BaseException]:
    """Closes all ``transports`` at the same time, and returns the errors that they raised."""
    raised: list[BaseException] = []

    def close(transport: Any) -> None:
        try:
            transport.close()
        except Exception as error:
            raised.append(error)

    threads = [
        threading.Thread(target=close, args=(transport,))
        for transport in transports
        if transport is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive()
    return raised


def take(transport: Transport) -> Arrival:
    """Waits for and returns the next message that ``transport`` receives."""
    item = transport.completions.wait(time.monotonic() + LIMIT_S)
    assert isinstance(item, Arrival)
    return item


def label(number: int) -> Label:
    return Label(1, Action(ActionKind.F, 0, number))


def names_within(profile: torch.profiler.profile, mark: str) -> set[str]:
    """Returns the names of the events in ``profile`` that begin within the range ``mark``.

    The range is created with ``record_function``. Events outside it do not count: the profiler
    itself calls a synchronization when it stops.
    """
    events: list[Any] = list(profile.events())
    ranges = [event.time_range for event in events if event.name == mark]
    # There is a second range with this name on a device. The range on the host starts first.
    inside = min(ranges, key=lambda event: event.start)
    return {event.name for event in events if inside.start <= event.time_range.start <= inside.end}
