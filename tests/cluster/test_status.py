"""Tests that ``job status`` shows progress, errors, changed settings and stalls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli import status as command
from megatron.adaptive.cli.status import JobStatus, read_status
from megatron.adaptive.errors import SetupError

FOLLOW = ("--follow", "--json")


SIZES = {"world_size": 4, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}


def write(folder: Path, *lines: dict[str, Any], age_s: float = 0.0) -> None:
    """Appends ``lines`` to the progress file in ``folder``, as the reporting rank does."""
    with (folder / "progress.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({"unix_ns": int((time.time() - age_s) * 1e9), **line}) + "\n")


def start(age_s: float, **more: object) -> dict[str, Any]:
    began_ns = int((time.time() - age_s) * 1e9)
    sizes = {**SIZES, "data_parallel_size": 2, **more}
    return {"total_iterations": 100, "start_iteration": 0, **sizes, "unix_ns": began_ns}


def step(iteration: int, age_s: float, **more: object) -> dict[str, Any]:
    done_ns = int((time.time() - age_s) * 1e9)
    progress = {"iteration": iteration, "step_ms": 50.0, "tokens_per_s": 1000.0, "loss": 5.0}
    return {**progress, **more, "unix_ns": done_ns}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the folder of a job with two nodes. The second node reports the progress."""
    job = tmp_path / "pods-1"
    job.mkdir()
    record(job, conf={"PIPELINE_MP_SIZE": "2", "DP_SIZE": "2"}, world_size=4)
    write(job, start(3), step(1, 2), step(2, 1))
    for rank, name in enumerate(("n1", "n2")):
        (job / f"{name}.out").write_text(f"=== now node {rank} starts\n")
        (job / f"{name}.err").write_text("=== now node 0 starts\n")
    write_samples(job, "n2", 0)
    with (job / "n2.gpu").open("a") as file:
        file.write('{"unix_s": 17')
    return job


def record(folder: Path, **changes: Any) -> None:
    """Sets the entries ``changes`` in the file ``run.json`` in ``folder``."""
    path = folder / "run.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **changes}))


def write_samples(folder: Path, name: str, age_s: float, **more: object) -> None:
    sample = {"unix_s": time.time() - age_s, "gpus": [], "processes": [], **more}
    (folder / f"{name}.gpu").write_text(json.dumps(sample) + "\n")


def read(folder: Path) -> JobStatus:
    return read_status(folder.name, folder.parent)


Shown = Callable[[], tuple[int, str]]


