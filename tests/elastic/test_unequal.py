"""Jobs on machines of unequal speed: the planner's shapes, and nodes that are slow unexpectedly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .jobs import FLAGS, TRAINER, ElasticJob, environment
from .planning_files import FAST_S, SLOW_S, cluster_file, profile_file

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(280)]

SPEEDS = Path(__file__).with_name("speeds.py")
ENDLESS = ("--train-iters", "9999", "--diagnose-interval", "6", "--trace-dir", "traces")


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


def has_trained(job: ElasticJob, epoch: int, steps: int = 3) -> None:
    job.until(lambda: len(job.steps(epoch)) >= steps, f"{steps} steps of epoch {epoch}")


def stop(job: ElasticJob) -> None:
    job.manager.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert job.left_behind() == []


def layers(shape: str) -> Sequence[int]:
    return [int(word) for word in shape.split("layers ")[1].partition(",")[0].split("-")]


def test_a_planned_job_moves_away_from_a_node_that_is_slower_than_its_type(tmp_path: Path) -> None:
    files = [
        cluster_file(tmp_path, {"fast": "ab", "slow": "cd"}),
        profile_file(tmp_path, {"fast": FAST_S, "slow": SLOW_S}),
    ]
    takes = {"a": 3 * FAST_S, "b": FAST_S, "c": SLOW_S, "d": SLOW_S}
    job = ElasticJob(
        tmp_path,
        "abcd",
        ["--num-layers", "6", "--global-batch-size", "8", "--save-interval", "10", *ENDLESS],
        [word for path in files for word in ("--plan-with", str(path))],
        script=SPEEDS,
        variables={"LAYER_S": json.dumps(takes)},
    )
    try:
        has_trained(job, 2)
        job.change("abc")
        has_trained(job, 3)
        stop(job)
        first, second, third = job.state()["epochs"]
        assert {one["chosen_by"] for one in (first, second, third)} == {"planner"}
        assert sorted(first["nodes"]) == ["a", "b", "c", "d"]
        assert len(set(layers(first["shape"]))) > 1
        # The planner did not know of it at first, and then met it.
        assert second["reason"].startswith("a is slow, rank "), job.said()
        assert first["predicted_step_s"] < second["predicted_step_s"] < first["step_s"]
        assert second["step_s"] < first["step_s"]
        assert third["reason"] == "d was taken from the machines file"
        assert [one["lost_steps"] for one in (first, second, third)] == [0, 0, 0]
        told = {node["name"]: node["slowness"] for node in job.state()["machines"]}
        assert told["a"] > 1.5
        assert {told[name] for name in "bc"} == {1.0}
        assert "a step of" in job.said()
        done = [line for line in job.lines() if "iteration" in line]
        last = done[-1]["iteration"]
        assert [line["iteration"] for line in done] == list(range(1, last + 1))
        expected = losses(job, tmp_path / "alone", 10, last)
        for line in done[10:]:
            assert line["loss"] == pytest.approx(expected[line["iteration"]], rel=1e-5)
    finally:
        job.close()


def test_a_slow_node_is_left_out_and_stays_at_hand(tmp_path: Path) -> None:
    takes = dict.fromkeys("abc", FAST_S) | {"b": 4 * FAST_S}
    job = ElasticJob(
        tmp_path,
        "abc",
        ["--save-interval", "100", *ENDLESS],
        ["--on-straggler", "exclude"],
        script=SPEEDS,
        variables={"LAYER_S": json.dumps(takes)},
    )
    try:
        has_trained(job, 2)
        state = job.state()
        assert state["epochs"][1]["nodes"] == ["a", "c"]
        assert state["epochs"][1]["reason"].startswith("b is slow, rank 1 takes ")
        assert [one["lost_steps"] for one in state["epochs"]] == [0, 0]
        (slow,) = [node for node in state["machines"] if node["name"] == "b"]
        assert (slow["status"], slow["why"]) == ("present", "left out: slow")
        stop(job)
    finally:
        job.close()
