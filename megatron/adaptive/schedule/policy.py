"""Defines policies, which choose the next action of a rank.

A policy reads a ``RankState`` and keeps no state of its own, so the same object can be used for all
steps, both in the simulator and in the executor. This module contains the interface, the policy
that applies a function of ``runtime_rules``, and the policy that follows a list of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Protocol

from megatron.adaptive.config.schedule_specs import built_in_schedules
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rank_kernel, runtime_rules
from megatron.adaptive.schedule.action import (
    KINDS,
    NUMBER,
    Action,
    ActionKind,
    SliceCounts,
    mirrored,
)
from megatron.adaptive.schedule.numba_kernels import Rule, is_known
from megatron.adaptive.schedule.rank_state import RankState


class Policy(Protocol):
    """Chooses the next action of one rank."""

    @property
    def name(self) -> str:
        """Returns the name by which users select the policy, such as ``adaptive``."""

    def pick(self, state: RankState) -> Action | None:
        """Returns the action that the rank should start now.

        The method must not block or change the state.

        Args:
            state: State of the rank.

        Returns:
            Action that is ready to start, or ``None`` to wait for the next input.

        Raises:
            ScheduleError: The policy failed, for example because a user's function raised an
                exception.
        """


class RulePolicy:
    """Chooses actions by applying a function of ``runtime_rules``.

    Args:
        name: Name by which users select the policy.
        rule: Function that returns the code of the chosen action.
        hint: Second argument of ``rule``, whose meaning depends on the rule. It may be the order of
            the rank's actions as integer codes.
    """

    def __init__(self, name: str, rule: Rule, hint: Sequence[int] = ()) -> None:
        self.name = name
        self.rule = rule
        self.hint = tuple(hint)

    def pick(self, state: RankState) -> Action | None:
        """Returns the action that the rule chooses in ``state``, or ``None`` to wait."""
        code = self.rule(state.numbers, self.hint)
        if code < 0:
            return None
        kind, chunk = divmod(code, state.placement.num_chunks)
        return state.next_action(kind, chunk)


class Follow(RulePolicy):
    """Chooses the actions of a list one after another, each as soon as it is ready.

    The position in the list is the number of actions that the rank has started. The limit on
    activations is ignored, because the memory that a list needs is known in advance
    (``validate.peak_units``). A pair of actions starts when both actions are ready. If the list is
    invalid (see ``validate``), the rank may wait forever.

    Args:
        order: Actions of one rank, in execution order.
        name: Name of the schedule that contains the list.
        num_slices: Number of slices of each microbatch, or 1 for whole microbatches.

    Raises:
        ScheduleError: The actions of a chunk and kind are not in ascending order of microbatches.
    """

    def __init__(
        self, order: Sequence[Action], name: str = "follow", num_slices: SliceCounts = 1
    ) -> None:
        self.order = tuple(order)
        num_chunks = 1 + max((action.chunk for action in order), default=0)
        super().__init__(name, runtime_rules.follow, codes_of(order, num_chunks, num_slices))

    def pick(self, state: RankState) -> Action | None:
        """Returns the next action in the list if it is ready in ``state``, or ``None`` to wait."""
        is_ready = self.rule(state.numbers, self.hint) >= 0
        return self.order[state.num_started] if is_ready else None


def codes_of(
    order: Sequence[Action], num_chunks: int, num_slices: SliceCounts = 1
) -> tuple[int, ...]:
    """Converts a list of actions to the integer codes that functions of ``runtime_rules`` read.

    Args:
        order: Actions of one rank, in execution order.
        num_chunks: Number of model chunks on the rank.
        num_slices: Number of slices of each microbatch. Backward passes start with the last slice.

    Returns:
        Code ``kind * num_chunks + chunk`` of each action. The code is increased by ``3 *
        num_chunks`` if the action starts together with the next action.

    Raises:
        ScheduleError: A chunk does not run its actions of one kind in ascending order. Such an
            order cannot be written as codes.
    """
    codes = []
    latest: dict[int, tuple[int, int]] = {}
    for action in order:
        code = NUMBER[action.kind] * num_chunks + action.chunk
        turned = num_slices != 1 and action.kind is not ActionKind.F
        index = mirrored(action.microbatch, num_slices) if turned else action.microbatch
        position = (index, action.piece)
        if position <= latest.get(code, (-1, 0)):
            rule = "ascending order of microbatch and piece"
            if num_slices != 1:
                rule += ", slices ascending for F and descending for B and W"
            raise ScheduleError(
                f"an order must list the actions of each kind and chunk in {rule}, but lists "
                f"{action.label(num_slices)} after a later action"
            )
        latest[code] = position
        codes.append(code + 3 * num_chunks * action.paired)
    return tuple(codes)


def actions_of(
    codes: Iterable[int], num_chunks: int, weight_pieces: int, num_slices: SliceCounts = 1
) -> tuple[Action, ...]:
    """Converts integer codes to actions. This is the inverse of :func:`codes_of`.

    Args:
        codes: Codes of one rank's actions, in execution order.
        num_chunks: Number of model chunks on the rank.
        weight_pieces: Number of W actions per weight gradient.
        num_slices: Number of slices of each microbatch.
    """
    counts = [0] * (3 * num_chunks)
    actions = []
    for marked in codes:
        paired, code = divmod(marked, 3 * num_chunks)
        kind, chunk = divmod(code, num_chunks)
        pieces = max(1, weight_pieces) if kind == rank_kernel.W else 1
        index, piece = divmod(counts[code], pieces)
        item = index if kind == rank_kernel.F else mirrored(index, num_slices)
        actions.append(Action(KINDS[kind], chunk, item, piece, bool(paired)))
        counts[code] += 1
    return tuple(actions)


def rule_of(policies: Sequence[Policy]) -> tuple[Rule, tuple[tuple[int, ...], ...]] | None:
    """Returns the rule shared by all ``policies``, and the hint of each policy.

    The simulation can only be compiled if all policies share a rule.

    Returns:
        The rule and the hints, or ``None`` if the policies do not share a function of
        ``runtime_rules``.
    """
    rule_policies = [
        policy for policy in policies if isinstance(policy, RulePolicy) and is_known(policy.rule)
    ]
    if len(rule_policies) < len(policies) or len({policy.rule for policy in rule_policies}) > 1:
        return None
    return rule_policies[0].rule, tuple(policy.hint for policy in rule_policies)


@cache
def _reasons_by_rule() -> Mapping[Rule, tuple[str, str, str]]:
    """Returns the reasons for F, B and W under each rule that has one reason per kind of action."""
    specs = built_in_schedules().values()
    reasons = {spec.function: spec.reasons for spec in specs if spec.reasons is not None}
    return {**reasons, runtime_rules.follow: ("order", "order", "order")}


def reasons_of(policy: Policy, codes: Sequence[int], num_chunks: int) -> list[str]:
    """Returns a one-word reason for the choice of each action of a rank, for the trace.

    If the policy does not provide reasons, they are all empty.

    Args:
        policy: Policy that chose the actions.
        codes: Code ``kind * num_chunks + chunk`` of each action, in the order in which they
            started.
        num_chunks: Number of model chunks on the rank.
    """
    if not isinstance(policy, RulePolicy):
        return [""] * len(codes)
    codes = [code % (3 * num_chunks) for code in codes]
    if policy.rule is runtime_rules.hinted:
        return _hinted(policy.hint, codes, num_chunks)
    reasons = _reasons_by_rule().get(policy.rule, ("", "", ""))
    return [reasons[code // num_chunks] for code in codes]


def _hinted(hint: Sequence[int], codes: Sequence[int], num_chunks: int) -> list[str]:
    """Returns the reasons why the ``hinted`` rule chose the actions with the given codes.

    Each reason follows from a comparison with ``hint``, whose entries are ``code + 3 * num_chunks *
    index``. Here ``index`` is the number of earlier actions with the same code.
    """
    lanes = 3 * num_chunks
    started = [0] * lanes
    first_open = 0
    reasons = []
    for code in codes:
        due = hint[first_open] if first_open < len(hint) else -1
        if code + lanes * started[code] == due:
            reasons.append("hint")
        else:
            reasons.append("filler" if code // num_chunks == rank_kernel.W else "overtake")
        started[code] += 1
        while (
            first_open < len(hint) and hint[first_open] // lanes < started[hint[first_open] % lanes]
        ):
            first_open += 1
    return reasons
