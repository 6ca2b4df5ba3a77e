"""Tests the HTML report of a job, for a real run with two processes and for synthetic runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli import report as command
from megatron.adaptive.cli.report import MAX_POINTS, gather
from megatron.adaptive.errors import ConfigError, SetupError, TraceError
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

from ..browser import complaints, opened_browser
from ..multiprocess.launch import free_port
from ..trace.views.test_page import Page

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 180.0
CONF = """
JOB_NAME='<b>a name</b>'
MODEL=tiny
DEVICE=cpu
TRAIN_ITERS=5
GLOBAL_BATCH_SIZE=4
PIPELINE_MP_SIZE=2
NNODES=1
NPROC_PER_NODE=2
TRACE=true
TRAINER_FLAGS='--vocab-size 255'
"""
SHOWN = """
const charts = [...document.querySelectorAll(".chart")].map((chart) =>
  [chart.id, (chart.data || []).length]);
return [document.body.dataset.ready, Object.fromEntries(charts), document.title,
  document.getElementById("settings").textContent];
"""
RANKS_OF_NODE = """
const page = document.querySelector("#pipeline iframe").contentDocument;
const node = page.getElementById("node"), done = arguments[1];
node.selectedIndex = arguments[0];
node.dispatchEvent(new Event("change"));
requestAnimationFrame(() => requestAnimationFrame(() =>
  done(page.getElementById("chart").layout.yaxis.ticktext)));
"""
BARS = """
const [done] = arguments;
const page = document.querySelector("#pipeline iframe").contentDocument;
const wait = () => page.body && page.body.dataset.ready === "yes"
  ? done(page.getElementById("chart").data.filter((one) => one.visible && one.x.length).length)
  : setTimeout(wait, 50);
