"""Tests how a manager reacts when ranks exit, and how a node changes to another manager."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cluster import manager as module
from megatron.adaptive.cluster.incarnation import EXIT_LEFT, JobSpec, RunningRanks, assign
from megatron.adaptive.cluster.job_state_file import Incarnation, IncarnationProgress
from megatron.adaptive.cluster.layout_rule import Chooser, ParallelLayout
from megatron.adaptive.cluster.manager import Manager, Participant
from megatron.adaptive.cluster.membership import Event, Node
from megatron.adaptive.engine.folder_lease import Lease, LeaseTakenError

from .jobs import FLAGS


def managed(folder: Path, *, worked: bool = True, **more: Any) -> Manager:
    """Returns a manager. If ``worked`` is true, the job has completed a step before."""
    flags = (*FLAGS, "--train-iters", "9")
    spec = JobSpec(script=Path("x.py"), arguments=flags, checkpoints=folder, **more)
    manager = Manager(spec, Chooser())
    manager._before = IncarnationProgress(first_ns=1 if worked else None)
    return manager


def ended(status: int) -> RunningRanks:
    """Returns an incarnation (a start of the job) whose only rank exited with ``status``."""
    layout = ParallelLayout(tensor=1, pipeline=1, data=1, partition=(1,), micro_batch=1, flags=())
    incarnation = Incarnation(number=1, layout="one", processes=1, nodes=("a",), reason="start")
    fault = f"rank 0 on a exited with status {status}"
    where, statuses = {"1/0": "a"}, {"1/0": status}
    return RunningRanks(
        incarnation=incarnation,
        layout=layout,
        folder=Path(),
        where=where,
        statuses=statuses,
        fault=fault,
    )


def test_only_what_never_worked_ends_the_job_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that only a job that has not completed any step ends at its first failure."""
    manager = managed(tmp_path, worked=False, max_restarts=2)
    assert manager._judge(ended(2)) == (2, "")
    manager._failures = 0
    manager._before = IncarnationProgress(first_ns=1, saved_ns=2)
    running = ended(1)
    assert manager._judge(running) == (None, running.fault)
    manager._before = IncarnationProgress()
    assert manager._judge(running) == (None, running.fault)
    assert manager._judge(running) == (1, "")
    assert "3 failures without a checkpoint between them" in capsys.readouterr().err


def test_nodes_that_are_taken_are_no_failures_of_the_program(tmp_path: Path) -> None:
    """Checks that the loss of a node does not count as a failure of the program."""
    manager = managed(tmp_path, max_restarts=1)
    lost = ended(-9)
    lost.fault = lost.gone = "node a was lost"
    for _ in range(5):
        assert manager._judge(lost) == (None, lost.fault)
    killed = ended(-9)
    assert manager._judge(killed) == (None, killed.fault)
    assert manager._judge(lost) == (None, lost.fault)
    assert manager._judge(killed) == (1, "")


