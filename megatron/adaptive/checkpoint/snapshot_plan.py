"""Which rank copies which part of the state, and what is sent to another node.

A part that ranks of several nodes hold, as data-parallel replicas and tied embeddings do, is copied
by one rank of each of these nodes and goes nowhere. A part of one node alone is copied there by one
rank and sent to the node's buddy. All ranks draw the same plan from what each of them tells.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron.adaptive.checkpoint.snapshot_file import ALIGN, SLOTS, slot_bytes

__all__ = ["CopyPlan", "RankParts", "make_plan", "why_not", "within_slot"]

_SHARE = 0.8  # of the memory that is left
_GIB = 1024**3

Part = tuple[str, tuple[int, ...]]
"""Name in a checkpoint, and place in the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """What one rank tells the others.

    Attributes:
        node: that it runs on.
        domain: what is lost at once; a node, or the machine of several.
        buddy: the node that keeps copies for this one, ``None`` where there is no other.
        machine: whose memory its node uses.
        available_bytes: that the machine has left.
        extra_bytes: the most that it copies besides tensors.
        parts: size of each part of the state that it holds, in bytes.
    """

    node: str
    domain: str
    buddy: str | None
    machine: str
    available_bytes: int
    extra_bytes: int
    parts: dict[Part, int]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Parts that the same ranks copy.

    Attributes:
        ranks: any of which is enough.
        is_sent: whether the one rank's copy is also with its buddy.
    """

    ranks: tuple[int, ...]
    is_sent: bool


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """Who copies what.

    Attributes:
        needs: that must be met for the whole state.
        need_of: for each part the index of its need.
        sent_bytes, tensor_bytes: of each rank: what it sends, and copies in all.
    """

    needs: list[Need]
    need_of: dict[Part, int]
    sent_bytes: list[int] = field(default_factory=list)
    tensor_bytes: list[int] = field(default_factory=list)

    def copied_by(self, rank: int, told: RankParts) -> list[Part]:
        """Parts that a rank copies, those first that it sends."""
        mine = [part for part in told.parts if rank in self.needs[self.need_of[part]].ranks]
        return sorted(mine, key=lambda part: (not self.needs[self.need_of[part]].is_sent, part))


def within_slot(size: int) -> int:
    """What a tensor takes in a slot, with the gap after it."""
    return -(-size // ALIGN) * ALIGN


def make_plan(told: Sequence[RankParts]) -> CopyPlan:
    """Share out the copying.

    Args:
        told: by each rank.
    """
    holders: dict[Part, list[int]] = {}
    sizes: dict[Part, int] = {}
    for rank, one in enumerate(told):
        for part, size in one.parts.items():
            holders.setdefault(part, []).append(rank)
            sizes[part] = size
    load = [0] * len(told)
    needs: dict[Need, int] = {}
    need_of: dict[Part, int] = {}
    for part in sorted(holders, key=lambda part: (-sizes[part], part)):
        chosen: dict[str, int] = {}
        for rank in holders[part]:
            best = chosen.setdefault(told[rank].domain, rank)
            if load[rank] < load[best]:
                chosen[told[rank].domain] = rank
        ranks = tuple(sorted(chosen.values()))
        for rank in ranks:
            load[rank] += within_slot(sizes[part])
        need = Need(ranks=ranks, is_sent=len(ranks) == 1 and told[ranks[0]].buddy is not None)
        need_of[part] = needs.setdefault(need, len(needs))
    plan = CopyPlan(needs=list(needs), need_of=need_of)
    for rank, one in enumerate(told):
        copied = plan.copied_by(rank, one)
        sent = [part for part in copied if plan.needs[need_of[part]].is_sent]
        plan.sent_bytes.append(sum(within_slot(one.parts[part]) for part in sent))
        plan.tensor_bytes.append(sum(within_slot(one.parts[part]) for part in copied))
    return plan


def why_not(plan: CopyPlan, told: Sequence[RankParts], limit_bytes: int | None) -> str | None:
    """Say which node lacks the memory for its part of a plan, ``None`` where all have it.

    Args:
        plan: of all ranks.
        told: by each rank.
        limit_bytes: that copies may take on a node, ``None`` for what is there.
    """
    by_node: dict[str, int] = {}
    by_machine: dict[str, int] = {}
    machines = {one.node: one.machine for one in told}
    for node, taken in _takes(plan, told):
        by_node[node] = by_node.get(node, 0) + taken
        machine = machines.get(node, node)
        by_machine[machine] = by_machine.get(machine, 0) + taken
    for node, taken in by_node.items():
        if limit_bytes is not None and taken > limit_bytes:
            return (
                f"they take {taken / _GIB:.3g} GiB on node {node} and --replicate-memory lets them"
                f" take {limit_bytes / _GIB:.3g} GiB: raise it"
            )
    for one in told:
        taken = by_machine[one.machine]
        if taken > _SHARE * one.available_bytes:
            return (
                f"they take {taken / _GIB:.3g} GiB on the machine of node {one.node}, which has"
                f" {one.available_bytes / _GIB:.3g} GiB left and must keep a fifth of that: use"
                " more nodes, or less memory for other things"
            )
    return None


def _takes(plan: CopyPlan, told: Sequence[RankParts]) -> Iterator[tuple[str, int]]:
    """Nodes and what each rank takes on them."""
    for rank, one in enumerate(told):
        yield one.node, SLOTS * slot_bytes(one.extra_bytes, plan.tensor_bytes[rank])
        if plan.sent_bytes[rank] and one.buddy is not None:
            yield one.buddy, SLOTS * slot_bytes(one.extra_bytes, plan.sent_bytes[rank])
