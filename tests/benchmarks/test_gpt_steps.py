"""The small GPT: who is compared with whom, and that all competitors compute the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpt_steps
from benchmarks.gpt_steps import DUELS, JOBS, disagreements, make_rows, markdown, takes_part


def results(**changes: Any) -> dict[str, dict[str, Any]]:
    """What jobs of three rounds return: a second per step, and all agree; with changed times."""
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


def row_of(rows: list[dict[str, Any]], job: str, schedule: str, rival: str) -> dict[str, Any]:
    (row,) = (
        row for row in rows if [row["job"], row["schedule"], row["rival"]] == [job, schedule, rival]
    )
    return row


def test_goals_are_against_megatron_and_the_same_for_all() -> None:
    with_goal = [duel for duel in DUELS if duel[3] is not None]
    assert with_goal == [
        ("1 chunk", "1f1b", "megatron", 1.02),
        ("1 chunk", "adaptive", "megatron", 1.02),
        ("2 chunks", "interleaved", "megatron", 1.02),
        ("2 chunks", "adaptive", "megatron", 1.02),
    ]
    for job, name, rival, _ in DUELS:
        assert {name, rival} <= {*JOBS[job].competitors}


def test_who_has_a_goal_takes_part_in_every_round() -> None:
    rounds = {
        name: [takes_part("2 chunks", name, i) for i in range(3)]
        for name in JOBS["2 chunks"].competitors
    }
    assert rounds["megatron"] == rounds["interleaved"] == rounds["adaptive"] == [True] * 3
    assert rounds["torch interleaved"] == [True, False, True]


def test_a_row_compares_the_rounds_that_both_took() -> None:
    times: dict[str, Any] = {"interleaved": [1.0, 9.0, 3.0], "torch interleaved": [2.0, None, 4.0]}
    rows = make_rows(results(**times))
    row = row_of(rows, "2 chunks", "interleaved", "torch interleaved")
    assert row["ratio"] == (1 / 2 + 3 / 4) / 2
    assert row["quartiles"] == [0.5, 0.75]
    assert (row["step_ms"], row["rival_step_ms"]) == (2000.0, 3000.0)
    assert row["goal"] is row["met"] is None
    missed = row_of(rows, "2 chunks", "interleaved", "megatron")
    assert (missed["ratio"], missed["met"]) == (3.0, False)
    assert row_of(rows, "2 chunks", "adaptive", "megatron")["met"] is True
    assert [
        line[-8:] for line in markdown(rows, results(**times)).splitlines() if "MISS" in line
    ] == ["MISSED |"]


@pytest.mark.parametrize("difference", [2e-5, math.nan])
def test_another_loss_is_told(difference: float) -> None:
    found = results()
    assert disagreements(found) == []
    found["V"]["differences"]["torch zb-v"]["loss"] = difference
    (line,) = disagreements(found)
    assert line.startswith("V: the loss of torch zb-v differs from that of zb-v by ")
    assert f"WRONG: {line}" in markdown(make_rows(found), found)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_all_competitors_compute_the_same(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = gpt_steps.measure(job, rounds=1)
    assert tuple(result["differences"]) == JOBS[job].competitors
    assert disagreements({job: result}) == []
    assert all(seconds > 0 for (seconds,) in result["times"].values())
