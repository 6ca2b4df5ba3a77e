"""Tests that a running job reports slow ranks once, and continues if the diagnosis fails."""

import io
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron.adaptive.cli.top import draw
from megatron.adaptive.engine.diagnosis import RunningDiagnosis
from megatron.adaptive.engine.progress import ProgressFile
from megatron.adaptive.trace.monitor import LiveRun
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

WATCHDOG_S = 60.0


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    fault = Fault(kind="slow-rank", rank=2, factor=1.5)
    write_synthetic(tmp_path, SyntheticRun(faults=(fault,), iterations=24))
    return tmp_path


def until_answered(diagnosis: RunningDiagnosis, iteration: int) -> None:
    end = time.monotonic() + WATCHDOG_S
    diagnosis.after_iteration(iteration)
    while diagnosis._process is not None and time.monotonic() < end:
        time.sleep(0.02)
        diagnosis.after_iteration(iteration)
    assert diagnosis._process is None


@pytest.mark.long
def test_a_finding_is_told_once(traces: Path) -> None:
    messages: list[str] = []
    diagnosis = RunningDiagnosis(str(traces), 10, 0, messages.append)
    for iteration in range(1, 11):
        diagnosis.after_iteration(iteration)
        assert diagnosis._process is None
    until_answered(diagnosis, 11)
    assert len(messages) == 1
    assert messages[0].startswith("warning: slow rank: rank 2 (stage 2, host0) takes 1.5")
    until_answered(diagnosis, 21)
    assert len(messages) == 1
    diagnosis.close()
    diagnosis.close()


def test_iterations_before_a_new_trace_in_the_folder_are_left_out(traces: Path) -> None:
    """Checks that iterations before the start of a new trace are not diagnosed."""
    messages: list[str] = []
    diagnosis = RunningDiagnosis(str(traces), 10, 0, messages.append)
    for path in traces.glob("trace_rank_*"):
        head, *blocks = path.read_text().split('{"begin_iteration"')
        path.write_text(head + "".join(f'{{"begin_iteration"{block}' for block in blocks[12:]))
    diagnosis.begin_after(12)
    diagnosis.after_iteration(22)
    assert diagnosis._process is None
    until_answered(diagnosis, 23)
    assert len(messages) == 1
    diagnosis.close()


def test_the_gain_of_each_finding_is_noted(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], bool]] = []

    def log(values: dict[str, float], *, commit: bool) -> None:
        logged.append((values, commit))

    run = types.SimpleNamespace(log=log)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    progress = ProgressFile(str(traces))
    progress.begins(0, 100)
    note = lambda **values: progress.report(values)  # noqa: E731
    diagnosis = RunningDiagnosis(str(traces), 10, 0, print, note)
    until_answered(diagnosis, 11)
    diagnosis.close()
    progress.close()
    snapshot = LiveRun(traces).refresh()
    (finding,) = snapshot.findings
    assert finding["headline"].startswith("slow rank: rank 2 (stage 2, host0) takes 1.5")
    assert 0.1 < finding["gain"] < 1 / 3
    assert [rank.rank for rank in snapshot.ranks if rank.slow] == [2]
    assert snapshot.ranks[2].slow == pytest.approx(1.5, abs=0.1)
    assert logged == [({"gain/slow rank 2": finding["gain"]}, False)]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(draw(snapshot, 200))
    assert f"gain {finding['gain']:.1%}: slow rank: rank 2" in console.export_text()


def test_a_rank_that_stays_slow_is_noted_each_time(traces: Path) -> None:
    noted: list[dict[str, Any]] = []
    diagnosis = RunningDiagnosis(str(traces), 10, 0, print, lambda **fields: noted.append(fields))
    until_answered(diagnosis, 11)
    until_answered(diagnosis, 21)
    diagnosis.close()
    noted = [note for note in noted if "findings" not in note]
    assert [(note["slow_rank"], note["times"]) for note in noted] == [(2, 1), (2, 2)]
    for note in noted:
        paces = note["pace_ns"]
        assert note["factor"] == pytest.approx(1.5, abs=0.1)
        assert len(paces) == 4
        assert paces[2] == max(paces) > 1.3 * min(paces)


def test_the_last_answer_is_told_at_the_end(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first diagnosis after an installation compiles code, which takes longer than a job
    # normally waits at its end.
    monkeypatch.setattr("megatron.adaptive.engine.diagnosis._LAST_S", WATCHDOG_S)
    messages: list[str] = []
    diagnosis = RunningDiagnosis(str(traces), 10, 0, messages.append)
    diagnosis.after_iteration(20)
    diagnosis.close()
    assert len(messages) == 1


def test_a_late_last_answer_does_not_delay_the_end(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.adaptive.engine.diagnosis._LAST_S", 0.01)
    messages: list[str] = []
    diagnosis = RunningDiagnosis(str(traces), 10, 0, messages.append)
    diagnosis.after_iteration(20)
    process = diagnosis._process
    assert process is not None
    diagnosis.close()
    assert process.returncode == -signal.SIGKILL
    assert messages == []


def test_a_job_goes_on_without_it(tmp_path: Path) -> None:
    messages: list[str] = []
    diagnosis = RunningDiagnosis(str(tmp_path / "none"), 1, 0, messages.append)
    until_answered(diagnosis, 5)  # The folder does not exist, so the diagnosis must fail.
    diagnosis.after_iteration(6)
    process = diagnosis._process
    assert process is not None
    process.kill()
    process.wait()
    diagnosis.after_iteration(7)
    diagnosis.after_iteration(8)
    # The diagnosis must have been started again after its process was killed.
    assert diagnosis._process is not None
    diagnosis.close()
    assert messages == []


def test_nothing_is_started_that_could_find_nothing(tmp_path: Path) -> None:
    for folder, interval, total in ((None, 1, 9), (str(tmp_path), 0, 9), (str(tmp_path), 5, 8)):
        diagnosis = RunningDiagnosis(folder, interval, 3, print, total_iterations=total)
        diagnosis.after_iteration(9)
        assert diagnosis._process is None
        diagnosis.close()
