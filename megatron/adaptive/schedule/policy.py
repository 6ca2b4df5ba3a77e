"""Decides which action a rank does next.

A policy reads a ``RankState`` and keeps nothing between two picks. So one object serves all steps,
in the simulator and in the executor. This module owns the interface, the policy that applies a
function of ``runtime_rules``, and the policy that follows a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rank_kernel, runtime_rules
from megatron.adaptive.schedule.action import KINDS, NUMBER, Action
from megatron.adaptive.schedule.numba_kernels import Rule, is_known
from megatron.adaptive.schedule.rank_state import RankState


class Policy(Protocol):
    """Picks the next action of one rank."""

    @property
    def name(self) -> str:
        """Returns the name by which users select the policy."""

    def pick(self, state: RankState) -> Action | None:
        """Chooses the action that the rank starts now.

        Returns at once and does not change the state.

        Args:
            state: State of the rank.

        Returns:
            An action that is ready, or None to wait for the next input.

        Raises:
            ScheduleError: The policy cannot continue.
        """


class RulePolicy:
    """Picks actions by a function of ``runtime_rules``.

    Args:
        name: Name by which users select the policy.
        rule: Function that chooses.
        hint: Second argument of the function, such as the order of the rank as codes.
    """

    def __init__(self, name: str, rule: Rule, hint: Sequence[int] = ()) -> None:
        self.name = name
        self.rule = rule
        self.hint = tuple(hint)

    def pick(self, state: RankState) -> Action | None:
        """Returns the choice of the rule, None to wait."""
        code = self.rule(state.numbers, self.hint)
        if code < 0:
            return None
        kind, chunk = divmod(code, state.placement.num_chunks)
        return state.next_action(kind, chunk)


class Follow(RulePolicy):
    """Picks the actions of a list one by one, each as soon as it is ready.

    The position in the list is the number of actions that the state has started. The cap of the
    state is ignored, as the memory of a list is known beforehand (``validate.peak_units``). A pair
    starts when both its actions are ready. With an invalid list (see ``validate``) the rank hangs.

    Args:
        order: Actions of one rank, first to last.
        name: Name of the schedule.

    Raises:
        ScheduleError: A chunk does not run the actions of a kind in ascending order.
    """

    def __init__(self, order: Sequence[Action], name: str = "follow") -> None:
        self.order = tuple(order)
        num_chunks = 1 + max((action.chunk for action in order), default=0)
        super().__init__(name, runtime_rules.follow, codes_of(order, num_chunks))

    def pick(self, state: RankState) -> Action | None:
        """Returns the next action of the list if it is ready, else None."""
        is_ready = self.rule(state.numbers, self.hint) >= 0
        return self.order[state.num_started] if is_ready else None


def codes_of(order: Sequence[Action], num_chunks: int) -> tuple[int, ...]:
    """Returns a rank's order as the codes that ``runtime_rules`` read.

    Returns:
        ``kind * num_chunks + chunk`` of each action, ``3 * num_chunks`` more for a paired forward.

    Raises:
        ScheduleError: A chunk does not run the actions of a kind in ascending order, which codes
            cannot express.
    """
    codes = []
    latest: dict[int, tuple[int, int]] = {}
    for action in order:
        code = NUMBER[action.kind] * num_chunks + action.chunk
        position = (action.microbatch, action.piece)
        if position <= latest.get(code, (-1, 0)):
            raise ScheduleError(
                f"an order lists {action} behind a later one of its kind and chunk: list them in"
                " ascending order of microbatch and piece"
            )
        latest[code] = position
        codes.append(code + 3 * num_chunks * action.paired)
    return tuple(codes)


def actions_of(codes: Iterable[int], num_chunks: int, weight_pieces: int) -> tuple[Action, ...]:
    """Returns the order that was turned into codes by ``codes_of``.

    Args:
        codes: Codes of the rank's actions.
        num_chunks: Number of model chunks on the rank.
        weight_pieces: Number of parts of each weight gradient.
    """
    counts = [0] * (3 * num_chunks)
    actions = []
    for marked in codes:
        paired, code = divmod(marked, 3 * num_chunks)
        kind, chunk = divmod(code, num_chunks)
        pieces = max(1, weight_pieces) if kind == rank_kernel.W else 1
        actions.append(Action(KINDS[kind], chunk, *divmod(counts[code], pieces), bool(paired)))
        counts[code] += 1
    return tuple(actions)


def rule_of(policies: Sequence[Policy]) -> tuple[Rule, tuple[tuple[int, ...], ...]] | None:
    """Returns the rule that all these policies share, with the hint of each, to be compiled.

    Returns:
        None if they do not share a function of ``runtime_rules``.
    """
    rule_policies = [
        policy for policy in policies if isinstance(policy, RulePolicy) and is_known(policy.rule)
    ]
    if len(rule_policies) < len(policies) or len({policy.rule for policy in rule_policies}) > 1:
        return None
    return rule_policies[0].rule, tuple(policy.hint for policy in rule_policies)


_BY_KIND: dict[Rule, tuple[str, str, str]] = {
    runtime_rules.ready_first: ("turn", "deepest", "filler"),
    runtime_rules.depth_first: ("deepest", "deepest", "filler"),
    runtime_rules.breadth_first: ("broadest", "deepest", "filler"),
    runtime_rules.follow: ("order", "order", "order"),
}
"""Reasons for F, B and W of the rules that have one reason for each kind."""


def reasons_of(policy: Policy, codes: Sequence[int], num_chunks: int) -> list[str]:
    """Returns for each action of a rank's step why it was picked, in one word for the trace.

    The word is empty if the policy gives no reason.

    Args:
        policy: Policy that picked the actions.
        codes: Codes of the actions in the order they started (see ``codes_of``).
        num_chunks: Number of model chunks on the rank.
    """
    if not isinstance(policy, RulePolicy):
        return [""] * len(codes)
    codes = [code % (3 * num_chunks) for code in codes]
    if policy.rule is runtime_rules.hinted:
        return _hinted(policy.hint, codes, num_chunks)
    reasons = _BY_KIND.get(policy.rule, ("", "", ""))
    return [reasons[code // num_chunks] for code in codes]


def _hinted(hint: Sequence[int], codes: Sequence[int], num_chunks: int) -> list[str]:
    """Returns reasons by comparing the actions with a hint of ``code + 3 * num_chunks * index``."""
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
