"""Defines static schedules, which list the actions of every rank in execution order.

This module only defines the data structure. ``fixed_in_loop`` and ``fixed_in_v`` create schedules,
``validate`` checks and draws them, and ``simulate`` computes their times.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind, SliceCounts
from megatron.adaptive.schedule.stage_placement import Placement

Order = tuple[Action, ...]
"""Actions of one rank in execution order."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of all ranks' actions in a step, determined before the step starts.

    Attributes:
        name: Name by which users select the schedule, shown in messages.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.
        num_slices: Number of slices of each microbatch, or 1 for whole microbatches. If there are
            several slices, the indices of actions count slices (see ``Action.microbatch``).
        orders: Actions of each rank in execution order. This class does not check the orders, which
            may come from a file. ``validate`` checks them.
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Order, ...]
    num_slices: int = 1

    @property
    def forward_only(self) -> bool:
        """Returns whether the schedule runs only forward passes, for an evaluation."""
        return all(action.kind is ActionKind.F for order in self.orders for action in order)

    @property
    def weight_pieces(self) -> int:
        """Returns the number of W actions per weight gradient, or 0 if there are no W actions."""
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
    """Checks that ``num_microbatches`` is at least 1.

    Raises:
        ScheduleError: The number of microbatches is less than 1.
    """
    if num_microbatches < 1:
        raise ScheduleError(
            f"the number of microbatches must be at least 1, got {num_microbatches}; increase "
            "--global-batch-size"
        )


def check_num_slices(num_slices: SliceCounts, num_microbatches: int = 1) -> None:
    """Checks that each of ``num_microbatches`` microbatches has at least one slice.

    Raises:
        ScheduleError: A number of slices is less than 1, or the number of entries in ``num_slices``
            differs from the number of microbatches.
    """
    if not isinstance(num_slices, int):
        if len(num_slices) != num_microbatches:
            raise ScheduleError(
                f"num_slices must contain one number for each of the {num_microbatches} "
                f"microbatches, got {len(num_slices)} numbers"
            )
        num_slices = min(num_slices)
    if num_slices < 1:
        raise ScheduleError(
            f"the number of slices per microbatch must be at least 1, got {num_slices}"
        )
