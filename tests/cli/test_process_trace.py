"""``process_trace.py`` as a user runs it: in a folder with ``runs/latest``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.trace import process as main
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.order import write_legacy
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import Recorder

SCRIPT = Path(__file__).parents[2] / "process_trace.py"
SHAPE = ["--pipeline_parallel", "2", "--model_chunks", "1"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a run of 2 ranks and 2 iterations behind ``runs/latest``."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "one"
    for rank in range(2):
        header = TraceHeader(
            run="one",
            rank=rank,
            world_size=2,
            pp_rank=rank,
            num_ranks=2,
            num_chunks=1,
            num_microbatches=1,
            schedule="1f1b",
        )
        with Recorder(run_dir / "traces", header) as recorder:
            for iteration in (1, 2):
                at = 10**10 * iteration
                recorder.begin_iteration(iteration, 1)
                recorder.record("F", 0, 0, at + rank * 1_000_000, at + (rank + 1) * 1_000_000)
                recorder.record("B", 0, 0, at + (4 - rank) * 10**6, at + (6 - rank * 2) * 10**6)
    write_legacy(read_run(run_dir / "traces"), run_dir / "trace_pipeline_2_model_chunks_1.txt")
    (tmp_path / "runs" / "latest").symlink_to("one")
    return tmp_path


def slices(path: Path) -> list[dict[str, object]]:
    """The slices in a file of events."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_the_script_prints_a_table_and_writes_events(checkout: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *SHAPE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=checkout,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert "run one, schedule 1f1b, 2 ranks x 1 chunks, 1 microbatches" in lines[0]
    assert lines[1].startswith("iteration 2: step 6.00 ms, bubble 58.3%")
    assert [line.split()[:2] for line in lines[3:5]] == [["stage", "0"], ["stage", "1"]]
    assert lines[5].split()[:4] == ["of", "the", "step,", "ms"]
    assert "over 2 complete iterations (1-2)" in lines[8]
    assert lines[9] == "clocks: one for all ranks"
    assert len(slices(checkout / "trace_pipeline_2_model_chunks_1.json")) == 8


def test_json_and_a_chosen_iteration(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--iteration", "1", "--output-dir", "out"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["iteration"] == 1
    assert figures["bubble_fraction"] == pytest.approx(7 / 12)
    assert [rank["busy_ms"] for rank in figures["ranks"]] == [3.0, 2.0]
    assert figures["events"] == "out/trace_pipeline_2_model_chunks_1.json"
    assert len(slices(Path(figures["events"]))) == 4


def test_views_are_written_as_well(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--format", "png,tensorboard", "--iterations", "1-2"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"iteration 2 drawn: {checkout}/trace_pipeline_2_model_chunks_1.png",
        "curves of 2 iterations: tensorboard --logdir trace_pipeline_2_model_chunks_1_tensorboard",
    ]


def test_the_text_form_gives_the_same_figures(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--json"])
    from_lines = json.loads(capsys.readouterr().out)
    text = "runs/latest/trace_pipeline_2_model_chunks_1.txt"
    main(["--json", "--run-dir", text, "--output", "other.json"])
    assert json.loads(capsys.readouterr().out) == {**from_lines, "events": "other.json"}
    assert (checkout / "other.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--iteration", "7"], "iteration 7 is not in runs/latest/traces; it has 1-2"),
        (["--pipeline_parallel", "4"], "has 2 pipeline ranks x 1 chunks, asked for 4 x 1"),
        (["--pipeline_parallel", "0"], "'0' is not a whole number from 1 on"),
        (["--model_chunks", "two"], "not a whole number"),
        (["--dp-rank", "1"], "no trace of data-parallel rank 1"),
        (["--run-dir", "missing"], "missing does not exist"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--output", "runs/one/traces/trace_rank_00000.jsonl/x"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    checkout: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = sorted(checkout.rglob("*"))
    assert run_cli(main, arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
    assert sorted(checkout.rglob("*")) == before
