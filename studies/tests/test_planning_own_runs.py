"""Tests how runs on this machine are evaluated. The tests do not start any runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from studies.planning import own_runs
from tests.support.synthetic_trace import SyntheticRun, write_synthetic


def test_goals_are_judged() -> None:
    records = [
        {"measured_s": 1.0, "predicted_s": 1.2, "error": 0.2},
        {"measured_s": 1.1, "predicted_s": 1.1, "error": 0.0},
        {"measured_s": 3.0, "predicted_s": 3.1, "error": -0.04},
    ]
    error, chosen, order = own_runs.summary(records, "own", 0.05)
    assert error.value == pytest.approx(0.04)
    assert error.met
    assert chosen.value == pytest.approx(0.1)
    assert not chosen.met
    assert order.value == pytest.approx(0.5)


def test_the_watch_tells_own_work_from_that_of_others() -> None:
    with own_runs.Watch(os.getpid()) as watch:
        begin = time.monotonic_ns()
        until = time.process_time() + 0.4
        while time.process_time() < until:
            pass
    first, last = watch.samples[0], watch.samples[-1]
    assert last[2] - first[2] > 0.2
    assert 0 <= watch.others(begin, time.monotonic_ns()) <= 1.1


def test_kept_runs_are_judged_without_running(tmp_path: Path) -> None:
    shape = own_runs.Shape(pp=2, layers=(4, 2))
    write_synthetic(tmp_path / "1", SyntheticRun(num_ranks=2, schedule="1f1b", iterations=6))
    busy = own_runs.QUIET * 2
    kept = {
        "shape": str(shape),
        "run": "1",
        "iterations": [3, 4, 5, 6],
        "steps_s": [1.0, 1.2, 9.0, 1.1],
        "others": [0.0, 0.01, busy, 0.02],
    }
    (tmp_path / own_runs.KEPT).write_text(json.dumps(kept))
    found = own_runs.reload(shape, tmp_path)
    assert found.iterations == (3, 4, 6)
    assert found.step_s == pytest.approx(1.1)
    assert found.trace.num_ranks == 2
    with pytest.raises(RuntimeError, match="measure again"):
        own_runs.reload(own_runs.Shape(), tmp_path)


def test_what_ran_in_quiet_is_kept_where_others_disturb_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, *plans = own_runs.TEACHERS[0], *own_runs.PLANS[:2]
    monkeypatch.setattr(own_runs, "TEACHERS", (teacher,))
    monkeypatch.setattr(own_runs, "PLANS", tuple(plans))
    # The stored runs of these configurations are from an earlier measurement that was interrupted.
    for shape in (teacher, plans[0]):
        place = tmp_path / "round-1" / str(shape).replace(" ", "_")
        made_up = SyntheticRun(num_ranks=2, schedule="1f1b", iterations=6, layers=3)
        write_synthetic(place / "0", made_up)
        kept = {"shape": str(shape), "run": "0", "iterations": [3, 4], "steps_s": [1.0, 1.0]}
        (place / own_runs.KEPT).write_text(json.dumps({**kept, "others": [0.0, 0.0]}))

    def disturbed(shape: own_runs.Shape, *_: object) -> own_runs.Outcome:
        raise own_runs.BusyError(f"{shape}: other programs disturbed the runs")

    monkeypatch.setattr(own_runs, "run", disturbed)
    found = own_runs.measure(tmp_path, again=True)
    assert [record["plan"] for record in found.facts["own"]] == [str(plans[0])]
    assert found.rows[0].note == "5 of 6 runs left out, because other programs disturbed them"
    assert "is incomplete: " in capsys.readouterr().out
