"""Tests that ``process_trace.py`` and ``visualize_trace.py`` read the run at ``runs/latest``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread
from openpyxl import load_workbook

from megatron.adaptive.cli.trace import process, visualize
from megatron.adaptive.trace.legacy_text import write_legacy
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import Recorder
from tests.trace.conftest import make_header, record

ROOT = Path(__file__).parents[2]
NAME = "trace_pipeline_2_model_chunks_1"
SHAPE = ["--pipeline_parallel", "2", "--model_chunks", "1"]
TABLES = """\
         actions  busy ms  wait ms  bubble         F ms         B ms  peak in flight
stage 0        2     3.00     0.00   50.0%  1.00 ± 0.00  2.00 ± 0.00               1
stage 1        2     2.00     0.00   66.7%  1.00 ± 0.00  1.00 ± 0.00               1
of the step, ms        busy      before       after        rest
stage 0          3.00 (50%)   0.00 (0%)   0.00 (0%)  3.00 (50%)
stage 1          2.00 (33%)  1.00 (17%)  2.00 (33%)  1.00 (17%)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a run of 2 ranks and 2 iterations to ``runs/one`` in a new folder.

    The new folder becomes the current folder, and is returned.
    """
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "one"
    for rank in range(2):
        header = make_header(rank, run="one", num_microbatches=1, schedule="1f1b")
        with Recorder(run_dir / "traces", header) as recorder:
            for iteration in (1, 2):
                start_ns = 10**10 * iteration
                recorder.begin_iteration(iteration, 1)
                record(
                    recorder,
                    "F",
                    0,
                    0,
                    start_ns + rank * 1_000_000,
                    start_ns + (rank + 1) * 1_000_000,
                )
                record(
                    recorder,
                    "B",
                    0,
                    0,
                    start_ns + (4 - rank) * 10**6,
                    start_ns + (6 - rank * 2) * 10**6,
                )
    write_legacy(read_run(run_dir / "traces"), run_dir / "trace_pipeline_2_model_chunks_1.txt")
    (tmp_path / "runs" / "latest").symlink_to("one")
    return tmp_path


def slices(path: Path) -> list[dict[str, object]]:
    """Returns the events with a duration in the file ``path``, without the ideal step."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["cat"] != "ideal"]


def run_script(name: str) -> list[str]:
    """Runs the script ``name`` in the current directory, and returns the lines that it prints."""
    result = subprocess.run(
        [sys.executable, str(ROOT / name), *SHAPE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    newest = Path("runs", "one").resolve()
    assert result.stderr == f"no folder given: reading the newest run, {newest}\n"
    assert result.returncode == 0
    return result.stdout.splitlines()


def test_the_script_prints_a_table_and_writes_events(checkout: Path) -> None:
    lines = run_script("process_trace.py")
    assert "run one, schedule 1f1b, 2 ranks x 1 chunks, 1 microbatches" in lines[0]
    assert lines[1].startswith("iteration 2: step 6.00 ms, bubble 58.3%")
    assert lines[2:8] == TABLES.splitlines()
    assert "over 2 complete iterations (1-2)" in lines[8]
    assert lines[9] == "clocks: one for all ranks"
    assert len(slices(checkout / f"{NAME}.json")) == 8


def test_the_script_writes_both_charts_here(checkout: Path) -> None:
    assert run_script("visualize_trace.py") == [
        f"iteration 2 drawn: {checkout / NAME}.xlsx",
        f"iteration 2 drawn: {checkout / NAME}.png",
    ]
    sheet = load_workbook(checkout / f"{NAME}.xlsx")["order"]
    assert [cell.value for cell in sheet[3][1:] if cell.value] == ["0-0", "0-0"]
    assert imread(checkout / f"{NAME}.png").shape[1] >= 2000


def test_one_format_one_iteration_another_place(checkout: Path) -> None:
    assert visualize(["--format", "xlsx", "--iteration", "1", "--output-dir", "charts"]) == 0
    assert [path.name for path in (checkout / "charts").iterdir()] == [f"{NAME}.xlsx"]
    title = load_workbook(checkout / "charts" / f"{NAME}.xlsx")["order"]["A1"].value
    assert "iteration 1" in title


def test_json_and_a_chosen_iteration(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert process(["--json", "--iteration", "1", "--output-dir", "out"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["iteration"] == 1
    assert figures["bubble_fraction"] == pytest.approx(7 / 12)
    assert [rank["busy_ms"] for rank in figures["ranks"]] == [3.0, 2.0]
    assert figures["events"] == "out/trace_pipeline_2_model_chunks_1.json"
    assert len(slices(Path(figures["events"]))) == 4


def test_the_text_form_gives_the_same_figures(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process(["--json"])
    from_lines = json.loads(capsys.readouterr().out)
    text = "runs/latest/trace_pipeline_2_model_chunks_1.txt"
    process(["--json", "--run-dir", text, "--output-dir", "other"])
    assert json.loads(capsys.readouterr().out) == {**from_lines, "events": f"other/{NAME}.json"}
    assert (checkout / "other" / f"{NAME}.json").exists()
