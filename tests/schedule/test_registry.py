"""Names: what is known, and that an unknown name lists it."""

from __future__ import annotations

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import (
    make_policies,
    make_schedule,
    policy_names,
    schedule_names,
)
from megatron.adaptive.schedule.simulate import StageTimes, simulate
from megatron.adaptive.schedule.validate import validate


def chunks_for(name: str) -> int:
    return 1 if name == "1f1b" else 2


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_is_valid_and_carries_its_name(name: str) -> None:
    schedule = make_schedule(name, Placement(num_ranks=2, num_chunks=chunks_for(name)), 4)
    assert schedule.name == name
    validate(schedule)


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_runs_a_step(name: str) -> None:
    placement = Placement(num_ranks=2, num_chunks=chunks_for(name))
    policies = make_policies(name, placement, 4)
    assert [policy.name for policy in policies] == [name, name]
    result = simulate(
        placement,
        4,
        policies,
        StageTimes.equal(placement.num_stages, forward_s=1, backward_s=2),
        forward_only=name == "forward-only",
    )
    assert result.makespan_s > 0


def test_names() -> None:
    assert schedule_names() == ("1f1b", "forward-only", "gpipe", "interleaved")
    assert policy_names() == ("1f1b", "adaptive", "forward-only", "gpipe", "interleaved")


def test_unknown_names_list_the_known_ones() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    with pytest.raises(ScheduleError, match=r"'2f2b'.*1f1b, forward-only, gpipe, interleaved"):
        make_schedule("2f2b", placement, 4)
    with pytest.raises(ScheduleError, match=r"'greedy'.*1f1b, adaptive, forward-only"):
        make_policies("greedy", placement, 4)
