"""Tests that a job has the losses of an undisturbed job if nodes join, leave or fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.folder import CheckpointFolder

from .jobs import ElasticJob, command, environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(280)]
Start = Callable[..., ElasticJob]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yields a function that starts a job with a save interval and options of the manager."""
    started: list[ElasticJob] = []

    def begin(names: str, interval: int, *options: str, extra: tuple[str, ...] = ()) -> ElasticJob:
        flags = ["--train-iters", "9999", "--save-interval", str(interval), *extra]
        started.append(ElasticJob(tmp_path, names, flags, options))
        return started[0]

    yield begin
    for job in started:
        job.close()


@pytest.mark.long
def test_a_job_goes_on_in_every_shape_with_the_same_losses(start: Start, tmp_path: Path) -> None:
    job = start("abcd", 15)
    job.trained(1)
    job.epoch(1)
    second = subprocess.run(
        command(job.machines, job.checkpoints, job.extra),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert second.returncode == 2
    assert f"is managed by process {job.manager.pid} on" in second.stderr
    assert second.stderr.count("\n") == 1

    job.change("abc")  # The job saves before it releases the removed node.
    job.trained(2)
    job.rank_on("a").kill()  # The rank fails, but its node continues.
    job.trained(3)
    # This signal announces that the node will be removed.
    os.kill(job.agent("c"), signal.SIGTERM)
    job.trained(4)
    job.change("abc")  # The removed node returns.
    job.trained(5, 20)
    before = job.steps(5)
    os.kill(job.agent("b"), signal.SIGKILL)  # The node is lost without notice.
    job.until(lambda: max(job.steps(6), default=0) > max(job.steps(5)), "steps done again")
    job.stop()
    state = job.state()
    layouts = ["PP 2 x DP 2", "PP 3 x DP 1", "PP 3 x DP 1", "PP 2 x DP 1", "PP 3 x DP 1"]
    layouts.append("PP 2 x DP 1")
    assert [incarnation["shape"].partition(",")[0] for incarnation in state["epochs"]] == layouts, (
        job.said()
    )
    assert "; when it works again, run touch " in job.said()
    reasons = [incarnation["reason"] for incarnation in state["epochs"]]
    assert reasons[2] == "rank 0 on a was killed by signal SIGKILL"
    assert reasons[3] == "c received SIGTERM"
    # If a node leaves with notice, no step is repeated. After a failure, the steps since the last
    # complete checkpoint are repeated.
    lost = [incarnation["lost_steps"] for incarnation in state["epochs"]]
    assert [lost[index] for index in (0, 1, 3, 4)] == [0, 0, 0, 0]
    resumed = state["epochs"][5]["resumed_iteration"]
    assert resumed % 15 == 0
    assert lost[5] == max(job.steps(5)) - resumed < 15 + 15
    assert max(job.steps(5)) >= max(before)
    assert job.steps(6)[0] == resumed + 1
    phases = {"notice", "checkpoint", "end", "plan", "start", "load", "first_step"}
    for index in (1, 3, 4):
        assert phases <= set(state["epochs"][index]["phases_s"])
    # Compare every step of every layout, including repeated steps.
    last = job.check_losses(tmp_path / "undisturbed", 15)
    assert {step for number in range(1, 7) for step in job.steps(number)} == set(range(1, last + 1))
    assert state["checkpoint_iteration"] == last


@pytest.mark.long
def test_a_job_goes_on_from_disks_of_its_nodes_and_from_shared_storage(
    start: Start, tmp_path: Path
) -> None:
    """Checks that a job survives the loss of a rank, and of a node together with its disk."""
    disks = tmp_path / "disks"
    job = start("ab", 5, extra=("--save-local", str(disks)))
    folder = CheckpointFolder(job.checkpoints)

    def saved() -> int:
        return folder.latest() or 0

    job.until(lambda: saved() >= 10, "a checkpoint")
    job.rank_on("b").kill()
    job.trained(2, 8)
    second, saved_step = job.epoch(2), saved()
    job.until(lambda: saved() > saved_step, "another checkpoint")
    job.change("a")  # The ranks get a notice, and write their whole state to shared storage.
    (lost,) = disks.glob("*/b")
    job.trained(3, 1)
    shutil.rmtree(lost)
    third, saved_step = job.epoch(3), saved()
    job.until(lambda: saved() > saved_step, "a checkpoint of the third epoch")
    job.close()
    assert "Traceback" not in job.said()
    assert second["resumed_iteration"] >= 10
    assert second["resumed_iteration"] % 5 == 0
    assert " on its local disk" in job.said()
    assert third["lost_steps"] == 0
    assert job.steps(3)[0] == max(job.steps(2)) + 1
    for step in folder.steps():
        folder.open(step)
    (kept,) = disks.glob("*/a")
    assert 1 <= len(list(kept.glob("iter_*"))) <= 3
    job.check_losses(tmp_path / "undisturbed", min(folder.steps()))


@pytest.mark.long
def test_a_job_loses_a_step_at_most_where_a_copy_is_left(start: Start, tmp_path: Path) -> None:
    job = start("abcd", 15, "--replicate-every", "1")
    first = job.trained(1, 18)
    job.lose("d")  # Other nodes run replicas of this node's ranks.
    second = job.trained(2, 8)
    job.lose("c")  # Another node has a copy of this node's state in memory.
    job.trained(3, 3)
    job.change("abe")
    job.trained(4, 4)
    # Avoid the steps around a checkpoint, because the checkpoint may or may not be complete.
    job.until(lambda: 2 <= max(job.steps(4)) % 15 <= 8, "a step between two checkpoints")
    # The neighbouring nodes b and e are both lost, so no copy of b's state is left.
    job.lose("b", "e")
    job.trained(5, 3)
    job.epoch(5)
    job.close()
    incarnations = job.state()["epochs"]
    assert len(incarnations) == 5, job.said()
    layouts = ["PP 2 x DP 2", "PP 3 x DP 1", "PP 2 x DP 1", "PP 3 x DP 1", "PP 1 x DP 1"]
    assert [incarnation["shape"].partition(",")[0] for incarnation in incarnations] == layouts
    for number, done in ((2, first), (3, second)):
        incarnation = incarnations[number - 1]
        assert incarnation["source"] == "copies in memory", job.said()
        assert incarnation["resumed_iteration"] >= done - 1
        assert incarnation["lost_steps"] <= 1
        last = max(job.steps(number - 1))
        assert incarnation["resumed_iteration"] >= last - 1
        assert job.steps(number)[0] == incarnation["resumed_iteration"] + 1
    # This checkpoint was saved before the new node joined.
    assert incarnations[3]["source"] == "checkpoint"
    assert incarnations[3]["lost_steps"] == 0
    # The copy on the neighbouring node may be from a different step than the rest of the state.
    nothing_left = r"checkpoint: no copy of the state of rank 1(, 2)? is left"
    assert re.fullmatch(nothing_left, incarnations[4]["source"]), job.said()
    assert (
        0
        <= incarnations[4]["lost_steps"]
        == max(job.steps(4)) - incarnations[4]["resumed_iteration"]
    )
    reported = {line["epoch"]: line["copies"] for line in job.lines() if "copies" in line}
    assert " and 0.0 MiB sent" in reported[1]
    assert " and 0.0 MiB sent" not in reported[2]
    said = r"warning: no copy of the state of rank 1(, 2)? is left; resuming from"
    assert re.search(said, job.said())
    job.check_losses(tmp_path / "undisturbed", 15)
