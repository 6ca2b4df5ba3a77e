"""Tests on which ranks stages are placed, and the path of a microbatch through the stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind

placements = st.builds(
    Placement,
    num_ranks=st.integers(1, 6),
    num_chunks=st.integers(1, 4),
    kind=st.sampled_from(["loop", "v"]),
)


@pytest.mark.parametrize(
    ("kind", "chunk_1"), [("loop", [4, 5, 6, 7]), ("v", [7, 6, 5, 4])], ids=["loop", "v"]
)
def test_layout_as_drawn(kind: PlacementKind, chunk_1: list[int]) -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind=kind)
    assert placement.num_stages == 8
    assert [placement.stage_of(rank, 0) for rank in range(4)] == [0, 1, 2, 3]
    assert [placement.stage_of(rank, 1) for rank in range(4)] == chunk_1


@given(placements)
def test_locate_inverts_stage_of_and_covers_all_stages(placement: Placement) -> None:
    places = [
        (rank, chunk)
        for rank in range(placement.num_ranks)
        for chunk in range(placement.num_chunks)
    ]
    assert sorted(placement.stage_of(*location) for location in places) == list(
        range(placement.num_stages)
    )
    assert all(placement.locate(placement.stage_of(*location)) == location for location in places)


@given(placements)
def test_next_walks_all_stages_and_previous_walks_back(placement: Placement) -> None:
    location = placement.locate(0)
    assert placement.source_of(ActionKind.F, *location) is None
    for stage in range(1, placement.num_stages):
        following = placement.target_of(ActionKind.F, *location)
        assert following == placement.locate(stage)
        assert placement.source_of(ActionKind.F, *following) == location
        location = following
    assert placement.target_of(ActionKind.F, *location) is None


def test_the_ring_of_neighbours_closes_with_several_chunks() -> None:
    for chunks, expected in (
        (1, [(1,), (0, 2), (1, 3), (2,)]),
        (2, [(1, 3), (0, 2), (1, 3), (0, 2)]),
    ):
        placement = Placement(num_ranks=4, num_chunks=chunks)
        assert [placement.neighbours_of(rank) for rank in range(4)] == expected
    assert Placement(num_ranks=1, num_chunks=3).neighbours_of(0) == ()


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(0, 1), (1, 0), (-2, 1)])
def test_counts_below_one_are_refused(num_ranks: int, num_chunks: int) -> None:
    with pytest.raises(ScheduleError, match="at least 1"):
        Placement(num_ranks=num_ranks, num_chunks=num_chunks)


def test_out_of_range_is_refused() -> None:
    placement = Placement(num_ranks=2, num_chunks=2)
    with pytest.raises(ScheduleError, match="rank 2, chunk 0"):
        placement.stage_of(2, 0)
    with pytest.raises(ScheduleError, match="rank 0, chunk -1"):
        placement.stage_of(0, -1)
    with pytest.raises(ScheduleError, match="stage 4"):
        placement.locate(4)
    with pytest.raises(ScheduleError, match="placement must be one of loop, v, got 'ring'"):
        Placement(num_ranks=2, num_chunks=2, kind="ring")  # type: ignore[arg-type]
