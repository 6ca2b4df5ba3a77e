"""Tests the output and the errors of ``trace`` for valid and for damaged traces."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from openpyxl import load_workbook

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.trace import diagnose_run, main
from megatron.adaptive.trace.legacy_text import write_legacy
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.trace_format import IterationStart, block_text, trace_file_name
from megatron.adaptive.trace.views.view import built_in_views
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

ROOT = Path(__file__).resolve().parents[2]
NAME = "trace_pipeline_2_model_chunks_1"
SMALL = SyntheticRun(num_ranks=2, replicas=2, num_microbatches=4, iterations=5, hosts=2)


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes traces of two replicas with two ranks each, and returns the folder of the traces.

    The current folder changes to the parent of this folder.
    """
    monkeypatch.chdir(tmp_path)
    write_synthetic(tmp_path / "traces", SMALL)
    return tmp_path / "traces"


def refused(
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    program: Callable[[Sequence[str]], int] = main,
) -> str:
    """Calls ``program``, which must fail and write no file, and returns its error line."""
    before = sorted(Path().rglob("*"))
    assert run_cli(program, arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return output.err


def test_the_program_prints_the_figures_and_writes_every_view(traces: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron.adaptive", "trace", "traces", "--output-dir", "views"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "run synthetic" in lines[0]
    assert lines[0].endswith("2 ranks x 1 chunks, 4 microbatches, replica 0 of 2")
    assert lines[1].startswith("iteration 5: step ")
    assert [line.split()[:2] for line in lines[3:5]] == [["stage", "0"], ["stage", "1"]]
    assert lines[5].startswith("of the step, ms")
    assert lines[8].startswith("over 5 complete iterations (1-5): step median")
    assert lines[9].startswith("clocks: 2 clocks, 1 with measured offsets: residual ")
    names = {path.name for path in Path("views").iterdir()}
    views = {f"{NAME}{view.ending}" for view in built_in_views().values() if view.ending}
    assert {f"{NAME}.xlsx", f"{NAME}.html", f"{NAME}_tensorboard"} <= names == views


def test_json(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["traces", "--json", "--format", "png", "--dp-rank", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    figures = run_figures(read_run(traces), [5], ranks=[1, 3])
    for rank in range(2):
        parts = report["ranks"][rank]["parts_ms"]
        assert parts["busy"] == pytest.approx(figures.busy_ns[0, rank] / 1e6)
        assert sum(parts.values()) == pytest.approx(report["step_ms"])
    assert report["clocks"]["count"] == 2
    assert report["clocks"]["residual_us"] > 0
    assert report["views"] == [f"iteration 5 drawn: {Path(NAME).resolve()}.png"]


def test_iterations_and_replica_are_chosen(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["traces", "--format", "xlsx"]
    main([*flags, "--iterations", "2-4", "--dp-rank", "1", "--output-dir", "a"])
    assert "over 3 complete iterations (2-4)" in capsys.readouterr().out
    book = load_workbook(Path("a", f"{NAME}.xlsx"))
    assert "iteration 4, replica 1 of 2" in book["order"]["A1"].value
    assert [book["summary"].cell(row, 2).value for row in (3, 4)] == [1, 3]
    numbers = [row[0] for row in book["iterations"].iter_rows(min_row=3, values_only=True)]
    assert numbers == [2, 3, 4]
    main([*flags, "--iteration", "2", "--output-dir", "one"])
    assert "over" not in capsys.readouterr().out
    assert (
        "iteration 2, replica 0 of 2"
        in load_workbook(Path("one", f"{NAME}.xlsx"))["order"]["A1"].value
    )
    # If a range is only partly within the run, the iterations within the run are selected.
    main([*flags, "--iterations", "4-90", "--output", "two/three.xlsx"])
    assert Path("two", "three.xlsx").exists()
    assert "over 2 complete iterations (4-5)" in capsys.readouterr().out


def test_diagnose(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose_run(["traces"]) == 0
    assert capsys.readouterr().out.strip()
    assert diagnose_run(["traces", "--json", "--iterations", "2-5"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    beyond = refused(capsys, "traces", "--iteration", "8", program=diagnose_run)
    assert "which has iterations 1-5" in beyond
    assert "does not exist" in refused(capsys, "missing", program=diagnose_run)


def test_the_text_form_has_views_and_a_diagnosis(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{NAME}.txt"
    write_legacy(read_run(traces), text)
    assert main([text, "--format", "xlsx,png,perfetto,tensorboard", "--output-dir", "out"]) == 0
    names = {path.name for path in Path("out").iterdir()}
    assert names == {f"{NAME}{end}" for end in (".xlsx", ".png", ".json.gz", "_tensorboard")}
    assert diagnose_run([text]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["traces", "--iteration", "7"], "iteration 7 is not in traces, which has iterations 1-5"),
        (["traces", "--iterations", "7-9"], "iterations 7-9 are not in traces, which has"),
        (["traces", "--iterations", "4-2"], "'4-2' ends before it begins"),
        (["traces", "--iterations", "few"], "'few' is not a range of iterations; use A-B"),
        (["traces", "--dp-rank", "2"], "which has data-parallel ranks 0-1"),
        (["traces", "--format", "xlsx,svg"], "invalid choice 'svg'; choose from "),
        (["traces", "--format", "json:dumps"], "must be a function decorated with trace_view"),
        (["traces", "--format", "no_such_module:x"], "cannot be imported: ModuleNotFoundError"),
        (["traces", "--format", "html,json:nothing"], "has no 'nothing'"),
        (["nowhere"], "nowhere does not exist"),
        (["traces", "--zoom"], "unrecognized arguments: --zoom"),
    ],
)
def test_wrong_flags(
    traces: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *arguments)


def test_what_is_wrong_with_a_trace_is_said(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (traces / trace_file_name(2)).unlink()
    with (traces / trace_file_name(1)).open("a") as file:
        file.write(block_text(IterationStart(6, 1, 1), []))
    path = traces / trace_file_name(0)
    text = path.read_text()
    path.write_text(text[: text.index('{"begin_iteration": 5') + 400])
    assert main(["traces", "--format", "png"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines()[:3] == [
        "warning: no trace of ranks 2 in traces",
        "warning: 1 truncated lines at the ends of trace files were dropped; the run may have "
        "been killed",
        "warning: the clock of rank 1 was set back before iterations 6; ignore times that span "
        "this moment",
    ]
    assert "iteration 4: step" in output.out  # Iteration 4 is the last complete iteration.


def test_damaged_folders_are_refused(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert "empty contains no trace: neither traces/trace_rank_*.jsonl nor" in refused(
        capsys, "empty"
    )
    path = traces / trace_file_name(0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "[0,0,x]\n", *lines[5:]]))
    assert "trace_rank_00000.jsonl" in refused(capsys, "traces")
