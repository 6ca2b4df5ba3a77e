"""Compares schedules and policies on the same simulated work.

Owns the choice of what a name stands for on a given pipeline (placement, pieces, cap, hint) and the
summary over several draws. ``simulate`` on the command line and the policy ``auto`` use it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.memory import default_cap
from megatron.adaptive.schedule.placement import Placement, PlacementKind
from megatron.adaptive.schedule.registry import (
    ANNEALED,
    EQUAL,
    Pace,
    is_rule,
    make_policies,
    placement_for,
    splits_backward,
)
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.workload import Jitter, StageProfile, draw

DEFAULT_PIECES = 4
"""Parts of a weight gradient under a run-time rule: small enough to fill waits for messages."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule or policy as it would run.

    Attributes:
        name: of the schedule or policy.
        placement: which rank holds which stage.
        weight_pieces: parts of each weight gradient, 0 for whole backwards.
        cap: of every rank in whole-rank microbatches, ``None`` for a static schedule, whose memory
            is its own.
        shares: whether chunks have shares of the cap under ``adaptive``.
        pace: of the stages, by which ``hinted`` chooses its hint.
        hint: what ``hinted`` or ``annealed`` follows in steps of as many microbatches; ``None`` for
            a choice of its own.
    """

    name: str
    placement: Placement
    weight_pieces: int
    cap: float | None
    shares: bool = True
    pace: Pace = EQUAL
    hint: Schedule | None = field(default=None, repr=False)

    def __str__(self) -> str:
        chunks = self.placement.num_chunks
        text = f"{self.name} ({self.placement.kind}, {chunks} chunk{'s' * (chunks > 1)}"
        if self.weight_pieces:
            text += f", W in {self.weight_pieces}"
        if not self.shares:
            text += ", no shares"
        if self.hint is not None and self.name != ANNEALED:
            text += ", annealed hint"
        return text + (f", cap {self.cap:g})" if self.cap is not None else ")")


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


def make_candidate(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    placement_kind: PlacementKind | None = None,
    cap: float | None = None,
    weight_pieces: int | None = None,
) -> Candidate:
    """Say how a schedule or policy would run on a pipeline.

    Args:
        name: of the schedule or policy.
        num_ranks: ranks of the pipeline.
        num_chunks: chunks per rank, where the schedule leaves the choice.
        num_microbatches: microbatches per step.
        placement_kind: ``loop`` or ``v`` for a rule; default that of ``placement_for``.
        cap: of a rule; default that of ``memory.default_cap``.
        weight_pieces: of a rule, 0 for whole backwards; default 4.

    Raises:
        ScheduleError: unknown name, or the pipeline does not suit it.
    """
    placement = placement_for(name, num_ranks, num_chunks)
    if not is_rule(name):
        return Candidate(
            name=name,
            placement=placement,
            weight_pieces=1 if splits_backward(name) else 0,
            cap=None,
        )
    if placement_kind is not None:
        placement = Placement(num_ranks=num_ranks, num_chunks=num_chunks, kind=placement_kind)
    return Candidate(
        name=name,
        placement=placement,
        weight_pieces=DEFAULT_PIECES if weight_pieces is None else weight_pieces,
        cap=default_cap(placement, num_microbatches) if cap is None else cap,
    )


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
    policies = make_policies(
        candidate.name,
        candidate.placement,
        num_microbatches,
        cap=candidate.cap,
        weight_pieces=candidate.weight_pieces,
        shares=candidate.shares,
        pace=candidate.pace,
        hint=candidate.hint,
    )
    results = []
    for seed in seeds:
        workload = draw(
            candidate.placement,
            num_microbatches,
            profile.times,
            jitter=Jitter(
                seed=seed,
                action_sigma=profile.action_sigma,
                microbatch_sigma=profile.microbatch_sigma,
                latency_sigma=profile.latency_sigma,
            ),
            link=profile.link,
            links=profile.links,
            rank_factors=profile.rank_factors,
            microbatch_factors=profile.factors_of(seed, num_microbatches),
        )
        results.append(
            simulate(
                candidate.placement,
                num_microbatches,
                policies,
                workload,
                cap=candidate.cap,
                weight_pieces=candidate.weight_pieces,
                beside=workload.cuts > 0,
                compiled=True,
            )
        )
    return CandidateOutcome(
        candidate=candidate,
        makespans_s=tuple(result.makespan_s for result in results),
        bubble_fraction=statistics.fmean(b for result in results for b in result.bubble_fraction),
        peak_units=max(units for result in results for units in result.peak_units),
        example=results[0],
    )
