"""Decides which action a rank does next.

A policy is a pure object: it looks at a ``RankState`` and keeps nothing between two picks, so one
object serves every step, and the simulator and the executor alike. Here: the interface, the policy
made of one of the ``rules``, and that of the rule which follows a list.
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
    """The rule that picks the next action of one rank."""

    @property
    def name(self) -> str:
        """Returns the name by which users select the policy."""

    def pick(self, state: RankState) -> Action | None:
        """Choose what the rank starts now.

        Returns at once and changes nothing, the state included.

        Args:
            state: what the rank knows.

        Returns:
            An action that is ready, or None to wait for the next input.

        Raises:
            ScheduleError: the policy cannot go on.
        """


class RulePolicy:
    """A policy made of one of the functions of ``rules``.

    Args:
        name: how users select it.
        rule: the function.
        hint: the rank's order as codes, for rules that look at one.
    """

    def __init__(self, name: str, rule: Rule, hint: Sequence[int] = ()) -> None:
        self.name = name
        self.rule = rule
        self.hint = tuple(hint)

    def pick(self, state: RankState) -> Action | None:
        """Choose by the rule; None if nothing is ready that it wants."""
        code = self.rule(state.numbers, self.hint)
        if code < 0:
            return None
        kind, chunk = divmod(code, state.placement.num_chunks)
        return state.next_action(kind, chunk)


class Follow(RulePolicy):
    """Does the actions of a list one by one, each as soon as it is ready; see ``rules.follow``.

    The position in the list is the number of actions the state has started. The cap of the state
    is not looked at: the memory of a list is known beforehand (``memory.peak_units``). A pair
    starts when both its actions are ready. With a list that is not valid (see ``validate``) the
    rank comes to stand still.

    Args:
        order: one rank's actions, first to last.
        name: the schedule's name.

    Raises:
        ScheduleError: some chunk takes a kind in another order than ascending.
    """

    def __init__(self, order: Sequence[Action], name: str = "follow") -> None:
        self.order = tuple(order)
        num_chunks = 1 + max((action.chunk for action in order), default=0)
        super().__init__(name, runtime_rules.follow, codes_of(order, num_chunks))

    def pick(self, state: RankState) -> Action | None:
        """Return the next action of the list if it is ready."""
        is_ready = self.rule(state.numbers, self.hint) >= 0
        return self.order[state.num_started] if is_ready else None


def codes_of(order: Sequence[Action], num_chunks: int) -> tuple[int, ...]:
    """A rank's order as the codes that ``rules`` read.

    Returns:
        ``kind * num_chunks + chunk`` of each action, ``3 * num_chunks`` more for a forward that is
        paired.

    Raises:
        ScheduleError: some chunk takes a kind in another order than ascending, which codes cannot
            say.
    """
    codes = []
    latest: dict[int, tuple[int, int]] = {}
    for action in order:
        code = NUMBER[action.kind] * num_chunks + action.chunk
        place = (action.microbatch, action.piece)
        if place <= latest.get(code, (-1, 0)):
            raise ScheduleError(
                f"an order lists {action} behind a later one of its kind and chunk: list them in"
                " ascending order of microbatch and piece"
            )
        latest[code] = place
        codes.append(code + 3 * num_chunks * action.paired)
    return tuple(codes)


def actions_of(codes: Iterable[int], num_chunks: int, weight_pieces: int) -> tuple[Action, ...]:
    """The order that ``codes_of`` says, with weight gradients in so many pieces."""
    counts = [0] * (3 * num_chunks)
    actions = []
    for word in codes:
        paired, code = divmod(word, 3 * num_chunks)
        kind, chunk = divmod(code, num_chunks)
        pieces = max(1, weight_pieces) if kind == rank_kernel.W else 1
        actions.append(Action(KINDS[kind], chunk, *divmod(counts[code], pieces), bool(paired)))
        counts[code] += 1
    return tuple(actions)


def rule_of(policies: Sequence[Policy]) -> tuple[Rule, tuple[tuple[int, ...], ...]] | None:
    """The rule that all these policies share, with each one's hint, for compiled simulation.

    Returns:
        None if they do not share one of ``rules``.
    """
    made = [one for one in policies if isinstance(one, RulePolicy) and is_known(one.rule)]
    if len(made) < len(policies) or len({one.rule for one in made}) > 1:
        return None
    return made[0].rule, tuple(one.hint for one in made)


_BY_KIND: dict[Rule, tuple[str, str, str]] = {
    runtime_rules.ready_first: ("turn", "deepest", "filler"),
    runtime_rules.depth_first: ("deepest", "deepest", "filler"),
    runtime_rules.breadth_first: ("broadest", "deepest", "filler"),
    runtime_rules.follow: ("order", "order", "order"),
}
"""Words for F, B and W of the rules whose choice says it by its kind."""


def reasons_of(policy: Policy, codes: Sequence[int], num_chunks: int) -> list[str]:
    """Return a word for each action of a rank's step, empty where the policy gives none.

    Args:
        policy: what picked them.
        codes: the actions in the order they started, as ``codes_of`` says them.
        num_chunks: chunks of the rank.
    """
    if not isinstance(policy, RulePolicy):
        return [""] * len(codes)
    codes = [code % (3 * num_chunks) for code in codes]
    if policy.rule is runtime_rules.hinted:
        return _hinted(policy.hint, codes, num_chunks)
    words = _BY_KIND.get(policy.rule, ("", "", ""))
    return [words[code // num_chunks] for code in codes]


def _hinted(hint: Sequence[int], codes: Sequence[int], num_chunks: int) -> list[str]:
    """Go along the hint, which lists ``code + 3 * num_chunks * index``, beside what was done."""
    lanes = 3 * num_chunks
    started = [0] * lanes
    head = 0
    words = []
    for code in codes:
        due = hint[head] if head < len(hint) else -1
        if code + lanes * started[code] == due:
            words.append("hint")
        else:
            words.append("filler" if code // num_chunks == rank_kernel.W else "overtake")
        started[code] += 1
        while head < len(hint) and hint[head] // lanes < started[hint[head] % lanes]:
            head += 1
    return words
