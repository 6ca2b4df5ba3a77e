"""Tests that ``auto`` chooses a rule only if it beats all fixed orders within the memory cap."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.adaptive.config.schedule_specs import built_in_schedules
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.choose_partition import Loads, choose_together
from megatron.adaptive.schedule import anneal, choose_by_simulation, numba_kernels, simulate
from megatron.adaptive.schedule.catalog import make_candidate
from megatron.adaptive.schedule.choose_by_simulation import (
    ScheduleChoice,
    candidates,
    choose,
    evaluate,
)
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, StageTimes
from tests.multiprocess.launch import wait_until


def pick(
    *,
    sigma: float = 0.0,
    most: float = 32.0,
    chunks: int = 2,
    splittable: bool = True,
    until_s: float = math.inf,
) -> ScheduleChoice:
    times = StageTimes.equal(4 * chunks, forward_s=0.01, backward_s=0.01, weight_s=0.01)
    return choose(
        StageProfile(times=times, action_sigma=sigma),
        placement=Placement(num_ranks=4, num_chunks=chunks, kind="v" if chunks == 2 else "loop"),
        num_microbatches=16,
        most=most,
        splittable=splittable,
        until_s=until_s,
    )


def test_quiet_stages_get_the_best_fixed_order() -> None:
    choice = pick()
    assert choice.best.name == "zb-v"
    assert "auto takes zb-v" in choice.reason


def test_under_jitter_a_rule_with_split_backwards_wins() -> None:
    choice = pick(sigma=0.4)
    assert choice.best.name in ("adaptive", "hinted")
    assert choice.best.weight_pieces > 0
    assert "best fixed order dualpipe-v" in choice.reason
    assert "spread of action times 0.40" in choice.reason


def test_lengths_are_part_of_the_choice() -> None:
    times = StageTimes.equal(8, forward_s=0.01, backward_s=0.01, weight_s=0.01)
    factors = tuple(4.0 if index % 5 == 0 else 0.5 for index in range(16))
    choice = choose(
        StageProfile(times=times, microbatch_factors=(factors,)),
        placement=Placement(num_ranks=4, num_chunks=2, kind="v"),
        num_microbatches=16,
        most=6.0,
        splittable=True,
    )
    assert choice.best.name in ("adaptive", "hinted")
    assert "the longest microbatch takes 4 times" in choice.reason
    tried = {(o.candidate.name, o.candidate.shares) for o in choice.outcomes}
    assert {("adaptive", True), ("adaptive", False), ("zb-v", True)} <= tried


def test_little_memory_is_kept() -> None:
    for most in (2.5, 4.0):
        choice = pick(sigma=0.3, most=most)
        chosen = next(o for o in choice.outcomes if o.candidate == choice.best)
        assert chosen.peak_units <= most
    assert pick(sigma=0.0, most=4.0).best.name == "zb-v"


def test_whole_backwards_where_they_cannot_be_split() -> None:
    choice = pick(sigma=0.3, splittable=False)
    assert all(outcome.candidate.weight_pieces == 0 for outcome in choice.outcomes)


def test_time_ends_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []

    def evaluate_slowly(*arguments: Any) -> choose_by_simulation.CandidateOutcome:
        outcome = evaluate(*arguments)
        simulated.append(outcome.candidate)
        wait_until(lambda: time.monotonic() >= until_s or len(simulated) < 3, lambda: "", 60.0)
        return outcome

    monkeypatch.setattr(choose_by_simulation, "evaluate", evaluate_slowly)
    until_s = time.monotonic() + 5.0
    choice = pick(until_s=until_s)
    assert len(choice.outcomes) == len(simulated) == 3
    assert choice.best in simulated
    assert choice.reason.endswith(
        "; the remaining candidates were not simulated because of the time limit"
    )
    with pytest.raises(ScheduleError, match="no schedule was simulated before the time limit"):
        pick(until_s=time.monotonic())


def test_one_chunk_has_its_own_schedules() -> None:
    listed = candidates(Placement(num_ranks=4, num_chunks=1), 16, most=8.0, splittable=True)
    names = {candidate.name for candidate in listed}
    assert {"1f1b", "zb-h1", "adaptive", "hinted"} <= names
    assert {built_in_schedules()[name].chunks for name in names} <= {"one", "any"}


def test_no_memory_at_all_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"room for 0\.5 microbatches"):
        pick(most=0.5)


EQUAL = StageProfile(times=StageTimes.equal(8, forward_s=0.5, backward_s=0.5, weight_s=0.5))


def test_what_a_name_stands_for() -> None:
    adaptive = make_candidate("adaptive", 4, 2, 16)
    assert adaptive.placement == Placement(num_ranks=4, num_chunks=2, kind="v")
    assert (adaptive.weight_pieces, adaptive.cap) == (4, 6.0)
    assert str(adaptive) == "adaptive (v, 2 chunks, W in 4, cap 6)"
    static = make_candidate("1f1b", 4, 2, 16)
    assert (static.placement.num_chunks, static.weight_pieces, static.cap) == (1, 0, None)
    assert str(static) == "1f1b (loop, 1 chunk)"
    assert make_candidate("zb-v", 4, 2, 16).weight_pieces == 1
    # Static schedules use the requested placement if they support it.
    kinds = [
        make_candidate(name, 4, 2, 16, placement_kind="v").placement.kind
        for name in ("gpipe", "interleaved", "zb-v")
    ]
    assert kinds == ["v", "loop", "v"]
    chosen = make_candidate("adaptive", 4, 2, 16, placement_kind="loop", cap=3, weight_pieces=0)
    assert (chosen.placement.kind, chosen.cap, chosen.weight_pieces) == ("loop", 3, 0)


def test_one_and_two_chunks_get_the_same_work() -> None:
    spread = StageProfile(times=EQUAL.times, action_sigma=0.3)
    work = []
    for name in ("1f1b", "interleaved", "zb-v"):
        outcome = evaluate(make_candidate(name, 4, 2, 16), 16, spread, [5])
        work.append(int(outcome.example.workload.durations_ps.sum()))
    assert max(work) - min(work) < 1000  # Rounding may change each sum by some picoseconds.


def test_figures_of_known_schedules() -> None:
    outcome = evaluate(make_candidate("1f1b", 4, 2, 16), 16, EQUAL, [0])
    assert outcome.mean_s == pytest.approx((16 + 3) * 3)
    assert outcome.peak_units == 4
    assert outcome.bubble_fraction == pytest.approx(3 / 19)
    assert evaluate(make_candidate("zb-v", 4, 2, 16), 16, EQUAL, [0]).mean_s == pytest.approx(
        16 * 3 + 3 * 0.5
    )


def test_unknown_names_and_no_draws() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule 'best'"):
        make_candidate("best", 4, 2, 16)
    with pytest.raises(ScheduleError, match="seeds must not be empty"):
        evaluate(make_candidate("1f1b", 4, 2, 16), 16, EQUAL, [])


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine without compiled code, on which compiling makes the test fail."""
    monkeypatch.setattr(numba_kernels, "_loops", dict)
    monkeypatch.setattr(numba_kernels, "is_cached", lambda loop: False)
    monkeypatch.setattr(anneal, "is_cached", lambda loop: False)

    def compiles(rule: Any) -> Any:
        return lambda world: pytest.fail("the simulation was compiled")

    monkeypatch.setattr(simulate, "compiled_loop", compiles)


