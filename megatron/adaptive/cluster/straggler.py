"""Tracks nodes that stay slow, and decides whether another layout would be faster.

If two consecutive diagnoses of the running job report the same rank as slow, the node of this rank
is considered slow. Later layouts take this into account, for example by giving fewer layers to the
stage on this node. The job changes its layout at most once for each slow node, and only if the new
layout is predicted to be faster. If a node leaves and joins again, or another manager takes over
the job, the node is no longer considered slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.adaptive.cluster.incarnation import Policy, RunningRanks, assign
from megatron.adaptive.cluster.job_state_file import SlowRank, say
from megatron.adaptive.cluster.layout_rule import (
    WORTH_A_MORPH,
    Chooser,
    Offer,
    ParallelLayout,
    relative_time,
)
from megatron.adaptive.cluster.membership import Node

_IN_A_ROW = 2
_LEAST = 1.1
"""Minimum ratio of measured to expected computing time at which a node counts as slow."""
_MOST_SLOW = 8.0
_LEFT_OUT = "left out: slow"


class Stragglers:
    """Tracks slow and excluded nodes of a job, and chooses layouts that suit these nodes.

    Args:
        policy: Reaction to a slow node: ``ignore``, ``replan`` (fewer layers) or ``exclude``.
        chooser: Object that chooses the layout for a list of nodes.
        arguments: The user's arguments for the trainer.
    """

    def __init__(self, policy: Policy, chooser: Chooser, arguments: Sequence[str]) -> None:
        self._policy = policy
        self._chooser = chooser
        self._arguments = arguments
        self._slowness: dict[str, float] = {}
        # Maps the name of each excluded node to the reason for the exclusion.
        self._aside: dict[str, str] = {}
        self._judged: set[str] = set()

    async def choose(self, nodes: Sequence[Node]) -> ParallelLayout | None:
        """Chooses a layout. Excluded nodes are used only if no layout fits without them.

        If necessary, excluded nodes are used again one by one, starting with the most recently
        excluded node.

        Args:
            nodes: Available nodes. They get ranks in this order.
        """
        aside = {node.name for node in nodes} & self._aside.keys()
        while True:
            included = [node for node in nodes if node.name not in aside]
            layout = await self._choose(included) if included else None
            if layout is not None or not aside:
                return layout
            aside.remove(next(name for name in reversed(self._aside) if name in aside))

    def included(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns the nodes in ``nodes`` that are not excluded."""
        return [node for node in nodes if node.name not in self._aside]

    async def leave_out(self, name: str, why: str, nodes: Sequence[Node]) -> bool:
        """Excludes the node ``name`` from later layouts, unless no layout fits without this node.

        Args:
            name: Name of the node.
            why: Reason for excluding the node, shown in the job's state.
            nodes: Available nodes. They get ranks in this order.

        Returns:
            Whether the node is excluded.
        """
        others = [node for node in self.included(nodes) if node.name != name]
        if not others or await self._choose(others) is None:
            return False
        self._aside[name] = f"left out: {why}"
        return True

    def take_back(self, name: str) -> None:
        """Includes the node ``name`` in layouts again, after :meth:`leave_out` has excluded it."""
        self._aside.pop(name, None)

    def joined(self, name: str) -> None:
        """Forgets that the node ``name`` was slow or excluded.

        A node that joins again may have been repaired.
        """
        self._slowness.pop(name, None)
        self._aside.pop(name, None)
        self._judged.discard(name)

    def to_dict(self, node: Node) -> dict[str, Any]:
        """Returns the entry for ``node`` in the job's state file, including the node's slowness."""
        left_out = self._aside.get(node.name, "")
        return {
            **node.to_dict(),
            "slowness": round(self._slowness.get(node.name, 1.0), 3),
            "is_left_out": bool(left_out),
            "why": left_out if left_out and node.status == "present" else node.why,
        }

    async def handle(
        self, slow_ranks: Sequence[SlowRank], running: RunningRanks, nodes: Sequence[Node]
    ) -> str:
        """Decides whether the job should change its layout because of a slow rank.

        Args:
            slow_ranks: Ranks that diagnoses have reported as slow since the ranks were started.
            running: State of the ranks. If a node is slow, the predicted step time of
                ``running.layout`` is increased.
            nodes: Available nodes. They get ranks in this order.

        Returns:
            Reason to change the layout, or an empty string to keep the layout.
        """
        if self._policy == "ignore":
            return ""
        for slow_rank in slow_ranks:
            name = running.where.get(f"{running.incarnation.number}/{slow_rank.slow_rank}")
            if name is None or name in self._judged or slow_rank.times < _IN_A_ROW:
                continue
            excess = min(_MOST_SLOW, self._excess(slow_rank, name, running))
            if excess < _LEAST:
                continue
            self._judged.add(name)
            reason = await self._judge(slow_rank, excess, name, running, nodes)
            if reason:
                return reason
        return ""

    def _excess(self, slow_rank: SlowRank, name: str, running: RunningRanks) -> float:
        """Returns the ratio of the measured to the expected computing time of the node ``name``.

        For each rank, the measured time is divided by the expected time. The largest ratio on the
        node is then divided by the median ratio of all ranks on other nodes. This cancels the
        difference between the job's actual and expected speed.
        """
        nodes = running.where.values()
        if len(slow_rank.pace_ns) != len(nodes):
            return slow_rank.factor
        node_times: list[float] = []
        other_times: list[float] = []
        for node, time_ns in zip(nodes, slow_rank.pace_ns, strict=True):
            expected = running.layout.pace.get(node, self._slowness.get(node, 1.0))
            (node_times if node == name else other_times).append(time_ns / expected)
        return max(node_times) / statistics.median(other_times) if other_times else 1.0

    async def _judge(
        self,
        slow_rank: SlowRank,
        excess: float,
        name: str,
        running: RunningRanks,
        nodes: Sequence[Node],
    ) -> str:
        text = (
            f"{name} is slow: rank {slow_rank.slow_rank} takes {excess:.2f} times as long as "
            "expected"
        )
        self._slowness[name] = self._slowness.get(name, 1.0) * excess
        _slow_down(running, name, excess)
        others = [
            node for node in self.included(nodes) if self._policy == "replan" or node.name != name
        ]
        layout = await self._choose(others) if others else None
        if layout is None or not self._is_faster(layout, others, running):
            other = "without it" if self._policy == "exclude" else "with fewer layers for it"
            say(f"warning: {text}; the layout stays the same, because no layout {other} is faster")
            return ""
        if self._policy == "exclude":
            self._aside[name] = _LEFT_OUT
        return text

    async def _choose(self, nodes: Sequence[Node]) -> ParallelLayout | None:
        offers = [
            Offer(
                name=node.name,
                slots=node.slots,
                hosts=tuple(
                    dict.fromkeys(
                        host for host in (node.machine and node.machine.host, node.host) if host
                    )
                ),
                slowness=round(self._slowness.get(node.name, 1.0), 2),
            )
            for node in nodes
        ]
        layout = await self._chooser.choose(self._arguments, offers)
        if layout is None or layout.places:
            return layout
        return replace(layout, places=tuple((node.name, node.slots) for node in nodes))

    def _is_faster(
        self, layout: ParallelLayout, nodes: Sequence[Node], running: RunningRanks
    ) -> bool:
        limit = 1 - WORTH_A_MORPH
        if layout.step_s is not None and running.layout.step_s is not None:
            return layout.step_s < limit * running.layout.step_s
        new = [self._slowness.get(node.name, 1.0) for node in assign(nodes, layout)]
        old = [self._slowness.get(name, 1.0) for name in running.where.values()]
        return relative_time(layout, new) < limit * relative_time(running.layout, old)


def _slow_down(running: RunningRanks, name: str, times: float) -> None:
    """Increases the predicted step time in ``running``, because the node ``name`` is slow.

    The node is slower than predicted by the factor ``times``.
    """
    layout = running.layout
    nodes = running.where.values()
    if layout.step_s is None:
        return
    pace = {**layout.pace, name: layout.pace[name] * times}
    time_before, time_after = (
        relative_time(layout, [paces[node] for node in nodes]) for paces in (layout.pace, pace)
    )
    running.layout = replace(layout, pace=pace, step_s=layout.step_s * time_after / time_before)
