"""``visualize_trace.py`` as a user runs it: in a folder with ``runs/latest``."""

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread
from openpyxl import load_workbook

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.trace import visualize as main
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.recorder import Recorder

SCRIPT = Path(__file__).parents[2] / "visualize_trace.py"
NAME = "trace_pipeline_1_model_chunks_2"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a run of 1 rank, 2 chunks and 2 iterations as the latest."""
    monkeypatch.chdir(tmp_path)
    header = TraceHeader(
        run="one",
        rank=0,
        world_size=1,
        pp_rank=0,
        num_ranks=1,
        num_chunks=2,
        num_microbatches=1,
        schedule="adaptive",
    )
    with Recorder(tmp_path / "runs" / "one" / "traces", header) as recorder:
        for iteration in (1, 2):
            recorder.begin_iteration(iteration, 1)
            for at, (action, chunk) in enumerate([("F", 0), ("F", 1), ("B", 1), ("B", 0)]):
                recorder.record(action, chunk, 0, at * 1000, at * 1000 + 900)
    (tmp_path / "runs" / "latest").write_text("one\n")
    return tmp_path


def test_the_script_writes_both_charts_here(checkout: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--pipeline_parallel", "1", "--model_chunks", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=checkout,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"iteration 2 drawn: {checkout / NAME}.xlsx",
        f"iteration 2 drawn: {checkout / NAME}.png",
    ]
    sheet = load_workbook(checkout / f"{NAME}.xlsx")["order"]
    texts = [cell.value for cell in sheet[3][1:] if cell.value]
    assert texts == ["0-0", "1-0", "1-0", "0-0"]
    assert imread(checkout / f"{NAME}.png").shape[1] >= 2000


def test_one_format_one_iteration_another_place(checkout: Path) -> None:
    assert main(["--format", "xlsx", "--iteration", "1", "--output-dir", "charts"]) == 0
    assert [path.name for path in (checkout / "charts").iterdir()] == [f"{NAME}.xlsx"]
    title = load_workbook(checkout / "charts" / f"{NAME}.xlsx")["order"]["A1"].value
    assert "iteration 1" in title
    assert main(["--format", "png", "--output", "my.png"]) == 0
    assert (checkout / "my.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--iteration", "3"], "it has 1-2"),
        (["--format", "svg"], "invalid choice"),
        (["--model_chunks", "1"], "has 1 pipeline ranks x 2 chunks, asked for 1 x 1"),
        (["--output-dir", "runs/latest"], "cannot write"),
        (["--output", "a.xlsx", "--output-dir", "b"], "not allowed with argument"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    checkout: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = sorted(checkout.rglob("*"))
    assert run_cli(main, arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
    assert sorted(checkout.rglob("*")) == before


def test_an_empty_place_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(main, []) == 2
    assert "run run_single.sh first or give --run-dir" in capsys.readouterr().err
