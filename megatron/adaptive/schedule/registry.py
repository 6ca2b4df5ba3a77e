"""Names of the schedules and policies that a user can ask for, and what each of them runs on.

Owns the lookup only. The list of names is fixed: adding a schedule means a file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import (
    breadth_first,
    forward_only,
    gpipe,
    hinted,
    interleaved,
    one_f_one_b,
    rules,
    v_half,
    varuna,
    zb_h1,
    zb_v,
)
from megatron.adaptive.schedule.adaptive import Adaptive
from megatron.adaptive.schedule.placement import Placement, PlacementKind
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy
from megatron.adaptive.schedule.schedule import Schedule

__all__ = [
    "Maker",
    "is_rule",
    "make_policies",
    "make_schedule",
    "placement_for",
    "policy_names",
    "schedule_names",
    "splits_backward",
]

Maker = Callable[[Placement, int], Schedule]
"""``make(placement, num_microbatches)`` of a static schedule."""


@dataclass(frozen=True)
class _Static:
    """A static schedule and what it runs on.

    Attributes:
        make: its generator.
        kind: how stages lie.
        num_chunks: chunks per rank, None where the user chooses.
        splits_backward: whether it has W actions.
    """

    make: Maker
    kind: PlacementKind = "loop"
    num_chunks: int | None = None
    splits_backward: bool = False


_STATIC: dict[str, _Static] = {
    "1f1b": _Static(one_f_one_b.make, num_chunks=1),
    "breadth-first": _Static(breadth_first.make),
    "forward-only": _Static(forward_only.make),
    "gpipe": _Static(gpipe.make),
    "interleaved": _Static(interleaved.make),
    "v-half": _Static(v_half.make, kind="v", num_chunks=2, splits_backward=True),
    "varuna": _Static(varuna.make, num_chunks=1),
    "zb-h1": _Static(zb_h1.make, num_chunks=1, splits_backward=True),
    "zb-v": _Static(zb_v.make, kind="v", num_chunks=2, splits_backward=True),
}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Describes the run that a rule is made for."""

    placement: Placement
    num_microbatches: int
    cap: float | None
    weight_pieces: int


def _alike(policy: Policy) -> Callable[[_Run], tuple[Policy, ...]]:
    return lambda run: (policy,) * run.placement.num_ranks


def _hinted(run: _Run) -> tuple[Policy, ...]:
    hint = hinted.hint_for(run.placement, run.num_microbatches, run.cap)
    return hinted.make(hint, run.weight_pieces)


_RULES: dict[str, Callable[[_Run], tuple[Policy, ...]]] = {
    "adaptive": _alike(Adaptive()),
    "bfc": _alike(RulePolicy("bfc", rules.breadth_first)),
    "dfc": _alike(RulePolicy("dfc", rules.depth_first)),
    "hinted": _hinted,
}


_BEST_IN_A_V = ("adaptive", "hinted")


def schedule_names() -> tuple[str, ...]:
    """The static schedules, sorted."""
    return tuple(sorted(_STATIC))


def policy_names() -> tuple[str, ...]:
    """Everything ``make_policies`` knows, sorted: static schedules and rules."""
    return tuple(sorted((*_STATIC, *_RULES)))


def is_rule(name: str) -> bool:
    """True for a rule that chooses at run time, False for a static schedule.

    Raises:
        ScheduleError: unknown name.
    """
    _check_policy(name)
    return name in _RULES


def splits_backward(name: str) -> bool:
    """True if the schedule lists weight gradients; a rule takes them as the run has them: False.

    Raises:
        ScheduleError: unknown name.
    """
    _check_policy(name)
    return name in _STATIC and _STATIC[name].splits_backward


def placement_for(name: str, num_ranks: int, num_chunks: int) -> Placement:
    """The placement that a schedule or rule runs on.

    Args:
        name: of the schedule or rule.
        num_ranks: ranks of the pipeline.
        num_chunks: chunks per rank, for a schedule that leaves the choice and for rules; others
            have their own number, whatever is given.

    Raises:
        ScheduleError: unknown name, or a number below 1.
    """
    _check_policy(name)
    static = _STATIC.get(name)
    if static is None:
        kind: PlacementKind = "v" if name in _BEST_IN_A_V and num_chunks == 2 else "loop"
        return Placement(num_ranks=num_ranks, num_chunks=num_chunks, kind=kind)
    chunks = num_chunks if static.num_chunks is None else static.num_chunks
    return Placement(num_ranks=num_ranks, num_chunks=chunks, kind=static.kind)


def make_schedule(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """Make the static schedule of that name.

    Raises:
        ScheduleError: unknown name, or the schedule refuses the placement or microbatches.
    """
    static = _STATIC.get(name)
    if static is None:
        raise ScheduleError(
            f"unknown schedule {name!r}: choose one of {', '.join(schedule_names())}"
        )
    return static.make(placement, num_microbatches)


def make_policies(
    name: str,
    placement: Placement,
    num_microbatches: int,
    *,
    cap: float | None = None,
    weight_pieces: int = 0,
) -> tuple[Policy, ...]:
    """Make one policy per rank: followers of a static schedule, or the rule of that name.

    Args:
        name: of the schedule or rule.
        placement: which rank holds which stage.
        num_microbatches: microbatches per step.
        cap: of the run, for a rule that chooses a hint by it; None for no limit.
        weight_pieces: of the run, likewise.

    Raises:
        ScheduleError: unknown name, or the schedule refuses the placement or microbatches.
    """
    _check_policy(name)
    if name in _RULES:
        run = _Run(
            placement=placement,
            num_microbatches=num_microbatches,
            cap=cap,
            weight_pieces=weight_pieces,
        )
        return _RULES[name](run)
    schedule = make_schedule(name, placement, num_microbatches)
    return tuple(Follow(order, name) for order in schedule.orders)


def _check_policy(name: str) -> None:
    if name not in _STATIC and name not in _RULES:
        raise ScheduleError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")
