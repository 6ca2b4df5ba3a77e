"""Runs a job in one layout after another as nodes join and leave.

An incarnation is the period during which ranks run in one layout. After an incarnation, the manager
starts the next incarnation, or the job ends::

    wait for nodes -> choose a layout -> start ranks -> watch ──┬─ all iterations done: end
         ^                                                      ├─ error in the program: end
         │            SIGUSR1 to the ranks, which save <──── node joins or will be removed
         └──────────────── from the last complete checkpoint <──┴─ node or rank lost

A new layout changes how the ranks divide the model and the batch. It changes neither the global
batch size nor the order of the data. Checkpoints do not depend on the layout, so ranks in a new
layout can resume from the newest complete checkpoint.

If nodes join by themselves, each node runs a :class:`Participant`. One of the nodes is the
manager::

    claim the job ── free ──> manage it until its end, or until this node is removed
       ^     └────── taken ──> join the manager ── released by the manager ──> end
       └────────────────────────── manager lost <┘
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from megatron.adaptive.cluster.agent import Agent
from megatron.adaptive.cluster.awake_time import AwakeClock
from megatron.adaptive.cluster.failed_probes import FailedProbes
from megatron.adaptive.cluster.incarnation import (
    EXIT_LEFT,
    JobSpec,
    RunningRanks,
    assign,
    earliest,
    ended_well,
    how_ended,
    rank_orders,
)
from megatron.adaptive.cluster.job_state_file import (
    Incarnation,
    IncarnationProgress,
    ProgressReader,
    StateFile,
    incarnation_folder,
    job_folder,
    phases,
    say,
    some_names,
)
from megatron.adaptive.cluster.layout_rule import Chooser, ParallelLayout
from megatron.adaptive.cluster.membership import RETRY_S, Event, Machine, Membership, Node
from megatron.adaptive.cluster.snapshot_placement import JobSnapshots
from megatron.adaptive.cluster.straggler import Stragglers
from megatron.adaptive.engine.folder_lease import Lease, LeaseTakenError
from megatron.adaptive.engine.progress import COMPLETE
from megatron.adaptive.errors import AdaptiveError, SetupError
from megatron.adaptive.handshake import new_secret
from megatron.adaptive.trace.files import drop_closed_terminal

_TICK_S = 2.0
_SETTLE_S = 0.5
_GRACE_S = 8.0
_KILL_S = 15.0
_PORT_S = 15.0
_RETURN_S = 15.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Manager:
    """Manages one job until it ends. :meth:`run` may only be called once.

    Args:
        spec: Description of the job.
        chooser: Object that chooses the best layout for the available nodes.
        own_machine: Machine of this process if nodes join by themselves, or ``None`` if the job has
            a machines file. If it is given, a stop signal to this process removes only this node
            from the job, and another node becomes the manager.
        keeper: Object with the snapshots that this node stored under the previous manager, or
            ``None`` if there are no snapshots.
    """

    def __init__(
        self,
        spec: JobSpec,
        chooser: Chooser,
        own_machine: Machine | None = None,
        keeper: SnapshotKeeper | None = None,
    ) -> None:
        self._spec = spec
        self._chooser = chooser
        self._stragglers = Stragglers(spec.on_straggler, chooser, spec.arguments)
        self._folder = job_folder(spec.checkpoints)
        self._state = StateFile(self._folder)
        self._program = spec.program
        self._lease = Lease(spec.checkpoints)
        self._program.folder.lease = self._lease
        self._secret = new_secret()
        # Random name of this manager. It is part of the names of folders and runs.
        self._name = secrets.token_hex(4)
        self._clock = AwakeClock()
        self._members = Membership(
            spec.machines, own_machine, spec.address, self._secret, asdict(spec.work)
        )
        self._probes = FailedProbes(
            spec.on_failed_probe, self._stragglers, self._members, self._nodes_in_use
        )
        self._own_machine = own_machine
        former_keeper = (
            None if own_machine is None or keeper is None else (own_machine.name, keeper)
        )
        folder = self._program.folder
        self._copies = JobSnapshots(
            spec.copy_settings, self._members, folder, self._name, former_keeper
        )
        self._copies_text = ""
        self._incarnations: list[Incarnation] = []
        self._status = "waiting for machines"
        self._iteration = 0
        self._total = 0
        # First stop signal that this process received, or ``None`` before any signal.
        self.notice: signal.Signals | None = None
        self._stop: signal.Signals | None = None
        self._is_deposed = False
        self._has_worked = False
        self._has_findings = False
        self._reconsider_s: float | None = None
        self._notice_ns: int | None = None
        self._before: IncarnationProgress | None = None
        self._progress = ProgressReader()
        self._failures = 0
        self._ended_ns = 0

    async def run(self) -> int:
        """Runs the job until it ends, and returns an exit status.

        Returns:
            0 if training is complete, 128 + N after signal N, or :data:`EXIT_LEFT` if a signal
            removed only this node. After a failure, the exit status of the first rank that failed
            is returned.

        Raises:
            LeaseTakenError: Another manager runs the job, or another job saves to the same
                checkpoint folder.
            SetupError: No layout fits the nodes before the timeout, or a folder is not writable.
            ConfigError: The trainer's arguments are invalid.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._asked_to_stop, number)
        try:
            await asyncio.to_thread(self._lease.claim, run=self._name)
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise self._not_writable(error) from error
        self._before_us = self._state.take_over(self._spec.checkpoints)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        ticking = loop.create_task(self._tick())
        status = 2
        try:
            self._iteration = self._latest()
            self._program.check()
            await self._members.start()
            address = {"address": self._members.address, "port": self._members.port}
            self._lease.publish({**address, "secret": self._secret})
            status = await self._run()
            if self._is_deposed:
                raise self._lease.taken()
            self._status = "complete" if status == 0 else f"exited with status {status}"
            return EXIT_LEFT if self._stop is not None and self._own_machine is not None else status
        except (AdaptiveError, OSError) as error:
            self._status = f"ended: {error}"
            if not isinstance(error, OSError):
                raise
            raise self._not_writable(error) from error
        finally:
            ticking.cancel()
            await self._probes.close()
            await self._members.close(
                status, hands_over=self._own_machine is not None and self._stop is not None
            )
            if not self._is_deposed:
                self._write_state()
            self._lease.end()

    def _not_writable(self, error: OSError) -> SetupError:
        return SetupError(
            f"cannot write {error.filename or self._folder}: {error.strerror}; free space there "
            "or choose another folder with --checkpoint"
        )

    async def _run(self) -> int:
        await self._first_nodes()
        if self._is_successor:
            await self._recover()
        reason = "start"
        while True:
            choice = await self._layout()
            if choice is None:  # A stop signal arrived before a layout fitted the nodes.
                assert self._stop is not None
                say(f"stopped by {self._stop.name} before training began")
                return 128 + int(self._stop)
            running = await self._start(*choice, reason)
            if running is None:
                continue
            # Programs that show the status expect the state file to exist from now on.
            self._write_state()
            await self._watch(running)
            # Recover while the remaining nodes are still connected, because they store the
            # snapshots.
            if running.fault:
                await self._recover()
            status, reason = self._judge(running)
            if status is not None:
                return status

    @property
    def _is_successor(self) -> bool:
        """Returns whether another manager ran this job before this one."""
        return "run" in self._lease.former

    async def _recover(self) -> None:
        self._fence()
        await self._copies.recover(self._spec.stop_s)
        # Apply the events that arrived while the nodes restored the training state.
        while not self._members.events.empty():
            await self._next(None)

    async def _first_nodes(self) -> None:
        """Waits until all started agents have connected or failed.

        Without a machines file, also waits until enough nodes have joined. Returns early if the
        timeout expires or the job is asked to stop.
        """
        expected = self._spec.nodes
        limit_s = self._spec.join_s
        if self._is_successor:
            # All nodes should join again, except the node on which the previous manager ran.
            expected = max(1, self._before_us - 1)
            limit_s = min(limit_s, _RETURN_S)
        until_s = self._clock.now_s() + limit_s
        while self._stop is None and self._clock.now_s() < until_s:
            enough = len(self._members.usable()) >= expected
            if not self._members.are_starting and (enough or self._spec.machines is not None):
                return
            await self._apply_all(until_s)

    async def _layout(self) -> tuple[ParallelLayout, list[Node]] | None:
        """Chooses a layout for the available nodes. Waits for more nodes while no layout fits.

        Returns the layout and its nodes, or ``None`` if the job was asked to stop.
        """
        self._status = "waiting for machines"
        until_s = self._clock.now_s() + self._spec.wait_s
        is_reported = False
        # Prefer nodes that have already imported the modules of the ranks, because ranks start
        # faster on these nodes. At the first start, no node has imported them yet.
        is_ready = bool(self._incarnations)
        while self._stop is None:
            if choice := await self._fitting(ready=is_ready) or await self._fitting():
                return choice
            why = f" ({self._chooser.why})" if self._chooser.why else ""
            slots = sum(node.slots for node in self._members.usable())
            safe = f"the last complete checkpoint is of iteration {self._latest()}"
            if not is_reported:
                is_reported = True
                say(f"waiting for machines, because no layout fits {slots} processes{why}; {safe}")
                self._write_state()
            if self._clock.now_s() >= until_s:
                raise SetupError(
                    f"no layout of the model fits {slots} processes{why}, and no machine joined "
                    f"within {self._spec.wait_s:g} s; add machines and start the job again; "
                    f"{safe}"
                )
            if self._members.start_lost_again():
                # All restarted nodes import their modules at the same time, so wait for all of them
                # instead of using only the fastest nodes.
                is_ready = False
                while self._members.are_starting and self._clock.now_s() < until_s:
                    await self._apply_all(until_s)
            else:
                await self._apply_all(min(until_s, self._clock.now_s() + RETRY_S))
        return None

    async def _fitting(self, *, ready: bool = False) -> tuple[ParallelLayout, list[Node]] | None:
        nodes = [node for node in self._members.usable() if node.is_ready or not ready]
        layout = await self._stragglers.choose(nodes) if nodes else None
        return None if layout is None else (layout, nodes)

    async def _start(
        self, layout: ParallelLayout, nodes: list[Node], reason: str
    ) -> RunningRanks | None:
        """Starts the ranks of ``layout`` on ``nodes``, and returns the state of these ranks.

        Returns ``None`` if a node of the layout has just left.
        """
        planned_ns = time.time_ns()
        places = assign([node for node in nodes if node.status == "present"], layout)
        if len(places) < layout.world_size:
            return None
        first = places[0]
        try:
            port = (await self._members.ask(first.name, "port", _PORT_S))["port"]
        except OSError:
            return None
        if not self._fence():
            return None
        incarnation = self._next_incarnation(layout, places, reason)
        incarnation.marks_ns |= {"planned": planned_ns, "begun": time.time_ns()}
        folder = incarnation_folder(self._folder, incarnation.number, self._name)
        arguments, variables = self._program.command(
            layout, incarnation.number, incarnation.resumed, folder
        )
        orders = rank_orders(
            arguments,
            places,
            incarnation.number,
            {
                **variables,
                "MASTER_ADDR": self._members.address_of(first),
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": f"{self._name}-{incarnation.number}",
                "TORCHELASTIC_RESTART_COUNT": str(incarnation.number - 1),
                "MEGATRON_ADAPTIVE_LEASE": str(self._lease.number),
            },
        )
        copies = self._copies.orders(incarnation.number, list(orders))
        for name, ranks in orders.items():
            link = self._members.nodes[name].link
            assert link is not None
            link.send("start", ranks=ranks, copies=copies.get(name))
        number = incarnation.number
        where = {f"{number}/{rank}": node.name for rank, node in enumerate(places)}
        self._incarnations.append(incarnation)
        self._status = "training"
        planned = "" if layout.step_s is None else f"; predicted step time {layout.step_s:.4g} s"
        say(
            f"epoch {incarnation.number} ({reason}): {layout},"
            f" on {some_names(incarnation.nodes)}{planned}"
        )
        self._reconsider_s = self._clock.now_s()
        return RunningRanks(incarnation=incarnation, layout=layout, folder=folder, where=where)

    def _next_incarnation(
        self, layout: ParallelLayout, places: Sequence[Node], reason: str
    ) -> Incarnation:
        resumed = self._latest()
        incarnation = Incarnation(
            number=len(self._incarnations) + 1,
            layout=str(layout),
            processes=layout.world_size,
            nodes=tuple(dict.fromkeys(node.name for node in places)),
            reason=reason,
            resumed=resumed,
            predicted_s=layout.step_s,
        )
        incarnation.source, incarnation.lost_steps = self._copies.begun(resumed, self._before)
        if self._before is not None:
            incarnation.before = self._before
            incarnation.marks_ns["ended"] = self._ended_ns
            if self._notice_ns is not None:
                incarnation.marks_ns["notice"] = self._notice_ns
        self._notice_ns = None
        return incarnation

    async def _watch(self, running: RunningRanks) -> None:
        """Waits until each rank in ``running`` has exited, or its node is lost."""
        while len(running.statuses) < len(running.where):
            event = await self._next(earliest(running.deadline_s, self._reconsider_s))
            kind = "" if event is None else event.kind
            if event is not None and kind == "ended" and event.message["key"] in running.where:
                self._rank_ended(running, event)
            # After a deadline, check all nodes, because the method ``_overdue`` marks nodes as lost
            # without sending an event.
            if event is None or kind == "lost":
                for key in running.alive:
                    name = running.where[key]
                    is_gone = self._members.nodes[name].status in ("lost", "gone")
                    # After an event, record only the ranks on the event's node as killed. Ranks on
                    # another lost node may have exited normally, and the queue may still contain
                    # their exit statuses. Do not check the status of the event's node, because this
                    # node may have joined again.
                    if is_gone if event is None else name == event.node:
                        running.statuses[key] = -signal.SIGKILL
                        running.record_fault(
                            lost := f"node {name} was lost", self._clock.now_s(), gone=lost
                        )
            if self._stop is not None:
                self._ask_to_save(running, f"signal {self._stop.name}")
            if kind == "tick" and not running.stopping:
                # The event ``tick`` may have been queued before the current ranks started, so read
                # again which of these ranks are slow.
                now = self._progress.read(running.folder)
                nodes = self._members.usable()
                reason = await self._probes.handle(now.failed, running, nodes)
                reason = reason or await self._stragglers.handle(now.slow, running, nodes)
                if reason:
                    self._ask_to_save(running, reason)
            now_s = self._clock.now_s()
            if self._reconsider_s is not None and now_s >= self._reconsider_s:
                self._reconsider_s = None
                await self._reconsider(running)
            if running.deadline_s is not None and now_s >= running.deadline_s:
                self._overdue(running)
        self._ended_ns = time.time_ns()
        self._before = self._progress.read(running.folder)
        self._note_progress()

    def _rank_ended(self, running: RunningRanks, event: Event) -> None:
        status = event.message["status"]
        running.statuses[event.message["key"]] = status
        if not ended_well(status):
            node = self._members.nodes[event.node]
            rank = event.message["key"].partition("/")[2]
            # The exit of a rank on a node that is leaving the job does not count as a failure.
            gone = node.why if node.status == "leaving" else ""
            fault = f"rank {rank} on {node.name} {how_ended(status)}"
            kill = status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV, -signal.SIGBUS)
            running.record_fault(fault, self._clock.now_s() + _GRACE_S, gone=gone, kill=kill)

    def _overdue(self, running: RunningRanks) -> None:
        """Kills the remaining ranks, or marks their nodes as lost if the kill had no effect."""
        if running.killed:
            for name in {running.where[key] for key in running.alive}:
                node = self._members.nodes[name]
                node.status = "lost"
                node.why = f"did not stop its ranks within {_KILL_S:g} s"
                say(f"warning: node {name} is lost: it {node.why}{self._way_back(node)}")
                if node.link is not None:
                    node.link.send("leave")
            return
        running.fault = running.fault or (
            f"the ranks did not exit within {self._spec.stop_s:g} s after the request to stop "
            f"({running.stopping})"
        )
        running.killed = True
        running.deadline_s = self._clock.now_s() + _KILL_S
        self._members.signal({running.where[key] for key in running.alive}, signal.SIGKILL)

    async def _reconsider(self, running: RunningRanks) -> None:
        """Asks the ranks to save and exit if a better layout exists for the available nodes."""
        leaving = self._members.leaving(running.incarnation.nodes)
        if leaving is not None:
            self._ask_to_save(running, leaving.why)
            return
        choice = await self._fitting(ready=True)
        if choice is not None and self._chooser.is_better(choice[0], running.layout):
            nodes = self._stragglers.included(choice[1])
            former_names = set(running.incarnation.nodes)
            newcomers = some_names(node.name for node in nodes if node.name not in former_names)
            self._ask_to_save(running, f"{newcomers} joined" if newcomers else "a better layout")
        elif not running.stopping:
            # The layout stays the same, so discard the time at which the nodes changed.
            self._notice_ns = None

    def _ask_to_save(self, running: RunningRanks, reason: str) -> None:
        if self._is_deposed and not running.killed:  # Another manager has taken over.
            running.fault = running.fault or "another manager has taken over the job"
            running.deadline_s = 0.0
        if running.stopping or running.fault:
            return
        running.stopping = reason
        running.deadline_s = self._clock.now_s() + self._spec.stop_s
        self._notice_ns = self._notice_ns or time.time_ns()
        say(f"{reason}: saving at the end of this step")
        self._members.signal({running.where[key] for key in running.alive}, signal.SIGUSR1)

    def _judge(self, running: RunningRanks) -> tuple[int | None, str]:
        """Decides, after all ranks in ``running`` have exited, whether the job ends.

        Returns:
            Exit status of the job and an empty string if the job ends. Otherwise, ``None`` and the
            reason to start another incarnation.
        """
        assert self._before is not None
        for node in list(self._members.nodes.values()):
            if node.status == "leaving":
                self._members.release(node, node.why, EXIT_LEFT)
        before = self._before
        self._has_worked |= before.first_ns is not None
        if not running.fault:
            self._failures = 0
            if self._stop is not None:
                say(
                    f"stopped by {self._stop.name}; the last checkpoint is of iteration"
                    f" {self._latest()}"
                )
                return 128 + int(self._stop), ""
            reason = self._program.goes_on(before, running.statuses.values())
            if reason or (running.stopping and before.ended != COMPLETE):
                return None, running.stopping or reason
            return 0, ""  # The program has already printed why training ended.
        self._notice_ns = None
        lost = running.gone
        statuses = running.statuses.values()
        if lost and before.ended == COMPLETE:
            say(f"{COMPLETE}; after the last iteration: {lost}")
            return 0, ""
        say(f"error: {running.fault}{f'; {lost}' if lost not in running.fault else ''}")
        if self._stop is not None:
            return 128 + int(self._stop), ""
        # Count the failures since the last checkpoint. The loss of a node is not the program's
        # fault, so do not count it.
        self._failures = (0 if before.saved_ns is not None else self._failures) + (not lost)
        code = next((code for code in statuses if code > 0 and not ended_well(code)), 1)
        is_own_error = not lost and not any(code < 0 for code in statuses)
        if is_own_error and not self._has_worked:
            # The program has never completed a step, so it would fail again. It has already printed
            # an error.
            return code, ""
        if self._failures > self._spec.max_restarts and not lost:
            say(
                f"error: giving up after {self._failures} failures without a checkpoint between "
                f"them; the last complete checkpoint is of iteration {self._latest()}"
            )
            return code, ""
        return None, lost or running.fault

    async def _apply_all(self, until_s: float | None) -> None:
        """Waits for an event, and then applies all queued events.

        If several nodes have joined at the same time, the next layout can then use all of them.
        """
        await self._next(until_s)
        while not self._members.events.empty():
            await self._next(None)

    async def _next(self, until_s: float | None) -> Event | None:
        """Waits for an event, updates the state of the event's node, and returns the event.

        Returns ``None`` if the deadline ``until_s`` passes first.
        """
        limit_s = None if until_s is None else max(0.0, until_s - self._clock.now_s())
        try:
            event = await asyncio.wait_for(self._members.events.get(), limit_s)
        except asyncio.TimeoutError:
            return None
        node = self._members.nodes.get(event.node)
        if node is None:
            return event
        now_s = self._clock.now_s()
        if event.kind == "joined":
            self._stragglers.joined(node.name)
            self._probes.joined(node.name)
        elif event.kind == "passed":
            self._probes.passed(node.name)
            say(f"node {node.name} passed its probe")
            self._notice_ns = self._notice_ns or time.time_ns()
            self._reconsider_s = now_s
        elif event.kind == "ready":
            # The node has imported its modules, so ranks can start on it without delay. Other nodes
            # may be ready soon, so wait a short time before choosing a layout.
            self._notice_ns = self._notice_ns or time.time_ns()
            self._reconsider_s = now_s + _SETTLE_S
        elif event.kind == "failed":
            say(f"warning: machine {node.name} is left out: {node.why}")
        elif event.kind == "lost":
            say(f"warning: node {node.name} is lost: {node.why}{self._way_back(node)}")
        elif event.kind in ("notice", "removed") and node.status == "present":
            node.status = "leaving"
            node.why = f"{node.name} was removed from the machines file"
            if event.kind == "notice":
                node.why = f"{node.name} received {event.message['signal']}"
            self._notice_ns = self._notice_ns or time.time_ns()
            self._reconsider_s = now_s
            if not self._incarnations or node.name not in self._incarnations[-1].nodes:
                self._members.release(node, node.why, EXIT_LEFT)
        return event

    def _way_back(self, node: Node) -> str:
        """Returns the end of a log line that explains how to restart the lost node ``node``.

        The result is empty if this manager does not start the node's agent.
        """
        if self._spec.machines is None or node.machine is None:
            return ""
        return f"; when it works again, run touch {self._spec.machines} to include it again"

    def _asked_to_stop(self, number: signal.Signals) -> None:
        self._stop = self._stop or number
        self.notice = self.notice or (None if self._is_deposed else number)
        self._members.events.put_nowait(Event("stop", "", {}))

    def _hung_up(self) -> None:
        """Stops the job if SIGHUP was sent because the terminal was closed.

        Any other SIGHUP is a request to reread the machines file.
        """
        if drop_closed_terminal():
            self._asked_to_stop(signal.SIGTERM)
        else:
            self._members.reread_file()

    async def _tick(self) -> None:
        """Periodically renews the lease, writes the state file and rereads the machines file."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._clock.now_s()
            if not self._holds():
                return
            self._members.reread_file()
            # Ignore errors here, because they are reported at the next change of the layout.
            with contextlib.suppress(AdaptiveError, OSError):
                self._write_state()
            if self._has_findings:
                self._members.events.put_nowait(Event("tick", "", {}))

    def _holds(self) -> bool:
        """Renews the manager's lease, and returns whether this manager still has the lease.

        The lease is the right to manage the job.
        """
        self._is_deposed = self._is_deposed or not self._lease.is_held(say)
        if self._is_deposed:
            self._asked_to_stop(signal.SIGTERM)
        return not self._is_deposed

    def _fence(self) -> bool:
        """Prevents ranks that still run in an earlier layout from saving checkpoints.

        Returns:
            Whether this manager still holds the job's lease, the right to manage the job.
        """
        # If the disk is full, the ranks report the error when they save.
        with contextlib.suppress(OSError):
            if not self._lease.advance():
                return self._holds()
        return self._holds()

    def _nodes_in_use(self) -> Sequence[str]:
        """Returns the names of the nodes on which ranks are running, or ran most recently."""
        return self._incarnations[-1].nodes if self._incarnations else ()

    def _latest(self) -> int:
        return self._program.folder.latest() or 0

    def _note_progress(self) -> None:
        if not self._incarnations:
            return
        incarnation = self._incarnations[-1]
        now = self._progress.read(incarnation_folder(self._folder, incarnation.number, self._name))
        incarnation.begun_at(now.start)
        self._iteration = max(now.iteration or 0, incarnation.resumed)
        self._total = now.total or self._total
        self._copies_text = now.copies
        incarnation.phases_s = phases(incarnation, now)
        incarnation.step_s = now.step_s
        self._has_findings = bool(now.slow or now.failed)

    def _write_state(self) -> None:
        self._note_progress()
        state = {
            "status": self._status,
            "iteration": self._iteration,
            "total_iterations": self._total,
            "checkpoint_iteration": self._latest(),
            "lost_steps": sum(incarnation.lost_steps for incarnation in self._incarnations),
            "copies": self._copies_text,
            "machines": [self._stragglers.to_dict(node) for node in self._members.nodes.values()],
            "epochs": [incarnation.to_dict() for incarnation in self._incarnations],
        }
        self._state.write(state)


_AGAIN_S = 0.5
_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


class Participant:
    """Takes part in a job as one node. :meth:`run` may only be called once per object.

    The node switches between the roles of manager and agent in the same event loop. It handles
    signals at all times, so that a signal during a switch does not kill the process.

    Args:
        spec: Description of the job.
        chooser: Object that chooses layouts while this node is the manager.
        name: Name of the node, unique in the job.
        slots: Number of processes on this node, or ``None`` for one per GPU.
        is_local: Whether all nodes of the job run on this machine.
    """

    def __init__(
        self, spec: JobSpec, chooser: Chooser, *, name: str, slots: int | None, is_local: bool
    ) -> None:
        self._spec = spec
        self._chooser = chooser
        self._name = name
        self._slots = slots
        # Snapshots of the training state must outlive the manager, because they are needed if the
        # manager is lost.
        self._keeper = SnapshotKeeper("127.0.0.1" if is_local else "")
        self._until_s = 0.0
        self._notice: signal.Signals | None = None

    async def run(self) -> int:
        """Takes part in the job until the job ends or this node is removed from it.

        Returns:
            Exit status of the job, or :data:`EXIT_LEFT` if this node was removed.

        Raises:
            SetupError: The manager could not be reached within ``join_s`` seconds, no layout fits,
                or a folder is not writable.
            ConfigError: The trainer's arguments are invalid.
            LeaseTakenError: Another job saves to the checkpoint folder.
        """
        own_machine = Machine(name=self._name, host="localhost", slots=self._slots)
        self._until_s = time.monotonic() + self._spec.join_s
        while self._notice is None:
            self._listen()
            manager = Manager(self._spec, self._chooser, own_machine, self._keeper)
            try:
                return await manager.run()
            except LeaseTakenError as error:
                owner = error.owner
                if "run" not in owner:  # The job has no manager that this node could join.
                    raise
            await self._over(manager.notice)
            status = None if self._notice is not None else await self._join(owner)
            if status is not None:
                return status
        say(f"node {self._name} is leaving the job: it received {self._notice.name}")
        return EXIT_LEFT

    async def _join(self, owner: Mapping[str, Any]) -> int | None:
        """Joins the job as an agent, and returns the exit status for this node.

        Returns ``None`` if the manager is lost or not ready yet.
        """
        agent = Agent(
            name=self._name,
            address=owner.get("address", ""),
            port=owner.get("port", 0),
            secret=owner.get("secret", ""),
            work=self._spec.work,
            slots=self._slots,
            keeper=self._keeper,
        )
        try:
            await agent.run()
        except SetupError:
            if time.monotonic() >= self._until_s:
                raise
            await asyncio.sleep(_AGAIN_S)
            return None
        # The manager may have been lost before it was notified of the signal, so remember the
        # signal.
        await self._over(agent.notice)
        if agent.status is not None:
            say(f"node {self._name} is leaving the job: {agent.why}")
            return agent.status
        say("lost the connection to the manager of the job; looking for another manager")
        self._until_s = time.monotonic() + self._spec.join_s
        return None

    async def _over(self, notice: signal.Signals | None) -> None:
        """Ends this node's role as manager or agent, and cancels all other tasks.

        Afterwards, this object handles the signals.
        """
        self._listen()
        self._notice = self._notice or notice
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # Let the event loop run pending signal handlers.

    def _listen(self) -> None:
        for number in _NOTICES:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        self._notice = self._notice or number
