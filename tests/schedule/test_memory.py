"""Caps: the least, the default, what is refused, and what schedules need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.memory import (
    check_cap,
    default_cap,
)
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_policies, make_schedule, placement_for
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import peak_units


@given(ranks=st.integers(1, 8), chunks=st.integers(1, 4), rounds=st.integers(1, 5))
def test_default_cap_covers_the_best_static_schedule(ranks: int, chunks: int, rounds: int) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    microbatches = ranks * rounds
    cap = default_cap(placement, microbatches)
    static = make_schedule("1f1b" if chunks == 1 else "interleaved", placement, microbatches)
    assert max(peak_units(static)) <= cap + 1e-9
    assert 1.0 <= cap <= microbatches
    check_cap(cap, (1 / chunks,) * chunks)


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "cap"),
    [(4, 1, 16, 6.0), (4, 1, 3, 3.0), (4, 2, 16, 8.5), (2, 2, 1, 1.0), (1, 2, 8, 1.0)],
)
def test_default_cap(ranks: int, chunks: int, microbatches: int, cap: float) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    assert default_cap(placement, microbatches) == cap


def test_a_cap_below_the_least_names_the_least() -> None:
    with pytest.raises(ScheduleError, match=r"cap 0.5 is below.*least cap is 1 \(one microbatch"):
        check_cap(0.5, (0.5, 0.5))
    with pytest.raises(ScheduleError, match="least cap is 4"):
        check_cap(3.5, (1.0, 3.0))
    with pytest.raises(ScheduleError, match="cap nan"):
        check_cap(float("nan"), (1.0,))


def on_one_rank(words: str) -> Schedule:
    actions = [word.replace(".", "-").split("-") for word in words.split()]
    return Schedule(
        name="mine",
        placement=Placement(num_ranks=1, num_chunks=2),
        num_microbatches=1 + max(int(numbers[1]) for numbers in actions),
        orders=(
            tuple(Action(ActionKind(n[0][0]), int(n[0][1]), *map(int, n[1:])) for n in actions),
        ),
    )


def test_peaks_with_unequal_chunks() -> None:
    schedule = on_one_rank("F0-0 F1-0 B1-0 F0-1 F1-1 B1-1 B0-0 B0-1")
    assert peak_units(schedule, (10.0, 1.0)) == (21.0,)
    assert peak_units(schedule) == (1.5,)


def test_a_split_backward_holds_until_the_last_piece_of_its_weight_gradient() -> None:
    schedule = on_one_rank("F0-0 B0-0 F1-0 B1-0 W0-0 W1-0 W1-0.1 W0-0.1")
    assert peak_units(schedule, (10.0, 1.0)) == (11.0,)
    assert peak_units(schedule, (10.0, 9.0), kept_fraction=0.5) == (14.0,)
    with pytest.raises(ScheduleError, match="kept fraction -1"):
        peak_units(schedule, kept_fraction=-1)


@given(
    name=st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-v", "v-half"]),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 3),
    kept=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_the_list_and_the_simulation_agree_on_the_peak(
    name: str, ranks: int, rounds: int, kept: float
) -> None:
    placement = placement_for(name, ranks, 2)
    schedule = make_schedule(name, placement, ranks * rounds)
    result = simulate(
        placement,
        ranks * rounds,
        make_policies(name, placement, ranks * rounds),
        StageTimes.equal(placement.num_stages, forward_s=1, backward_s=1, weight_s=1),
        weight_pieces=schedule.weight_pieces,
        kept_fraction=kept,
    )
    assert result.peak_units == pytest.approx(peak_units(schedule, kept_fraction=kept))
