"""Tests that an elastic job excludes a node after a failed probe, until a later probe passes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli.run import main
from megatron.adaptive.cluster import failed_probes
from megatron.adaptive.cluster.failed_probes import FailedProbes
from megatron.adaptive.cluster.incarnation import NodeWork, ProbePolicy, RunningRanks
from megatron.adaptive.cluster.job_state_file import Incarnation
from megatron.adaptive.cluster.layout_rule import Chooser
from megatron.adaptive.cluster.membership import Event, Membership, Node
from megatron.adaptive.cluster.straggler import Stragglers
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.profiling.failed_nodes import FailedNode
from megatron.adaptive.profiling.probe_findings import MATRIX_PRODUCT
from tests.multiprocess.launch import ROOT, run_forked

from .jobs import FLAGS, TRAINER, ElasticJob

# This script runs the trainer. At the first start of the job, matrix multiplications are slow, and
# node c is the slowest. Because the other nodes are slow too, node c passes the probe later even on
# a busy machine.
SCRIPT = f"""
import os, runpy, time, torch

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    slow_s = 0.2 if os.environ["MEGATRON_ADAPTIVE_NODE"] == "c" else 0.04
    product = torch.mm

    def slow(*matrices, **options):
        time.sleep(slow_s)
        return product(*matrices, **options)

    torch.mm = slow
runpy.run_path({str(ROOT / "pretrain_gpt.py")!r}, run_name="__main__")
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ElasticJob]:
    script = tmp_path / "own_pretrain_gpt.py"
    script.write_text(SCRIPT)
    flags = ["--train-iters", "9999", "--save-interval", "1000", "--probe-interval", "5000"]
    options = ["--on-failed-probe", "exclude"]
    started = ElasticJob(tmp_path, "abc", flags, options, script=script)
    yield started
    started.close()


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_node_that_fails_is_left_out_until_it_passes(job: ElasticJob) -> None:
    first, second = job.epoch(1), job.epoch(2)
    assert first["nodes"] == ["a", "b", "c"]
    assert "c" not in second["nodes"], job.said()
    assert second["lost_steps"] == 0
    # The probe runs before the first step, so the slow node has not taken part in any step.
    assert max(job.steps(1), default=0) <= 100
    (line,) = (
        line
        for line in job.said().splitlines()
        if "node c failed its probe" in line and "saving" in line
    )
    assert "rank 2 on node c: matrix product: " in line
    assert "the others' median" in line
    assert line.endswith("times slower; the node is excluded: saving at the end of this step")
    node = next(node for node in job.state()["machines"] if node["name"] == "c")
    assert node["is_left_out"] is True
    assert node["why"].startswith("left out: rank 2 on node c: matrix product: ")

    def used_again() -> bool:
        return any("c" in epoch["nodes"] for epoch in job.state()["epochs"][1:])

    job.until(used_again, "incarnation with node c")
    assert "node c passed its probe" in job.said()
    job.stop()


TEXT = "rank 2 on node c: matrix product: 1 GFLOP/s, the others' median 9 GFLOP/s, 9.0 times slower"


def handle(policy: ProbePolicy, names: str, failed: str, *more: str) -> tuple[str, list[str]]:
    """Returns the reason to change the layout after failed probes, and the nodes used afterwards.

    Each letter of ``names`` and of ``failed`` is a node.
    """

    async def run() -> tuple[str, list[str]]:
        nodes = [Node(name=name, slots=1, status="present") for name in names]
        stragglers = Stragglers("ignore", Chooser(), (*FLAGS, *more, "--save", "none"))
        members = Membership(None, None, None, "")
        probes = FailedProbes(policy, stragglers, members, lambda: ())
        layout = await stragglers.choose(nodes)
        assert layout is not None
        incarnation = Incarnation(number=1, layout="", processes=3, nodes=(), reason="")
        where = {f"1/{rank}": node.name for rank, node in enumerate(nodes)}
        running = RunningRanks(incarnation=incarnation, layout=layout, folder=Path(), where=where)
        entries = [FailedNode(node=name, text=TEXT, limits={}) for name in failed]
        reason = await probes.handle(entries, running, nodes)
        # A failed probe must be handled only once.
        assert not await probes.handle(entries, running, nodes)
        await probes.close()
        return reason, [node.name for node in stragglers.included(nodes)]

    return asyncio.run(run())


