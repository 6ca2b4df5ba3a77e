"""Tests that a job survives if the disk is full for a while, and ends if the disk stays full."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.folder import CheckpointFolder
from tests.support.nodes import fill

from ..multiprocess.launch import limited_disk
from .jobs import ElasticJob

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(280),
]

NOT_WRITTEN = "error: the checkpoint of iteration"
REASON = r"No space left on device: \S+; earlier checkpoints are unchanged. Free space there"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with limited_disk(tmp_path / "checkpoints", "32m") as made:
        yield made


def test_a_full_disk_costs_steps_and_ends_the_job_only_if_it_stays_full(
    small_disk: Path, tmp_path: Path
) -> None:
    flags = ["--train-iters", "99999", "--save-interval", "10", "--async-save"]
    job = ElasticJob(tmp_path, "a", [*flags, "--keep-checkpoints", "3"], slots=2)
    folder = CheckpointFolder(small_disk)

    def latest() -> int:
        return folder.latest() or 0

    try:
        job.until(lambda: latest() >= 20, "a checkpoint")
        fill(small_disk / "filler")
        job.until(lambda: NOT_WRITTEN in job.said(), "word of the full disk")
        kept = latest()
        folder.open(kept)
        (small_disk / "filler").unlink()
        job.until(lambda: latest() > kept, "a checkpoint after that")
        job.until(lambda: job.state()["checkpoint_iteration"] > kept, "word of it")
        _, *others = job.state()["epochs"]
        assert others, job.said()
        assert others[0]["resumed_iteration"] == kept
        assert others[0]["reason"].startswith("rank ")

        assert re.search(REASON, job.said()), job.said()
        failures = job.said().count(NOT_WRITTEN)
        assert failures == len(others), job.said()  # Each failure must print one line.
        fill(small_disk / "filler")
        assert job.end() == 2
    finally:
        job.close()
    said = job.said()
    assert "Traceback" not in said
    last_words = f"the last complete checkpoint is of iteration {latest()}"
    assert last_words in said, said
    for path in small_disk.glob("iter_*"):
        folder.open(int(path.name[5:]))
    assert not list(small_disk.glob(".iter_*"))
    assert job.left_behind() == []
