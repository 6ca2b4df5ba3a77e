"""The policy ``auto``: takes the schedule or rule that is fastest in simulation of this very job.

Owns the candidates, the summary of several simulations of each on the same work, and the choice,
from times that were measured in the first steps. ``simulate`` on the command line compares what its
user names; measuring is the business of ``rebalance``.

A rule is only taken where it is faster than the best fixed order that memory allows by more than
the error of a simulation; else that order is. Placement and layers are chosen together with it by
``planner.choose_partition``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.anneal import improve
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
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, draw

STATIC = selectable_names(lambda spec: spec.is_auto_candidate)
RULES = (("adaptive", True), ("adaptive", False), ("hinted", True))
"""Names, each with and without chunk shares where these matter."""
DRAWS, _MANY = 6, 20_000
"""Draws of a step; one where the spread of so many forwards averages out."""
GAIN = 0.005
"""Least gain of a rule over the best fixed order; simulated and measured steps differ by more."""


@dataclass(frozen=True, kw_only=True)
class CandidateOutcome:
    """Summarizes several simulations of a candidate.

    Attributes:
        candidate: what was simulated.
        makespans_s: seconds of each draw's step.
        bubble_fraction: mean over ranks and draws.
        peak_units: the most that any rank held in any draw, in whole-rank microbatches.
        example: the first draw's step.
    """

    candidate: Candidate
    makespans_s: tuple[float, ...]
    bubble_fraction: float
    peak_units: float
    example: SimResult

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.makespans_s)


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """Records the schedule that ``auto`` takes, and why.

    Attributes:
        best: the candidate to run.
        outcomes: everything that was simulated, fastest first.
        reason: one line for the log.
    """

    best: Candidate
    outcomes: tuple[CandidateOutcome, ...]
    reason: str

    @property
    def step_s(self) -> float:
        """Seconds of a step under ``best``, simulated."""
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
) -> list[Candidate]:
    """List what could run on a pipeline whose stages lie so; layers cannot be cut anew.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step.
        most: most activations that memory allows, in whole-rank microbatches.
        splittable: whether backwards can be split.
        pieces: most parts of a weight gradient.
        pace: of the stages.
        also: Names of further schedules and rules.
    """
    found = []
    for name in (*STATIC, *(name for name in also if not is_rule(name))):
        candidate = make_candidate(
            name, placement.num_ranks, placement.num_chunks, num_microbatches
        )
        if candidate.placement != placement or (candidate.weight_pieces and not splittable):
            continue
        with contextlib.suppress(ScheduleError):  # not for this pipeline
            make_schedule(name, placement, num_microbatches)
            found.append(candidate)
    usual = default_cap(placement, num_microbatches)
    caps = sorted({usual, usual / 1.5, min(most, float(num_microbatches))})
    found += [
        Candidate(
            name=name,
            placement=placement,
            weight_pieces=cut,
            cap=cap,
            shares=shares,
            pace=pace if name == "hinted" else EQUAL,
        )
        for cap in caps
        if 1.0 <= cap <= with_rounding(most)
        for cut in (sorted({0, 1, 2, pieces}) if splittable else [0])
        for name, shares in (*RULES, *((name, True) for name in also if is_rule(name)))
        if shares or placement.num_chunks > 1
    ]
    return found


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
) -> ScheduleChoice:
    """Simulate the candidates and take the fastest.

    Args:
        profile: measured times and their spread, per stage.
        placement: how the stages lie.
        num_microbatches: microbatches per step.
        most: most activations that memory allows, in whole-rank microbatches.
        splittable: whether backwards can be split.
        pieces: most parts of a weight gradient.
        also: Names of further schedules and rules to try.
        quick: simulate one draw of each, and anneal nothing.
        until_s: Time of ``time.monotonic`` after which no other candidate is simulated.

    Raises:
        ScheduleError: memory does not allow any candidate, or none was simulated in time.
    """
    spread = (
        profile.action_sigma
        or profile.microbatch_sigma
        or profile.latency_sigma
        or profile.microbatch_factors
    )
    many = placement.num_stages * num_microbatches >= _MANY
    seeds = range(DRAWS if spread and not (quick or many) else 1)

    def fitting(offered: Iterable[Candidate]) -> list[CandidateOutcome]:
        in_time = itertools.takewhile(lambda _: time.monotonic() < until_s, offered)
        found = (evaluate(one, num_microbatches, profile, seeds) for one in in_time)
        return [one for one in found if one.peak_units <= with_rounding(most)]

    outcomes = fitting(
        candidates(
            placement,
            num_microbatches,
            most=most,
            splittable=splittable,
            pieces=pieces,
            pace=_pace(profile),
            also=also,
        )
    )
    if not quick and time.monotonic() < until_s:
        outcomes += fitting(_annealed(outcomes, num_microbatches, profile, most, pieces))
    is_late = time.monotonic() >= until_s
    if not outcomes and is_late:
        raise ScheduleError("no schedule was simulated in time: the processors are busy")
    if not outcomes:
        raise ScheduleError(
            f"memory for {most:g} microbatches: no schedule of {placement.num_ranks}"
            f" ranks with {placement.num_chunks} chunks fits; lower --micro-batch-size or recompute"
            " activations"
        )
    outcomes.sort(key=lambda outcome: (outcome.mean_s, outcome.peak_units))
    best = outcomes[0]
    fixed = next((o for o in outcomes if _is_fixed(o.candidate.name)), None)
    if fixed is not None and best.mean_s > fixed.mean_s * (1 - GAIN):
        best = fixed
    reason = _reason(best, fixed, profile, most)
    if is_late:
        reason += "; the time limit ended the simulation of others"
    return ScheduleChoice(best=best.candidate, outcomes=tuple(outcomes), reason=reason)


def evaluate(
    candidate: Candidate, num_microbatches: int, profile: StageProfile, seeds: Sequence[int]
) -> CandidateOutcome:
    """Simulate a candidate once per seed.

    Candidates with the same profile and seeds get the same work, also with other numbers of chunks:
    the profile's stages are drawn, and added up where a chunk holds several.

    Args:
        candidate: what to simulate.
        num_microbatches: microbatches per step.
        profile: measured times; its number of stages is a multiple of the candidate's.
        seeds: one draw each; without any spread in the profile one suffices.

    Raises:
        ScheduleError: the candidate cannot run on this pipeline.
    """
    if not seeds:
        raise ScheduleError("no seeds: give at least one draw to simulate")
    policies = candidate.policies(num_microbatches)
    results = []
    for seed in seeds:
        workload = draw(candidate.placement, num_microbatches, profile, seed=seed)
        results.append(candidate.simulate(workload, compiled=True, policies=policies))
    return CandidateOutcome(
        candidate=candidate,
        makespans_s=tuple(result.makespan_s for result in results),
        bubble_fraction=statistics.fmean(b for result in results for b in result.bubble_fraction),
        peak_units=max(units for result in results for units in result.peak_units),
        example=results[0],
    )


def _is_fixed(name: str) -> bool:
    return name != ANNEALED and not is_rule(name)


def _pace(profile: StageProfile) -> Pace:
    times = profile.times
    forward_s = statistics.fmean(times.forward_s)
    if not forward_s:
        return EQUAL
    message_s = max(
        one.latency_s + one.occupancy_s for one in (profile.link, *profile.links.values())
    )
    others = (statistics.fmean(some or (0.0,)) for some in (times.backward_s, times.weight_s))
    latency, backward, weight = (round(one / forward_s, 2) for one in (message_s, *others))
    return latency, backward, weight


def _annealed(
    outcomes: Sequence[CandidateOutcome],
    num_microbatches: int,
    profile: StageProfile,
    limit: float,
    pieces: int,
) -> list[Candidate]:
    """Returns ``hinted`` with an order made for the mean times, from the best that is known."""
    quiet = replace(
        profile, action_sigma=0.0, microbatch_sigma=0.0, latency_sigma=0.0, microbatch_factors=()
    )
    splits = any(one.candidate.weight_pieces for one in outcomes)
    starts = [one.candidate for one in outcomes if one.candidate.weight_pieces == int(splits)]
    if not starts:
        return []
    runs = (evaluate(one, num_microbatches, quiet, (0,)).example for one in starts)
    best = min(runs, key=lambda run: run.makespan_s)
    cap = min(limit, float(num_microbatches))
    hint = improve(best.to_schedule("best"), best.workload, cap)
    if hint is None:
        return []
    made = Candidate(
        name=ANNEALED, placement=hint.placement, weight_pieces=int(splits), cap=cap, hint=hint
    )
    cuts = {1, pieces} if splits else {0}
    return [made, *(replace(made, name="hinted", weight_pieces=cut) for cut in sorted(cuts))]


def _reason(
    best: CandidateOutcome, fixed: CandidateOutcome | None, profile: StageProfile, most: float
) -> str:
    text = (
        f"auto takes {best.candidate}: {best.mean_s * 1e3:.4g} ms simulated a step, bubble"
        f" {best.bubble_fraction:.1%}, {best.peak_units:.3g} of {most:.3g} microbatches of memory"
    )
    if fixed is not None and fixed is not best:
        text += f"; best fixed order {fixed.candidate}: {fixed.mean_s * 1e3:.4g} ms"
    if profile.action_sigma:
        text += f"; measured spread of an action {profile.action_sigma:.2f}"
    if profile.microbatch_factors:
        longest = max(max(factors) for factors in profile.microbatch_factors)
        text += f"; the longest microbatch takes {longest:.3g} times the mean"
    return text