@pytest.fixture
def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Returns a function that runs ``job status``, and returns the exit status and the output."""
    return lambda: (
        command.main([folder.name, "--log-dir", str(folder.parent)]),
        capsys.readouterr().out,
    )


def test_a_run_that_goes_well(folder: Path) -> None:
    status = read(folder)
    assert (status.iteration, status.iterations, status.iteration_ms) == (2, 100, 50.0)
    assert status.tokens_per_s == 1000.0
    assert (status.is_stalled, status.differences) == (False, ())
    first, second = status.nodes
    assert (first.use, first.errors) == (None, ())
    assert second.use is not None


def test_one_that_stands_still_is_shown(folder: Path, shown: Shown) -> None:
    (folder / "progress.jsonl").unlink()
    write(folder, start(301), step(1, 300), step(2, 200))
    assert read(folder).is_stalled
    status, text = shown()
    assert (status, "STALLED" in text) == (1, True)
    write(folder, {"ended": "signal SIGTERM"})
    assert not read(folder).is_stalled


def test_what_differs_from_the_request_is_marked(folder: Path, shown: Shown) -> None:
    write(folder, start(0, data_parallel_size=1))
    assert read(folder).differences == (("DP_SIZE", "2", "1"),)
    assert "DIFFERENT: DP_SIZE is 1, but 2 was requested" in shown()[1]


def test_errors_apart_from_warnings_and_of_the_latest_start_only(folder: Path) -> None:
    (folder / "n1.err").write_text(
        "error: an old one\n=== now node 0 starts\nUserWarning: beware\nerror: rank 1 is lost\n"
    )
    (node, _) = read(folder).nodes
    assert node.errors == ("error: rank 1 is lost",)
    assert node.warnings == ("UserWarning: beware",)


def test_large_missing_and_truncated_files(folder: Path) -> None:
    (folder / "n3.out").touch()
    last = {"n2.out": b"UserWarning: the last line\n", "n3.out": b"x\n", "progress.jsonl": b""}
    for name, text in last.items():
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 30)  # The file is sparse, so it uses no disk space.
            file.seek(0, 2)
            file.write(b"\n" + text)
    write(folder, step(7, 1))
    with (folder / "progress.jsonl").open("a") as file:
        file.write('{"iteration": 8, "uni')
    (folder / "run.json").write_text('{"conf": ')
    (folder / "n1.err").unlink()
    status = read(folder)
    assert (status.iteration, status.requested, len(status.nodes)) == (7, {}, 3)


def test_a_start_that_trains_not_yet_has_no_iteration(folder: Path) -> None:
    write(folder, {"ended": "signal SIGUSR1"})
    record(folder, started_unix_s=time.time() + 60)
    status = read(folder)
    assert (status.iteration, status.is_over, status.is_stalled) == (None, False, False)
    record(folder, started_unix_s=time.time() - 1)
    assert read(folder).iteration == 2


def test_a_job_without_logs(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="job pods-9: .*--log-dir"):
        read_status("pods-9", tmp_path)


def test_a_node_whose_samples_stopped_is_lost(folder: Path, shown: Shown) -> None:
    write_samples(folder, "n1", 60)
    status = read(folder)
    assert (list(status.lost), status.has_errors) == (["n1"], True)
    code, text = shown()
    lost = "LOST: node n1: the last sample of its resource use is 60 s old"
    assert (code, lost in text) == (1, True)
    # The job has finished, so its nodes are no longer expected to send samples.
    write(folder, {"ended": "all iterations are done"})
    status = read(folder)
    assert (status.lost, status.is_over) == ({}, True)
    write_samples(folder, "n1", 60, ended=True)
    assert read(folder).lost == {}


def test_nodes_of_an_earlier_start_do_not_count(folder: Path, shown: Shown) -> None:
    write_samples(folder, "n1", 300)
    (folder / "n1.err").write_text("=== now node 0 starts\nerror: rank 1 is lost\n")
    record(folder, started_unix_s=time.time() - 100)
    status = read(folder)
    assert (status.lost, status.has_errors) == ({}, False)
    code, text = shown()
    assert code == 0
    assert "--- n1: took part in an earlier start of the job, but not in the latest" in text


def test_following_ends_with_the_job(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_PERIOD_S", 0.05)

    def end_it() -> None:
        write(folder, step(3, 0), {"ended": "all iterations are done"})

    timer = threading.Timer(0.5, end_it)
    timer.start()
    try:
        assert command.main([folder.name, "--log-dir", str(folder.parent), *FOLLOW]) == 0
    finally:
        timer.join()
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert len(lines) > 1
    assert [state["is_over"] for state in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[0]["iteration"], lines[-1]["iteration"]) == (2, 3)


def test_sizes_that_grow_on_purpose_do_not_differ(folder: Path) -> None:
    write(folder, step(3, 0, global_batch_size=16))
    record(folder, conf={"GLOBAL_BATCH_SIZE": "64"})
    (differing,) = read(folder).differences
    assert differing == ("GLOBAL_BATCH_SIZE", "64", "16")
    ramp = "--rampup-batch-size 16 16 100"
    record(folder, conf={"GLOBAL_BATCH_SIZE": "64", "TRAINER_FLAGS": ramp})
    assert read(folder).differences == ()
