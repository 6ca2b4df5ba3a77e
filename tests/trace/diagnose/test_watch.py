"""The process beside a job: it answers, and it ends with who asked."""

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


def test_it_answers_the_newest_question_and_ends_with_its_input(traces: Path) -> None:
    told = subprocess.run(
        [*COMMAND, str(traces), str(os.getpid())],
        input="2 5\n2 12\n",
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout
    (line,) = told.splitlines()
    assert "11 iterations" in json.loads(line)["findings"][0]["text"]


def test_it_ends_with_the_process_that_started_it(traces: Path) -> None:
    starter = (
        "import os, subprocess, sys\n"
        "command = [*sys.argv[1:], str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdin=int(os.environ['INPUT']))\n"
        "print(child.pid, flush=True)\n"
    )
    # Its input stays open, as where another child of the job holds it.
    given, open_end = os.pipe()
    try:
        # Returns when the last of both has closed the output.
        subprocess.run(
            [sys.executable, "-c", starter, *COMMAND, str(traces)],
            stdout=subprocess.PIPE,
            timeout=WATCHDOG_S,
            check=True,
            pass_fds=(given,),
            env={**os.environ, "PYTHONPATH": str(ROOT), "INPUT": str(given)},
        )
    finally:
        os.close(given)
        os.close(open_end)
