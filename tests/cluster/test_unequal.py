"""Tests the layouts of jobs on machines with different speeds."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from .jobs import ROOT, ElasticJob
from .planning_files import FAST_S, SLOW_S, cluster_file, profile_file

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(280),
]

SPEEDS = ROOT / "tests" / "support" / "timed_layers.py"
WIDE = ("--global-batch-size", "16", "--train-iters", "9999", "--save-interval", "1000")
ENDLESS = ("--train-iters", "9999", "--diagnose-interval", "4", "--trace-dir", "traces")


def epoch_for(job: ElasticJob, reason: str) -> dict[str, Any]:
    """Waits until the job starts for a reason that begins with ``reason``, and runs three steps.

    Returns the entry of this start in the state file.
    """

    def incarnations_for() -> list[dict[str, Any]]:
        incarnations = job.state().get("epochs", [])
        return [
            incarnation for incarnation in incarnations if incarnation["reason"].startswith(reason)
        ]

    def has_trained() -> bool:
        chosen = incarnations_for()
        return bool(chosen) and len(job.steps(chosen[0]["epoch"])) >= 3

    job.until(has_trained, f"epoch for {reason}")
    (incarnation,) = incarnations_for()
    return incarnation


def layers_of(incarnation: dict[str, Any], name: str) -> int:
    """Returns the number of layers on the node ``name``, or 0 if the layout does not use it."""
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
        variables={
            "LAYER_MS": json.dumps({name: 1e3 * seconds for name, seconds in takes.items()})
        },
    )
    try:
        moved = epoch_for(job, "a is slow: rank ")
        job.change("abc")
        epoch_for(job, "d was removed from the machines file")
        job.stop()
        incarnations = job.state()["epochs"]
        assert {incarnation["chosen_by"] for incarnation in incarnations} == {"planner"}
        assert [incarnation["lost_steps"] for incarnation in incarnations] == [0] * len(
            incarnations
        )
        first = incarnations[0]
        assert sorted(first["nodes"]) == ["a", "b", "c", "d"]
        assert layers_of(first, "a") == layers_of(first, "b") > layers_of(first, "c")
        # The planner did not know at first how slow the node is.
        before = incarnations[moved["epoch"] - 2]
        assert layers_of(moved, "a") < layers_of(before, "a")
        assert moved["predicted_step_s"] > before["predicted_step_s"]
        assert "d" not in incarnations[-1]["nodes"]
        slowness = {node["name"]: node["slowness"] for node in job.state()["machines"]}
        assert slowness["a"] > 1.5
        done = [line["iteration"] for line in job.lines() if "iteration" in line]
        assert done == list(range(1, max(done) + 1))
        job.check_losses(tmp_path / "alone", 8, "--global-batch-size", "8")
    finally:
        job.close()


def test_three_nodes_are_two_stages_of_unequal_width(tmp_path: Path) -> None:
    """Checks the losses after a third node joins two nodes, and after a node is lost."""
    files = [cluster_file(tmp_path, {"fast": ""}), profile_file(tmp_path, {"fast": FAST_S})]
    options = [word for path in files for word in ("--plan-with", str(path))]
    options += ["--unequal", "--replicate-every", "1"]
    job = ElasticJob(tmp_path, "ab", WIDE, options)

    try:
        job.trained(1)
        job.change("abc")
        job.trained(2)
        os.kill(job.agent("b"), signal.SIGKILL)
        job.trained(3)
        job.stop()
        incarnations: list[dict[str, Any]] = job.state()["epochs"]
        assert incarnations[1]["shape"].startswith(("PP 2 x DP 2-1,", "PP 2 x DP 1-2,"))
        assert sorted(incarnations[1]["nodes"]) == ["a", "b", "c"]
        assert "-" not in incarnations[2]["shape"].partition(",")[0]
        # Other nodes had copies of the lost node's state, so no checkpoint was needed.
        assert incarnations[2]["source"] == "copies in memory", job.said()
        assert [incarnation["lost_steps"] <= 1 for incarnation in incarnations] == [True] * 3
        begin = incarnations[1]["resumed_iteration"]
        job.check_losses(tmp_path / "alone", begin, "--global-batch-size", "16")
    finally:
        job.close()
