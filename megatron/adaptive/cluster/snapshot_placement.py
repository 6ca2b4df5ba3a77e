"""Decides which nodes store copies of the training state, and restores the state from copies.

The copies (snapshots) are stored in the memory of the nodes. After ranks have failed, the manager
asks each remaining node which copies it has. It chooses the newest step for which the remaining
nodes have all parts. The nodes write this step as a checkpoint, from which the job resumes as
usual. If no step is complete, a message lists the ranks whose state is missing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.checkpoint.folder import CheckpointFolder, PipelineFolder
from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from megatron.adaptive.cluster.job_state_file import IncarnationProgress, say
from megatron.adaptive.cluster.membership import Membership, Node

_ANSWER_S = 20.0
_SETTLE_S = 5.0
_HERE = ("present", "leaving")
_NONE: Mapping[str, Any] = {"run": "", "buddy": None, "settings": {}}


@dataclass(frozen=True, kw_only=True)
class SnapshotSource:
    """Newest step that can be restored from copies, or the reason why no step can be restored.

    Attributes:
        step: Newest step whose parts all still exist; 0 if there is no such step.
        seen: Newest step for which any part of a snapshot still exists, or 0 if no part exists.
        why: Reason why no step can be restored, or empty if a step can be restored.
        parts: Copies from which ``step`` is restored. Each element is the entry of a copy in its
            node's inventory, with two additional keys: ``node`` is the name of the node, and
            ``needs`` contains the indices of the required parts that the copy provides.
    """

    step: int = 0
    seen: int = 0
    why: str = ""
    parts: tuple[Mapping[str, Any], ...] = ()


def buddies(nodes: Sequence[Node]) -> dict[str, str | None]:
    """Chooses, for each node, another node (its buddy) that stores copies of the node's state.

    Returns the names of the buddies, keyed by node name. The buddy is the next node on another
    machine, in cyclic order. If all nodes are on the same machine, such as in a trial run, the
    buddy is the next node. The buddy of a single node is ``None``.
    """
    buddy_names: dict[str, str | None] = {}
    alone = len({node.host for node in nodes}) == 1
    for index, node in enumerate(nodes):
        others = (nodes[(index + step) % len(nodes)] for step in range(1, len(nodes)))
        candidates = (other.name for other in others if alone or other.host != node.host)
        buddy_names[node.name] = next(candidates, None)
    return buddy_names


def newest(kept: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> SnapshotSource:
    """Finds the newest step for which the remaining nodes still have all parts.

    Args:
        kept: Pairs of a remaining node's name and the list of copies in this node's memory. In the
            entry of a copy, ``needs`` lists the parts that make up a complete step. A copy from any
            of the part's ``ranks`` provides the part. If the part's ``is_sent`` is false, the copy
            must also be in the memory of the rank's own node.
    """
    copies: list[Mapping[str, Any]] = []
    needs: dict[tuple[str, int], Sequence[Mapping[str, Any]]] = {}
    for node, stores in kept:
        for copy in stores:
            copies.append({**copy, "node": node})
            if "needs" in copy:
                needs[copy["run"], copy["generation"]] = copy["needs"]
    steps = {(step, copy["run"], copy["generation"]) for copy in copies for step in copy["steps"]}
    seen = max((step for step, _, _ in steps), default=0)
    why = ""
    for step, run, generation in sorted(steps, reverse=True):
        step_copies: list[dict[str, Any]] = [
            {**copy, "needs": []}
            for copy in copies
            if (copy["run"], copy["generation"]) == (run, generation) and step in copy["steps"]
        ]
        missing: set[int] = set()
        for index, need in enumerate(needs.get((run, generation), ())):
            fitting = [
                copy
                for copy in step_copies
                if copy["rank"] in need["ranks"] and (copy["kind"] == "own" or need["is_sent"])
            ]
            if fitting:
                # Prefer a copy that is already needed for another part, so that fewer copies are
                # read. Otherwise, prefer a copy on the rank's own node to a copy on another node.
                best = min(fitting, key=lambda copy: (not copy["needs"], copy["kind"] != "own"))
                best["needs"].append(index)
            else:
                missing |= set(need["ranks"])
        parts = tuple(copy for copy in step_copies if copy["needs"])
        if not missing and any(copy["has_common"] for copy in parts):
            return SnapshotSource(step=step, seen=seen, parts=parts)
        if not why:
            ranks = ", ".join(map(str, sorted(missing)))
            why = f"no copy of the state of rank {ranks} is left"
    return SnapshotSource(seen=seen, why=why or "no remaining node has copies")


class JobSnapshots:
    """Decides which nodes store a job's snapshots, and restores the training state from them.

    Args:
        settings: Interval and memory limit of snapshots, or ``None`` to take no snapshots.
            ``every`` is the number of steps between snapshots, and ``limit_bytes`` is the maximum
            size of the snapshots on a node.
        members: Nodes of the job.
        folder: Folder of checkpoints.
        manager: Name of the manager that starts the ranks.
        kept: Name of the manager's own node, and the object with the snapshots that this node
            stored under the previous manager; ``None`` if there are none.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None,
        members: Membership,
        folder: CheckpointFolder | PipelineFolder,
        manager: str,
        kept: tuple[str, SnapshotKeeper] | None = None,
    ) -> None:
        self._settings = settings
        self._members = members
        self._folder = folder
        self._manager = manager
        self._kept = kept
        self._last = SnapshotSource()
        self._restored = 0
        self._written = 0

    def orders(self, epoch: int, names: Sequence[str]) -> dict[str, Any]:
        """Returns the snapshot settings for each node that starts ranks, keyed by node name.

        Asks all other nodes to delete their copies.

        Args:
            epoch: Number of the incarnation (start of the ranks in a layout), counted from 1.
            names: Names of the nodes that start ranks, ordered by rank.
        """
        settings = self._settings
        members = self._members
        if settings is None:
            return {}
        taking_part = set(names)
        for name, node in members.nodes.items():
            if node.link is not None and node.status in _HERE and name not in taking_part:
                # The copies of a node without ranks become outdated, so ask the node to delete
                # them.
                node.link.send("start", ranks=[], copies=_NONE)
        nodes = [members.nodes[name] for name in names]
        alone = len({node.host for node in nodes}) == 1
        orders: dict[str, Any] = {}
        for name, buddy in buddies(nodes).items():
            node = members.nodes[name]
            target = None
            if buddy is not None:
                buddy_node = members.nodes[buddy]
                address = members.address_of(buddy_node)
                target = {"name": buddy, "address": address, "port": buddy_node.copies_port}
            orders[name] = {
                "run": f"{self._manager}-{epoch}",
                "buddy": target,
                "settings": {"node": name, "domain": name if alone else node.host, **settings},
            }
        return orders

    def begun(self, resumed: int, before: IncarnationProgress | None) -> tuple[str, int]:
        """Returns where the training state comes from, and how many steps must be repeated.

        Args:
            resumed: Iteration of the checkpoint that the incarnation resumes from.
            before: Last progress of the previous incarnation, or ``None`` for the first
                incarnation.
        """
        last = self._last
        restored = self._restored
        self._last = SnapshotSource()
        self._restored = 0
        done = max(last.seen, 0 if before is None else before.iteration or 0)
        if restored and restored == resumed:
            source = "copies in memory"
        else:
            source = "checkpoint" if resumed else "start"
            if last.why and done > resumed:
                source += f": {last.why}"
        return source, max(0, done - resumed)

    async def recover(self, limit_s: float) -> None:
        """Writes the newest complete step in memory as a checkpoint.

        A step that is not newer than the last checkpoint is not written.

        Args:
            limit_s: Timeout in seconds for the nodes to write the checkpoint.
        """
        if self._settings is None:
            return
        try:
            await self._recover(limit_s)
        finally:
            if self._kept is not None:
                self._kept[1].close()
                self._kept = None

    async def _recover(self, limit_s: float) -> None:
        latest = self._folder.latest() or 0
        self._last = source = await self._ask()
        if source.step <= latest:
            if source.why and latest < source.seen:
                say(f"warning: {source.why}; resuming from the checkpoint of iteration {latest}")
            return
        begun_s = time.monotonic()
        try:
            self._folder.begin(source.step)
            why = await self._write(source, begun_s + limit_s)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
        if why:
            self._folder.abandon(source.step)
            why = f"the copies of iteration {source.step} could not be written: {why}"
            self._last = SnapshotSource(seen=source.seen, why=why)
            say(f"warning: {why}; resuming from the checkpoint of iteration {latest}")
            return
        self._restored = source.step
        say(
            f"iteration {source.step} was restored from copies in memory in "
            f"{time.monotonic() - begun_s:.1f} s; the last checkpoint was of iteration {latest}"
        )

    async def _ask(self) -> SnapshotSource:
        """Asks all nodes for their copies, and returns the newest step that can be restored."""

        async def held(name: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
            try:
                ask = self._members.ask(name, "inventory", _ANSWER_S, within_s=_SETTLE_S)
                return name, (await ask)["held"]
            except OSError:
                return name, ()

        names = [node.name for node in self._members.nodes.values() if node.status in _HERE]
        kept = await asyncio.gather(*map(held, names))
        if self._kept is not None:
            own_name, keeper = self._kept
            kept.append((own_name, await asyncio.to_thread(keeper.inventory, _SETTLE_S)))
        return newest(kept)

    async def _write(self, source: SnapshotSource, until_s: float) -> str:
        """Asks the nodes to write their snapshots of the step in ``source`` as a checkpoint.

        Returns a description of the first failure, or an empty string if the nodes succeed before
        ``until_s``.
        """
        by_node: dict[str, list[Mapping[str, Any]]] = {}
        for part in source.parts:
            by_node.setdefault(part["node"], []).append(part)
        common = next(part["node"] for part in source.parts if part["has_common"])
        common_order = {
            "checkpoints": str(self._folder.path),
            "is_pipeline": isinstance(self._folder, PipelineFolder),
            "step": source.step,
            "lease": 0 if self._folder.lease is None else self._folder.lease.number,
        }
        orders = {
            name: {
                **common_order,
                "what": "write",
                "index": index,
                "parts": parts,
                "has_common": name == common,
            }
            for index, (name, parts) in enumerate(by_node.items())
        }
        why = await self._run(orders, until_s)
        if why:
            return why
        assembly = {**common_order, "what": "assemble", "count": len(orders)}
        return await self._run({common: assembly}, until_s)

    async def _run(self, orders: Mapping[str, Mapping[str, Any]], until_s: float) -> str:
        """Runs the program that restores snapshots on all nodes in ``orders``.

        Returns:
            Description of the first failure, or an empty string if the program succeeded on all
            nodes before ``until_s``.
        """
        self._written += 1

        async def run(name: str, order: Mapping[str, Any]) -> int:
            rank = {
                "key": f"restore-{self._written}/{name}",
                "variables": {},
                "arguments": [json.dumps(order)],
            }
            within_s = max(0.0, until_s - time.monotonic())
            answer = await self._members.ask(
                name, "start", within_s, ranks=[rank], program="restore"
            )
            return int(answer["status"])

        statuses = await asyncio.gather(*(run(*order) for order in orders.items()))
        for name, status in zip(orders, statuses, strict=True):
            if status:
                return f"{name} exited with status {status}"
        return ""
