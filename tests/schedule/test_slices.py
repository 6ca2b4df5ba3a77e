"""Tests the order, memory and costs of slices of sequences, and the time that slices save."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.config.sequence_slices import SliceCut
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind, item_label, mirrored
from megatron.adaptive.schedule.catalog import (
    Candidate,
    hint_for,
    make_candidate,
    make_schedule,
    placement_for,
)
from megatron.adaptive.schedule.choose_by_simulation import CandidateOutcome, choose, evaluate
from megatron.adaptive.schedule.memory_caps import chunk_shares
from megatron.adaptive.schedule.policy import actions_of, codes_of
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.schedule_file import load, save
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import peak_units, render_schedule, validate
from megatron.adaptive.schedule.workload import (
    StageProfile,
    StageTimes,
    draw,
    slice_bounds,
    slice_costs,
)
from tests.schedule.conftest import run

V = Placement(num_ranks=2, num_chunks=2, kind="v")
ONE = Placement(num_ranks=1, num_chunks=1)


def whole_step(share: float, cut: SliceCut = "equal-cost", jitter: float = 0.0) -> StageProfile:
    """Returns a profile of 32 stages, in which a microbatch takes 96 s for all F, B and W.

    ``share`` is the share of attention in the time of a forward pass. ``cut`` is the method of
    cutting sequences, and ``jitter`` is the relative spread of action times.
    """
    return StageProfile(
        times=StageTimes.equal(32, forward_s=1.0, backward_s=1 + share, weight_s=1 - share),
        attention_share=share,
        slice_cut=cut,
        action_sigma=jitter,
    )


def outcome(
    name: str,
    ranks: int,
    microbatches: int,
    slices: int,
    cap: float | None,
    share: float,
    jitter: float = 0.0,
) -> CandidateOutcome:
    candidate = make_candidate(name, ranks, 2, microbatches, cap=cap, num_slices=slices)
    seeds = range(3 if jitter else 1)
    return evaluate(candidate, microbatches, whole_step(share, jitter=jitter), seeds)


def efficiency(of: CandidateOutcome, ranks: int, microbatches: int) -> float:
    return 96 * microbatches / ranks / of.mean_s


def test_backwards_run_the_last_slice_of_each_microbatch_first() -> None:
    state = RankState(placement=ONE, rank=0, num_microbatches=2, num_slices=3, weight_pieces=1)
    assert (state.num_items, state.num_actions) == (6, 18)
    run(state, "F0-0 F0-1")
    assert state.ready() == (Action(ActionKind.F, 0, 2),)
    last = Action(ActionKind.B, 0, 2)
    assert not state.is_possible(last)
    assert state.why_not(last) == "its own forward F0-0.2 has not finished"
    first = Action(ActionKind.B, 0, 0)
    assert state.why_not(first) == "B0-0.2 comes before it"
    run(state, "F0-2")
    assert state.is_possible(last)
    run(state, "F0-3 B0-2 W0-2 B0-1 B0-0 F0-4 F0-5 B0-5")
    assert state.why_not(Action(ActionKind.W, 0, 5)) == "W0-0.1 comes before it"
    run(state, "W0-1 W0-0 W0-5 B0-4 B0-3 W0-4 W0-3")
    assert state.done
    assert state.in_flight == 0


def test_a_backward_waits_for_the_last_slice_of_its_microbatch() -> None:
    state = RankState(placement=V, rank=0, num_microbatches=1, num_slices=2)
    run(state, "F0-0")
    state.arrive(ActionKind.F, 1, 0)
    run(state, "F1-0")
    # This slice has finished its forward pass on the last stage. However, its backward pass must
    # wait for the last slice.
    assert state.ready() == (Action(ActionKind.F, 0, 1),)
    lacking = state.lacking()
    assert lacking == [Action(ActionKind.F, 1, 1)]
    run(state, "F0-1")
    state.arrive(ActionKind.F, 1, 1)
    run(state, "F1-1")
    assert state.ready() == (Action(ActionKind.B, 1, 1),)


def test_only_the_first_slice_of_a_microbatch_must_fit_with_all_the_others() -> None:
    state = RankState(placement=ONE, rank=0, num_microbatches=3, num_slices=4, cap=1.5)
    for item in range(4):
        action = Action(ActionKind.F, 0, item)
        assert state.fits(action)
        run(state, action)
    assert state.in_flight == 1.0
    assert not state.fits(Action(ActionKind.F, 0, 4))
    run(state, "B0-3")
    assert not state.fits(Action(ActionKind.F, 0, 4))
    run(state, "B0-2")
    # The rank now holds half a microbatch. The cap of 1.5 allows another whole microbatch.
    assert state.fits(Action(ActionKind.F, 0, 4))


def test_begun_microbatches_keep_the_memory_of_their_later_slices() -> None:
    state = RankState(placement=V, rank=0, num_microbatches=4, num_slices=2, cap=2.25)
    run(state, "F0-0 F0-1 F0-2")
    state.arrive(ActionKind.F, 1, 0)
    run(state, "F1-0")
    assert state.fits(Action(ActionKind.F, 0, 3))
    run(state, "F0-3")
    # The rank holds five of nine units of memory. One unit is reserved for the rest of a
    # microbatch. Another one would need two units in this chunk and two in the later chunk.
    assert not state.fits(Action(ActionKind.F, 0, 4))
    assert state.fits(Action(ActionKind.F, 1, 1))


@pytest.mark.parametrize(
    ("sizes", "least"), [(None, "1"), ([1, 2, 3, 4, 0.5, 0.5], "3.5"), ([0, 0, 1, 2, 1, 2], "1.5")]
)
def test_a_cap_below_one_microbatch_names_the_least(
    sizes: Sequence[float] | None, least: str
) -> None:
    message = rf"cap must be at least {re.escape(least)} \(the largest microbatch.* got 0.75"
    with pytest.raises(ScheduleError, match=message):
        RankState(placement=V, rank=0, num_microbatches=3, num_slices=2, cap=0.75, sizes=sizes)


def test_as_many_sizes_as_slices() -> None:
    with pytest.raises(ScheduleError, match="each of 3 microbatches of 2 slices, got 3"):
        RankState(placement=V, rank=0, num_microbatches=3, num_slices=2, sizes=[1, 2, 3])
    with pytest.raises(ScheduleError, match="slices per microbatch must be at least 1, got 0"):
        RankState(placement=V, rank=0, num_microbatches=3, num_slices=0)


@given(item=st.integers(0, 200), slices=st.integers(1, 9))
def test_mirrored_is_its_own_inverse(item: int, slices: int) -> None:
    turned = mirrored(item, slices)
    assert turned // slices == item // slices
    assert item % slices + turned % slices == slices - 1
    assert mirrored(turned, slices) == item


def test_labels_show_microbatch_and_slice() -> None:
    assert item_label(29, 8) == "3.5"
    assert item_label(29, 1) == "29"
    assert Action(ActionKind.W, 1, 29, 2).label(8) == "W1-3.5.2"


@given(
    slices=st.integers(1, 40),
    share=st.floats(0, 1),
    cut=st.sampled_from(["equal-cost", "equal-length"]),
)
def test_cuts_cover_the_sequence(slices: int, share: float, cut: SliceCut) -> None:
    bounds = slice_bounds(slices, share, cut)
    assert len(bounds) == slices + 1
    assert (bounds[0], bounds[-1]) == (0, pytest.approx(1))
    costs = slice_costs(bounds, share)
    assert sum(costs) == pytest.approx(1)
    if cut == "equal-cost":
        assert costs == pytest.approx((1 / slices,) * slices)
    else:
        assert list(costs) == pytest.approx(sorted(costs))


def test_slices_share_the_time_of_the_microbatch() -> None:
    profile = whole_step(0.6, "equal-length")
    whole = draw(V, 2, profile)
    cut = draw(V, 2, profile, num_slices=4)
    assert cut.durations_ps.shape == (3, 4, 8)
    of_microbatches = cut.durations_ps.reshape(3, 4, 2, 4).sum(axis=-1)
    assert abs(of_microbatches - whole.durations_ps).max() < 10
    forward, backward, weight = cut.durations_ps[:, 0, :4]
    # Attention takes 0.6 of the 1.0 s of a forward pass, and 1.2 of the 1.6 s of a backward pass.
    # It has no part in weight gradients.
    assert forward[3] / forward[0] == pytest.approx((0.4 / 4 + 0.6 * 7 / 16) / (0.1 + 0.6 / 16))
    assert backward[3] / backward[0] == pytest.approx((0.1 + 1.2 * 7 / 16) / (0.1 + 1.2 / 16))
    assert len(set(weight.tolist())) == 1
    assert cut.sizes == ()
    even = draw(V, 2, whole_step(0.6), num_slices=4)
    totals = even.durations_ps[:, 0, :4].sum(axis=0)
    assert totals == pytest.approx(totals[:1].repeat(4), rel=1e-9)
    assert sum(even.sizes[:4]) == pytest.approx(4)
    assert list(even.sizes[:4]) == sorted(even.sizes[:4], reverse=True)


def test_shares_admit_a_whole_microbatch() -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    assert chunk_shares(placement, 0, 4.0, 3) == (21,)
    assert chunk_shares(placement, 3, 1.0, 3) == (3,)


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 6), slices=st.integers(1, 6))
def test_seq_1f1b_is_valid_and_holds_few_slices(ranks: int, microbatches: int, slices: int) -> None:
    placement = placement_for("seq-1f1b", ranks, 2)
    schedule = make_schedule("seq-1f1b", placement, microbatches, num_slices=slices)
    validate(schedule)
    held = [min(ranks - rank + slices - 1, microbatches * slices) / slices for rank in range(ranks)]
    assert peak_units(schedule) == pytest.approx(held, abs=1e-3)
    if slices == 1:
        assert schedule.orders == make_schedule("1f1b", placement, microbatches).orders


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v", "interleaved", "varuna"])
def test_orders_of_whole_microbatches_refuse_slices(name: str) -> None:
    message = f"schedule {name} does not support slices, got 4 slices per microbatch; use"
    with pytest.raises(ScheduleError, match=f"{message}.*seq-1f1b"):
        make_schedule(name, placement_for(name, 2, 2), 4, num_slices=4)


def test_an_evaluation_takes_slices_in_ascending_order() -> None:
    schedule = make_schedule("forward-only", V, 2, num_slices=3)
    validate(schedule)
    assert schedule.forward_only


def test_codes_and_actions_are_inverse() -> None:
    schedule = make_schedule("seq-1f1b", Placement(num_ranks=2, num_chunks=1), 3, num_slices=4)
    for order in schedule.orders:
        assert actions_of(codes_of(order, 1, 4), 1, 0, 4) == order
        with pytest.raises(ScheduleError, match="slices ascending for F and descending for B"):
            codes_of(order[::-1], 1, 4)


def test_files_and_drawings_of_slices(tmp_path: Path) -> None:
    schedule = make_schedule("seq-1f1b", Placement(num_ranks=2, num_chunks=1), 2, num_slices=3)
    path = tmp_path / "order.json"
    save(schedule, path)
    assert '"slices": 3' in path.read_text()
    loaded = load(path)
    assert (loaded.orders, loaded.num_slices) == (schedule.orders, 3)
    assert "B0-1.2 B0-1.1 B0-1.0" in render_schedule(loaded)
    path.write_text(path.read_text().replace("B0-5 B0-4", "B0-4 B0-5"))
    with pytest.raises(ScheduleError, match=r"B0-1.1 cannot be here: B0-1.2 comes before it"):
        load(path)


def test_a_simulated_order_is_a_valid_schedule_and_can_be_followed() -> None:
    candidate = make_candidate("adaptive", 4, 2, 3, cap=2.0, num_slices=4)
    work = draw(candidate.placement, 3, whole_step(0.4), num_slices=4)
    result = candidate.simulate(work, compiled=False)
    schedule = result.to_schedule("run")
    assert (schedule.num_microbatches, schedule.num_slices) == (3, 4)
    validate(schedule)
    assert max(result.peak_units) <= 2.001
    followed = Candidate(
        name="annealed", placement=candidate.placement, weight_pieces=4, hint=schedule, num_slices=4
    )
    assert followed.simulate(work, compiled=False).makespan_s == result.makespan_s


def test_hinted_takes_the_order_of_slices_as_its_hint() -> None:
    placement = Placement(num_ranks=4, num_chunks=1)
    hint = hint_for(placement, 4, 4.0, num_slices=4, weight_pieces=0)
    assert (hint.name, hint.num_slices) == ("seq-1f1b", 4)
    validate(hint)


def test_auto_simulates_rules_and_the_order_of_slices() -> None:
    placement = Placement(num_ranks=4, num_chunks=1)
    profile = StageProfile(
        times=StageTimes.equal(4, forward_s=1.0, backward_s=1.2, weight_s=0.8), attention_share=0.2
    )
    choice = choose(
        profile,
        placement=placement,
        num_microbatches=2,
        most=2.0,
        splittable=True,
        quick=True,
        num_slices=4,
    )
    names = {outcome.candidate.name for outcome in choice.outcomes}
    assert names == {"adaptive", "hinted", "seq-1f1b"}
    assert {outcome.candidate.num_slices for outcome in choice.outcomes} == {4}


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_slices_fill_the_pipeline_with_few_microbatches(share: float) -> None:
    for microbatches, least in ((8, 0.95), (16, 0.97), (32, 0.98)):
        sliced = outcome("adaptive", 16, microbatches, 16, 4.0, share)
        assert efficiency(sliced, 16, microbatches) >= least
        assert sliced.peak_units <= 4.001


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_slices_beat_whole_microbatches_in_half_of_their_memory(microbatches: int) -> None:
    whole = min(
        (outcome(name, 8, microbatches, 1, 8.0, 0.6) for name in ("adaptive", "hinted", "zb-v")),
        key=lambda outcome: outcome.mean_s,
    )
    sliced = outcome("adaptive", 8, microbatches, 8, 4.0, 0.6)
    gain = {4: 1.9, 8: 1.22, 16: 1.1}[microbatches]
    assert whole.mean_s / sliced.mean_s >= gain
    assert sliced.peak_units <= 4.001


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_with_jitter_slices_at_run_time_beat_the_fixed_order(ranks: int) -> None:
    gains = []
    for microbatches in (ranks // 2, ranks, 2 * ranks):
        chosen = outcome("adaptive", ranks, microbatches, 8, ranks / 2, 0.2, jitter=0.3)
        fixed = outcome("seq-1f1b", ranks, microbatches, 8, None, 0.2, jitter=0.3)
        gains.append(fixed.mean_s / chosen.mean_s)
    assert statistics.fmean(gains) >= 1.05
