"""Tests that the best partition is chosen for ranks with measured speeds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.choose_partition import (
    Decision,
    Loads,
    balanced,
    choose_together,
    propose,
    simulated_step,
    travelling,
)
from megatron.adaptive.schedule.catalog import Candidate, make_candidate
from megatron.adaptive.schedule.choose_by_simulation import evaluate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile

LOOP4 = Placement(num_ranks=4, num_chunks=1)
NOTHING = (0.0, 0.0, 0.0)


def loads(
    placement: Placement,
    partition: tuple[int, ...],
    speeds: tuple[float, ...],
    beside: dict[int, float] | None = None,
    most: tuple[float, ...] | None = None,
) -> Loads:
    """Returns the loads of ranks. A layer takes 1 ms per pass, times its rank's ``speeds`` entry.

    Passes are forward passes, backward passes and weight gradients. ``beside`` contains additional
    milliseconds per pass of some stages, and ``most`` contains the maximum number of layers of each
    rank.
    """
    times = [1e-3 * speed for speed in speeds]
    return Loads(
        placement=placement,
        partition=partition,
        layer_s=tuple(((each, each, each),) for each in times),
        beside_s=tuple(
            (extra * 1e-3,) * 3 if (extra := (beside or {}).get(stage)) else NOTHING
            for stage in range(placement.num_stages)
        ),
        most_layers=most or (math.inf,) * placement.num_ranks,
    )


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yields all partitions of ``layers`` layers into ``stages`` stages."""
    for cuts in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        edges = (0, *cuts, layers)
        yield tuple(high - low for low, high in itertools.pairwise(edges))


def step_of(present: Loads, name: str = "1f1b", microbatches: int = 8):  # type: ignore[no-untyped-def]
    """Returns a function that takes a partition and simulates its step time in seconds.

    The schedule is ``name``.
    """
    placement = present.placement
    candidate = make_candidate(name, placement.num_ranks, placement.num_chunks, microbatches)
    return simulated_step(present, candidate, microbatches)


@pytest.mark.parametrize("seed", range(8))
def test_no_partition_has_a_quicker_pace(seed: int) -> None:
    drawn = random.Random(seed)
    chunks = drawn.choice((1, 2))
    placement = Placement(num_ranks=3, num_chunks=chunks, kind="v" if chunks == 2 else "loop")
    every = list(partitions(drawn.randint(0, 9), placement.num_stages))
    present = loads(
        placement,
        drawn.choice(every),
        tuple(drawn.choice((1.0, 1.3, 2.0, 0.7)) for _ in range(3)),
        {0: drawn.random(), placement.num_stages - 1: 3 * drawn.random()},
        tuple(drawn.choice((4.0, 6.0, math.inf)) for _ in range(3)),
    )
    paces = [max(present.paces(partition)) for partition in every if present.fits(partition)]
    chosen = balanced(present)
    assert present.fits(chosen) == bool(paces)
    if paces:
        assert max(present.paces(chosen)) == pytest.approx(min(paces), rel=1e-6)


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_regains_what_the_best_of_all_partitions_would(slow: int) -> None:
    speeds = tuple(1.5 if rank == slow else 1.0 for rank in range(4))
    present = loads(LOOP4, (3, 3, 3, 3), speeds)
    step_s = step_of(present)
    proposal = propose(present, step_s, 0.03)
    assert proposal is not None
    ideal = min(map(step_s, partitions(12, 4)))
    assert proposal.partition[slow] == 2
    assert proposal.present_s - proposal.step_s >= 0.8 * (proposal.present_s - ideal)


@pytest.mark.parametrize("name", ["interleaved", "adaptive"])
def test_stages_of_several_chunks_share_what_their_rank_can_do(name: str) -> None:
    kind = "loop" if name == "interleaved" else "v"
    placement = Placement(num_ranks=2, num_chunks=2, kind=kind)
    present = loads(placement, (3, 3, 3, 3), (1.0, 2.0))
    proposal = propose(present, step_of(present, name), 0.05)
    assert proposal is not None
    ranks = [placement.locate(stage)[0] for stage in range(4)]
    assert sum(n for n, rank in zip(proposal.partition, ranks, strict=True) if rank == 0) == 8


