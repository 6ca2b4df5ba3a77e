"""A job whose nodes come and go trains as one that nothing happens to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .jobs import FLAGS, ROOT, ElasticJob, command, environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ElasticJob]:
    words = ["--train-iters", "9999", "--save-interval", "15"]
    # Without copies in memory, so that what follows a loss is the last checkpoint.
    job = ElasticJob(tmp_path, "abcd", words)
    yield job
    job.close()


def undisturbed(job: ElasticJob, folder: Path, last: int, first: int = 15) -> dict[int, float]:
    """Losses of one process that goes on alone from the job's first checkpoint."""
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS, "--train-iters", "9999"]
    words += ["--pipeline-model-parallel-size", "1", "--progress-dir", str(folder)]
    words += ["--load", str(job.checkpoints), "--ckpt-step", str(first)]
    words += ["--exit-interval", str(last)]
    subprocess.run(words, env=environment(), check=True, timeout=300, capture_output=True)
    lines = map(json.loads, (folder / "progress.jsonl").read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines if "iteration" in line}


def test_a_job_goes_on_in_every_shape_with_the_same_losses(job: ElasticJob, tmp_path: Path) -> None:
    def trained(incarnation: int, steps: int = 4) -> None:
        job.until(
            lambda: len(job.steps(incarnation)) >= steps, f"{steps} steps of epoch {incarnation}"
        )

    def incarnations() -> list[dict[str, Any]]:
        return list(job.state().get("epochs", []))

    trained(1)
    job.until(incarnations, "state")
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

    job.change("abc")  # an entry is taken out: saved first
    trained(2)
    job.rank_on("a").kill()  # a rank dies, its node does not
    trained(3)
    os.kill(job.agent("c"), signal.SIGTERM)  # notice that a node will be taken
    trained(4)
    job.change("abc")  # it comes back
    trained(5, steps=20)
    before = job.steps(5)
    os.kill(job.agent("b"), signal.SIGKILL)  # a node is lost without notice
    job.until(lambda: max(job.steps(6), default=0) > max(job.steps(5)), "steps done again")
    job.manager.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    state = job.state()
    layouts = ["PP 2 x DP 2", "PP 3 x DP 1", "PP 3 x DP 1", "PP 2 x DP 1", "PP 3 x DP 1"]
    layouts.append("PP 2 x DP 1")
    assert [one["shape"].partition(",")[0] for one in state["epochs"]] == layouts, job.said()
    reasons = [one["reason"] for one in state["epochs"]]
    assert reasons[2] == "rank 0 on a was killed by signal SIGKILL"
    assert reasons[3] == "notice SIGTERM on c"
    # With notice nothing is done twice; without, what came after the last complete checkpoint.
    lost = [incarnation["lost_steps"] for incarnation in state["epochs"]]
    assert [lost[at] for at in (0, 1, 3, 4)] == [0, 0, 0, 0]
    resumed = state["epochs"][5]["resumed_iteration"]
    assert resumed % 15 == 0
    assert lost[5] == max(job.steps(5)) - resumed < 15 + 15
    assert max(job.steps(5)) >= max(before)
    assert job.steps(6)[0] == resumed + 1
    for one in (state["epochs"][at] for at in (1, 3, 4)):
        assert {"notice", "checkpoint", "end", "plan", "start", "load", "first_step"} <= set(
            one["phases_s"]
        )
    # Every step of every shape, those done twice too.
    done = [line for line in job.lines() if "iteration" in line]
    last = max(line["iteration"] for line in done)
    assert {line["iteration"] for line in done} == set(range(1, last + 1))
    assert state["checkpoint_iteration"] == last
    # All shapes start from the weights of the first: how weights are drawn depends on the shape.
    expected = undisturbed(job, tmp_path / "undisturbed", last)
    assert set(expected) == set(range(16, last + 1))
    for line in done:
        if line["iteration"] > 15:
            assert line["loss"] == pytest.approx(expected[line["iteration"]], rel=1e-5)
    assert job.left_behind() == []
