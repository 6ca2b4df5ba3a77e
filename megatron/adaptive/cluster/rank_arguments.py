"""What each rank of a shape is told: its place, and the arguments of the trainer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.adaptive.cluster.job import Epoch
from megatron.adaptive.cluster.layouts import Shape
from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.cluster.programs import Program, Script, Trainer
from megatron.adaptive.cluster.snapshot_placement import SnapshotSpec

__all__ = [
    "EXIT_LEFT",
    "JobSpec",
    "Place",
    "Policy",
    "Running",
    "assign",
    "earliest",
    "how_ended",
    "rank_orders",
]

Policy = Literal["ignore", "replan", "exclude"]
"""What is done about a node that stays slow."""

NODE_VARIABLE = "MEGATRON_ADAPTIVE_NODE"
"""Tells a rank the name of its node in the job."""
EXIT_LEFT = 75
"""A node that left a job which goes on without it: it may come back."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What is to be run.

    Attributes:
        script: of every rank.
        arguments: of the script, as the user gave them.
        checkpoints: folder of checkpoints, on storage that all nodes share.
        machines: file of machines, ``None`` where nodes come by themselves.
        nodes: to wait for before the first start, where they come by themselves.
        join_s: how long to wait for them.
        wait_s: how long to wait for nodes when no shape fits those that are there.
        stop_s: how long ranks have to come to the end of a step and to save.
        max_restarts: failures in a row without a checkpoint between them.
        address: at which other machines reach the manager, ``None`` to find out.
        copies: of the state in memory, ``None`` for none.
        on_straggler: what is done about a node that stays slow.
        is_pipeline: whether the script trains a ``Pipeline``, and has arguments of its own.
    """

    script: Path
    arguments: tuple[str, ...]
    checkpoints: Path
    machines: Path | None = None
    nodes: int = 1
    join_s: float = 60.0
    wait_s: float = 600.0
    stop_s: float = 600.0
    max_restarts: int = 3
    address: str | None = None
    copies: SnapshotSpec | None = None
    on_straggler: Policy = "ignore"
    is_pipeline: bool = False

    @property
    def program(self) -> Program:
        """What the ranks run."""
        if self.is_pipeline:
            return Script(self.script, self.arguments, self.checkpoints)
        return Trainer(self.arguments, self.checkpoints)


@dataclass(kw_only=True, eq=False)
class Running:
    """The ranks of one epoch.

    Attributes:
        epoch: what they run.
        shape: their shape.
        folder: where they tell how far they are.
        where: the node of each rank, by key.
        statuses: of the ranks that ended, by key.
        stopping: why they were asked to save and end.
        fault: what went wrong first.
        gone: the first node that was lost, or went with notice and took a rank along, in words.
        deadline_s: when the rest is killed.
        killed: whether it was.
    """

    epoch: Epoch
    shape: Shape
    folder: Path
    where: dict[str, str]
    statuses: dict[str, int] = field(default_factory=dict)
    stopping: str = ""
    fault: str = ""
    gone: str = ""
    deadline_s: float | None = None
    killed: bool = False

    @property
    def alive(self) -> set[str]:
        """Ranks that have not ended."""
        return set(self.where) - set(self.statuses)

    def at_fault(self, fault: str, grace_s: float, *, gone: str = "") -> None:
        """Note what went wrong first; the other ranks get a moment to say what they saw of it.

        Args:
            fault: what went wrong.
            grace_s: that moment.
            gone: what became of a node, where that is why. Ranks that cannot reach it may end, and
                be seen to, before it counts as lost.
        """
        self.gone = self.gone or gone
        self.fault = self.fault or fault
        if not self.killed:
            self.deadline_s = earliest(self.deadline_s, time.monotonic() + grace_s)

    def rank_failed(self, key: str, node: Node, status: int, grace_s: float) -> None:
        """Note that a rank ended; one that its node took along before it had saved is no fault."""
        gone = node.why if node.status == "leaving" else ""
        rank = key.partition("/")[2]
        self.at_fault(f"rank {rank} on {node.name} {how_ended(status)}", grace_s, gone=gone)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs.

    Attributes:
        node: its node.
        node_rank: of the node among those used.
        local_rank: of the rank on its node.
        local_world_size: ranks on the node.
    """

    node: Node
    node_rank: int
    local_rank: int
    local_world_size: int

    def variables(self, rank: int, world_size: int) -> dict[str, str]:
        """The environment that says so, as torchrun has it."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
        }


def earliest(*moments: float | None) -> float | None:
    """The first of some moments, ``None`` for never."""
    return min((one for one in moments if one is not None), default=None)


def how_ended(status: int) -> str:
    """Say how a process ended."""
    if status < 0:
        return f"was killed by signal {signal.Signals(-status).name}"
    return f"ended with status {status}"


def assign(nodes: Sequence[Node], shape: Shape) -> list[Place]:
    """Lay the ranks of a shape on nodes, one after the other; tensor-parallel groups stay whole.

    Args:
        nodes: with slots enough, in the order of the ranks where the shape has no other.
        shape: what is to run.

    Returns:
        The place of each rank; of fewer ranks where nodes are missing.
    """
    places: list[Place] = []
    left = shape.world_size
    by_name = {node.name: node for node in nodes}
    wanted = shape.places or [(node.name, node.slots) for node in nodes]
    for name, most in wanted:
        node = by_name.get(name)
        if node is None:
            continue
        count = min(left, most // shape.tensor * shape.tensor)
        if not count:
            continue
        node_rank = places[-1].node_rank + 1 if places else 0
        places += [
            Place(node=node, node_rank=node_rank, local_rank=local, local_world_size=count)
            for local in range(count)
        ]
        left -= count
    return places


def rank_orders(
    script: Path,
    arguments: Sequence[str],
    places: Sequence[Place],
    epoch: int,
    variables: Mapping[str, str],
) -> dict[str, list[dict[str, Any]]]:
    """Return what the agent of each node is told to start.

    Args:
        script: of every rank.
        arguments: of the script.
        places: of the ranks.
        epoch: number of the one that they begin.
        variables: that all ranks get.
    """
    orders: dict[str, list[dict[str, Any]]] = {}
    for rank, place in enumerate(places):
        order = {
            "key": f"{epoch}/{rank}",
            "variables": {
                **place.variables(rank, len(places)),
                NODE_VARIABLE: place.node.name,
                **variables,
            },
            "script": str(script),
            "arguments": list(arguments),
            "folder": os.getcwd(),
        }
        orders.setdefault(place.node.name, []).append(order)
    return orders
