"""The simulator's answer to a measured step: same draws, same order of work."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, Workload

from .competitors import Competitor
from .scenarios import Draws

_TRIES = 20
# Sigma of the logarithm of what the runtime adds: some wake-ups take several times the mean.
_ACTION_SIGMA, _MESSAGE_SIGMA = 0.5, 0.7


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the executor adds to the draws.

    Attributes:
        action_s: seconds that each action takes longer, by kind.
        message_s: seconds from the end of an action to that of its message, beyond ``action_s``.
    """

    action_s: Mapping[ActionKind, float] = field(
        default_factory=lambda: dict.fromkeys(ActionKind, 0.0)
    )
    message_s: float = 0.0

    @classmethod
    def measured(
        cls, records: Sequence[Mapping[str, Any]], otherwise: Runtime | None = None
    ) -> Runtime:
        """Take the means of records of our executor, see ``overhead.Overhead``.

        Args:
            records: steps.
            otherwise: what to take for actions of which no step says anything.
        """
        otherwise = otherwise or cls()
        late_s = _mean(records, "late_s") or 0.0
        action_s = {}
        for kind in ActionKind:
            after_s = _mean(records, f"after_{kind.lower()}_s")
            action_s[kind] = otherwise.action_s[kind] if after_s is None else late_s + after_s
        message_s = _mean(records, "message_s")
        if message_s is None:
            return cls(action_s=action_s, message_s=otherwise.message_s)
        sending_s = (action_s[ActionKind.F] + action_s[ActionKind.B]) / 2 - late_s
        return cls(action_s=action_s, message_s=max(0.0, message_s - sending_s))


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """``None`` where there was nothing to measure, which a step says with 0."""
    values = [record[name] for record in records if record[name]]
    return statistics.fmean(values) if values else None


def simulated(
    competitor: Competitor, draws: Draws, runtime: Runtime | None = None, *, seed: int = 0
) -> SimResult:
    """Simulate a step of one of our competitors.

    Args:
        competitor: which.
        draws: durations of the step.
        runtime: what the executor adds to the draws, nothing where ``None``.
        seed: of the spread of what it adds.
    """
    placement = competitor.placement(draws.num_ranks)
    pieces = competitor.weight_pieces
    return simulate(
        placement,
        draws.num_microbatches,
        competitor.policies(draws.num_ranks, draws.num_microbatches),
        _workload(placement, pieces, draws, runtime or Runtime(), seed),
        cap=competitor.cap_for(draws.num_ranks, draws.num_microbatches),
        weight_pieces=pieces,
        compiled=True,
    )


def nearest_makespan_s(
    competitor: Competitor, draws: Draws, runtime: Runtime, measured_s: float
) -> float:
    """What simulations say that differ in when exactly messages arrive, nearest to a measurement.

    A policy may decide by microseconds, where all draws are equal above all, and then neither one
    run nor one simulation says much: ``dfc`` over a slow link takes 2.35 to 2.60 s from one seed to
    the next. So the answer is the measured time if it lies between the 5th and the 95th percentile
    of the simulations, else the nearer of these two. Mostly they differ by less than a percent.
    """
    makespans_s = [
        simulated(competitor, draws, runtime, seed=seed).makespan_s for seed in range(_TRIES)
    ]
    low_s, high_s = np.percentile(makespans_s, (5, 95))
    return float(np.clip(measured_s, low_s, high_s))


def _workload(
    placement: Placement, pieces: int, draws: Draws, runtime: Runtime, seed: int
) -> Workload:
    rng = np.random.default_rng(seed)

    def spread_ps(seconds: float, sigma: float, shape: tuple[int, ...]) -> Any:
        factors = np.exp(sigma * rng.standard_normal(shape) - sigma * sigma / 2)
        return np.rint(PS_PER_S * seconds * factors).astype(np.int64)

    work = draws.workload(placement)
    durations, delays = work.durations_ps.copy(), work.delays_ps.copy()
    # The time of a weight gradient is shared by its pieces; without pieces it is part of B.
    for row, (kind, times) in enumerate(zip(ActionKind, (1, 1, pieces), strict=True)):
        added_s = times * runtime.action_s[kind]
        durations[row] += spread_ps(added_s, _ACTION_SIGMA, durations[row].shape)
    ranks = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
    for stage, (here, there) in enumerate(itertools.pairwise(ranks)):
        if here != there:
            for row, sender in ((0, stage), (1, stage + 1)):
                message_s = runtime.message_s
                delays[row, sender] += spread_ps(message_s, _MESSAGE_SIGMA, delays[0, 0].shape)
    return replace(work, durations_ps=durations, delays_ps=delays)
