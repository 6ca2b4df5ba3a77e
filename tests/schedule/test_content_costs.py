"""Tests that costs of microbatches are fitted to numbers that describe their content."""

from __future__ import annotations

import random

import pytest

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.content_costs import (
    ContentCosts,
    Numbers,
    StageFit,
    products_of,
    squares_of,
)
from megatron.adaptive.schedule.stage_placement import Placement


def rows_of(seed: int, count: int) -> list[Numbers]:
    """Returns tokens, token pairs, pixels and the constant 1 for ``count`` random microbatches.

    ``seed`` is the seed of the random generator.
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        tokens = float(rng.randrange(50, 2000))
        rows.append((tokens, tokens * tokens, 1e5 * rng.randrange(9), 1.0))
    return rows


def dot(factors: Numbers, row: Numbers) -> float:
    """Returns the dot product of ``factors`` and ``row``."""
    return sum(a * b for a, b in zip(factors, row, strict=True))


def test_a_stage_learns_what_its_time_depends_on() -> None:
    """Checks that the fitted costs of three stages match the true costs for noisy times."""
    truths = [(0.0, 0.0, 3e-9, 2e-4), (2e-6, 0.0, 0.0, 0.0), (1e-6, 1e-9, 0.0, 1e-4)]
    placement = Placement(num_ranks=3, num_chunks=1, kind="loop")
    costs = ContentCosts(placement, (1, 1, 1), [StageFit(4)] * 3)
    rng = random.Random(5)
    for step in range(40):
        sums_at = {}
        for replica in range(2):
            rows = rows_of(2 * step + replica, 8)
            for rank, truth in enumerate(truths):
                actions = [
                    (Action(kind, 0, number), round(dot(truth, row) * share * rng.uniform(95, 105)))
                    for number, row in enumerate(rows)
                    for kind, share in ((ActionKind.F, 0.4e7), (ActionKind.B, 0.6e7))
                ]
                sums_at[replica, rank] = costs.measured(rows, actions)
                assert len(sums_at[replica, rank]) == costs.num_sums
        costs.add(sums_at)
    costs.fit()
    for row in rows_of(99, 20):
        for stage, truth in zip(costs.stages, truths, strict=True):
            assert stage.cost(row) == pytest.approx(dot(truth, row), rel=0.1, abs=1e-4)
    assert costs.cost(row) == pytest.approx(sum(stage.cost(row) for stage in costs.stages))


def test_factors_are_never_negative_and_numbers_that_grow_together_share_the_cost() -> None:
    rows: list[Numbers] = [(n, n, 0.0, 1.0) for n in (1.0, 2.0, 5.0)]
    fit = StageFit(4)
    fit.add(squares_of(rows), products_of(rows, [2.0, 4.0, 10.0]))
    fit.fit()
    assert [fit.cost((n, n, 0.0, 1.0)) for n in (1.0, 4.0)] == pytest.approx([2, 8], rel=0.05)
    assert min(fit.factors[:2]) > 0.5
    assert fit.factors[2] == 0
    falling = StageFit(4)
    falling.add(squares_of(rows), products_of(rows, [5.0, 3.0, 1.0]))
    falling.fit()
    assert min(falling.factors) >= 0
    assert falling.cost((3.0, 3.0, 0.0, 1.0)) > 0


def test_of_a_single_microbatch_no_number_gets_the_whole_cost() -> None:
    """Checks that the cost is split between text and images if only their sum was measured."""
    fit = StageFit(3)
    sample: list[Numbers] = [(3e5, 700.0, 1.0)]
    fit.add(squares_of(sample), products_of(sample, [6.0]))
    fit.fit()
    assert fit.cost(sample[0]) == pytest.approx(6.0)
    assert fit.cost((0.0, 700.0, 1.0)) == pytest.approx(4.0)


def test_of_a_single_microbatch_the_first_numbers_share_the_cost() -> None:
    """Checks that quantities that are equal in all microbatches get no part of the cost."""
    fit = StageFit(6)
    sample: list[Numbers] = [(64.0, 48.0, 10.0, 100.0, 9.0, 1.0)]
    fit.add(squares_of(sample), products_of(sample, [60.0]))
    fit.fit({2, 5})
    assert fit.cost(sample[0]) == pytest.approx(60.0)
    assert fit.cost((64.0, 48.0, 30.0, 900.0, 9.0, 1.0)) == pytest.approx(120.0)


def test_numbers_that_were_not_measured_keep_the_counted_work() -> None:
    """Checks that images keep an estimated cost if no microbatch with images was measured."""
    segments = [StageFit(3), StageFit(3)]
    segments[0].factors = [0.0, 4.0, 0.0]
    segments[1].factors = [2.0, 1.0, 0.0]
    placement = Placement(num_ranks=2, num_chunks=1, kind="loop")
    costs = ContentCosts(placement, (1, 1), segments)
    rows: list[Numbers] = [(tokens, 0.0, 1.0) for tokens in (100.0, 200.0, 300.0)]
    for _ in range(3):
        sums = [
            costs.measured(
                rows,
                [(Action(ActionKind.F, 0, n), round(row[0] * ns)) for n, row in enumerate(rows)],
            )
            for ns in (0.0, 1e4)
        ]
        costs.add({(0, rank): each for rank, each in enumerate(sums)})
    costs.fit()
    # Each token has two units of work and takes 1e-5 s, so a unit of work takes 5e-6 s.
    assert costs.cost((100.0, 0.0, 1.0)) == pytest.approx(1e-3, rel=0.01)
    assert costs.cost((100.0, 30.0, 1.0)) == pytest.approx(1e-3 + 30 * 5 * 5e-6, rel=0.01)
    rows.append((100.0, 30.0, 1.0))
    sums = costs.measured(rows, [(Action(ActionKind.F, 0, 3), 7)])
    costs.add({(0, 0): sums, (0, 1): sums})
    costs.fit()
    assert costs.cost((0.0, 30.0, 0.0)) < 1e-6


def test_the_costs_follow_a_change_and_are_equal_wherever_they_are_computed() -> None:
    fits = [StageFit(4), StageFit(4)]
    for step in range(80):
        rows = rows_of(step, 6)
        seconds = [row[0] * (1e-6 if step < 40 else 3e-6) for row in rows]
        for fit in fits:
            fit.add(squares_of(rows), products_of(rows, seconds))
            fit.fit()
    assert fits[0].factors == fits[1].factors
    assert fits[0].cost((1000.0, 1e6, 0.0, 1.0)) == pytest.approx(3e-3, rel=0.1)
