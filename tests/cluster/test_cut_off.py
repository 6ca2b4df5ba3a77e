"""Tests that a job continues if a node loses its network, and uses the node again later."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from tests.support.nodes import Nodes, why_not

from ..multiprocess.launch import forking
from .jobs import FLAGS, TRAINER, JobFolder

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(400),
]
SHARED_BYTES = 64 << 20


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if reason := why_not():
        pytest.skip(reason)
    pair = Nodes(tmp_path, (1, 1), SHARED_BYTES)
    yield pair
    pair.close()


def test_a_node_that_is_cut_off_counts_as_lost_and_not_as_a_failure(
    nodes: Nodes, tmp_path: Path
) -> None:
    checkpoints, disks = nodes.shared / "checkpoints", tmp_path / "disks"
    job = JobFolder(checkpoints)
    job.said = lambda: str([node.said[-3000:] for node in nodes.all])  # type: ignore[method-assign]

    def goes_on(incarnation: int) -> bool:
        """Returns whether the latest start is number ``incarnation``, and has completed steps."""
        state = job.state()
        done = len(state.get("earlier", [])) + len(state.get("epochs", []))
        return done == incarnation and state["epochs"][-1]["step_s"] is not None

    for node in nodes.all:
        agent = [
            sys.executable,
            "-m",
            "megatron.adaptive",
            "train",
            "elastic",
            "--checkpoint",
            str(checkpoints),
        ]
        agent += ["--name", node.name, "--slots", "1", "--nodes", "2", "--max-restarts", "1"]
        agent += [str(TRAINER), *FLAGS, "--train-iters", "99999", "--save-interval", "20"]
        agent += ["--save-local", str(disks), "--keep-checkpoints", "3"]
        node.boot(agent, forking())
    first, second = nodes.all
    folder = CheckpointFolder(checkpoints)
    job.until(lambda: (folder.latest() or 0) >= 40 and goes_on(1), "checkpoint")
    manager = job.state()["manager"]["host"]
    far = second if manager == first.name else first
    near = first if far is second else second
    far.cut(silently=True)
    job.until(lambda: goes_on(2), "epoch without the node that is cut off")
    _, alone = job.state()["epochs"]
    assert alone["nodes"] == [near.name]
    assert alone["reason"] == f"node {far.name} was lost"
    assert alone["resumed_iteration"] >= 40
    far.mend()
    job.until(lambda: goes_on(3), "epoch with both")
    again = job.state()["epochs"][-1]
    assert sorted(again["nodes"]) == sorted([near.name, far.name])
    assert again["lost_steps"] == 0
    for step in folder.steps():
        folder.open(step)
    assert {disk.name for disk in disks.glob("*/*")} == {near.name, far.name}
    assert "Traceback" not in near.said
    assert "giving up" not in near.said
