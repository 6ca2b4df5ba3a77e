"""Jobs on machines of unequal speed: the planner's shapes, and nodes that are slow unexpectedly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .jobs import FLAGS, TRAINER, ElasticJob, environment
from .planning_files import FAST_S, SLOW_S, cluster_file, profile_file

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(280)]

SPEEDS = Path(__file__).with_name("speeds.py")
ENDLESS = ("--train-iters", "9999", "--diagnose-interval", "4", "--trace-dir", "traces")


def losses(job: ElasticJob, folder: Path, begin: int, last: int) -> dict[int, float]:
    """Losses of one process that goes on alone from a checkpoint of the job."""
    words = [sys.executable, str(TRAINER), *FLAGS, *job.extra, "--trace-iterations", "1"]
    words += ["--pipeline-model-parallel-size", "1", "--progress-dir", str(folder)]
    words += ["--load", str(job.checkpoints), "--ckpt-step", str(begin)]
    words += ["--exit-interval", str(last), "--diagnose-interval", "0"]
    subprocess.run(
        words, env=environment(), check=True, timeout=200, capture_output=True, cwd=folder.parent
    )
    lines = map(json.loads, (folder / "progress.jsonl").read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines if "iteration" in line}


def epoch_for(job: ElasticJob, reason: str) -> dict[str, Any]:
    """Wait until a job has trained a few steps in the shape that it took for a reason."""

    def found() -> list[dict[str, Any]]:
        incarnations = job.state().get("epochs", [])
        return [one for one in incarnations if one["reason"].startswith(reason)]

    job.until(lambda: found() and len(job.steps(found()[0]["epoch"])) >= 3, f"epoch for {reason}")
    (one,) = found()
    return one


def stop(job: ElasticJob) -> None:
    job.manager.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert job.left_behind() == []


def layers_of(incarnation: dict[str, Any], name: str) -> int:
    """Layers on a node of one process; 0 for one that is not used."""
    degrees = re.match(r"PP (\d+) x DP (\d+), layers ([0-9-]+)", incarnation["shape"])
    assert degrees is not None
    if name not in incarnation["nodes"]:
        return 0
    return int(degrees[3].split("-")[incarnation["nodes"].index(name) // int(degrees[2])])


def test_a_planned_job_moves_away_from_a_node_that_is_slower_than_its_type(tmp_path: Path) -> None:
    files = [
        cluster_file(tmp_path, {"fast": "ab", "slow": "cd"}),
        profile_file(tmp_path, {"fast": FAST_S, "slow": SLOW_S}),
    ]
    takes = {"a": 8 * FAST_S, "b": FAST_S, "c": SLOW_S, "d": SLOW_S}
    job = ElasticJob(
        tmp_path,
        "abcd",
        ["--global-batch-size", "8", "--save-interval", "8", *ENDLESS],
        [word for path in files for word in ("--plan-with", str(path))],
        script=SPEEDS,
        variables={"LAYER_S": json.dumps(takes)},
    )
    try:
        moved = epoch_for(job, "a is slow, rank ")
        job.change("abc")
        epoch_for(job, "d was taken from the machines file")
        stop(job)
        incarnations = job.state()["epochs"]
        assert {one["chosen_by"] for one in incarnations} == {"planner"}
        assert [one["lost_steps"] for one in incarnations] == [0] * len(incarnations)
        first = incarnations[0]
        assert sorted(first["nodes"]) == ["a", "b", "c", "d"]
        assert layers_of(first, "a") == layers_of(first, "b") > layers_of(first, "c")
        # The planner did not know how slow it is at first, and then met it.
        before = incarnations[moved["epoch"] - 2]
        assert layers_of(moved, "a") < layers_of(before, "a")
        assert moved["predicted_step_s"] > before["predicted_step_s"]
        assert "d" not in incarnations[-1]["nodes"]
        told = {node["name"]: node["slowness"] for node in job.state()["machines"]}
        assert told["a"] > 1.5
        done = [line for line in job.lines() if "iteration" in line]
        last = done[-1]["iteration"]
        assert [line["iteration"] for line in done] == list(range(1, last + 1))
        expected = losses(job, tmp_path / "alone", 8, last)
        for line in done[8:]:
            assert line["loss"] == pytest.approx(expected[line["iteration"]], rel=1e-5)
    finally:
        job.close()


def test_a_slow_node_is_left_out_and_stays_at_hand(tmp_path: Path) -> None:
    takes = dict.fromkeys("abc", FAST_S) | {"b": 6 * FAST_S}
    job = ElasticJob(
        tmp_path,
        "abc",
        ["--save-interval", "100", *ENDLESS],
        ["--on-straggler", "exclude"],
        script=SPEEDS,
        variables={"LAYER_S": json.dumps(takes)},
    )
    try:
        moved = epoch_for(job, "b is slow, rank ")
        assert "b" not in moved["nodes"]
        assert moved["lost_steps"] == 0
        (slow,) = [node for node in job.state()["machines"] if node["name"] == "b"]
        assert (slow["status"], slow["why"]) == ("present", "left out: slow")
        stop(job)
    finally:
        job.close()
