"""The policy ``auto``: takes the schedule or rule that is fastest in simulation of this very job.

Owns the candidates and the choice, from times that were measured in the first steps. Measuring and
telling all ranks is the business of the pipeline's ``calibrate``.

A rule is only taken where it is faster than the best fixed order that memory allows by more than
what a simulation can tell; else that order is. Another placement is taken where its best is clearly
faster than the best under the present one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.compare import (
    DEFAULT_PIECES,
    Candidate,
    Outcome,
    evaluate,
    make_candidate,
)
from megatron.adaptive.schedule.memory import default_cap, least_cap, with_rounding
from megatron.adaptive.schedule.placement import Placement, PlacementKind
from megatron.adaptive.schedule.registry import (
    is_rule,
    make_schedule,
    placement_for,
    splits_backward,
)
from megatron.adaptive.schedule.workload import StageProfile

__all__ = ["Choice", "candidates", "choose"]

STATIC = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
RULES = ("adaptive", "hinted")
DRAWS = 6
GAIN = 0.005
"""What a rule must gain over the best fixed order: simulated and measured steps differ by more."""
PLACEMENT_GAIN = 0.03
"""What another placement must gain over the present one: to move there, weights must be moved."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What ``auto`` takes, and why.

    Attributes:
        best: the candidate to run.
        outcomes: everything that was simulated, fastest first.
        reason: one line for the log.
        gain: share of a step that moving to another placement saves, 0 where ``best`` needs none.
        stay: the choice for a pipeline that cannot move, where ``best`` lies elsewhere; ``None``
            also where memory does not allow to stay.
    """

    best: Candidate
    outcomes: tuple[Outcome, ...]
    reason: str
    gain: float = 0.0
    stay: Choice | None = None


def candidates(
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    placements: Sequence[PlacementKind],
    most: float,
    splittable: bool,
    pieces: int = DEFAULT_PIECES,
) -> list[Candidate]:
    """List what could run on a pipeline.

    Args:
        num_ranks: ranks of the pipeline.
        num_chunks: chunks per rank; they are what they are, for layers cannot be cut anew.
        num_microbatches: microbatches per step.
        placements: how the stages may lie.
        most: most activations that memory allows, in whole-rank microbatches.
        splittable: whether backwards can be split.
        pieces: most parts of a weight gradient.
    """
    cuts = sorted({0, 1, 2, pieces}) if splittable else [0]
    found = list(_static(num_ranks, num_chunks, num_microbatches, placements, splittable))
    for kind in placements:
        placement = Placement(num_ranks=num_ranks, num_chunks=num_chunks, kind=kind)
        usual = default_cap(placement, num_microbatches)
        caps = {usual, usual / 1.5, min(most, float(num_microbatches))}
        for cap in sorted(c for c in caps if least_cap((1.0,)) <= c <= with_rounding(most)):
            for cut in cuts:
                for name in RULES:
                    found.append(
                        Candidate(name=name, placement=placement, weight_pieces=cut, cap=cap)
                    )
    return found


def _static(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    placements: Sequence[PlacementKind],
    splittable: bool,
) -> Iterable[Candidate]:
    for name in STATIC:
        placement = placement_for(name, num_ranks, num_chunks)
        try:
            make_schedule(name, placement, num_microbatches)
        except ScheduleError:
            continue  # not for this pipeline
        if placement.num_chunks != num_chunks or (splits_backward(name) and not splittable):
            continue
        if num_chunks == 1 or placement.kind in placements:
            yield make_candidate(name, num_ranks, num_chunks, num_microbatches)


def choose(
    profile: StageProfile,
    *,
    present: Placement,
    num_microbatches: int,
    most: Mapping[PlacementKind, float],
    splittable: bool,
    pieces: int = DEFAULT_PIECES,
    compiled: bool = True,
) -> Choice:
    """Simulate the candidates and take the fastest.

    Args:
        profile: measured times and their spread, per stage.
        present: how the stages lie now.
        num_microbatches: microbatches per step.
        most: how they may lie, and the most activations that memory allows then, in whole-rank
            microbatches.
        splittable: whether backwards can be split.
        pieces: most parts of a weight gradient.
        compiled: see ``simulate``.

    Raises:
        ScheduleError: memory does not allow any candidate.
    """
    outcomes = []
    for kind, limit in most.items():
        offered = candidates(
            num_ranks=present.num_ranks,
            num_chunks=present.num_chunks,
            num_microbatches=num_microbatches,
            placements=(kind,),
            most=limit,
            splittable=splittable,
            pieces=pieces,
        )
        outcomes += _simulated(offered, num_microbatches, profile, limit, compiled=compiled)
    if not outcomes:
        raise _no_room(present, max(most.values()))
    outcomes.sort(key=lambda outcome: (outcome.mean_s, outcome.peak_units))
    near = [o for o in outcomes if o.candidate.placement.kind == present.kind]
    far = [o for o in outcomes if o.candidate.placement.kind != present.kind]
    here, elsewhere = _prefer_fixed(near), _prefer_fixed(far)
    if elsewhere is None or (
        here is not None and elsewhere.mean_s >= here.mean_s * (1 - PLACEMENT_GAIN)
    ):
        assert here is not None
        return replace(_choice(here, near, profile, most), outcomes=tuple(outcomes))
    moved = _choice(elsewhere, far, profile, most)
    if here is None:
        return moved
    return replace(
        moved,
        outcomes=tuple(outcomes),
        reason=f"{moved.reason}; in a {present.kind} at best {here.mean_s * 1e3:.4g} ms",
        gain=1 - elsewhere.mean_s / here.mean_s,
        stay=_choice(here, near, profile, most),
    )


def _no_room(present: Placement, most: float) -> ScheduleError:
    return ScheduleError(
        f"memory for {most:g} microbatches: no schedule of {present.num_ranks} ranks with"
        f" {present.num_chunks} chunks fits; lower --micro-batch-size or recompute activations"
    )


def _simulated(
    offered: Sequence[Candidate],
    num_microbatches: int,
    profile: StageProfile,
    most: float,
    *,
    compiled: bool,
) -> list[Outcome]:
    """Simulate candidates; returns those that fit memory."""
    spread = profile.action_sigma or profile.microbatch_sigma or profile.latency_sigma
    seeds = range(DRAWS if spread else 1)
    found = (
        evaluate(candidate, num_microbatches, profile, seeds, compiled=compiled)
        for candidate in offered
    )
    return [outcome for outcome in found if outcome.peak_units <= with_rounding(most)]


def _choice(
    best: Outcome,
    outcomes: Sequence[Outcome],
    profile: StageProfile,
    most: Mapping[PlacementKind, float],
) -> Choice:
    limit = most[best.candidate.placement.kind]
    return Choice(
        best=best.candidate,
        outcomes=tuple(outcomes),
        reason=_reason(best, outcomes, profile, limit),
    )


def _prefer_fixed(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The fastest; the best fixed order where a rule gains too little over it."""
    if not outcomes:
        return None
    fastest = outcomes[0]
    fixed = next((o for o in outcomes if not is_rule(o.candidate.name)), None)
    if fixed is not None and fastest.mean_s > fixed.mean_s * (1 - GAIN):
        return fixed
    return fastest


def _reason(best: Outcome, outcomes: Sequence[Outcome], profile: StageProfile, most: float) -> str:
    fixed = next((o for o in outcomes if not is_rule(o.candidate.name)), None)
    text = (
        f"auto takes {best.candidate}: {best.mean_s * 1e3:.4g} ms simulated a step, bubble"
        f" {best.bubble_fraction:.1%}, {best.peak_units:.3g} of {most:.3g} microbatches of memory"
    )
    if fixed is not None and fixed is not best:
        text += f"; best fixed order {fixed.candidate}: {fixed.mean_s * 1e3:.4g} ms"
    if profile.action_sigma:
        text += f"; measured spread of an action {profile.action_sigma:.2f}"
    return text
