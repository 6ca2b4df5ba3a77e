"""The process beside a job answers what it is asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tracing.synthetic import Fault, SyntheticRun, write_synthetic
from megatron.adaptive.trace.diagnose.watch import answer

ROOT = Path(__file__).resolve().parents[3]
WATCHDOG_S = 60.0
COMMAND = [sys.executable, "-m", "megatron.adaptive.trace.diagnose.watch"]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    fault = Fault(kind="slow-rank", rank=1, factor=1.5)
    write_synthetic(tmp_path, SyntheticRun(faults=(fault,), iterations=12))
    return tmp_path


def test_an_answer_names_what_was_found(traces: Path) -> None:
    (finding,) = answer(str(traces), 2, 9)["findings"]
    assert finding["key"] == ["slow rank", 1]
    assert "rank 1 (stage 1, host0)" in finding["text"]
    assert finding["goes_on"]
    assert answer(str(traces), 50, 60) == {"findings": []}
    assert "does not exist" in answer(str(traces / "none"), 1, 2)["error"]


def test_it_prints_its_answer(traces: Path) -> None:
    printed = subprocess.run(
        [*COMMAND, str(traces), "2", "12"],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout
    (line,) = printed.splitlines()
    assert "11 iterations" in json.loads(line)["findings"][0]["text"]
