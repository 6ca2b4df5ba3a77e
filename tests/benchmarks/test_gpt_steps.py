"""Tests that the competitors in the GPT benchmark agree, and how their times are compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpt_steps
from benchmarks.gpt_steps import JOBS, disagreements, make_rows, takes_part
from harness.report import Row
from tests.multiprocess.launch import forking


def results(**changes: Any) -> dict[str, dict[str, Any]]:
    """Returns results of three rounds. All steps take one second, except those in ``changes``."""
    return {
        job: {
            "times": {
                name: changes.get(
                    name, [1.0 if takes_part(job, name, i) else None for i in range(3)]
                )
                for name in JOBS[job].competitors
            },
            "differences": {name: {"loss": 0.0, "gradient": 0.0} for name in JOBS[job].competitors},
        }
        for job in JOBS
    }


def row_of(rows: list[Row], text: str) -> Row:
    (row,) = (row for row in rows if text in row.what)
    return row


def test_a_row_compares_the_rounds_that_both_took() -> None:
    times: dict[str, Any] = {"interleaved": [1.0, 9.0, 3.0], "torch interleaved": [2.0, None, 4.0]}
    rows = make_rows(results(**times))
    row = row_of(rows, "2 chunks: step of interleaved over torch interleaved")
    assert list(row.samples) == [1 / 2, 3 / 4]
    assert row.value == (1 / 2 + 3 / 4) / 2
    assert row.note == "2000.0 ms against 3000.0"
    assert row.goal is row.met is None
    missed = row_of(rows, "2 chunks: step of interleaved over megatron")
    assert (missed.value, missed.met) == (3.0, False)
    assert row_of(rows, "2 chunks: step of adaptive over megatron").met is True
    assert sum(row.met is False for row in rows) == 1


@pytest.mark.parametrize("difference", [2e-5, math.nan])
def test_another_loss_is_named(difference: float) -> None:
    jobs = results()
    assert disagreements(jobs) == []
    jobs["V"]["differences"]["torch zb-v"]["loss"] = difference
    (line,) = disagreements(jobs)
    assert line.startswith("V: the loss of torch zb-v differs from that of zb-v by ")
    row = row_of(make_rows(jobs), "difference of the loss")
    assert (row.met, row.note) == (False, line)
    assert row_of(make_rows(jobs), "difference of the gradient").met


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_all_competitors_compute_the_same(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in forking().items():
        monkeypatch.setenv(name, value)
    result = gpt_steps.measure(job, rounds=1, width=64)
    assert tuple(result["differences"]) == JOBS[job].competitors
    assert disagreements({job: result}) == []
    assert all(seconds > 0 for (seconds,) in result["times"].values())
