"""Tests the minimum and default memory cap, invalid caps, and the memory that schedules need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import make_schedule
from megatron.adaptive.schedule.memory_caps import chunk_shares, default_cap, scaled_cap
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import peak_units


@given(ranks=st.integers(1, 8), chunks=st.integers(1, 4), rounds=st.integers(1, 5))
def test_default_cap_covers_the_best_static_schedule(ranks: int, chunks: int, rounds: int) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    microbatches = ranks * rounds
    cap = default_cap(placement, microbatches)
    static = make_schedule("1f1b" if chunks == 1 else "interleaved", placement, microbatches)
    assert max(peak_units(static)) <= cap + 1e-9
    assert 1.0 <= cap <= microbatches
    scaled_cap(cap, chunks)


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "cap"),
    [(4, 1, 16, 6.0), (4, 1, 3, 3.0), (4, 2, 16, 8.5), (2, 2, 1, 1.0), (1, 2, 8, 1.0)],
)
def test_default_cap(ranks: int, chunks: int, microbatches: int, cap: float) -> None:
    placement = Placement(num_ranks=ranks, num_chunks=chunks)
    assert default_cap(placement, microbatches) == cap


@pytest.mark.parametrize("cap", [0.5, float("nan")])
def test_a_cap_below_the_least_names_the_least(cap: float) -> None:
    with pytest.raises(ScheduleError, match=f"at least 1 .* in each of 2 chunks.*got {cap}"):
        scaled_cap(cap, 2)


def test_chunks_share_the_cap_by_the_stages_that_follow() -> None:
    # Rank 0 of a V has the stages 0 and 7, and rank 3 has the stages 3 and 4. A cap of 4
    # microbatches with two chunks each allows 8 activations of single chunks.
    assert chunk_shares(Placement(num_ranks=4, num_chunks=2, kind="v"), 0, 4.0) == (7,)
    assert chunk_shares(Placement(num_ranks=4, num_chunks=2, kind="v"), 3, 4.0) == (4,)
    assert chunk_shares(Placement(num_ranks=4, num_chunks=3), 3, 4.0) == (7, 4)
    assert chunk_shares(Placement(num_ranks=4, num_chunks=3), 0, 1.0) == (1, 1)
    assert chunk_shares(Placement(num_ranks=4, num_chunks=1), 0, 4.0) == ()


def test_a_cap_below_the_largest_microbatch_is_refused() -> None:
    with pytest.raises(ScheduleError, match="cap must be at least 2.5 .* got 2"):
        scaled_cap(2.0, 2, 2.5)