wait();
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a job in one pod with two processes, and returns its log folder."""
    folder = tmp_path_factory.mktemp("a run")
    (folder / "conf.sh").write_text(CONF)
    command = ["bash", str(ROOT / "run_master.sh"), str(folder / "conf.sh")]
    done = subprocess.run(
        [*command, "--master-port", str(free_port())],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (log_folder,) = (folder / "logs").iterdir()
    return log_folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Writes the log files of a job with 20 ranks on three nodes, and returns their folder."""
    folder = tmp_path / "logs" / "pods-2"
    folder.mkdir(parents=True)
    now_s = time.time()

    def stamp(age_s: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s - age_s))

    def step(iteration: int, age_s: float) -> dict[str, Any]:
        progress = {"iteration": iteration, "unix_ns": int((now_s - age_s) * 1e9), "loss": 5.0}
        return {**progress, "step_ms": 50.0, "tokens_per_s": 5000.0, "global_batch_size": 64}

    def start(iteration: int, age_s: float, **more: object) -> dict[str, Any]:
        begun = {"start_iteration": iteration, "unix_ns": int((now_s - age_s) * 1e9)}
        return {**begun, "total_iterations": 20000, "world_size": 20, **more}

    lines = [start(0, 950), *(step(number + 1, 900) for number in range(6000))]
    lines += [start(5000, 350), *(step(number + 5001, 300) for number in range(2000))]
    lines += [start(7000, 299, moved=True)]
    (folder / "progress.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"iter')
    for rank, (name, count) in enumerate((("n1", 8), ("n2", 8), ("n3", 4))):
        starts = f"=== {stamp(1000)} node {rank} starts\n", f"=== {stamp(400)} node {rank} starts\n"
        logged = ("", "") if rank == 2 else ("error: no luck\n" * count, "UserWarning: ha\n")
        (folder / f"{name}.out").write_text(
            starts[0] + logged[0] + starts[1] + logged[1] + "half a li"
        )
        (folder / f"{name}.err").write_text("".join(starts))
        gpu = {"index": 0, "used_percent": 90, "memory_used_bytes": 1 << 30, "pids": [1]}
        samples = [
            {"unix_s": now_s - 400 + number, "gpus": [gpu] * (number > 0), "processes": []}
            for number in range(3)
        ]
        (folder / f"{name}.gpu").write_text("\n".join(map(json.dumps, samples)) + '\n{"unix')
    conf = {"GLOBAL_BATCH_SIZE": "32", "NNODES": "3"}
    record = {"conf": conf, "world_size": 20, "processes": [8, 8, 4], "started_unix_s": now_s - 400}
    (folder / "run.json").write_text(json.dumps(record))
    write_synthetic(folder / "traces", SyntheticRun(num_ranks=4, replicas=5, iterations=6))
    return folder


def page_of(report: dict[str, Any], folder: Path) -> Page:
    """Writes the pipeline page in ``report`` to ``folder``, and returns the page's data."""
    path = folder / "page.html"
    path.write_text(report["traces"]["page"])
    return Page(path)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_real_run(job: Path, tmp_path: Path) -> None:
    report = gather(job.name, job.parent)
    settings = {setting["name"]: setting for setting in report["settings"]}
    sizes = {name: settings[name]["effective"] for name in ("WORLD_SIZE", "PIPELINE_MP_SIZE")}
    assert sizes == {"WORLD_SIZE": "2", "PIPELINE_MP_SIZE": "2"}
    assert settings["GLOBAL_BATCH_SIZE"]["effective"] == "4"
    assert not any(setting["differs"] for setting in report["settings"])
    assert report["curves"]["iteration"] == [1, 2, 3, 4, 5]
    assert all(4 < loss < 7 for loss in report["curves"]["loss"])
    assert all(value > 0 for value in report["curves"]["tokens_per_s"])
    ((name, use),) = report["use"].items()
    assert max(use["gib"]) > 0.1
    traces = report["traces"]
    assert (traces["ranks"], traces["iterations"]) == ([0, 1], [1, 2, 3, 4, 5])
    # The time from the first to the last action of a rank is most of the iteration time in the log.
    # If the system delayed a rank, part of its time may belong to the next iteration.
    for row in traces["rank_ms"]:
        assert len(row) == 5
        assert min(row) > 0
        assert 0.2 < sum(row) / sum(report["curves"]["ms"]) < 1.5
    drawn = page_of(report, tmp_path)
    assert drawn.head["nodes"] == {name: [0, 1]}
    kinds = [category["kind"] for category in drawn.head["categories"]]
    assert drawn.head["iterations"] == [1, 2, 3, 4, 5]
    for index in range(5):
        block = drawn.block(0, index)
        for row in (0, 1):
            bars = slice(*block["offset"][row : row + 2])
            done = [kinds[number] for number in block["category"][bars]]
            assert (done.count("F"), done.count("B")) == (4, 4)


def test_a_large_run_that_went_on(large: Path, tmp_path: Path) -> None:
    report = gather(large.name, large.parent)
    assert report["starts"] == [5001]
    assert 1000 < len(report["curves"]["iteration"]) <= MAX_POINTS
    assert report["curves"]["tokens_per_s"][0] == 5000.0
    (differing,) = (setting for setting in report["settings"] if setting["differs"])
    named = (differing["name"], differing["requested"], differing["effective"])
    assert named == ("GLOBAL_BATCH_SIZE", "32", "64")
    rows = page_of(report, tmp_path).head["nodes"]
    spans = {name: (spans_of_row[0], len(spans_of_row)) for name, spans_of_row in rows.items()}
    assert spans == {"n1": (0, 8), "n2": (8, 8), "n3": (16, 4)}
    first, second = report["messages"][:2]
    assert (first["node"], first["kind"], first["count"]) == ("n1", "error", 8)
    assert (second["text"], second["count"]) == ("error: no luck", 8)
    assert {message["kind"] for message in report["messages"]} == {"error", "warning"}
    assert report["use"]["n1"]["gpus"][0]["percent"] == [None, 90, 90]
    assert any("curves show" in note for note in report["notes"])


def test_mistakes(large: Path, tmp_path: Path) -> None:
    for name in ("n1", "n2", "n3"):
        (large / f"{name}.out").unlink()
    with pytest.raises(SetupError, match="job pods-2 has no logs in .*--log-dir"):
        command.main([str(large)])
    with pytest.raises(SetupError, match="job 99: Slurm does not know this job"):
        command.main(["99", "--log-dir", str(tmp_path)])
    with pytest.raises(ConfigError, match="report: .*--colour"):
        command.main(["99", "--colour"])


def test_damaged_traces_and_a_place_that_cannot_be_written(large: Path) -> None:
    for path in (large / "traces").iterdir():
        path.write_text('{"half')
    report = gather(large.name, large.parent)
    assert report["traces"] is None
    assert any(note.startswith("no timeline: ") for note in report["notes"])
    with pytest.raises(TraceError):
        command.main([str(large), "--output", "/proc/report.html"])


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Any]]:
    """Yields a function that opens a page in a headless Chromium."""
    with opened_browser(tmp_path_factory.mktemp("profile")) as browser:

        def opened(page: Path) -> Any:
            browser.get(page.as_uri())
            assert complaints(browser) == []
            return browser

        yield opened


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_page_of_a_real_run_in_a_browser(
    job: Path, show: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([job.name, "--log-dir", str(job.parent)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == job / "report.html"
    assert "http-equiv" in page.read_text()
    shown = show(page)
    ready, charts, title, settings = shown.execute_script(SHOWN)
    assert (ready, title) == ("yes", f"Job {job.name}: <b>a name</b>")
    assert shown.execute_async_script(BARS) > 3
    assert {name: charts[name] for name in ("loss", "throughput", "times", "memory")} == {
        "loss": 1,
        "throughput": 1,
        "times": 3,
        "memory": 1,
    }
    assert "WORLD_SIZE22" in settings


@pytest.mark.long
@pytest.mark.slow
def test_the_page_of_many_ranks_in_a_browser(large: Path, show: Callable[[Path], Any]) -> None:
    assert command.main([str(large)]) == 0
    page = show(large / "report.html")
    ready, charts, _, settings = page.execute_script(SHOWN)
    assert ready == "yes"
    assert (charts["times"], charts["percent"]) == (1, 6)
    assert "64 (differs)" in settings
    assert page.execute_async_script(BARS) > 3
    assert complaints(page) == []
    assert len(page.execute_async_script(RANKS_OF_NODE, 0)) == 20
    last = page.execute_async_script(RANKS_OF_NODE, 3)
    assert (last[0].split(":")[0], len(last)) == ("rank 16", 4)
