"""Names why a policy picked each action of a step, as one short word for the trace.

Derived afterwards from the order that came about, so that picking costs nothing more. Words of the
rules:

=============  ====================================================================================
``order``      its turn in a fixed order
``hint``       its turn in the hint
``filler``     a weight gradient in the place of what the hint or the rule would rather have done
``overtake``   before its turn, because what was due could not start
``turn``       a forward, lowest group of microbatches first
``deepest``    of the ready ones the one on the deepest chunk, or the furthest microbatch
``broadest``   a forward of the shallowest chunk
=============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.schedule import machine, rules
from megatron.adaptive.schedule.compiled import Rule
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy

__all__ = ["reasons_of"]

_BY_KIND: dict[Rule, tuple[str, str, str]] = {
    rules.ready_first: ("turn", "deepest", "filler"),
    rules.depth_first: ("deepest", "deepest", "filler"),
    rules.breadth_first: ("broadest", "deepest", "filler"),
    rules.follow: ("order", "order", "order"),
}
"""Words for F, B and W of the rules whose choice says it by its kind."""


def reasons_of(policy: Policy, codes: Sequence[int], num_chunks: int) -> list[str]:
    """Return a word for each action of a rank's step, empty where the policy gives none.

    Args:
        policy: what picked them.
        codes: the actions in the order they started, ``kind * num_chunks + chunk``.
        num_chunks: chunks of the rank.
    """
    if isinstance(policy, Follow):
        return ["order"] * len(codes)
    if not isinstance(policy, RulePolicy):
        return [""] * len(codes)
    if policy.rule is rules.hinted:
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
            words.append("filler" if code // num_chunks == machine.W else "overtake")
        started[code] += 1
        while head < len(hint) and hint[head] // lanes < started[hint[head] % lanes]:
            head += 1
    return words
