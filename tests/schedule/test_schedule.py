"""The container: what it says about itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_schedule
from megatron.adaptive.schedule.schedule import check_num_microbatches, check_weight_pieces


def test_only_a_schedule_without_backwards_is_forward_only() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    assert make_schedule("forward-only", placement, 2).forward_only
    assert not make_schedule("1f1b", placement, 2).forward_only


def test_pieces_are_those_of_the_finest_weight_gradient() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    assert make_schedule("1f1b", placement, 2).weight_pieces == 0
    schedule = make_schedule("zb-h1", placement, 2)
    assert schedule.weight_pieces == 1
    cut = (*schedule.orders[0], Action(ActionKind.W, 0, 0, 2))
    assert replace(schedule, orders=(cut, schedule.orders[1])).weight_pieces == 3


@pytest.mark.parametrize("weight_pieces", [-1, -4])
def test_a_negative_number_of_pieces_is_refused(weight_pieces: int) -> None:
    check_weight_pieces(0)
    with pytest.raises(ScheduleError, match=f"{weight_pieces} pieces of a weight gradient"):
        check_weight_pieces(weight_pieces)


@pytest.mark.parametrize("num_microbatches", [0, -1])
def test_an_empty_step_is_refused(num_microbatches: int) -> None:
    with pytest.raises(ScheduleError, match=f"{num_microbatches} microbatches.*at least 1"):
        check_num_microbatches(num_microbatches)