TRAINED = ("--train-iters", "9", "--save-interval", "3")


def test_a_node_is_only_reported_unless_the_user_says_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert handle("report", "abc", "c", *TRAINED) == ("", ["a", "b", "c"])
    assert capsys.readouterr().err.splitlines() == [
        f"[elastic] warning: node c failed its probe: {TEXT}; use --on-failed-probe "
        "exclude to exclude such nodes"
    ]


def test_so_many_nodes_stay_that_the_job_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    reason, used = handle("exclude", "abc", "abc", *TRAINED)
    assert used == ["c"]
    assert reason == ", ".join(
        f"node {name} failed its probe: {TEXT}; the node is excluded" for name in "ab"
    )
    assert capsys.readouterr().err.splitlines() == [
        f"[elastic] warning: node c failed its probe: {TEXT}; the node is not excluded, "
        "because no layout fits without it"
    ]


def test_a_node_that_was_left_out_is_used_if_nothing_else_fits() -> None:
    nodes = [Node(name=name, slots=1, status="present") for name in "abc"]
    stragglers = Stragglers("ignore", Chooser(), (*FLAGS, *TRAINED, "--save", "none"))

    async def run() -> list[int]:
        assert await stragglers.leave_out("a", "slow", nodes)
        assert await stragglers.leave_out("b", "slow", nodes)
        sizes = []
        for present in (nodes, nodes[:2], nodes[:1]):
            layout = await stragglers.choose(present)
            assert layout is not None
            sizes.append(layout.world_size)
        return sizes

    assert asyncio.run(run()) == [1, 1, 1]


class NodeThatChecks(Membership):
    """Runs the check of a node's devices in processes, as the node's agent and forkserver do.

    Args:
        folder: Working directory of the processes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(None, None, None, "")
        self.statuses: list[int] = []
        self._folder = folder

    async def ask(self, name: str, kind: str, limit_s: float, **values: Any) -> dict[str, Any]:
        work = NodeWork(script=str(TRAINER), arguments=(), checkpoints=str(self._folder))
        (rank,) = values["ranks"]
        order = work.order(rank, values["program"])
        ended = run_forked(
            [order["script"], *order["arguments"]],
            folder=self._folder,
            limit_s=limit_s,
            variables=order["variables"],
        )
        self.statuses.append(ended.returncode)
        return {"status": ended.returncode}


def test_the_check_of_a_node_measures_each_of_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_probes, "_FIRST_WAIT_S", 0.0)

    async def run() -> tuple[list[int], Event | None]:
        members = NodeThatChecks(tmp_path)
        nodes = [Node(name=name, slots=2, status="present") for name in "bc"]
        members.nodes.update({node.name: node for node in nodes})
        stragglers = Stragglers("ignore", Chooser(), (*FLAGS, *TRAINED, "--save", "none"))
        probes = FailedProbes("exclude", stragglers, members, lambda: ("b",))
        layout = await stragglers.choose(nodes)
        assert layout is not None
        incarnation = Incarnation(number=1, layout="", processes=4, nodes=(), reason="")
        where = {"1/0": "b", "1/1": "b", "1/2": "c", "1/3": "c"}
        running = RunningRanks(incarnation=incarnation, layout=layout, folder=Path(), where=where)
        failed = FailedNode(node="c", text=TEXT, limits={MATRIX_PRODUCT: 1.0})
        assert await probes.handle([failed], running, nodes)
        while len(members.statuses) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        await probes.close()
        event = None if members.events.empty() else members.events.get_nowait()
        return members.statuses, event

    assert asyncio.run(run()) == ([0, 0], Event("passed", "c", {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [str(TRAINER), *FLAGS, *TRAINED],
            "exclude requires probes; add a positive --probe-interval",
        ),
        ([str(ROOT / "examples/cutpoint/elastic.py")], "does not parse the trainer's arguments"),
    ],
)
def test_nodes_fail_only_where_they_are_probed(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["--on-failed-probe", "exclude", "--checkpoint", str(tmp_path / "c"), *arguments])
