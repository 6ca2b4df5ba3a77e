"""Tests measurements in a running pipeline, such as the times and the memory of stages."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.profiling.pipeline_times import LayerShare, Sample, most_of, profile_of
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
MS = 1_000_000


def sample(pp_rank: int, factor: float, links: dict[int, Link] | None = None) -> Sample:
    sample = Sample(pp_rank=pp_rank, links=links or {})
    for _ in range(2):
        sample.add(
            [
                (Action(kind, chunk, microbatch, piece), int(ms * factor * MS))
                for microbatch in range(3)
                for chunk in range(2)
                for kind, ms, piece in ((F, 10, 0), (B, 20, 0), (W, 4, 0), (W, 2, 1))
            ]
        )
    return sample


def test_stages_get_the_times_of_the_ranks_that_hold_them() -> None:
    placement = Placement(num_ranks=2, num_chunks=2, kind="v")
    links = {1: Link(latency_s=0.001, occupancy_s=0.002)}
    # There are two samples per rank, from different replicas.
    samples = [sample(0, 1.0, links), sample(1, 2.0), sample(0, 1.0), sample(1, 2.0)]
    profile = profile_of(samples, placement)
    assert profile.times.forward_s == (0.010, 0.020, 0.020, 0.010)
    assert profile.times.backward_s == (0.020, 0.040, 0.040, 0.020)
    assert profile.times.weight_s == (0.006, 0.012, 0.012, 0.006)
    assert profile.links == {(0, 1): links[1], (1, 0): links[1]}
    assert profile.action_sigma == 0.0


V2, LOOP2 = (Placement(num_ranks=2, num_chunks=2, kind=kind) for kind in ("v", "loop"))


def test_links_that_were_not_measured_are_as_slow_as_the_slowest() -> None:
    links = {1: Link(latency_s=0.001, occupancy_s=0.002)}
    more = {0: Link(latency_s=0.003, occupancy_s=0.001)}
    profile = profile_of([sample(0, 1.0, links), sample(1, 1.0, more)], V2)
    assert profile.link == Link(latency_s=0.003, occupancy_s=0.002)


def test_memory_of_another_placement_follows_its_stages() -> None:
    # Rank 0 holds all weights and activations in the V placement. The loop placement moves half of
    # them to rank 1.
    samples = [
        Sample(pp_rank=0, free_bytes=1000, kept_bytes=(100, 100), held_bytes=(300, 300)),
        Sample(pp_rank=1, free_bytes=1000, kept_bytes=(0, 0), held_bytes=(0, 0)),
    ]
    assert most_of(samples, V2, V2) == pytest.approx(900 / 200)
    assert most_of(samples, V2, LOOP2) == pytest.approx((900 - 300) / 100)
    # The replica with the least free memory limits the number of microbatches.
    tight = Sample(pp_rank=1, free_bytes=400, kept_bytes=(0, 0), held_bytes=(0, 0))
    assert most_of([*samples, tight], V2, LOOP2) == pytest.approx((360 - 300) / 100)


def test_memory_under_another_partition_follows_the_layers() -> None:
    # Each layer takes 10 bytes for activations and 20 bytes for weights. The loss takes another 40
    # bytes for activations. Each rank has two stages.
    samples = [
        Sample(pp_rank=0, free_bytes=1000, kept_bytes=(20, 60), held_bytes=(40, 40)),
        Sample(pp_rank=1, free_bytes=1000, kept_bytes=(20, 20), held_bytes=(40, 40)),
    ]
    now = (2, 2, 2, 2)
    assert most_of(samples, V2, V2, now, now) == most_of(samples, V2, V2)
    fewer = most_of(samples, V2, V2, now, (2, 3, 3, 0))
    assert fewer == pytest.approx(min((900 + 40) / 60, (900 - 40) / 60))
    assert most_of(samples, V2, LOOP2, now, (0, 4, 4, 0)) == pytest.approx(
        min((900 + 80 - 80) / 40, (900 + 80 - 80) / 80)
    )


class Waits(torch.nn.Module):
    """Runs the module ``inside`` if it is not ``None``, and then sleeps for ``seconds``."""

    def __init__(self, seconds: float, inside: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.inside = inside

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        activation = activation if self.inside is None else self.inside(activation)
        time.sleep(self.seconds)
        return activation


def test_the_share_is_that_of_the_block_in_its_model() -> None:
    block = Waits(0.02)
    model = Waits(0.001, block)
    measured = LayerShare({1: (model, block)}, CpuClock())
    assert measured.share(1) == 1.0
    for _ in range(3):
        model(torch.zeros(1))
    assert 0.5 < measured.share(1) < 1.0
    assert measured.share(0) == 1.0
    block.seconds, model.seconds = 0.0, 0.02
    measured.begin()
    for _ in range(3):
        model(torch.zeros(1))
    model.eval()
    model(torch.zeros(1))
    assert measured.share(1) < 0.5
    measured.close()
    assert not model._forward_hooks
    assert not block._forward_pre_hooks


def test_slices_of_a_microbatch_are_added_up() -> None:
    # The step has two microbatches of two slices each. The weight gradients of each slice are
    # computed by two actions.
    actions = [(Action(F, 0, item), 10 + item) for item in range(4)]
    actions += [(Action(B, 0, item), 20 + item) for item in (1, 0, 3, 2)]
    actions += [(Action(W, 0, item, piece), 5) for item in (1, 0, 3, 2) for piece in (0, 1)]
    sample = Sample(pp_rank=0)
    sample.add(actions, 2)
    assert sample.durations_ns == {(F, 0): [21, 25], (B, 0): [41, 45], (W, 0): [20, 20]}
