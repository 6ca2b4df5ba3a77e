"""Measurements of a running pipeline: stage times from samples, slow ranks, room, layer shares."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.profiling.pipeline import (
    LayerShare,
    Sample,
    most_of,
    profile_of,
    rank_factors,
)
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.workload import Link

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
MS = 1_000_000


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


def measured(
    placement: Placement, layers: tuple[int, ...], ranks: tuple[float, ...], *, split: bool = True
) -> dict[ActionKind, tuple[float, ...]]:
    """Stage times with these factors of ranks, an embedding and a heavy loss."""
    times = {}
    for kind, per_layer_s in ((F, 0.01), (B, 0.01 if split else 0.02), (W, 0.01 if split else 0.0)):
        stages = [per_layer_s * count for count in layers]
        if kind is not B or not split:
            stages[0] += 0.001
        if kind is not W or split:
            stages[-1] += 0.04
        factors = [ranks[placement.locate(stage)[0]] for stage in range(len(stages))]
        times[kind] = tuple(t * f for t, f in zip(stages, factors, strict=True))
    return times


V2, LOOP2 = (Placement(num_ranks=2, num_chunks=2, kind=kind) for kind in ("v", "loop"))
V4 = Placement(num_ranks=4, num_chunks=2, kind="v")


@pytest.mark.parametrize("placement", [V2, LOOP2, V4], ids=lambda p: f"{p.num_ranks}{p.kind}")
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("split", [True, False])
def test_a_slow_rank_is_told_from_a_heavy_stage(
    placement: Placement, slow: int, split: bool
) -> None:
    layers = (2, 3, *(4,) * (placement.num_stages - 3), 1)
    ranks = tuple(2.0 if rank == slow else 1.0 for rank in range(placement.num_ranks))
    found = rank_factors(measured(placement, layers, ranks, split=split), placement, layers)
    relative = [factor / found[1 - slow] for factor in found]
    # The look-up of the embedding counts as slowness where the backward is not split.
    assert relative == pytest.approx(ranks, rel=1e-6 if split else 0.06)
    # Without layers to compare, ranks are alike.
    assert rank_factors(measured(V2, (4, 0, 0, 4), (1.0, 1.0)), V2, (4, 0, 0, 4)) == (1.0, 1.0)


def test_a_straggler_stays_with_its_rank_and_the_loss_with_its_stage() -> None:
    layers = (2, 2, 2, 2)
    samples = [Sample(pp_rank=rank) for rank in range(2)]
    for kind, times in measured(V2, layers, (1.0, 2.0)).items():
        for stage, time_s in enumerate(times):
            rank, chunk = V2.locate(stage)
            samples[rank].add([(Action(kind, chunk, 0), round(time_s * 1e9))])
    profile = profile_of(samples, V2, layers)
    assert profile.rank_factors is not None
    expected = measured(LOOP2, layers, (1.0, 2.0))[F]
    found = [
        time_s * profile.rank_factors[LOOP2.locate(stage)[0]]
        for stage, time_s in enumerate(profile.times.forward_s)
    ]
    assert found == pytest.approx(expected, rel=1e-6)


def test_links_that_were_not_measured_are_as_slow_as_the_slowest() -> None:
    links = {1: Link(latency_s=0.001, occupancy_s=0.002)}
    more = {0: Link(latency_s=0.003, occupancy_s=0.001)}
    profile = profile_of([sample(0, 1.0, links), sample(1, 1.0, more)], V2)
    assert profile.link == Link(latency_s=0.003, occupancy_s=0.002)


def test_memory_of_another_placement_follows_its_stages() -> None:
    # All weights and activations are on rank 0; a loop gives half of them to rank 1.
    samples = [
        Sample(pp_rank=0, free_bytes=1000, kept_bytes=(100, 100), held_bytes=(300, 300)),
        Sample(pp_rank=1, free_bytes=1000, kept_bytes=(0, 0), held_bytes=(0, 0)),
    ]
    assert most_of(samples, V2, V2) == pytest.approx(900 / 200)
    assert most_of(samples, V2, LOOP2) == pytest.approx((900 - 300) / 100)
    # A replica with less room counts.
    tight = Sample(pp_rank=1, free_bytes=400, kept_bytes=(0, 0), held_bytes=(0, 0))
    assert most_of([*samples, tight], V2, LOOP2) == pytest.approx((360 - 300) / 100)


class Waits(torch.nn.Module):
    """A model that does what is inside and then takes some time itself."""

    def __init__(self, seconds: float, inside: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.inside = inside

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given = given if self.inside is None else self.inside(given)
        time.sleep(self.seconds)
        return given


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
