"""A job whose nodes have disks of their own loses ranks, and a node with its disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.folder import CheckpointFolder

from .jobs import ElasticJob
from .test_morphs import undisturbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(280)]


def test_a_job_goes_on_from_disks_of_its_nodes_and_from_shared_storage(tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    words = ["--train-iters", "9999", "--save-interval", "5"]
    job = ElasticJob(tmp_path, "ab", [*words, "--save-local", str(disks)])
    folder = CheckpointFolder(job.checkpoints)

    def saved() -> int:
        return folder.latest() or 0

    try:
        job.until(lambda: saved() >= 10, "a checkpoint")
        job.rank_on("b").kill()
        job.until(lambda: len(job.steps(2)) >= 8, "steps of the second epoch")
        job.until(lambda: job.state()["epochs"][-1]["epoch"] == 2, "state of it")
        second = job.state()["epochs"][1]
        at = saved()
        job.until(lambda: saved() > at, "another checkpoint")
        job.change("a")  # with notice: all of it comes to shared storage
        (lost,) = disks.glob("*/b")
        job.until(lambda: len(job.steps(3)) >= 1, "steps of the third epoch")
        shutil.rmtree(lost)
        job.until(lambda: job.state()["epochs"][-1]["epoch"] == 3, "state of it")
        third = job.state()["epochs"][2]
        at = saved()
        job.until(lambda: saved() > at, "a checkpoint of the third epoch")
    finally:
        job.close()
    said = job.said()
    assert "Traceback" not in said
    assert second["resumed_iteration"] >= 10
    assert second["resumed_iteration"] % 5 == 0
    assert "of iteration" in said
    assert " on their own disks" in said
    assert third["lost_steps"] == 0
    assert job.steps(3)[0] == max(job.steps(2)) + 1
    for step in folder.steps():
        folder.open(step)
    (kept,) = disks.glob("*/a")
    assert 1 <= len(list(kept.glob("iter_*"))) <= 3
    done, first = [line for line in job.lines() if "iteration" in line], min(folder.steps())
    expected = undisturbed(job, tmp_path / "undisturbed", done[-1]["iteration"], first)
    for line in done[first:]:
        assert line["loss"] == pytest.approx(expected[line["iteration"]], rel=1e-5)
