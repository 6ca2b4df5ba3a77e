"""Simulates the schedules that this job supports, and chooses the fastest for ``auto``.

Each candidate is simulated several times, and all candidates get the same action durations. The
durations are measured in the first steps and provided by ``rebalance``. The command ``simulate``
compares only the schedules that the user selects.

A run-time rule is chosen only if its gain over the best static schedule that fits into memory
exceeds the error of a simulation. ``planner.choose_partition`` uses this module to choose the
placement of stages and the layers of each stage.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.anneal import compile_s, improve
from megatron.adaptive.schedule.catalog import (
    ANNEALED,
    DEFAULT_PIECES,
    EQUAL,
    Candidate,
    Pace,
    is_rule,
    make_candidate,
    make_schedule,
)
from megatron.adaptive.schedule.memory_caps import default_cap, with_rounding
from megatron.adaptive.schedule.numba_kernels import saves_time
from megatron.adaptive.schedule.policy import rule_of
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, draw

STATIC = selectable_names(lambda spec: spec.is_auto_candidate)
RULES = (("adaptive", True), ("adaptive", False), ("hinted", True))
"""Names of the run-time rules to simulate, each with its value of ``Candidate.shares``."""
DRAWS = 6
"""Number of simulated steps per candidate, each with different random durations."""
_MANY = 20_000
"""Number of forward passes per step above which a single simulated step is enough.

Above this number, random differences between actions average out.
"""
GAIN = 0.005
"""Minimum relative gain over the best static schedule for choosing a run-time rule.

