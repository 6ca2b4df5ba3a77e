"""Tests that ``make_trace`` writes the requested number of spans and rejects invalid arguments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.trace.read import read_run
from tests.support.make_trace import main

SCRIPT = Path(__file__).parents[2] / "tools" / "make_trace.py"


def test_the_script_writes_about_as_many_spans_as_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    command = [sys.executable, str(SCRIPT), "--output", str(folder), "--ranks", "8"]
    command += ["--spans", "5000", "--truth", str(tmp_path / "truth.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    run = read_run(folder)
    assert (run.world_size, run.num_ranks, run.missing_ranks) == (8, 4, ())
    count = sum(len(trace.table()) for trace in run.ranks.values())
    assert count == int(result.stdout.split()[0])
    assert abs(count - 5000) < 400
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert len(truth["bubble_fraction"]) == len(run.iterations)
    assert main(["--output", str(folder), "--iterations", "1"]) == 0
    assert (tmp_path / "traces-1").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "gremlins:1"], "unknown fault 'gremlins'"),
        (["--fault", "slow-rank:1"], "expected slow-rank:RANK:FACTOR"),
        (["--fault", "slow-link:1:2"], "expected slow-rank:RANK:FACTOR"),
        (["--fault", "slow-rank:7:2"], "a rank outside 0..3"),
        (["--ranks", "6"], "--ranks must be a multiple of --pipeline 4, got 6"),
        (["--iterations", "0"], "must be 1 or more, got 0"),
        (["--schedule", "1f1b", "--pipeline", "4", "--bogus"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_cli(main, ["--output", str(tmp_path / "traces"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
