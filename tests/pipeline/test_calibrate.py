"""What ``auto`` is told: stage times from samples, their spread, links by messages to and fro."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from megatron.adaptive.errors import DeadlineError
from megatron.adaptive.pipeline.calibrate import Sample, measure_link, profile_of, spread_of
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.workload import Link
from megatron.adaptive.transport.interface import Arrival, CompletionQueue, Label

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
MS = 1_000_000


class Wire:
    """A channel to one peer: messages follow each other on the link, then take the latency."""

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
        item = Arrival(label, 0, tensor.nbytes, lambda: tensor)
        threading.Timer(wait_s, self.other.completions.put, [item]).start()

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def sample(pp_rank: int, factor: float, links: dict[int, Link] | None = None) -> Sample:
    found = Sample(pp_rank=pp_rank, links=links or {})
    for _ in range(2):
        found.add(
            [
                (Action(kind, chunk, microbatch, piece), int(ms * factor * MS))
                for microbatch in range(3)
                for chunk in range(2)
                for kind, ms, piece in ((F, 10, 0), (B, 20, 0), (W, 4, 0), (W, 2, 1))
            ]
        )
    return found


def test_stages_get_the_times_of_the_ranks_that_hold_them() -> None:
    placement = Placement(num_ranks=2, num_chunks=2, kind="v")
    links = {1: Link(latency_s=0.001, occupancy_s=0.002)}
    # Two replicas of each rank.
    samples = [sample(0, 1.0, links), sample(1, 2.0), sample(0, 1.0), sample(1, 2.0)]
    profile = profile_of(samples, placement)
    assert profile.times.forward_s == (0.010, 0.020, 0.020, 0.010)
    assert profile.times.backward_s == (0.020, 0.040, 0.040, 0.020)
    assert profile.times.weight_s == (0.006, 0.012, 0.012, 0.006)
    assert profile.links == {(0, 1): links[1], (1, 0): links[1]}
    assert profile.action_sigma == 0.0


def test_the_spread_is_that_of_the_durations_whatever_their_mean() -> None:
    rng = random.Random(0)
    found = Sample(pp_rank=0)
    for chunk, mean in enumerate((1.0, 50.0)):
        found.add(
            (Action(F, chunk, i), int(mean * MS * rng.lognormvariate(0, 0.3))) for i in range(2000)
        )
    # One action in a hundred was interrupted for long.
    found.add((Action(F, 0, i), 1000 * MS) for i in range(20))
    assert spread_of([found]) == pytest.approx(0.3, rel=0.08)


def test_latency_and_occupancy_come_apart() -> None:
    one, other = Wire(0.010, 1e-6), Wire(0.010, 1e-6)
    one.other, other.other = other, one
    payload = torch.zeros(2000, dtype=torch.float32)  # 8 ms on the wire
    found: dict[bool, Link] = {}

    def side(wire: Wire, leads: bool) -> None:
        found[leads] = measure_link(wire, 0, leads=leads, payload=payload, step=-1, timeout_s=10.0)

    follower = threading.Thread(target=side, args=(other, False))
    follower.start()
    side(one, True)
    follower.join()
    assert 0.006 < found[True].latency_s < 0.018
    assert 0.006 < found[True].occupancy_s < 0.016


def test_a_silent_peer_is_named() -> None:
    wire = Wire(0.0, 0.0)
    wire.other = Wire(0.0, 0.0)
    with pytest.raises(DeadlineError, match="rank 7 did not answer within 0.05 s"):
        measure_link(wire, 7, leads=True, payload=torch.zeros(1), step=-1, timeout_s=0.05)
