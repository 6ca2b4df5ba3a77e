"""Who decides what a rank does next.

A policy is a pure object: it looks at a ``RankState`` and keeps nothing between two picks, so one
object serves every step, and the simulator and the executor alike. Here: the interface and the
policy that follows a list. Rules that choose at run time have a file each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action
from megatron.adaptive.schedule.state import RankState

__all__ = ["Follow", "Policy"]


class Policy(Protocol):
    """The rule that picks the next action of one rank."""

    @property
    def name(self) -> str:
        """How users select and recognise the policy."""

    def pick(self, state: RankState) -> Action | None:
        """Choose what the rank starts now.

        Returns at once and changes nothing, the state included.

        Args:
            state: what the rank knows.

        Returns:
            An action that is ready, or None to wait for the next input.

        Raises:
            ScheduleError: the policy can never again pick a possible action.
        """


class Follow:
    """Does the actions of a list one by one, each as soon as it is ready.

    The position in the list is the number of actions the state has started. The cap of the state
    is not looked at: the memory of a list is known beforehand (``memory.peak_units``).

    Args:
        order: one rank's actions, first to last.
        name: the schedule's name.
    """

    def __init__(self, order: Sequence[Action], name: str = "follow") -> None:
        self._order = tuple(order)
        self._name = name

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self._name

    def pick(self, state: RankState) -> Action | None:
        """Return the next action of the list if it is ready.

        Raises:
            ScheduleError: the list ends too early, or its next action can never be ready.
        """
        position = state.num_started
        if position >= len(self._order):
            if position < state.num_actions:
                raise ScheduleError(
                    f"rank {state.rank}: the order of {self._name} ends after {position} of"
                    f" {state.num_actions} actions: list each action of the rank once"
                )
            return None
        action = self._order[position]
        if state.is_ready(action):
            return action
        if not state.is_possible(action):
            raise ScheduleError(
                f"rank {state.rank}: position {position} of {self._name} lists {action}:"
                f" {state.why_not(action)}"
            )
        return None
