"""A schedule as data: for every rank the list of its actions, in order.

Owns the container. Making one is the business of the generators, checking and drawing one of
``validate``, timing one of ``simulate``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.stage_placement import Placement

Order = tuple[Action, ...]
"""The actions of one rank, first to last."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Orders known before the step starts, one per rank.

    Attributes:
        name: how users select and recognise it.
        placement: which rank holds which stage.
        num_microbatches: microbatches per step.
        orders: ``orders[rank]`` lists that rank's actions, first to last. Not checked here: a
            schedule may come from a file (see ``validate``).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Order, ...]

    @property
    def forward_only(self) -> bool:
        """True if no rank lists a backward: the schedule is one of an evaluation."""
        return all(action.kind is ActionKind.F for order in self.orders for action in order)

    @property
    def weight_pieces(self) -> int:
        """Parts of each weight gradient: 0 if no rank lists a W and backwards are whole."""
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
    """Refuse an empty batch.

    Raises:
        ScheduleError: fewer than one microbatch.
    """
    if num_microbatches < 1:
        raise ScheduleError(
            f"{num_microbatches} microbatches: a step needs at least 1, raise the global batch size"
        )
