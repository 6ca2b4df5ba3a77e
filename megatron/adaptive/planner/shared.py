"""Times of a fixed order where ranks share the cores of their nodes.

On GPUs every rank has its own device. Ranks that compute on CPUs share cores: while more processes
work on a node than it has cores, all of them get slower alike, and get faster when others wait. How
much is a node's ``Pace``, here 1 for all cores whatever works:

::

    2 cores, 3 ranks of one process     at once   a |==>      |   2/3 of full speed while three work
                                                  b |====>    |   full speed once a has ended
                                                  c |====>    |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.adaptive.planner.pace import Pace
from megatron.adaptive.planner.timing import Steps, StepTimes

__all__ = ["slowdown", "shared_times"]


def slowdown(processes: Sequence[int], nodes: Sequence[int], cores: Sequence[int]) -> float:
    """How many times longer work takes that all ranks do at once, at least 1.

    Args:
        processes: of each rank.
        nodes: where each rank lies.
        cores: of each node; 0 for as many as it needs.
    """
    worst = 1.0
    for node, count in enumerate(cores):
        busy = sum(p for p, where in zip(processes, nodes, strict=True) if where == node)
        if count and busy > count:
            worst = max(worst, busy / count)
    return worst


def shared_times(
    steps: Steps,
    durations_s: Any,
    message_s: Any,
    *,
    processes: Sequence[int],
    nodes: Sequence[int],
    cores: Sequence[int],
    paces: Sequence[Pace] = (),
) -> StepTimes:
    """Time one step.

    Args:
        steps: of the schedule.
        durations_s: ``[3, stages]``: forward, backward by inputs, by weights, while all cores work
            and each has one process.
        message_s: ``[2, stages]``: of the message after each stage's forward and backward.
        processes: of each rank, its replicas and their tensor-parallel ranks.
        nodes: where each rank lies.
        cores: of each node; 0 for as many as it needs.
        paces: of each node; none for those of a node that loses nothing.
    """
    durations = np.array(durations_s, dtype=np.float64)
    if not steps.split:
        durations[1] += durations[2]
        durations[2] = 0.0
    held = paces or [Pace()] * len(cores)
    return _Fluid(steps, durations, message_s, processes, nodes, cores, held).run()


class _Fluid:
    """Ranks that work at the speed their node has left for them."""

    def __init__(
        self,
        steps: Steps,
        durations: Any,
        messages: Any,
        processes: Sequence[int],
        nodes: Sequence[int],
        cores: Sequence[int],
        paces: Sequence[Pace],
    ) -> None:
        ranks = steps.placement.num_ranks
        rows = [tuple(map(int, row)) for row in steps.rows]
        self.steps, self.durations, self.messages = steps, durations, messages
        self.orders = [[row for row in rows if row[3] == rank] for rank in range(ranks)]
        self.processes, self.nodes = processes, nodes
        self.cores, self.paces = cores, paces
        self.at = [0] * ranks
        self.left: list[float | None] = [None] * ranks
        self.end = np.zeros(ranks)
        self.arrival: dict[tuple[int, int, int], float] = {}
        self.now = 0.0

    def run(self) -> StepTimes:
        """Go from event to event until every rank is done."""
        while any(at < len(order) for at, order in zip(self.at, self.orders, strict=True)):
            self._start()
            speeds = self._speeds()
            self._advance(speeds, self._next_event(speeds))
        busy = np.zeros(len(self.orders))
        for rank, order in enumerate(self.orders):
            busy[rank] = sum(self.durations[kind, stage] for kind, stage, _, _ in order)
        return StepTimes(end_s=self.end, busy_s=np.minimum(busy, self.end))

    def _start(self) -> None:
        for rank, order in enumerate(self.orders):
            if self.left[rank] is None and self.at[rank] < len(order):
                kind, stage, microbatch, _ = order[self.at[rank]]
                if self._input(kind, stage, microbatch) <= self.now:
                    self.left[rank] = float(self.durations[kind, stage])

    def _input(self, kind: int, stage: int, microbatch: int) -> float:
        first = stage == (0 if kind == 0 else self.steps.placement.num_stages - 1)
        if kind == 2 or first:
            return 0.0
        return self.arrival.get((kind, stage, microbatch), math.inf)

    def _speeds(self) -> list[float]:
        busy = [0] * len(self.cores)
        for rank, left in enumerate(self.left):
            if left is not None:
                busy[self.nodes[rank]] += self.processes[rank]
        return [
            pace.speed(active, count) if active else 1.0
            for count, active, pace in zip(self.cores, busy, self.paces, strict=True)
        ]

    def _next_event(self, speeds: list[float]) -> float:
        times = [
            self.now + left / speeds[self.nodes[rank]]
            for rank, left in enumerate(self.left)
            if left is not None
        ]
        for rank, order in enumerate(self.orders):
            if self.left[rank] is None and self.at[rank] < len(order):
                times.append(self._input(*order[self.at[rank]][:3]))
        return min(times)

    def _advance(self, speeds: list[float], until: float) -> None:
        for rank, left in enumerate(self.left):
            if left is None:
                continue
            left -= (until - self.now) * speeds[self.nodes[rank]]
            self.left[rank] = left
            if left <= 1e-12:
                self._finish(rank, until)
        self.now = until

    def _finish(self, rank: int, until: float) -> None:
        kind, stage, microbatch, _ = self.orders[rank][self.at[rank]]
        self.left[rank] = None
        self.at[rank] += 1
        self.end[rank] = until
        target = stage + (1 if kind == 0 else -1)
        if kind < 2 and 0 <= target < self.steps.placement.num_stages:
            self.arrival[kind, target, microbatch] = until + float(self.messages[kind, stage])
