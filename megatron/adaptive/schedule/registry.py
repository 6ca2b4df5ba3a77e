"""Names of the schedules and policies that a user can ask for.

Owns the lookup only. The list of names is fixed: adding a schedule means a file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import forward_only, gpipe, interleaved, one_f_one_b
from megatron.adaptive.schedule.adaptive import Adaptive
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Follow, Policy
from megatron.adaptive.schedule.schedule import Schedule

__all__ = ["Maker", "make_policies", "make_schedule", "policy_names", "schedule_names"]

Maker = Callable[[Placement, int], Schedule]
"""``make(placement, num_microbatches)`` of a static schedule."""

_MAKERS: dict[str, Maker] = {
    "1f1b": one_f_one_b.make,
    "forward-only": forward_only.make,
    "gpipe": gpipe.make,
    "interleaved": interleaved.make,
}


def schedule_names() -> tuple[str, ...]:
    """The static schedules, sorted."""
    return tuple(sorted(_MAKERS))


def policy_names() -> tuple[str, ...]:
    """Everything ``make_policies`` knows, sorted: static schedules and rules."""
    return tuple(sorted((*_MAKERS, Adaptive().name)))


def make_schedule(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """Make the static schedule of that name.

    Raises:
        ScheduleError: unknown name, or the schedule refuses the placement or microbatches.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise ScheduleError(
            f"unknown schedule {name!r}: choose one of {', '.join(schedule_names())}"
        )
    return maker(placement, num_microbatches)


def make_policies(name: str, placement: Placement, num_microbatches: int) -> tuple[Policy, ...]:
    """Make one policy per rank: followers of a static schedule, or the rule of that name.

    Raises:
        ScheduleError: unknown name, or the schedule refuses the placement or microbatches.
    """
    if name == Adaptive().name:
        return (Adaptive(),) * placement.num_ranks
    if name not in _MAKERS:
        raise ScheduleError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")
    schedule = make_schedule(name, placement, num_microbatches)
    return tuple(Follow(order, name) for order in schedule.orders)
