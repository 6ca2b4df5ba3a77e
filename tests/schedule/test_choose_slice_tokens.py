"""Tests that the best slice length is found although only two lengths have been measured."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron.adaptive.config.sequence_slices import Cut, SliceRule
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.choose_slice_tokens import (
    CostParts,
    Setting,
    SlicedStep,
    Timed,
    TokensChoice,
    choose_tokens,
    fit,
    fitting_candidates,
)
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import Link

IN_V = Placement(num_ranks=2, num_chunks=2, kind="v")
LOOP = replace(IN_V, kind="loop")
SETTING = Setting(
    placements=[IN_V],
    weight_pieces=1,
    link=Link(latency_s=1e-5, occupancy_s=1e-5),
    links={},
    link_tokens=64,
    room=lambda tokens, placement: math.inf,
)
DOCUMENTS = [512, 64, 64, 64, 32, 32]


def cuts_of(tokens: int, documents: Sequence[int] = DOCUMENTS) -> list[list[Cut]]:
    """Returns a step with one row of tokens for each length in ``documents``.

    Each row is cut into slices of ``tokens`` tokens.
    """
    rule = SliceRule(slices=1, tokens=tokens, is_packed=True, varies=True)
    return [[rule.cut(-(-length // tokens) * tokens, [length]) for length in documents]]


def measured(parts: CostParts, *lengths: int) -> dict[tuple[ActionKind, int], list[Timed]]:
    """Returns the times of the slices of all documents, for each slice length in ``lengths``.

    ``parts`` contains the times per slice, per token and per pair of tokens. The times are equal
    for all kinds of actions and all stages.
    """
    works = [
        cut.work(index)
        for tokens in lengths
        for cut in cuts_of(tokens)[0]
        for index in range(len(cut.ends))
    ]
    rows = [Timed(t, p, parts.fixed_s + t * parts.token_s + p * parts.pair_s) for t, p in works]
    return {(kind, stage): rows for kind in ActionKind for stage in range(4)}


def choice(parts: CostParts, setting: Setting = SETTING, until_s: float = math.inf) -> TokensChoice:
    lanes = measured(parts, 64, 128)
    return choose_tokens([128, 32, 64, 256, 512], lanes, cuts_of, setting, until_s)


@pytest.mark.parametrize(
    "parts", [CostParts(1e-3, 2e-5, 3e-8), CostParts(0.0, 2e-5, 0.0), CostParts(1e-3, 0.0, 1e-7)]
)
def test_slices_of_two_lengths_tell_all_parts_of_the_time(parts: CostParts) -> None:
    rows = measured(parts, 64, 128)[ActionKind.F, 0]
    assert fit(rows) == pytest.approx(parts, abs=1e-12)
    # Add a time that is much too long, as if the action had been interrupted. The fit must ignore
    # it.
    late = [*rows, Timed(64, 64**2, 1.0)]
    assert fit(late) == pytest.approx(parts, abs=1e-12)


def test_noise_never_makes_a_part_negative() -> None:
    rng = random.Random(3)
    for _ in range(20):
        rows = [
            Timed(row.tokens, row.pairs, row.seconds * rng.uniform(0.5, 1.5))
            for row in measured(CostParts(0.0, 1e-5, 0.0), 64, 128)[ActionKind.B, 1]
        ]
        parts = fit(rows)
        assert min(parts) >= 0
        assert max(parts) > 0


def test_short_slices_are_chosen_if_they_cost_nothing_and_long_ones_if_they_do() -> None:
    free = choice(CostParts(0.0, 1e-5, 0.0))
    assert free.tokens <= 64
    assert "simulated step times by slice length: 32: " in free.text
    assert f"auto takes slices of {free.tokens} tokens, adaptive (v, 2 chunks, W in 1" in free.text
    dear = choice(CostParts(1e-2, 1e-5, 0.0))
    assert dear.tokens >= 256
    assert dear.candidate is not None
    assert dear.candidate.cap is None  # A larger cap would not make the step faster.


def test_the_faster_placement_is_chosen() -> None:
    both = choice(CostParts(1e-4, 1e-5, 0.0), replace(SETTING, placements=[LOOP, IN_V]))
    alone = [
        choice(CostParts(1e-4, 1e-5, 0.0), replace(SETTING, placements=[placement]))
        for placement in (LOOP, IN_V)
    ]
    simulated = [
        float(each.text.split("simulated step ")[1].split()[0].replace(",", ""))
        for each in (both, *alone)
    ]
    assert simulated[0] == pytest.approx(min(simulated[1:]), rel=0.02)


def test_nothing_is_chosen_that_does_not_fit_into_memory() -> None:
    parts = CostParts(1e-2, 1e-5, 0.0)

    def room(tokens: int, placement: Placement) -> float:
        return 600.0 if tokens <= 64 else 100.0

    assert choice(parts, replace(SETTING, room=room)).tokens == 64

    # Memory is sufficient for two rows of 64 tokens, but the default cap would need memory for
    # three.
    chosen = choose_tokens(
        [128, 64],
        measured(parts, 64, 128),
        lambda tokens: cuts_of(tokens, [64] * 12),
        replace(SETTING, room=lambda tokens, placement: 2.1 * 64),
        math.inf,
    )
    assert chosen.candidate is not None
    assert (chosen.tokens, chosen.candidate.cap) == (64, 2.0)
    with pytest.raises(ScheduleError, match="no slice length fits into memory"):
        choice(parts, replace(SETTING, room=lambda tokens, placement: 100.0))


def test_each_step_is_compared_with_the_memory_that_it_needs_itself() -> None:
    # The longest row of each step has 1,024 tokens. The mean length of rows is 128 tokens in the
    # first step, and 448 in the second.
    parts = {(kind, stage): CostParts(0.0, 1e-5, 0.0) for kind in ActionKind for stage in range(4)}
    steps = [
        SlicedStep.of(cuts_of(64, documents)[0], parts, IN_V, SETTING)
        for documents in ([1024, *[64] * 14], [1024, *[256] * 3])
    ]

    def offered(room: float) -> list[Candidate]:
        setting = replace(SETTING, room=lambda tokens, placement: room)
        return list(fitting_candidates(steps, IN_V, setting, 64))

    assert offered(1200.0)
    for candidate in offered(1200.0):
        held = [step.cap_of(IN_V, candidate.cap) * step.row_tokens for step in steps]
        assert max(held) <= 1200.0
    assert not offered(1000.0)


def test_a_cap_of_the_user_is_kept() -> None:
    chosen = choice(CostParts(1e-2, 1e-5, 0.0), replace(SETTING, cap=1.5))
    assert chosen.candidate is not None
    assert chosen.candidate.cap == 1.5


def test_without_time_only_the_measured_length_is_simulated() -> None:
    chosen = choice(CostParts(0.0, 1e-5, 0.0), until_s=-math.inf)
    assert chosen.tokens == 128
    assert chosen.text.count(" ms") == 2
