"""Tests the memory limits and the ratios in the benchmark of long documents."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.long_documents import (
    INTERLEAVED,
    SLICED,
    SLICES,
    WHOLE,
    _rows,
    candidates,
    profile_of,
    simulated,
)
from megatron.adaptive.schedule.choose_by_simulation import evaluate


@pytest.mark.long
def test_orders_keep_their_memory_and_simulated_goals_are_met() -> None:
    by_name = candidates(4, 4)
    assert set(by_name) == {WHOLE, SLICED}
    peaks = {
        name: evaluate(candidate, 4, profile_of(4), (0,)).peak_units
        for name, candidate in by_name.items()
    }
    assert peaks[SLICED] <= 2.001
    assert peaks[WHOLE] <= 4.001
    assert by_name[SLICED].num_slices == SLICES
    assert set(candidates(4, 8)) == {WHOLE, SLICED, INTERLEAVED}
    assert all(row.met for row in simulated(None).rows)


def test_factors_are_those_of_the_same_repetition() -> None:
    times = {WHOLE: (4.0, 6.0), SLICED: (2.0, 2.0)}
    records: list[dict[str, Any]] = [
        {"count": 4, "name": name, "s": seconds, "peak": 4.0, "order": "order"}
        for name, pair in times.items()
        for seconds in pair
    ]
    (row,) = _rows(records, 4)
    assert row.samples == (2.0, 3.0)
    assert row.met