A smaller gain could be an error of the simulation.
"""


@dataclass(frozen=True, kw_only=True)
class CandidateOutcome:
    """Results of several simulations of a candidate.

    Attributes:
        candidate: Simulated candidate.
        makespans_s: Duration of each simulated step, in seconds.
        bubble_fraction: Fraction of time that ranks are idle, from 0 to 1, averaged over ranks and
            simulated steps.
        peak_units: Maximum activation memory that any rank held in any step. The unit is the
            activation memory of one microbatch in all chunks of the rank.
        example: Result of the first simulated step.
    """

    candidate: Candidate
    makespans_s: tuple[float, ...]
    bubble_fraction: float
    peak_units: float
    example: SimResult

    @property
    def mean_s(self) -> float:
        """Returns the mean duration of a simulated step, in seconds."""
        return statistics.fmean(self.makespans_s)


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """Schedule that ``auto`` chose, with the reason for the choice.

    Attributes:
        best: Chosen schedule with its settings.
        outcomes: Results of all simulated candidates, fastest first.
        reason: Explanation of the choice, as one line for the log.
    """

    best: Candidate
    outcomes: tuple[CandidateOutcome, ...]
    reason: str

    @property
    def step_s(self) -> float:
        """Returns the simulated duration of a step under ``best``, in seconds."""
        return next(o.mean_s for o in self.outcomes if o.candidate is self.best)


def candidates(
    placement: Placement,
    num_microbatches: int,
    *,
    most: float,
    splittable: bool,
    pieces: int = DEFAULT_PIECES,
    pace: Pace = EQUAL,
    also: Sequence[str] = (),
    num_slices: int = 1,
) -> list[Candidate]:
    """Returns the schedules and run-time rules that support ``placement``, with their settings.

    Args:
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.
        most: Number of microbatches whose activations, in all chunks of a rank, fit into the rank's
            memory.
        splittable: Whether the model can compute weight gradients in separate actions (W).
        pieces: Maximum number of W actions per weight gradient.
        pace: Relative durations of messages, B and W, used by ``hinted``.
        also: Names of additional schedules and run-time rules to include.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.
    """
    static = STATIC
    if num_slices > 1:
        static = selectable_names(lambda spec: spec.orders_slices)
    options = []
    for name in (*static, *(name for name in also if not is_rule(name))):
        candidate = make_candidate(
            name, placement.num_ranks, placement.num_chunks, num_microbatches, num_slices=num_slices
        )
        if candidate.placement != placement or (candidate.weight_pieces and not splittable):
            continue
        # Skip schedules that do not support this pipeline.
        with contextlib.suppress(ScheduleError):
            make_schedule(name, placement, num_microbatches, num_slices=num_slices)
            options.append(candidate)
    usual = default_cap(placement, num_microbatches, num_slices)
    caps = sorted({usual, usual / 1.5, min(most, float(num_microbatches))})
    options += [
        Candidate(
            name=name,
            placement=placement,
            weight_pieces=cut,
            cap=cap,
            shares=shares,
            pace=pace if name == "hinted" else EQUAL,
            num_slices=num_slices,
        )
        for cap in caps
        if 1.0 <= cap <= with_rounding(most)
        for cut in (sorted({0, 1, 2, pieces}) if splittable else [0])
        for name, shares in (*RULES, *((name, True) for name in also if is_rule(name)))
        if shares or placement.num_chunks > 1
    ]
    return options


def choose(
    profile: StageProfile,
    *,
    placement: Placement,
    num_microbatches: int,
    most: float,
    splittable: bool,
    pieces: int = DEFAULT_PIECES,
    also: Sequence[str] = (),
    quick: bool = False,
    until_s: float = math.inf,
    num_slices: int = 1,
) -> ScheduleChoice:
    """Simulates all candidates and chooses the fastest.

    Args:
        profile: Measured durations on each stage, and their variation.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.
        most: Number of microbatches whose activations, in all chunks of a rank, fit into the rank's
            memory.
        splittable: Whether the model can compute weight gradients in separate actions (W).
        pieces: Maximum number of W actions per weight gradient.
        also: Names of additional schedules and run-time rules to simulate.
        quick: Whether to simulate only one step per candidate and skip simulated annealing.
        until_s: Value of ``time.monotonic`` after which no more candidates are simulated.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.

    Raises:
        ScheduleError: No candidate fits into memory, or the time limit passed before the first
            simulation.
    """
    is_large = placement.num_stages * num_microbatches >= _MANY
    seeds = range(DRAWS if _has_spread(profile) and not (quick or is_large) else 1)
    planned: Counter[str] = Counter()

    def fitting(offered: Iterable[Candidate]) -> list[CandidateOutcome]:
        in_time = itertools.takewhile(lambda _: time.monotonic() < until_s, offered)
        simulated = (
            evaluate(candidate, num_microbatches, profile, seeds, planned[loop_of(candidate)])
            for candidate in in_time
        )
        return [outcome for outcome in simulated if outcome.peak_units <= with_rounding(most)]

    offered = candidates(
        placement,
        num_microbatches,
        most=most,
        splittable=splittable,
        pieces=pieces,
        pace=pace_of(profile, num_slices),
        also=also,
        num_slices=num_slices,
    )
    for candidate in offered:
        planned[loop_of(candidate)] += len(seeds) * num_actions(candidate, num_microbatches)
    outcomes = fitting(offered)
    # The annealing functions are only compiled if enough time is left.
    if not quick and time.monotonic() + compile_s() < until_s:
        outcomes += fitting(_annealed(outcomes, num_microbatches, profile, most, pieces, planned))
    is_late = time.monotonic() >= until_s
    if not outcomes and is_late:
        raise ScheduleError(
            "no schedule was simulated before the time limit, because the processors are busy"
        )
    if not outcomes:
        raise ScheduleError(
            f"no schedule for {placement.num_ranks} ranks with {placement.num_chunks} chunks each "
            f"fits into memory, which has room for {most:g} microbatches; lower --micro-batch-size "
            "or recompute activations"
        )
    choice = _fastest(outcomes, profile, most)
    if is_late:
        late = (
            f"{choice.reason}; the remaining candidates were not simulated because of the time "
            "limit"
        )
        return replace(choice, reason=late)
    return choice


def _fastest(
    outcomes: Sequence[CandidateOutcome], profile: StageProfile, most: float
) -> ScheduleChoice:
    """Chooses the fastest candidate from ``outcomes``.

    A static schedule is preferred to a run-time rule with a relative gain below ``GAIN``.
    ``profile`` and ``most`` are only used to explain the choice.
    """
    ranked = sorted(outcomes, key=lambda outcome: (outcome.mean_s, outcome.peak_units))
    best = ranked[0]
    fixed = next((o for o in ranked if _is_fixed(o.candidate.name)), None)
    if fixed is not None and best.mean_s > fixed.mean_s * (1 - GAIN):
        best = fixed
    reason = _reason(best, fixed, profile, most)
    return ScheduleChoice(best=best.candidate, outcomes=tuple(ranked), reason=reason)


def loop_of(candidate: Candidate) -> str:
    """Returns a key that identifies the compiled simulation loop used by ``candidate``."""
    return candidate.name if is_rule(candidate.name) and candidate.name != ANNEALED else "fixed"


def num_actions(candidate: Candidate, num_microbatches: int) -> int:
    """Returns the number of actions on all ranks in a step of ``num_microbatches`` microbatches."""
    items = candidate.placement.num_stages * num_microbatches * candidate.num_slices
    return items * (2 + candidate.weight_pieces)


def evaluate(
    candidate: Candidate,
    num_microbatches: int,
    profile: StageProfile,
    seeds: Sequence[int],
    planned: int | None = None,
) -> CandidateOutcome:
    """Simulates a candidate once per random seed.

    Candidates with the same profile and seeds get the same action durations, even if their numbers
    of chunks differ. To achieve this, durations are drawn for the stages of the profile, and added
    up if a chunk consists of several of these stages.

    Args:
        candidate: Candidate to simulate.
        num_microbatches: Number of microbatches per step.
        profile: Measured durations of stages. Its number of stages is a multiple of the candidate's
            number of stages.
        seeds: Random seeds, one per simulated step. One seed is enough if the durations of the
            profile do not vary.
        planned: Number of actions in all planned simulations with this candidate's rule. It
            determines whether the simulation is compiled. With ``None``, it is always compiled.

    Raises:
        ScheduleError: The candidate does not support this pipeline.
    """
    if not seeds:
        raise ScheduleError("seeds must not be empty; pass one seed per simulated step")
    policies = candidate.policies(num_microbatches)
    shared = rule_of(policies)
    compiled = planned is None or (shared is not None and saves_time(shared[0], planned))
    results = []
    for seed in seeds:
        workload = draw(
            candidate.placement,
            num_microbatches,
            profile,
            seed=seed,
            num_slices=candidate.num_slices,
        )
        results.append(candidate.simulate(workload, compiled=compiled, policies=policies))
    return CandidateOutcome(
        candidate=candidate,
        makespans_s=tuple(result.makespan_s for result in results),
        bubble_fraction=statistics.fmean(b for result in results for b in result.bubble_fraction),
        peak_units=max(units for result in results for units in result.peak_units),
        example=results[0],
    )


def _has_spread(profile: StageProfile) -> bool:
    return bool(
        profile.action_sigma
        or profile.microbatch_sigma
        or profile.latency_sigma
        or profile.microbatch_factors
    )


def _is_fixed(name: str) -> bool:
    return name != ANNEALED and not is_rule(name)


def pace_of(profile: StageProfile, num_slices: int = 1) -> Pace:
    """Returns the relative durations of messages, backward passes (B) and weight gradients (W).

    The durations are relative to a forward pass (F). Durations of actions are means over the
    stages. The duration of a message is that on the slowest link.

    Args:
        profile: Durations for whole microbatches.
        num_slices: Number of slices of each microbatch. A message carries one slice, but its
            duration is relative to the F of a whole microbatch.
    """
    times = profile.times
    forward_s = statistics.fmean(times.forward_s)
    if not forward_s:
        return EQUAL
    message_s = max(
        link.latency_s + link.occupancy_s / num_slices
        for link in (profile.link, *profile.links.values())
    )
    backward_s, weight_s = (
        statistics.fmean(of_stages or (0.0,)) for of_stages in (times.backward_s, times.weight_s)
    )
    return (
        round(message_s / forward_s, 2),
        round(backward_s / forward_s, 2),
        round(weight_s / forward_s, 2),
    )


def _annealed(
    outcomes: Sequence[CandidateOutcome],
    num_microbatches: int,
    profile: StageProfile,
    limit: float,
    pieces: int,
    planned: Counter[str],
) -> list[Candidate]:
    """Returns candidates whose order of actions was improved by simulated annealing.

    Annealing uses mean durations, and starts from the candidate in ``outcomes`` that is fastest
    with mean durations. The memory of the result stays within ``limit`` microbatches. ``planned``
    maps each compiled loop (see :func:`loop_of`) to the number of actions that it simulates. This
    function adds its own simulated actions to these numbers.
    """
    quiet = replace(
        profile, action_sigma=0.0, microbatch_sigma=0.0, latency_sigma=0.0, microbatch_factors=()
    )
    tried = [outcome.candidate for outcome in outcomes]
    splits = any(candidate.weight_pieces for candidate in tried)
    starts = [candidate for candidate in tried if candidate.weight_pieces == int(splits)]
    if not starts:
        return []
    for start in starts:
        planned[loop_of(start)] += num_actions(start, num_microbatches)
    runs = (
        evaluate(start, num_microbatches, quiet, (0,), planned[loop_of(start)]).example
        for start in starts
    )
    best = min(runs, key=lambda run: run.makespan_s)
    cap = min(limit, float(num_microbatches))
    hint = improve(best.to_schedule("best"), best.workload, cap)
    if hint is None:
        return []
    made = Candidate(
        name=ANNEALED,
        placement=hint.placement,
        weight_pieces=int(splits),
        cap=cap,
        hint=hint,
        num_slices=hint.num_slices,
    )
    cuts = {1, pieces} if splits else {0}
    return [made, *(replace(made, name="hinted", weight_pieces=cut) for cut in sorted(cuts))]


def _reason(
    best: CandidateOutcome, fixed: CandidateOutcome | None, profile: StageProfile, most: float
) -> str:
    text = (
        f"auto takes {best.candidate}: simulated step {number_text(best.mean_s * 1e3, 4)} ms, "
        f"bubble {best.bubble_fraction:.1%}, memory for {best.peak_units:.3g} of {most:.3g} "
        "microbatches"
    )
    if fixed is not None and fixed is not best:
        text += f"; best fixed order {fixed.candidate}: {number_text(fixed.mean_s * 1e3, 4)} ms"
    if profile.action_sigma:
        text += f"; measured relative spread of action times {profile.action_sigma:.2f}"
    if profile.microbatch_factors:
        longest = max(max(factors) for factors in profile.microbatch_factors)
        text += f"; the longest microbatch takes {longest:.3g} times the mean"
    return text