@pytest.mark.usefixtures("uncompiled")
def test_orders_to_anneal_are_compared_without_compiling() -> None:
    # Compiling the loops would take 32 s. Without compiling, the comparison takes only 3 s.
    choice = pick()
    assert any(outcome.candidate.hint for outcome in choice.outcomes)


@pytest.mark.usefixtures("uncompiled")
def test_partitions_of_a_small_job_are_compared_without_compiling() -> None:
    placement = Placement(num_ranks=4, num_chunks=1)
    heavy = Loads(
        placement=placement,
        partition=(2, 2, 2, 2),
        layer_s=(((1e-3,) * 3,),) * 4,
        beside_s=((0.0,) * 3,) * 3 + ((3e-3,) * 3,),
        most_layers=(math.inf,) * 4,
    )
    decision = choose_together(
        heavy,
        StageProfile(times=heavy.stage_times(heavy.partition)),
        {"loop": lambda partition: 32.0},
        gain=0.02,
        num_microbatches=8,
        splittable=True,
    )
    assert decision.partition is not None


@pytest.mark.usefixtures("uncompiled")
def test_a_small_job_is_decided_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anneal, "_compiled", lambda: SimpleNamespace(signatures=[]))
    # The remaining time is too short to compile the code for annealing.
    choice = pick(until_s=time.monotonic() + anneal.COMPILE_S)
    assert choice.best.name == "zb-v"
    assert not any(outcome.candidate.hint for outcome in choice.outcomes)
