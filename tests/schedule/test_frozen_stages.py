"""Tests pipelines whose first stages are frozen, so that these stages get no gradients."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import Candidate, make_candidate
from megatron.adaptive.schedule.memory_caps import chunk_shares, default_cap, lead_of
from megatron.adaptive.schedule.policy import RulePolicy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.stage_placement import Placement, frozen_stages_of
from megatron.adaptive.schedule.workload import StageTimes, draw

from .conftest import actions, run

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W


def make_state(
    *,
    rank: int = 0,
    chunks: int = 2,
    frozen: int = 2,
    cap: float | None = 2.0,
    microbatches: int = 6,
    pieces: int = 1,
) -> RankState:
    """Returns the state of ``rank`` of two ranks. The first ``frozen`` stages are frozen."""
    return RankState(
        placement=Placement(num_ranks=2, num_chunks=chunks),
        rank=rank,
        num_microbatches=microbatches,
        cap=cap,
        weight_pieces=pieces,
        frozen_stages=frozen,
    )


def arrive(state: RankState, names: str) -> None:
    for action in actions(names):
        state.arrive(action.kind, action.chunk, action.microbatch)


def pick(state: RankState) -> str:
    return str(RulePolicy("adaptive", runtime_rules.ready_first).pick(state))


def test_a_frozen_chunk_has_forward_passes_only_and_keeps_nothing() -> None:
    state = make_state()
    assert state.frozen_chunks == 1
    assert state.num_actions == 6 * (1 + 3)
    run(state, "F0-0")
    assert state.in_flight == 0
    assert not state.is_ready(Action(B, 0, 0))
    assert state.why_not(Action(B, 0, 0)) == "no gradient flows through its stage"
    arrive(state, "F1-0 B1-0")
    run(state, "F1-0")
    # Only one of the rank's two chunks stores activations, so a microbatch in this chunk counts as
    # 1.
    assert state.in_flight == 1
    run(state, "B1-0 W1-0")
    assert state.in_flight == 0
    for number in range(1, 6):
        arrive(state, f"B0-{number - 1} F1-{number} B1-{number}")
        run(state, f"F0-{number} F1-{number} B1-{number} W1-{number}")
    assert state.done


def test_a_frozen_chunk_waits_until_the_next_stage_takes_its_outputs() -> None:
    state = make_state()
    run(state, "F0-0 F0-1")
    assert not state.is_ready(Action(F, 0, 2))
    assert state.why_not(Action(F, 0, 2)) == "stage 1 has not acknowledged the output of F0-0"
    assert "stage 1 to acknowledge the output of F0-0" in state.missing()
    assert state.untaken(Action(F, 0, 2)) == Action(F, 0, 0)
    assert state.is_acknowledgment(Action(B, 0, 0))
    arrive(state, "B0-0")
    assert state.is_ready(Action(F, 0, 2))
    assert state.untaken(Action(F, 0, 2)) is None
    free = make_state(cap=None)
    run(free, *(f"F0-{number}" for number in range(6)))


def test_only_outputs_that_a_frozen_stage_waits_for_are_acknowledged() -> None:
    state = make_state(rank=1, frozen=2)
    assert [state.acknowledged(Action(F, 0, number)) for number in range(6)] == [
        *[(0, 0)] * 4,
        None,
        None,
    ]
    first = make_state(rank=0, frozen=2)
    assert first.acknowledged(Action(F, 0, 0)) is None
    assert first.acknowledged(Action(F, 1, 0)) == (1, 0)
    assert not first.sends_gradient(1)
    assert make_state(rank=1, frozen=2).sends_gradient(1)
    assert make_state(frozen=0).acknowledged(Action(F, 1, 0)) is None


@pytest.mark.parametrize("frozen", [-1, 4])
def test_the_last_stage_cannot_be_frozen(frozen: int) -> None:
    with pytest.raises(ScheduleError, match="frozen_stages must be from 0 to 3, .* got"):
        make_state(frozen=frozen)


@pytest.mark.parametrize(
    ("partition", "frozen", "stages"),
    [((2, 3, 3), 0, 0), ((2, 3, 3), 1, 0), ((2, 3, 3), 2, 1), ((2, 3, 3), 6, 2), ((4, 4), 8, 1)],
)
def test_a_stage_is_frozen_if_all_its_layers_are(
    partition: tuple[int, ...], frozen: int, stages: int
) -> None:
    assert frozen_stages_of(partition, frozen) == stages


def test_shares_are_those_of_the_other_chunks() -> None:
    placement = Placement(num_ranks=2, num_chunks=3)
    assert chunk_shares(placement, 0, 3.0, frozen_stages=2) == (-1, 4)
    assert chunk_shares(placement, 0, 3.0, frozen_stages=0) == chunk_shares(placement, 0, 3.0)
    assert lead_of(None, 9) == 9
    assert lead_of(1.0, 9) == 2
    assert lead_of(2.5, 9) == 3


def test_a_frozen_forward_fills_waits_and_never_delays_what_others_wait_for() -> None:
    state = make_state()
    arrive(state, "F1-0 F1-1")
    assert pick(state) == "F1-0"
    run(state, "F1-0")
    arrive(state, "B1-0")
    assert pick(state) == "B1-0"
    run(state, "B1-0")
    assert pick(state) == "F1-1"
    run(state, "F1-1")
    # A frozen stage's forward pass comes first, because other stages need its output. No stage
    # needs a weight gradient.
    assert pick(state) == "F0-0"
    run(state, "F0-0 F0-1")
    assert pick(state) == "W1-0"


def test_a_weight_gradient_goes_first_if_a_forward_needs_its_memory() -> None:
    state = make_state(cap=1.0)
    arrive(state, "F1-0 B1-0 F1-1")
    run(state, "F1-0 B1-0")
    assert pick(state) == "W1-0"
    run(state, "W1-0")
    assert pick(state) == "F1-1"


def test_a_filling_forward_does_not_change_whose_turn_it_is() -> None:
    state = make_state(pieces=0)
    arrive(state, "F1-0")
    run(state, "F1-0 F0-0")
    arrive(state, "F1-1 B1-0")
    assert pick(state) == "B1-0"
    run(state, "B1-0 F0-1")
    assert pick(state) == "F1-1"


def simulated(
    candidate: Candidate, times: StageTimes, count: int, *, compiled: bool = False
) -> SimResult:
    return candidate.simulate(draw(candidate.placement, count, times), compiled=compiled)


def random_times(stages: int, frozen: int, seed: int) -> StageTimes:
    """Returns random times for ``stages`` stages. ``seed`` is the seed of the random numbers.

    Backward passes of the first ``frozen`` stages take no time.
    """
    rng = random.Random(seed)

    def times(first: int) -> tuple[float, ...]:
        return tuple(0.0 if stage < first else rng.uniform(0.2, 2.0) for stage in range(stages))

    return StageTimes(forward_s=times(0), backward_s=times(frozen), weight_s=times(frozen))


@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    kind=st.sampled_from(["loop", "v"]),
    count=st.integers(1, 12),
    pieces=st.integers(0, 2),
    name=st.sampled_from(["adaptive", "hinted", "dfc", "bfc"]),
    seed=st.integers(0, 10**6),
)
def test_every_step_ends_within_the_memory(
    ranks: int, chunks: int, kind: str, count: int, pieces: int, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)  # type: ignore[arg-type]
    stages = placement.num_stages
    frozen = rng.randrange(stages)
    cap = rng.choice([1.0, 1.5, default_cap(placement, count)])
    candidate = Candidate(
        name=name, placement=placement, weight_pieces=pieces, cap=cap, frozen_stages=frozen
    )
    result = simulated(candidate, random_times(stages, frozen, seed), count)
    assert max(result.peak_units) <= cap + 1e-3
    starts: dict[tuple[str, int, int], float] = {}
    for rank, spans in enumerate(result.spans):
        for span in spans:
            stage = placement.stage_of(rank, span.action.chunk)
            if span.action.piece == 0:
                key = str(span.action.kind), stage, span.action.microbatch
                assert key not in starts
                starts[key] = span.start_s
    expected = {("F", stage, m) for stage in range(stages) for m in range(count)}
    for kind_name in "BW"[: 1 + (pieces > 0)]:
        expected |= {(kind_name, s, m) for s in range(frozen, stages) for m in range(count)}
    assert starts.keys() == expected
    lead = lead_of(cap, count)
    for stage in range(frozen):
        for microbatch in range(lead, count):
            taken_s = starts["F", stage + 1, microbatch - lead]
            assert starts["F", stage, microbatch] >= taken_s


def test_the_compiled_simulation_is_the_same() -> None:
    placement = Placement(num_ranks=3, num_chunks=2, kind="v")
    candidate = Candidate(
        name="adaptive", placement=placement, weight_pieces=2, cap=2.0, frozen_stages=2
    )
    times = random_times(6, 2, 5)
    plain, compiled = (simulated(candidate, times, 7, compiled=each) for each in (False, True))
    assert plain.makespan_s == compiled.makespan_s
    assert plain.orders == compiled.orders


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_static_schedule_keeps_its_order(name: str) -> None:
    """Checks that a static schedule keeps its order of actions if a stage is frozen."""
    candidate = make_candidate(name, 4, 1, 8)
    frozen = replace(candidate, frozen_stages=1)
    assert frozen.skipped_stages == 0
    times = random_times(4, 1, 3)
    assert simulated(frozen, times, 8).orders == simulated(candidate, times, 8).orders


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_encoder_that_runs_ahead_shortens_the_step(chunks: int) -> None:
    """Checks that the limit on stored activations does not delay a frozen encoder.

    A frozen encoder stores no activations.
    """
    placement = Placement(num_ranks=4, num_chunks=chunks)
    stages, frozen = placement.num_stages, chunks
    forward = tuple(0.5 if stage < frozen else 1.0 for stage in range(stages))
    other = tuple(0.0 if stage < frozen else 1.0 for stage in range(stages))
    times = StageTimes(forward_s=forward, backward_s=other, weight_s=other)
    charged = Candidate(name="adaptive", placement=placement, weight_pieces=1, cap=1.0)
    free = replace(charged, frozen_stages=frozen)
    assert simulated(free, times, 16).makespan_s <= simulated(charged, times, 16).makespan_s
