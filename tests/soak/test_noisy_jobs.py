"""Tests that noise neither moves layers permanently nor distributes microbatches unevenly."""

from __future__ import annotations

import os

import pytest

from tests.soak.noisy_jobs import KINDS, PATIENCE, kept_moves, run_jobs

MINUTES = float(os.environ.get("NOISY_MINUTES", "0"))
"""Minimum duration of all jobs in minutes.

Use a few hundred before a release. The value 0 skips the jobs.
"""


def iterations(first: int, end: int) -> str:
    return "".join(f" iteration {number:8}/ 48 | loss\n" for number in range(first, end))


def moved(partition: str) -> str:
    return f"  repartition: 3-3 -> {partition}: rank 1 takes 1.2 times as long; 1 layer moved\n"


@pytest.mark.parametrize(
    ("log", "moves", "kept"),
    [
        (iterations(1, 40), 0, ()),
        (iterations(1, 7) + moved("4-2") + iterations(7, 13) + moved("3-3"), 2, ()),
        (iterations(1, 40) + moved("4-2") + iterations(40, 45), 1, ()),
        (
            iterations(1, 7) + moved("4-2") + iterations(7, 40),
            1,
            (f"4-2 from iteration 6 to {6 + PATIENCE}",),
        ),
        (iterations(1, 5) + "the stages of 2-2-2-2 layers are now placed in a v: moved\n", 0, ()),
        (
            "the stages of 3-2-2-1 layers are now placed in a v: moved in 1 s\n"
            + iterations(1, 40),
            1,
            (),
        ),
    ],
    ids=["none", "back", "at the end", "kept", "order", "even ranks"],
)
def test_moves_that_stay_are_read_from_the_log(log: str, moves: int, kept: tuple[str, ...]) -> None:
    assert kept_moves(log) == (moves, kept)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.skipif(not MINUTES, reason="NOISY_MINUTES=N trains with noise for N minutes")
@pytest.mark.timeout(60 * MINUTES + 900)
def test_noise_moves_nothing_that_stays() -> None:
    jobs = run_jobs(list(KINDS), MINUTES, seed=1)
    assert [(job.name, job.kept) for job in jobs if job.kept] == []
