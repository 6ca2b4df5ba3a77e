"""A job on three nodes: stages with unequal numbers of replicas, where that is faster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli.run import main
from megatron.adaptive.errors import ConfigError

from .jobs import FLAGS, TRAINER, ElasticJob, environment
from .planning_files import FAST_S, profile_file

MODEL = ("--global-batch-size", "16", "--train-iters", "9999", "--save-interval", "1000")


def alone(job: ElasticJob, folder: Path, begin: int, last: int) -> dict[int, float]:
    """Losses of one process that goes on from a checkpoint of the job."""
    words = [sys.executable, str(TRAINER), *FLAGS, *job.extra]
    words += ["--pipeline-model-parallel-size", "1", "--progress-dir", str(folder)]
    words += ["--load", str(job.checkpoints), "--ckpt-step", str(begin)]
    words += ["--exit-interval", str(last)]
    subprocess.run(
        words, env=environment(), check=True, timeout=200, capture_output=True, cwd=folder.parent
    )
    lines = map(json.loads, (folder / "progress.jsonl").read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines if "iteration" in line}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_three_nodes_are_two_stages_of_unequal_width(tmp_path: Path) -> None:
    """Two nodes, then three, then a node is lost: the losses are those of one process."""
    own = ["--plan-with", str(profile_file(tmp_path, {"fast": FAST_S}))]
    own += ["--unequal", "--replicate-every", "1"]
    job = ElasticJob(tmp_path, "ab", MODEL, own)

    def trained(incarnation: int) -> None:
        job.until(lambda: len(job.steps(incarnation)) >= 4, f"4 steps of epoch {incarnation}")

    try:
        trained(1)
        job.change("abc")
        trained(2)
        os.kill(job.agent("b"), signal.SIGKILL)
        trained(3)
        job.manager.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
        incarnations: list[dict[str, Any]] = job.state()["epochs"]
        assert incarnations[1]["shape"].startswith(("PP 2 x DP 2-1,", "PP 2 x DP 1-2,"))
        assert sorted(incarnations[1]["nodes"]) == ["a", "b", "c"]
        assert "-" not in incarnations[2]["shape"].partition(",")[0]
        # Every stage has a copy of its state on another node.
        assert incarnations[2]["source"] == "copies in memory", job.said()
        assert [one["lost_steps"] <= 1 for one in incarnations] == [True] * 3
        begin = incarnations[1]["resumed_iteration"]
        done = {line["iteration"]: line["loss"] for line in job.lines() if "iteration" in line}
        expected = alone(job, tmp_path / "alone", begin, max(done))
        for iteration, loss in done.items():
            if iteration > begin:
                assert loss == pytest.approx(expected[iteration], rel=1e-5)
    finally:
        job.close()


@pytest.mark.parametrize(
    ("own", "more", "told"),
    [
        (["--unequal"], (), "--unequal: the planner chooses stages .* add --plan-with FILE"),
        ([], ("--stage-data-parallel-sizes", "2-1"), "a job that changes layout chooses the ranks"),
    ],
)
def test_bad_input(own: list[str], more: tuple[str, ...], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        main([*own, "--checkpoint", str(tmp_path / "c"), str(TRAINER), *FLAGS, *MODEL, *more])
    assert not (tmp_path / "c").exists()
