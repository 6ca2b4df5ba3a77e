"""What jitter costs: actions that take longer by chance hold up those that wait for them.

A rank alone loses nothing on average. In a pipeline every hand-over waits for the later of two, so
that the mean step is longer than the step of the means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.adaptive.planner.timing import Steps

__all__ = ["jitter_s"]

DRAWS = 32
"""Steps that are drawn at once; the mean of what they take longer is within a tenth or so."""


def jitter_s(steps: Steps, durations_s: Any, message_s: Any, sigma: float) -> float:
    """Seconds by which a step is longer on average, at least 0.

    Every action has a factor of its own, lognormal with mean 1. Draws depend on the place of the
    action in the order alone, so that plans with the same order get the same.

    Args:
        steps: of the schedule.
        durations_s: ``[3, stages]``: forward, backward by inputs, by weights.
        message_s: ``[2, stages]``: of the message after each stage's forward and backward.
        sigma: spread of the logarithm of the factors.
    """
    if sigma <= 0:
        return 0.0
    durations = np.array(durations_s, dtype=np.float64)
    if not steps.split:
        durations[1] += durations[2]
        durations[2] = 0.0
    rng = np.random.default_rng(0)
    factors = np.exp(sigma * rng.standard_normal((len(steps.rows), DRAWS)) - sigma**2 / 2)
    # The last column has no jitter; the others are compared with the mean over their own draws.
    factors = np.concatenate([factors, np.ones((len(factors), 1))], axis=1)
    last = steps.placement.num_stages - 1
    ends = np.zeros((steps.placement.num_ranks, DRAWS + 1))
    arrivals: dict[tuple[int, int, int], Any] = {}
    for row, (kind, stage, microbatch, rank) in zip(factors, steps.rows.tolist(), strict=True):
        start = ends[rank]
        if kind < 2 and stage != (0 if kind == 0 else last):
            start = np.maximum(start, arrivals.pop((kind, stage, microbatch)))
        ends[rank] = start + durations[kind, stage] * row
        target = stage + (1 if kind == 0 else -1)
        if kind < 2 and 0 <= target <= last:
            arrivals[kind, target, microbatch] = ends[rank] + message_s[kind, stage]
    whole = ends.max(axis=0)
    return max(0.0, float(whole[:-1].mean() - whole[-1]))
