"""Tests which pairs of ranks are measured, and how latency and bandwidth are computed."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.config.parallel import TransportConfig  # noqa: E402
from megatron.adaptive.errors import DeadlineError, TransportError  # noqa: E402
from megatron.adaptive.profiling import links  # noqa: E402
from megatron.adaptive.profiling.links import Rounds, as_curve, measure_link, pairings  # noqa: E402
from megatron.adaptive.profiling.transport_check import check_contents  # noqa: E402
from megatron.adaptive.schedule.workload import Link  # noqa: E402
from megatron.adaptive.transport.interface import CompletionQueue, HeldArrival, Label  # noqa: E402


class Wire:
    """Simulates a transport that has a link to one peer.

    The link sends one message at a time. Each message arrives some time after it was sent.
    """

    name = "wire"

    def __init__(self, latency_s: float, byte_s: float) -> None:
        self.completions = CompletionQueue()
        self.other: Wire | None = None
        self.cost = latency_s, byte_s
        self.free_s = 0.0

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        latency_s, byte_s = self.cost
        self.free_s = max(self.free_s, time.monotonic()) + byte_s * tensor.nbytes
        wait_s = self.free_s + latency_s - time.monotonic()
        assert self.other is not None
        item = HeldArrival(label, 0, tensor.nbytes, lambda: tensor)
        threading.Timer(wait_s, self.other.completions.put, [item]).start()


def test_latency_and_occupancy_come_apart() -> None:
    first, other = Wire(0.010, 1e-6), Wire(0.010, 1e-6)
    first.other, other.other = other, first
    payload = torch.zeros(2000, dtype=torch.float32)  # The link needs 8 ms to send this payload.
    measured: dict[bool, Link] = {}

    def side(wire: Wire, leads: bool) -> None:
        measured[leads] = measure_link(wire, 0, leads=leads, payload=payload, timeout_s=10.0)

    follower = threading.Thread(target=side, args=(other, False))
    follower.start()
    side(first, True)
    follower.join()
    assert 0.006 < measured[True].latency_s < 0.018
    assert 0.006 < measured[True].occupancy_s < 0.016


def test_a_silent_peer_is_named() -> None:
    wire = Wire(0.0, 0.0)
    wire.other = Wire(0.0, 0.0)
    with pytest.raises(DeadlineError, match="rank 7 did not respond within 0.05 s"):
        measure_link(wire, 7, leads=True, payload=torch.zeros(1), timeout_s=0.05)


def test_the_leader_says_when_enough_time_has_passed() -> None:
    first, other = Wire(0.001, 0.0), Wire(0.001, 0.0)
    first.other, other.other = other, first
    rounds: list[float] = []

    def count() -> float:
        rounds.append(time.perf_counter())
        return rounds[-1]

    def follow() -> None:
        measure_link(
            other,
            0,
            leads=False,
            payload=torch.zeros(1),
            timeout_s=10.0,
            rounds=Rounds(burst=2),
            clock=count,
        )

    follower = threading.Thread(target=follow)
    follower.start()
    long_rounds = Rounds(burst=2, seconds=0.2)
    measure_link(first, 1, leads=True, payload=torch.zeros(1), timeout_s=10.0, rounds=long_rounds)
    follower.join()
    # The measurement begins with short rounds, and then runs long ones.
    assert rounds[-1] - rounds[0] >= 0.4
    assert len(rounds) > 40


def test_a_payload_that_comes_changed_is_refused() -> None:
    wire = Wire(0.0, 0.0)
    wire.other = wire
    check_contents(wire, 0, torch.device("cpu"))
    damage = wire.send
    wire.send = lambda peer, label, tensor: damage(peer, label, tensor.roll(1))  # type: ignore
    with pytest.raises(TransportError, match="1000 bytes from rank 0 over wire were corrupted"):
        check_contents(wire, 0, torch.device("cpu"))


def test_pairs_are_each_kind_of_link_alone_and_together() -> None:
    machines = ["m0", "m0", "m0", "m0", "m1", "m1", "m1", "m1", "m2", "m2"]
    names = ["a"] * 8 + ["b"] * 2
    rounds = pairings(machines, names)
    assert (True, (0, 1), [(0, 1)]) in rounds
    assert (True, (0, 1), [(0, 1), (2, 3)]) in rounds
    assert (True, (8, 9), [(8, 9)]) in rounds
    assert (False, (0, 4), [(0, 4), (1, 5), (2, 6), (3, 7)]) in rounds
    assert (False, (0, 8), [(0, 8)]) in rounds
    assert (False, (0, 8), [(0, 8), (1, 9)]) in rounds
    assert len(rounds) == 7


def test_a_curve_gives_the_measured_seconds_back() -> None:
    curve = as_curve([(1024, 1e-5), (1 << 20, 1.1e-4), (1 << 22, 4.1e-4)])
    assert curve["latency_s"] == 1e-5
    for (size, speed), seconds in zip(curve["sizes"], (1.1e-4, 4.1e-4), strict=True):
        assert curve["latency_s"] + size / speed == pytest.approx(seconds)
    assert as_curve([(1024, 2e-5), (2048, 1e-5)])["sizes"] == [[2048, 2048 / 1e-5]]


@pytest.mark.parametrize(
    ("slow", "most_bytes", "measured", "slots"),
    [
        (None, math.inf, links.SIZES, [1 << 22, 1 << 25]),
        (None, 1 << 20, links.SIZES[:4], [1 << 22]),
        (1 << 16, math.inf, links.SIZES[:2], [1 << 22]),
    ],
)
def test_each_message_fits_in_a_slot(
    slow: int | None,
    most_bytes: float,
    measured: tuple[int, ...],
    slots: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that each measurement opens channels whose slots are large enough for its messages."""
    opened: list[int] = []
    sizes: list[int] = []
    closed: list[bool] = []

    def connect(endpoint: Any, peers: list[int], options: TransportConfig) -> Any:
        assert peers == [1]
        assert options.transport_slot_bytes is not None
        opened.append(options.transport_slot_bytes)
        return SimpleNamespace(close=lambda: closed.append(True))

    def measure(transport: Any, peer: int, *, payload: torch.Tensor, **_: Any) -> Link:
        assert payload.nbytes <= opened[-1]
        sizes.append(payload.nbytes)
        return Link(latency_s=1.0 if payload.nbytes == slow else 1e-6, occupancy_s=0.0)

    job: Any = SimpleNamespace(
        rank=0,
        places=[{"machine": "m"}] * 2,
        environment=SimpleNamespace(master_addr=""),
        control_group=None,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        gather=lambda value: [value, value],
    )
    connector = SimpleNamespace(connect=connect, own_end=lambda *_: None)
    monkeypatch.setattr(links, "make_connector", lambda job: connector)
    monkeypatch.setattr(links, "measure_link", measure)
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    (row,) = links.measure_links(job, ["a", "a"], most_bytes=most_bytes)
    assert tuple(sizes) == measured
    assert opened == slots
    assert len(closed) == len(slots)
    assert row["within"]
