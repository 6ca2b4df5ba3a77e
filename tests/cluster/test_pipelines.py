"""Tests that a script with a Pipeline continues in other layouts if nodes join, leave or fail."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli.run import main
from megatron.adaptive.errors import ConfigError

from ..multiprocess.launch import run_forked
from .jobs import ElasticJob

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("pipeline_script.py")
SIZE, ENDLESS, LIMIT_S = 12, 99999, 400.0
SHAPED = {"micro_batch_size": 2, "pipeline_size": 2}

Start = Callable[..., ElasticJob]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yields a function that starts a job. By default, each node runs one process."""
    started: list[ElasticJob] = []

    def begin(
        names: str, total: int = ENDLESS, *manager_options: str, slots: int = 1, **options: Any
    ) -> ElasticJob:
        (tmp_path / "told").mkdir(exist_ok=True)
        arguments = [str(total), str(SIZE), str(tmp_path / "told"), json.dumps(options)]
        job = ElasticJob(
            tmp_path, names, arguments, manager_options, script=SCRIPT, flags=(), slots=slots
        )
        started.append(job)
        return job

    yield begin
    for job in started:
        job.close()


def told(folder: Path) -> list[dict[str, Any]]:
    """Returns the reports of all ranks in ``folder``, sorted by start of the job, step and rank."""
    reports = []
    for path in (folder / "told").glob("epoch-*.jsonl"):
        _, incarnation, rank = path.stem.split("-")
        for line in path.read_text().splitlines():
            reports.append({"epoch": int(incarnation), "rank": int(rank), **json.loads(line)})
    return sorted(reports, key=lambda report: (report["epoch"], report["step"], report["rank"]))


def train(job: ElasticJob, folder: Path, incarnation: int, steps: int) -> None:
    """Waits until start number ``incarnation`` of ``job`` has completed ``steps`` steps."""

    def done() -> bool:
        return (
            len({report["step"] for report in told(folder) if report["epoch"] == incarnation})
            >= steps
        )

    job.until(done, f"{steps} steps of epoch {incarnation}", LIMIT_S)


