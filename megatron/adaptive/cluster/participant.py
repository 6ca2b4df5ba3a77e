"""A node's part in a job whose nodes come by themselves: it manages the job, or joins who does.

::

    claim the job ── it is free ──> manage it to its end, or until this node is taken
       ^     └────── it is taken ──> join its manager ── let go ──> end
       └──────────────────────────────────── manager lost <┘
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Any

from megatron.adaptive.cluster.agent import Agent, AgentSpec
from megatron.adaptive.cluster.layouts import Chooser
from megatron.adaptive.cluster.lease import LeaseTakenError
from megatron.adaptive.cluster.machines import Machine
from megatron.adaptive.cluster.manager import Manager
from megatron.adaptive.cluster.rank_arguments import EXIT_LEFT, JobSpec
from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from megatron.adaptive.errors import SetupError

__all__ = ["Participant"]

_AGAIN_S = 0.5
_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


class Participant:
    """One node; use :meth:`run` once.

    All of it is in one event loop, whose handlers of signals stay from one part to the next: a
    notice that comes between two of them is heeded, and does not end the process without a word.

    Args:
        spec: of the job.
        chooser: of shapes, should this node manage the job.
        name: of the node, unique in the job.
        slots: processes of this node, ``None`` for one on each GPU.
        is_local: no other machine takes part.
    """

    def __init__(
        self, spec: JobSpec, chooser: Chooser, *, name: str, slots: int | None, is_local: bool
    ) -> None:
        self._spec = spec
        self._chooser = chooser
        self._name = name
        self._slots = slots
        # Copies outlive the manager that they were made under.
        self._keeper = SnapshotKeeper("127.0.0.1" if is_local else "")
        self._until_s = 0.0
        self._notice: signal.Signals | None = None

    async def run(self) -> int:
        """Take part until the job ends, or this node is taken.

        Returns:
            The exit status.

        Raises:
            SetupError: the manager cannot be reached within the time for joining, or what
                :meth:`Manager.run` raises.
        """
        own = Machine(name=self._name, host="localhost", slots=self._slots)
        self._until_s = time.monotonic() + self._spec.join_s
        while self._notice is None:
            self._listen()
            manager = Manager(self._spec, self._chooser, own, self._keeper)
            try:
                return await manager.run()
            except LeaseTakenError as error:
                owner = error.owner
            await self._over(manager.notice)
            status = None if self._notice is not None else await self._join(owner)
            if status is not None:
                return status
        print(f"[elastic] node {self._name} leaves: {self._notice.name}", flush=True)
        return EXIT_LEFT

    async def _join(self, owner: Mapping[str, Any]) -> int | None:
        """Be a node of the job; ``None`` where its manager is lost or not there yet."""
        agent = Agent(
            AgentSpec(
                name=self._name,
                address=owner.get("address", ""),
                port=owner.get("port", 0),
                secret=owner.get("secret", ""),
                slots=self._slots,
            ),
            keeper=self._keeper,
        )
        try:
            await agent.run()
        except SetupError:
            if time.monotonic() >= self._until_s:
                raise
            await asyncio.sleep(_AGAIN_S)
            return None
        # The manager may never have heard of the notice.
        await self._over(agent.notice)
        if agent.status is not None:
            print(f"[elastic] node {self._name} leaves: {agent.why}", flush=True)
            return agent.status
        print("[elastic] the manager of the job is lost: looking for another", flush=True)
        self._until_s = time.monotonic() + self._spec.join_s
        return None

    async def _over(self, notice: signal.Signals | None) -> None:
        """Heed signals again, and end what a manager or an agent has left in the loop."""
        self._listen()
        self._notice = self._notice or notice
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # signals are taken in the loop

    def _listen(self) -> None:
        for number in _NOTICES:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        self._notice = self._notice or number
