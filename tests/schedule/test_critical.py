"""The critical path: a small step by hand, and that its parts add up to the makespan."""

from __future__ import annotations

import pytest

from megatron.adaptive.schedule.adaptive import Adaptive
from megatron.adaptive.schedule.critical import critical_path
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import make_policies
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.workload import Jitter, StageTimes


def test_one_microbatch_goes_there_and_back() -> None:
    placement = Placement(num_ranks=2, num_chunks=1)
    times = StageTimes(forward_s=(1.0, 1.5), backward_s=(2.0, 3.0))
    result = simulate(placement, 1, [Adaptive()] * 2, times, latency_s=0.25)
    path = critical_path(result)
    assert [(step.rank, str(step.span.action), step.wait_s) for step in path] == [
        (0, "F0-0", 0.0),
        (1, "F0-0", 0.25),
        (1, "B0-0", 0.0),
        (0, "B0-0", 0.25),
    ]


def test_a_slow_stage_is_the_path_of_a_long_step() -> None:
    placement = Placement(num_ranks=3, num_chunks=1)
    times = StageTimes(forward_s=(1.0, 4.0, 1.0), backward_s=(1.0, 4.0, 1.0))
    result = simulate(placement, 10, make_policies("1f1b", placement, 10), times)
    path = critical_path(result)
    assert sum(step.rank == 1 for step in path) == 20


@pytest.mark.parametrize("weight_pieces", [0, 3])
@pytest.mark.parametrize("kind", ["loop", "v"])
def test_actions_and_waits_add_up_to_the_makespan(kind: str, weight_pieces: int) -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind=kind)  # type: ignore[arg-type]
    times = StageTimes.equal(8, forward_s=1.0, backward_s=1.0, weight_s=0.8)
    for seed in range(5):
        result = simulate(
            placement,
            8,
            [Adaptive()] * 4,
            times,
            latency_s=0.2,
            jitter=Jitter(seed=seed, action_sigma=0.4),
            cap=3.0,
            weight_pieces=weight_pieces,
        )
        path = critical_path(result)
        whole = sum(step.wait_s + step.span.end_s - step.span.start_s for step in path)
        assert whole == pytest.approx(result.makespan_s, rel=1e-9)
        assert all(step.wait_s >= -1e-12 for step in path)
