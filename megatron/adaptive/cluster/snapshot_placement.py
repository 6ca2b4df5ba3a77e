"""Places snapshots on nodes, and restores what is left of them after a loss.

After ranks are lost the manager asks every node what it keeps, takes the newest step of which all
parts are left on some node, and has the nodes write it into the folder of checkpoints, from where
the job goes on as from any other. What is missing for that is said in words.
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
    """Names a step that can be restored, or why none can.

    Attributes:
        step: the newest whole one, 0 for none.
        seen: the newest one of which anything is left.
        why: in words, where there is none.
        parts: copies to restore it from, as keepers list them, with the ``node`` of each and as
            ``needs`` the indices of those that it meets.
    """

    step: int = 0
    seen: int = 0
    why: str = ""
    parts: tuple[Mapping[str, Any], ...] = ()


def buddies(nodes: Sequence[Node]) -> dict[str, str | None]:
    """Returns the node that keeps copies for each: the next one on another machine.

    Where all are on one machine, as where a job is tried out, just the next one.
    """
    found: dict[str, str | None] = {}
    alone = len({node.host for node in nodes}) == 1
    for at, node in enumerate(nodes):
        others = (nodes[(at + step) % len(nodes)] for step in range(1, len(nodes)))
        far = (one.name for one in others if alone or one.host != node.host)
        found[node.name] = next(far, None)
    return found


def newest(kept: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> SnapshotSource:
    """Finds the newest step that is whole.

    Args:
        kept: names of the nodes that are left, and what their keepers gave as inventory. Of its
            ``needs`` any of ``ranks`` is enough, and ``is_sent`` says whether a copy that was sent
            is enough as well.
    """
    held: list[Mapping[str, Any]] = []
    needs: dict[tuple[str, int], Sequence[Mapping[str, Any]]] = {}
    for node, stores in kept:
        for one in stores:
            held.append({**one, "node": node})
            if "needs" in one:
                needs[one["run"], one["generation"]] = one["needs"]
    steps = {(step, one["run"], one["generation"]) for one in held for step in one["steps"]}
    seen, why = max((step for step, _, _ in steps), default=0), ""
    for step, run, generation in sorted(steps, reverse=True):
        here: list[dict[str, Any]] = [
            {**one, "needs": []}
            for one in held
            if (one["run"], one["generation"]) == (run, generation) and step in one["steps"]
        ]
        missing: set[int] = set()
        for index, need in enumerate(needs.get((run, generation), ())):
            fitting = [
                one
                for one in here
                if one["rank"] in need["ranks"] and (one["kind"] == "own" or need["is_sent"])
            ]
            if fitting:
                # What is at hand already, and the rank's own before one that was sent.
                best = min(fitting, key=lambda one: (not one["needs"], one["kind"] != "own"))
                best["needs"].append(index)
            else:
                missing |= set(need["ranks"])
        parts = tuple(one for one in here if one["needs"])
        if not missing and any(one["has_common"] for one in parts):
            return SnapshotSource(step=step, seen=seen, parts=parts)
        if not why:
            ranks = ", ".join(map(str, sorted(missing)))
            why = f"no copy is left of what rank {ranks} held"
    return SnapshotSource(seen=seen, why=why or "no node that is left keeps copies")


class JobSnapshots:
    """Places and restores the snapshots of one job, for its manager.

    Args:
        settings: steps from one to the next (``every``) and what they may take on a node
            (``limit_bytes``); ``None`` for no snapshots.
        members: the nodes.
        folder: of checkpoints.
        manager: name of the one that starts the ranks.
        kept: this node's name and the keeper of what it kept for the manager before.
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
        """Returns what the agent of each node gets with the ranks that it starts.

        Args:
            epoch: its number.
            names: of the nodes with ranks, in their order.
        """
        settings, members = self._settings, self._members
        if settings is None:
            return {}
        taking_part = set(names)
        for name, node in members.nodes.items():
            if node.link is not None and node.status in _HERE and name not in taking_part:
                # What it kept is of steps that the others do not go on from.
                node.link.send("start", ranks=[], copies=_NONE)
        nodes = [members.nodes[name] for name in names]
        alone = len({node.host for node in nodes}) == 1
        found: dict[str, Any] = {}
        for name, buddy in buddies(nodes).items():
            node = members.nodes[name]
            other = None
            if buddy is not None:
                one = members.nodes[buddy]
                address = members.address_of(one)
                other = {"name": buddy, "address": address, "port": one.copies_port}
            found[name] = {
                "run": f"{self._manager}-{epoch}",
                "buddy": other,
                "settings": {"node": name, "domain": name if alone else node.host, **settings},
            }
        return found

    def begun(self, resumed: int, before: IncarnationProgress | None) -> tuple[str, int]:
        """Returns where an epoch goes on from, and how many steps are done again.

        Args:
            resumed: the iteration that it goes on from.
            before: what the ranks of the one before wrote at last, ``None`` for the first.
        """
        last, restored = self._last, self._restored
        self._last, self._restored = SnapshotSource(), 0
        done = max(last.seen, 0 if before is None else before.iteration or 0)
        if restored and restored == resumed:
            source = "copies in memory"
        else:
            source = "checkpoint" if resumed else "start"
            if last.why and done > resumed:
                source += f": {last.why}"
        return source, max(0, done - resumed)

    async def recover(self, limit_s: float) -> None:
        """Makes a checkpoint of the newest step that is left, if it is newer than the last one.

        Args:
            limit_s: for the nodes to write it.
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
                say(f"warning: {source.why}: going on from the checkpoint of {latest}")
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
            say(f"warning: {why}; going on from the checkpoint of {latest}")
            return
        self._restored = source.step
        say(
            f"iteration {source.step} was restored from copies in memory in"
            f" {time.monotonic() - begun_s:.1f} s; the last checkpoint was of {latest}"
        )

    async def _ask(self) -> SnapshotSource:
        """Asks all nodes what they keep."""

        async def held(name: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
            try:
                ask = self._members.ask(name, "inventory", _ANSWER_S, within_s=_SETTLE_S)
                return name, (await ask)["held"]
            except OSError:
                return name, ()

        names = [node.name for node in self._members.nodes.values() if node.status in _HERE]
        kept = await asyncio.gather(*map(held, names))
        if self._kept is not None:
            own, keeper = self._kept
            kept.append((own, await asyncio.to_thread(keeper.inventory, _SETTLE_S)))
        return newest(kept)

    async def _write(self, source: SnapshotSource, until_s: float) -> str:
        """Lets the nodes write a step; returns which of them failed."""
        by_node: dict[str, list[Mapping[str, Any]]] = {}
        for one in source.parts:
            by_node.setdefault(one["node"], []).append(one)
        common = next(one["node"] for one in source.parts if one["has_common"])
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
        last = {**common_order, "what": "assemble", "count": len(orders)}
        return await self._run({common: last}, until_s)

    async def _run(self, orders: Mapping[str, Mapping[str, Any]], until_s: float) -> str:
        """Runs the program on nodes at once and waits for all; returns which of them failed."""
        self._written += 1

        async def run(name: str, order: Mapping[str, Any]) -> int:
            rank = {
                "key": f"restore-{self._written}/{name}",
                "variables": {},
                "arguments": [json.dumps(order)],
            }
            within_s = max(0.0, until_s - time.monotonic())
            answer = await self._members.ask(name, "start", within_s, ranks=[rank], is_restore=True)
            return int(answer["status"])

        statuses = await asyncio.gather(*(run(*order) for order in orders.items()))
        for name, status in zip(orders, statuses, strict=True):
            if status:
                return f"{name} ended with status {status}"
        return ""