def test_nothing_moves_for_less_than_the_least_gain() -> None:
    present = loads(LOOP4, (8, 8, 8, 8), (1.0, 1.04, 1.0, 0.98))
    assert propose(present, step_of(present), 0.05) is None
    # No other partition is faster per microbatch. Therefore, no step needs to be simulated, and
    # simulating one makes the test fail.
    slow = loads(LOOP4, (2, 2, 2, 2), (1.0, 1.2, 1.0, 1.0))
    assert propose(slow, lambda partition: pytest.fail(f"{partition}"), 0.05) is None
    assert slow.slowness == pytest.approx((1.0, 1.2, 1.0, 1.0))


def test_memory_is_kept_to() -> None:
    present = loads(LOOP4, (4, 4, 4, 4), (1.0, 2.0, 1.0, 1.0), most=(4, 4, 6, 4))
    proposal = propose(present, step_of(present), 0.05)
    assert proposal is not None
    assert present.fits(proposal.partition)
    assert proposal.partition[2] > 4
    full = loads(LOOP4, (4, 4, 4, 4), (1.0, 2.0, 1.0, 1.0), most=(4, 4, 4, 4))
    assert propose(full, step_of(full), 0.05) is None


def test_of_equals_the_one_with_least_travel_is_taken() -> None:
    # Each rank except the slow one can take another layer without delay. The layer must move to a
    # neighbour of the slow rank.
    present = loads(LOOP4, (2, 2, 2, 2), (1.0, 1.0, 1.0, 3.0))
    proposal = propose(present, lambda partition: max(present.paces(partition)), 0.05)
    assert proposal is not None
    assert proposal.partition == (2, 2, 3, 1)
    assert travelling(present.partition, proposal.partition, LOOP4) == 1
    turn = Placement(num_ranks=2, num_chunks=2, kind="v")
    assert travelling((2, 2, 2, 2), (2, 3, 1, 2), turn) == 0


