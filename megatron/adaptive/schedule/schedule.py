"""Represents a schedule as data: the list of actions of every rank, in order.

Owns the container only. ``fixed_in_loop`` and ``fixed_in_v`` make schedules, ``validate`` checks
and draws them, ``simulate`` times them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.stage_placement import Placement

Order = tuple[Action, ...]
"""Actions of one rank, first to last."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Contains the orders of all ranks, known before the step starts.

    Attributes:
        name: Name by which users select and recognise the schedule.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.
        orders: Actions of each rank, first to last. They are not checked here, though a schedule
            may come from a file (see ``validate``).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Order, ...]

    @property
    def forward_only(self) -> bool:
        """Returns whether no rank lists a backward, as in an evaluation."""
        return all(action.kind is ActionKind.F for order in self.orders for action in order)

    @property
    def weight_pieces(self) -> int:
        """Returns the number of parts of each weight gradient, 0 if no rank lists a W."""
        return max(
            (
                action.piece + 1
                for order in self.orders
                for action in order
                if action.kind is ActionKind.W
            ),
            default=0,
        )


def check_num_microbatches(num_microbatches: int) -> None:
    """Checks that a step has microbatches.

    Raises:
        ScheduleError: There is less than one microbatch.
    """
    if num_microbatches < 1:
        raise ScheduleError(
            f"{num_microbatches} microbatches: a step needs at least 1, raise the global batch size"
        )