@pytest.mark.parametrize("order", [("killed", "fails"), ("fails", "killed")])
def test_a_killed_rank_is_named_though_its_peer_is_seen_to_end_first(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    """Checks that the error names the killed rank, even if another rank's exit is seen first."""
    manager = managed(tmp_path)
    for name in "ab":
        manager._members.nodes[name] = Node(name=name, slots=1, status="present")
    running = ended(2)
    running.fault, running.statuses = "", {}
    running.where = {"1/0": "a", "1/1": "b"}
    events = {
        "killed": Event("ended", "a", {"key": "1/0", "status": -9}),
        "fails": Event("ended", "b", {"key": "1/1", "status": 2}),
    }
    for which in order:
        manager._rank_ended(running, events[which])
    assert running.fault == "rank 0 on a was killed by signal SIGKILL"
    assert running.statuses == {"1/0": -9, "1/1": 2}


@pytest.mark.parametrize("first", ["b", "a"])
def test_a_node_that_is_cut_off_is_no_failure_of_the_program(
    tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a lost node causes a restart, even if its loss is noticed after ranks exit."""

    async def cut() -> tuple[int | None, str]:
        manager = managed(tmp_path, max_restarts=0)
        manager._has_worked = True
        manager._members.nodes |= {name: Node(name=name, status="present") for name in "ab"}
        running = ended(2)
        running.where, running.statuses, running.fault = {"1/0": "a", "1/1": "b"}, {}, ""
        lost = manager._members.nodes["b"]
        events = [Event("ended", "a", {"key": "1/0", "status": 2}), Event("lost", "b", {})]
        for event in events if first == "a" else events[::-1]:
            manager._members.events.put_nowait(event)
        lost.status, lost.why = "lost", "nothing was heard from it for 20 s"
        if first == "a":
            lost.status = "present"
            asyncio.get_running_loop().call_later(0.1, setattr, lost, "status", "lost")
        await manager._watch(running)
        return manager._judge(running)

    for _ in range(3):
        assert asyncio.run(cut()) == (None, "node b was lost")
    assert "giving up" not in capsys.readouterr().err


def test_a_rank_that_goes_with_its_node_is_no_failure_of_the_program(tmp_path: Path) -> None:
    """Checks that the job continues if a node is removed before its ranks have saved."""
    manager = managed(tmp_path, max_restarts=0)
    reason = "b received SIGTERM"
    nodes = {"a": Node(name="a", status="present")}
    nodes["b"] = Node(name="b", status="leaving", why=reason)
    manager._members.nodes |= nodes
    running = ended(2)
    running.where, running.statuses, running.fault = {"1/0": "a", "1/1": "b"}, {}, ""
    manager._rank_ended(running, Event("ended", "a", {"key": "1/0", "status": 2}))
    manager._rank_ended(running, Event("ended", "b", {"key": "1/1", "status": -9}))
    assert manager._judge(running) == (None, reason)
    assert nodes["b"].status == "gone"
    alone = ended(2)
    # No node was removed here, so the program itself has failed.
    assert manager._judge(alone) == (2, "")


def test_a_job_that_trained_goes_on_without_nodes_that_still_import(tmp_path: Path) -> None:
    """Checks that a running job does not wait for a node that has just joined."""
    manager = managed(tmp_path)

    def chosen() -> list[str]:
        chosen_layout = asyncio.run(manager._layout())
        assert chosen_layout is not None
        layout, nodes = chosen_layout
        return [node.name for node in assign(nodes, layout)]

    for name, is_ready in (("a", False), ("b", True), ("c", True)):
        node = Node(name=name, status="present", slots=1, is_ready=is_ready)
        manager._members.nodes[name] = node
    # Before the job's first start, the manager also uses nodes that still import their modules.
    assert chosen() == ["a", "b", "c"]
    manager._incarnations.append(ended(0).incarnation)
    assert chosen() == ["b", "c"]
    for node in manager._members.nodes.values():
        node.is_ready = False
    assert chosen() == ["a", "b", "c"]


def test_a_node_that_changes_nothing_begins_no_morph(tmp_path: Path) -> None:
    """Checks that a new node does not count as the start of a layout change if it is not used."""
    manager = managed(tmp_path)
    node = Node(name="a", status="present", slots=1, is_ready=True)
    manager._members.nodes["a"] = node
    running = ended(0)
    manager._incarnations.append(running.incarnation)

    async def tell_ready() -> int | None:
        manager._members.events.put_nowait(Event("ready", "a", {}))
        await manager._next(None)
        await manager._reconsider(running)
        return manager._notice_ns

    assert asyncio.run(tell_ready()) is None
    running.stopping = "another plan"
    assert asyncio.run(tell_ready()) is not None


def test_ranks_of_every_incarnation_may_save_no_more_before_the_next(tmp_path: Path) -> None:
    manager, rank, later = managed(tmp_path), Lease(tmp_path), Lease(tmp_path)
    run = manager._name
    manager._lease.claim(run=run)
    assert rank.join_manager(manager._lease.number, f"{run}-1")
    rank.require()
    assert manager._fence()
    with pytest.raises(LeaseTakenError):
        rank.require()
    assert later.join_manager(manager._lease.number, f"{run}-2")
    managed(tmp_path)._lease.claim(run="another")
    assert not manager._fence()
    with pytest.raises(LeaseTakenError):
        later.require()


class Part:
    """Stand-in for an agent, which sends SIGTERM to this process while it runs.

    Args:
        handles: Whether the agent handles the signal. Otherwise, the participant that runs the
            agent must handle it.
        status: Exit status of the agent if the manager releases it.
    """

    def __init__(self, handles: bool, status: int | None = None) -> None:
        self.handles = handles
        self.status = status
        self.why = "the job has ended"
        self.notice: signal.Signals | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Part:
        return self

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        if self.handles:
            loop.add_signal_handler(signal.SIGTERM, self._take)
        os.kill(os.getpid(), signal.SIGTERM)
        while self.handles and self.notice is None:
            await asyncio.sleep(0)
        return 0

    def _take(self) -> None:
        self.notice = signal.SIGTERM


class Taken:
    """Stand-in for the manager of a job that is already managed by another manager."""

    notice: signal.Signals | None = None

    def __init__(self, *arguments: Any) -> None:
        pass

    async def run(self) -> int:
        raise LeaseTakenError("taken", {"run": "", "address": "127.0.0.1", "port": 1})


@pytest.mark.parametrize("handles", [True, False])
@pytest.mark.parametrize("status", [None, 0])
def test_a_notice_is_heeded_whenever_it_comes(
    handles: bool,
    status: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Checks that a node that joins another manager's job leaves after a signal, and says why."""
    monkeypatch.setattr(module, "Manager", Taken)
    monkeypatch.setattr(module, "Agent", Part(handles, status))
    spec = JobSpec(script=Path("x.py"), arguments=(), checkpoints=tmp_path)
    part = Participant(spec, Chooser(), name="a", slots=1, is_local=True)
    former = signal.getsignal(signal.SIGTERM)
    try:
        assert asyncio.run(part.run()) == (EXIT_LEFT if status is None else status)
    finally:
        signal.signal(signal.SIGTERM, former)
    why = "it received SIGTERM" if status is None else "the job has ended"
    assert f"[elastic] node a is leaving the job: {why}" in capsys.readouterr().out