def unlike(seed: int, chunks: int) -> Loads:
    """Returns random loads with up to three kinds of layers and with ranks of different speeds."""
    drawn = random.Random(seed)
    placement = Placement(num_ranks=3, num_chunks=chunks, kind="v" if chunks == 2 else "loop")
    layers, costs = drawn.randint(6, 10), (1.0, drawn.uniform(1.5, 4), 0.2)
    even = [layers // placement.num_stages] * placement.num_stages
    even[-1] += layers - sum(even)
    speeds = [drawn.choice((1.0, 1.3, 2.0)) for _ in range(3)]
    return Loads(
        placement=placement,
        partition=tuple(even),
        layer_s=tuple(tuple((speed * cost,) * 3 for cost in costs) for speed in speeds),
        beside_s=(*((drawn.random(),) * 3 for _ in range(placement.num_stages - 1)), (2.0,) * 3),
        most_layers=tuple(drawn.choice((7.0, math.inf)) for _ in range(3)),
        kinds=tuple(drawn.choice((0, 1, 1, 2)) for _ in range(layers)),
        sizes=((1.0, 1.8, 0.5),) * 3,
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("chunks", [1, 2])
def test_unlike_layers_get_the_quickest_pace(seed: int, chunks: int) -> None:
    present = unlike(seed, chunks)
    stages = present.placement.num_stages
    fitting = [
        division for division in partitions(len(present.kinds), stages) if present.fits(division)
    ]
    best = min(max(present.paces(division)) for division in fitting)

    def pace(partition: tuple[int, ...]) -> float:
        assert present.fits(partition) or partition == present.partition
        return max(present.paces(partition))

    proposal = propose(present, pace, 1e-3)
    taken = present.partition if proposal is None else proposal.partition
    # If each rank has one stage, the result is optimal. Step times that are nearly equal count as
    # equal, so allow a small difference.
    assert pace(taken) <= best * (1.006 if chunks == 1 else 1.2)


def test_dense_layers_before_experts_are_not_taken_for_as_many() -> None:
    """Checks that dense layers, which are faster, count less than layers with experts."""
    present = Loads(
        placement=Placement(num_ranks=2, num_chunks=1),
        partition=(5, 5),
        layer_s=(((1e-3,) * 3, (4e-3,) * 3),) * 2,
        beside_s=(NOTHING, NOTHING),
        most_layers=(math.inf, math.inf),
        kinds=(0, 0) + (1,) * 8,
    )
    proposal = propose(present, step_of(present), 0.05)
    assert proposal is not None
    assert proposal.partition == (6, 4)
    assert present.stage_times((6, 4)).forward_s == pytest.approx((18e-3, 16e-3))


V2 = Placement(num_ranks=2, num_chunks=2, kind="v")
V4 = Placement(num_ranks=4, num_chunks=2, kind="v")


def together(
    present: Loads,
    gain: float | None = None,
    most: tuple[float, float] = (8.0, 8.0),
    halves: tuple[Loads, ...] = (),
) -> Decision:
    """Returns the schedule, placement and partition that are chosen together.

    The ranks currently have the loads ``present``. ``most`` contains the memory limits of a V
    placement and of a loop placement, in microbatches.
    """
    return choose_together(
        present,
        StageProfile(times=present.stage_times(present.partition)),
        {"v": lambda partition: most[0], "loop": lambda partition: most[1]},
        num_microbatches=8,
        splittable=True,
        gain=gain,
        halves=halves,
    )


def seconds(
    present: Loads, candidate: Candidate | None, partition: tuple[int, ...] | None
) -> float:
    """Returns the simulated step time of ``candidate`` with ``partition`` in seconds."""
    assert candidate is not None
    times = present.placed(candidate.placement.kind).stage_times(partition or present.partition)
    return evaluate(candidate, 8, StageProfile(times=times), (0,)).mean_s


def test_order_placement_and_layers_are_chosen_together() -> None:
    """Checks that a joint choice is not slower than separate choices and random partitions."""
    present = loads(V4, (2,) * 8, (1.0,) * 4, {7: 3.0})
    decision = together(present, gain=0.03)
    assert decision.partition is not None
    assert sum(decision.partition) == 16
    best = seconds(present, decision.move, decision.partition)
    assert best < 0.97 * seconds(present, decision.stay, None)
    assert "with the v of 2-2-2-2-2-2-2-2 layers, a step takes" in decision.text
    in_turn = propose(present, step_of(present, "zb-v"), 0.03)
    assert in_turn is not None
    assert best <= in_turn.step_s
    drawn = random.Random(1)
    for _ in range(40):
        cuts = sorted(drawn.choices(range(17), k=7))
        other = tuple(high - low for low, high in itertools.pairwise((0, *cuts, 16)))
        assert step_of(present, "zb-v")(other) >= best


@pytest.mark.long
def test_layers_stay_where_others_gain_too_little_or_only_at_times() -> None:
    quiet, slow = (loads(V4, (2,) * 8, (1.0, factor, 1.0, 1.0)) for factor in (1.0, 1.5))
    for decision in (
        together(quiet, gain=0.03),
        together(slow),
        together(slow, gain=0.5),
        together(slow, gain=0.03, halves=(slow, quiet)),
    ):
        assert decision.stay is not None
        assert (decision.move, decision.partition) == (None, None)
    assert together(slow, gain=0.03, halves=(slow, slow)).partition is not None


def test_a_v_with_heavy_ends_becomes_a_loop() -> None:
    present = loads(V2, (4, 0, 0, 4), (1.0, 1.0))
    decision = together(present)
    assert decision.partition is None
    assert decision.move is not None
    assert decision.stay is not None
    assert (decision.move.placement.kind, decision.stay.placement.kind) == ("loop", "v")
    assert seconds(present, decision.move, None) < 0.7 * seconds(present, decision.stay, None)
    assert "(loop, 2 chunks" in decision.text
    assert "with the v, a step takes" in decision.text


def test_a_v_with_a_slow_rank_stays() -> None:
    # Both stages of rank 0 are three times slower. In both placements, rank 0 has two stages, so
    # changing the placement does not help.
    assert together(loads(V2, (1,) * 4, (3.0, 1.0))).move is None


def test_memory_is_counted_for_each_placement() -> None:
    heavy, even = loads(V2, (4, 0, 0, 4), (1.0, 1.0)), loads(V2, (1,) * 4, (1.0, 1.0))
    assert together(heavy, most=(8.0, 0.5)).move is None
    forced = together(even, most=(0.5, 8.0))
    assert forced.move is not None
    assert (forced.move.placement.kind, forced.stay) == ("loop", None)
    with pytest.raises(ScheduleError, match=r"room for 0\.5 microbatches"):
        together(even, most=(0.5, 0.5))


def test_what_slows_a_rank_stays_with_it_under_another_placement() -> None:
    # The last stage of a V is on rank 0.
    present = loads(V4, (2,) * 8, (2.0, 1.0, 1.0, 1.0), {7: 4.0})
    lying = present.placed("loop")
    assert sum(lying.beside_s[7]) == pytest.approx(sum(present.beside_s[7]) / 2)
    assert lying.placed("v").beside_s == present.beside_s
