"""Tests that ``tests.soak.tried_ranks`` measures each rank's memory and reports missed goals."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.soak import tried_ranks


def test_a_rank_and_its_memory_are_found_by_its_process() -> None:
    program = "print(len(bytearray(1 << 25)), flush=True); input()"
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "RANK": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with rank:
        assert rank.stdout is not None
        assert int(rank.stdout.readline()) == 1 << 25
        assert tried_ranks.rank_of(rank.pid) == 3
        assert tried_ranks.peak_bytes(rank.pid) > 1 << 25
        rank.kill()
    assert tried_ranks.rank_of(rank.pid) is None
    assert tried_ranks.peak_bytes(rank.pid) == 0


def test_a_ratio_far_from_1_on_either_side_misses_the_goal() -> None:
    for quotients, met in (([0.96, 1.2, 1.04], True), ([0.94], False), ([1.06], False)):
        ratio, distance = tried_ranks.rows_of("memory", quotients, 0.05)
        assert ratio.met is None
        assert distance.met is met
