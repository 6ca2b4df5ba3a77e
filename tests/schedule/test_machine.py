"""The numbers of a rank: what the plain functions do to them, with split and whole backwards."""

from __future__ import annotations

import pytest

from megatron.adaptive.schedule import machine
from megatron.adaptive.schedule.machine import B, F, W
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.state import new_numbers

V = Placement(num_ranks=2, num_chunks=2, kind="v")


def ready(s: list[int]) -> list[tuple[int, int]]:
    chunks = s[machine.CHUNKS]
    return [(k, c) for k in (F, B, W) for c in range(chunks) if machine.is_ready(s, k, c)]


def do(s: list[int], kind: int, chunk: int) -> None:
    assert machine.is_ready(s, kind, chunk)
    machine.start(s, kind, chunk)
    machine.finish(s, kind, chunk)


def test_one_microbatch_through_a_rank_that_holds_both_ends() -> None:
    s = new_numbers(placement=V, rank=0, num_microbatches=1, weight_pieces=2)
    assert s[machine.TOTAL] == 2 * (1 + 1 + 2)
    assert ready(s) == [(F, 0)]
    do(s, F, 0)
    assert ready(s) == []
    machine.arrive(s, F, 1, 0)
    do(s, F, 1)
    assert ready(s) == [(B, 1)]  # the last stage's backward starts from its own loss
    do(s, B, 1)
    assert ready(s) == [(W, 1)]
    do(s, W, 1)
    do(s, W, 1)
    assert ready(s) == []
    machine.arrive(s, B, 0, 0)
    do(s, B, 0)
    do(s, W, 0)
    do(s, W, 0)
    assert s[machine.FINISHED] == s[machine.TOTAL]
    assert s[machine.IN_FLIGHT] == 0


@pytest.mark.parametrize(("kept", "after_backward"), [(1.0, 0.5), (0.25, 0.125), (0.0, 0.0)])
def test_a_split_backward_keeps_its_part_until_the_last_piece(
    kept: float, after_backward: float
) -> None:
    s = new_numbers(placement=V, rank=1, num_microbatches=2, weight_pieces=3, kept_fraction=kept)
    held = []
    machine.arrive(s, F, 0, 0)
    machine.arrive(s, B, 0, 0)
    for kind in (F, B, W, W, W):
        do(s, kind, 0)
        held.append(s[machine.IN_FLIGHT] / machine.MEMORY_SCALE)
    assert held == [0.5, after_backward, after_backward, after_backward, 0.0]


def test_a_whole_backward_frees_everything_and_there_is_no_weight_gradient() -> None:
    s = new_numbers(placement=V, rank=1, num_microbatches=1)
    machine.arrive(s, F, 0, 0)
    machine.arrive(s, B, 0, 0)
    do(s, F, 0)
    do(s, B, 0)
    assert s[machine.IN_FLIGHT] == 0
    assert not machine.is_ready(s, W, 0)
    assert s[machine.TOTAL] == 4


def test_last_remembers_forwards_and_backwards_only() -> None:
    s = new_numbers(placement=V, rank=1, num_microbatches=1, weight_pieces=1)
    assert (s[machine.LAST], s[machine.LAST_STARTED]) == (-1, -1)
    machine.arrive(s, F, 0, 0)
    machine.arrive(s, B, 0, 0)
    for kind in (F, B, W):
        do(s, kind, 0)
    assert (s[machine.LAST], s[machine.LAST_STARTED]) == (B, W)


def test_the_graded_rule_leaves_room_for_later_chunks() -> None:
    s = new_numbers(placement=V, rank=0, num_microbatches=4, cap=1.5)
    for _ in range(2):
        assert machine.fits(s, 0)
        do(s, F, 0)
    assert not machine.fits(s, 0)  # a third one would leave no room for chunk 1
    assert machine.fits(s, 1)


def test_thirds_add_up_to_their_cap() -> None:
    placement = Placement(num_ranks=2, num_chunks=3)
    s = new_numbers(placement=placement, rank=0, num_microbatches=2, cap=1.0)
    for chunk in range(3):
        machine.arrive(s, F, chunk, 0) if chunk else None
        assert machine.fits(s, chunk)
        do(s, F, chunk)
    assert not machine.fits(s, 0)
