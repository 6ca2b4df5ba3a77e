"""Excludes nodes that fail a probe of the running job, and uses them again once they pass.

The ranks probe each other (``--probe-interval``) and report the nodes that failed. With the policy
``exclude``, such a node gets no ranks if any layout fits the other nodes. The excluded node is then
measured alone, at increasing intervals, until it is fast enough to pass the probe::

    probe fails ──> excluded ── 5 s ──> measure ── fails, 10 s ──> measure ── passes ──> used again

A single node cannot measure its link to another node. A node with a slow link therefore stays
excluded until it joins again, for example because the user removes its line from the machines file
and then adds the line again.

Some nodes are slow only while they train, for example because they overheat. Such a node passes
when it is measured alone, but fails again in the job, and the ranks must be restarted in a
different layout each time. To make such restarts rare, the interval is reset only when the node
joins again, and not when it passes.

Only the manager excludes nodes. Ranks only report measurements, and a node cannot exclude itself.
If another manager takes over the job, it uses all nodes again, because it does not know which nodes
were excluded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence

from megatron.adaptive.cluster.incarnation import CHECK_S, ProbePolicy, RunningRanks
from megatron.adaptive.cluster.job_state_file import say
from megatron.adaptive.cluster.membership import Event, Membership, Node
from megatron.adaptive.cluster.straggler import Stragglers
from megatron.adaptive.profiling.failed_nodes import FailedNode

_FIRST_WAIT_S = 5.0
"""Time in seconds after which an excluded node is measured for the first time."""
_MOST_WAIT_S = 600.0


class FailedProbes:
    """Handles the nodes of a job that fail a probe, according to a policy.

    Args:
        policy: Reaction to a node that fails a probe: ``report`` or ``exclude``.
        stragglers: Object that chooses layouts and stores which nodes are excluded.
        members: Nodes of the job. When a node passes its check, the event ``passed`` is put into
            the event queue of ``members``.
        in_use: Function that returns the names of the nodes running ranks.
    """

    def __init__(
        self,
        policy: ProbePolicy,
        stragglers: Stragglers,
        members: Membership,
        in_use: Callable[[], Collection[str]],
    ) -> None:
        self._policy = policy
        self._stragglers = stragglers
        self._members = members
        self._in_use = in_use
        # For each node name, the number of the last incarnation (start of the ranks in a layout) in
        # which a failure of the node was handled.
        self._handled: dict[str, int] = {}
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._waits_s: dict[str, float] = {}
        self._count = 0

    async def handle(
        self, failed: Sequence[FailedNode], running: RunningRanks, nodes: Sequence[Node]
    ) -> str:
        """Prints which nodes failed a probe, and excludes them if the policy is ``exclude``.

        Args:
            failed: Nodes that have failed a probe since the ranks were started, with the
                measurements that violated a limit.
            running: State of the running ranks.
            nodes: Available nodes. They get ranks in this order.

        Returns:
            Reason to change the layout, or an empty string to keep the layout.
        """
        reasons = []
        for entry in failed:
            name = entry.node
            if name not in running.where.values() or self._is_handled(name, running):
                continue
            self._handled[name] = running.incarnation.number
            text = f"node {name} failed its probe: {entry.text}"
            if self._policy == "report":
                say(f"warning: {text}; use --on-failed-probe exclude to exclude such nodes")
            elif await self._stragglers.leave_out(name, entry.text, nodes):
                reasons.append(f"{text}; the node is excluded")
                self._begin_checks(entry)
            else:
                say(f"warning: {text}; the node is not excluded, because no layout fits without it")
        return ", ".join(reasons)

    def joined(self, name: str) -> None:
        """Forgets earlier failures of the node ``name`` when it joins.

        A node that joins again may have been repaired.

        Args:
            name: Name of the node, which need not have failed before.
        """
        self._handled.pop(name, None)
        self._waits_s.pop(name, None)
        if (task := self._checks.pop(name, None)) is not None:
            task.cancel()

    def passed(self, name: str) -> None:
        """Includes the node ``name`` in layouts again, after it has passed its check.

        Args:
            name: Name of the node, from the event ``passed``.
        """
        self._checks.pop(name, None)
        self._handled.pop(name, None)
        self._stragglers.take_back(name)

    async def close(self) -> None:
        """Cancels all checks that are still running."""
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    def _is_handled(self, name: str, running: RunningRanks) -> bool:
        """Returns whether the manager has already handled the failure of the node ``name``.

        With the policy ``exclude``, a failure is handled again after each restart of the ranks,
        because a layout without the node may have become possible.
        """
        number = self._handled.get(name)
        if number is None or self._policy == "report":
            return number is not None
        return number == running.incarnation.number

    def _begin_checks(self, failed: FailedNode) -> None:
        if failed.limits and failed.node not in self._checks:
            task = asyncio.get_running_loop().create_task(self._check(failed))
            self._checks[failed.node] = task

    async def _check(self, failed: FailedNode) -> None:
        """Measures the node in ``failed`` repeatedly, until it passes or leaves the job."""
        name = failed.node
        while True:
            # Double the wait before each measurement. Do not reset the wait when the node passes,
            # because the node may fail in the job again.
            wait_s = self._waits_s.get(name, _FIRST_WAIT_S)
            self._waits_s[name] = min(2 * wait_s, _MOST_WAIT_S)
            await asyncio.sleep(wait_s)
            node = self._members.nodes[name]
            if node.status != "present":
                del self._checks[name]
                return
            # Do not measure a node that runs ranks, because the ranks would disturb the
            # measurement. The job's own probes measure such a node.
            if name not in self._in_use() and await self._passes(node, failed):
                self._members.events.put_nowait(Event("passed", name, {}))
                return

    async def _passes(self, node: Node, failed: FailedNode) -> bool:
        """Returns whether all devices of ``node`` now meet the limits in ``failed``."""
        for local_rank in range(node.slots):
            self._count += 1
            order = {
                "key": f"check-{self._count}/{node.name}",
                "variables": {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(node.slots)},
                "arguments": [json.dumps({"limits": dict(failed.limits)})],
            }
            try:
                answer = await self._members.ask(
                    node.name, "start", CHECK_S, ranks=[order], program="check"
                )
            except OSError:
                return False
            if answer["status"] != 0:
                return False
        return True
