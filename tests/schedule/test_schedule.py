"""The container: what it says about itself."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_schedule
from megatron.adaptive.schedule.schedule import check_num_microbatches


def test_only_a_schedule_without_backwards_is_forward_only() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    assert make_schedule("forward-only", placement, 2).forward_only
    assert not make_schedule("1f1b", placement, 2).forward_only


@pytest.mark.parametrize("num_microbatches", [0, -1])
def test_an_empty_step_is_refused(num_microbatches: int) -> None:
    with pytest.raises(ScheduleError, match=f"{num_microbatches} microbatches.*at least 1"):
        check_num_microbatches(num_microbatches)
