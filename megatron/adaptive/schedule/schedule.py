"""Defines a static schedule as data: the actions of every rank, in the order they run.

This module only defines the container. ``fixed_in_loop`` and ``fixed_in_v`` make schedules,
``validate`` checks and draws them, ``simulate`` times them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind, SliceCounts
from megatron.adaptive.schedule.stage_placement import Placement

Order = tuple[Action, ...]
"""Actions of one rank in the order they run."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Contains the order of actions on all ranks, which is known before the step starts.

    Attributes:
        name: Name by which users select the schedule, and which messages show.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.
        num_slices: Number of slices of each microbatch, 1 for whole microbatches. Actions then
            count slices (see ``Action.microbatch``).
        orders: Actions of each rank in the order they run. They are not checked here; ``validate``
            checks them, for example if they come from a file.
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Order, ...]
    num_slices: int = 1

    @property
    def forward_only(self) -> bool:
        """Returns whether the schedule has only forward passes, as in an evaluation."""
        return all(action.kind is ActionKind.F for order in self.orders for action in order)

    @property
    def weight_pieces(self) -> int:
        """Returns the number of W actions per weight gradient, 0 if no rank has a W."""
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
    """Checks that a step has at least one microbatch.

    Raises:
        ScheduleError: The number of microbatches is below 1.
    """
    if num_microbatches < 1:
        raise ScheduleError(
            f"{num_microbatches} microbatches: a step needs at least 1, raise the global batch size"
        )


def check_num_slices(num_slices: SliceCounts, num_microbatches: int = 1) -> None:
    """Checks that each microbatch has at least one slice.

    Raises:
        ScheduleError: A number of slices is below 1, or the number of entries differs from the
            number of microbatches.
    """
    if not isinstance(num_slices, int):
        if len(num_slices) != num_microbatches:
            raise ScheduleError(
                f"{len(num_slices)} numbers of slices for {num_microbatches} microbatches: give "
                "one for each"
            )
        num_slices = min(num_slices)
    if num_slices < 1:
        raise ScheduleError(
            f"{num_slices} slices of a microbatch: give 1 for whole microbatches, or more"
        )