def undisturbed(folder: Path, steps: int, **options: Any) -> list[dict[str, Any]]:
    """Runs ``steps`` steps of the script in a single process, and returns its reports."""
    (folder / "alone").mkdir()
    (folder / "alone" / "told").mkdir()
    arguments = [str(steps), str(SIZE), str(folder / "alone" / "told"), json.dumps(options)]
    done = run_forked([str(SCRIPT), *arguments], folder=folder, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return told(folder / "alone")


@pytest.mark.long
def test_losses_and_samples_are_those_of_an_undisturbed_run(start: Start, tmp_path: Path) -> None:
    job = start("abcd", save_interval=20, **SHAPED)

    train(job, tmp_path, 2, 8)  # The first start of the job only measures the model.
    os.kill(job.agent("d"), signal.SIGTERM)  # The next line sends a second notice.
    job.change("ab")
    job.until(lambda: job.state()["epochs"][-1]["processes"] == 2, "two processes", LIMIT_S)
    train(job, tmp_path, len(job.state()["epochs"]), 8)
    job.change("abc")
    job.until(lambda: job.state()["epochs"][-1]["processes"] == 3, "three processes", LIMIT_S)
    train(job, tmp_path, len(job.state()["epochs"]), 25)
    before = len(job.state()["epochs"])
    job.rank_on("b").kill()  # The rank is killed without notice.
    job.until(lambda: len(job.state()["epochs"]) > before, "another start", LIMIT_S)
    train(job, tmp_path, before + 1, 8)
    job.change("abcd")
    job.until(lambda: job.state()["epochs"][-1]["processes"] == 4, "four processes", LIMIT_S)
    train(job, tmp_path, len(job.state()["epochs"]), 8)
    job.stop(LIMIT_S)

    state = job.state()
    layouts = [incarnation["shape"] for incarnation in state["epochs"]]
    assert layouts[0] == "4 processes that measure the model"
    four, two, three = "PP 2 x DP 2", "PP 2 x DP 1", "PP 3 x DP 1"
    seen = [shape.partition(",")[0] for shape in layouts[1:]]
    assert set(seen) == {four, two, three}
    assert seen[0] == seen[-1] == four
    assert all("segments" in shape for shape in layouts[1:])
    assert all(incarnation["predicted_step_s"] > 0 for incarnation in state["epochs"][1:])
    # If a node leaves with notice, no step is repeated. After a failure, the steps since the last
    # complete checkpoint are repeated.
    assert all(
        incarnation["lost_steps"] == 0
        for index, incarnation in enumerate(state["epochs"])
        if index != before
    )
    killed = state["epochs"][before]
    # The error names rank 1, or a rank that detected the failure of rank 1 before the manager did.
    assert killed["reason"].startswith("rank ")
    assert killed["resumed_iteration"] > 0
    assert state["checkpoint_iteration"] == state["iteration"]

    lines = told(tmp_path)
    last = max(report["step"] for report in lines)
    assert state["iteration"] == last + 1
    expected = undisturbed(tmp_path, last + 1, micro_batch_size=2, pipeline_size=1)
    losses = {report["step"]: report["loss"] for report in expected}
    assert sorted(losses) == list(range(last + 1))
    by_turn: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for report in lines:
        assert report["loss"] == pytest.approx(losses[report["step"]], rel=1e-5)
        by_turn.setdefault((report["epoch"], report["step"]), []).append(report)
    kept: dict[int, list[int]] = {}
    for (_, step), ranks in by_turn.items():
        pipeline_size = ranks[0]["shape"][0]
        samples = sorted(sample for report in ranks for sample in report["samples"])
        # Ignore steps in which a rank was killed, because their reports are incomplete.
        if len(ranks) == pipeline_size * ranks[0]["shape"][1]:
            kept[step] = samples[::pipeline_size]
    assert kept == {step: list(range(step * SIZE, (step + 1) * SIZE)) for step in range(last + 1)}


@pytest.mark.long
def test_a_node_that_is_lost_costs_a_step_at_most(start: Start, tmp_path: Path) -> None:
    """Checks that a lost node costs at most one step, for stages with and without replicas."""
    options = {"save_interval": 99999, "state": True, **SHAPED}
    job = start("abcd", ENDLESS, "--replicate-every", "1", **options)

    train(job, tmp_path, 2, 6)
    job.lose("d")
    train(job, tmp_path, 3, 6)
    job.lose("c")
    train(job, tmp_path, 4, 6)
    job.stop(LIMIT_S)
    incarnations = job.state()["epochs"]
    seen = [incarnation["shape"].partition(",")[0] for incarnation in incarnations[1:]]
    assert seen == ["PP 2 x DP 2", "PP 3 x DP 1", "PP 2 x DP 1"], job.said()
    lines = told(tmp_path)
    for number in (3, 4):
        incarnation = incarnations[number - 1]
        assert incarnation["source"] == "copies in memory", job.said()
        assert incarnation["lost_steps"] <= 1
        done = max(line["step"] for line in lines if line["epoch"] == number - 1) + 1
        # A step that one rank has reported may be incomplete on another rank.
        assert done - 2 <= incarnation["resumed_iteration"] <= done
        first = min(line["step"] for line in lines if line["epoch"] == number)
        assert first == incarnation["resumed_iteration"]
    assert (
        sum(incarnation["lost_steps"] for incarnation in incarnations)
        == job.state()["lost_steps"]
        <= 2
    )
    last = max(report["step"] for report in lines)
    expected = undisturbed(tmp_path, last + 1, micro_batch_size=2, pipeline_size=1, state=True)
    losses = {report["step"]: report["loss"] for report in expected}
    assert {report["step"] for report in lines} == set(losses)
    for report in lines:
        assert report["loss"] == pytest.approx(losses[report["step"]], rel=1e-5)


@pytest.mark.long
def test_a_node_that_becomes_slow_gets_fewer_segments(start: Start, tmp_path: Path) -> None:
    options = {"late": True, "diagnose_interval": 10, "trace_dir": str(tmp_path / "traces")}
    job = start("abc", ENDLESS, micro_batch_size=2, pipeline_size=3, **options)

    train(job, tmp_path, 2, 12)  # The first start of the job only measures the model.
    (tmp_path / "told" / "b").touch()
    train(job, tmp_path, 3, 5)
    job.stop(LIMIT_S)
    state = job.state()
    even, moved = state["epochs"][1:3]
    assert even["shape"].startswith("PP 3 x DP 1, segments 2-2-2"), job.said()
    assert moved["reason"].startswith("b is slow: rank 1 takes "), job.said()
    assert moved["lost_steps"] == 0
    (slow,) = [machine for machine in state["machines"] if machine["name"] == "b"]
    assert slow["slowness"] > 2
    assert moved["shape"] != even["shape"]
    assert moved["predicted_step_s"] > even["predicted_step_s"]
    steps = [report["step"] for report in told(tmp_path) if report["rank"] == 0]
    assert steps == list(range(len(steps)))


@pytest.mark.long
def test_a_job_that_is_complete_ends_and_runs_what_follows(start: Start, tmp_path: Path) -> None:
    # The planner chooses all parallel sizes.
    job = start("a", 12, save_interval=5, async_save=True, slots=2)
    assert job.end(LIMIT_S) == 0, job.said()
    state = job.state()
    assert state["status"] == "complete"
    assert (state["iteration"], state["total_iterations"]) == (12, 12)
    assert "training ends: all iterations are done" in job.said()
    for step, how in ((5, "(training waited "), (10, "(training waited "), (12, "(")):
        saved = f"saved checkpoint from iteration {step:7d} to {job.checkpoints}/step_{step:08d} "
        assert saved + how in job.said()
    assert {file.name for file in (tmp_path / "told").glob("after-*")} == {"after-0", "after-1"}
    assert main(["--status", str(job.checkpoints)]) == 0
    again = start("a", 12, save_interval=5, slots=2)
    assert again.end(LIMIT_S) == 0, again.said()
    assert "measure" not in again.said()  # The job reuses the measurements of the previous job.
    assert {report["step"] for report in told(tmp_path)} == set(range(12))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wrong": "no pipeline"}, "pipeline_script.py exited without training"),
        pytest.param(
            {"wrong": "no loop", **SHAPED}, "outside of Pipeline.loop", marks=pytest.mark.long
        ),
        pytest.param(
            {"wrong": "another model", **SHAPED},
            "build the same Pipeline at every start",
            marks=pytest.mark.long,
        ),
        ({"micro_batch_size": 5}, "batch_size must be a multiple of "),
    ],
)
def test_what_cannot_work_ends_the_job_with_the_reason(
    options: dict[str, Any], said: str, start: Start
) -> None:
    job = start("a", 12, "--max-restarts", "1", slots=2, **options)
    assert job.end(LIMIT_S) in (1, 2), job.said()
    assert said in job.said()
    assert "Traceback" not in job.said()
    assert job.left_behind() == []


def test_what_is_the_trainers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass the folder of its checkpoints"):
        main([str(SCRIPT)])
    for arguments, text in (
        (
            ["--plan-with", "x.yaml"],
            "--plan-with: pipeline_script.py counts as a script that trains a Pipeline, ",
        ),
        (
            ["--unequal"],
            "--unequal: pipeline_script.py counts as a script that trains a Pipeline, ",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            main([*arguments, "--checkpoint", str(tmp_path), str(SCRIPT)])
