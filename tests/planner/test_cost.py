"""Tests plans whose stages have different numbers of GPUs, and the runs of such plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.config.plan_file import plan_flags, world_size_of
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner import cost
from megatron.adaptive.planner.chunk_partition import handed_over, scheduled
from megatron.adaptive.planner.cost import (
    StageSums,
    as_run,
    dealt_widths,
    held_of,
    predict,
    simulated,
)
from megatron.adaptive.planner.layer_costs import OURS
from megatron.adaptive.planner.plan import Plan, Replica, StagePlace, conf_text, plan_document
from megatron.adaptive.planner.propose import Request, propose
from megatron.adaptive.schedule.unequal_widths import Widths
from tests.support.small_clusters import Problem, random_problem


def problem() -> Problem:
    """Returns a random problem with at least three nodes, each with one GPU."""
    for seed in range(100):
        drawn = random_problem(seed)
        if len(drawn.cluster.nodes) >= 3 and all(kind.gpus == 1 for kind in drawn.cluster.types):
            return drawn
    raise AssertionError


def plan_of(inputs: Problem, sizes: tuple[int, ...], waves: int = 4) -> Plan:
    """Returns a plan whose stages have ``sizes`` GPUs, each on a separate node."""
    nodes = iter(range(len(inputs.cluster.nodes)))
    wave = Widths(sizes).round_size
    places = tuple(
        StagePlace(
            replicas=tuple(Replica(node=next(nodes), gpu=0, tp=1) for _ in range(size)),
            micro_batch=wave // size,
        )
        for size in sizes
    )
    layers = inputs.model.num_layers
    return Plan(
        tp=1, dp=sizes[0], pp=len(sizes), micro_batch=wave // sizes[0], global_batch=waves * wave,
        partition=(layers - len(sizes) + 1, *(1,) * (len(sizes) - 1)), places=places,
    )  # fmt: skip


def test_the_run_has_microbatches_of_one_size() -> None:
    searched = plan_of(problem(), (2, 1))
    assert dealt_widths(searched) is None
    run = as_run(searched)
    assert [stage.micro_batch for stage in run.places] == [1, 1]
    assert dealt_widths(run) == Widths((2, 1))
    assert as_run(run) == run
    assert held_of(run, Widths((2, 1))) == (2.0, 1.0)
    # A plan must remain unchanged if the trainer cannot run it, or if all of its stages have the
    # same number of ranks.
    for other in (replace(searched, distributed_optimizer=True), plan_of(problem(), (1, 1))):
        assert as_run(other) == other


def test_a_prediction_adds_up_and_knows_its_schedules() -> None:
    inputs = problem()
    run = as_run(plan_of(inputs, (2, 1)))
    for schedule in ("1f1b", "adaptive", "gpipe"):
        seen = predict(replace(run, schedule=schedule), inputs)
        assert sum(seen.parts.values()) == pytest.approx(seen.seconds)
        assert all(0 <= stage.bubble < 1 for stage in seen.stages)
    with pytest.raises(
        ScheduleError, match="zb-h1 does not support stages of unequal widths .2-1."
    ):
        predict(replace(run, schedule="zb-h1"), inputs)
    row = scheduled(plan_of(inputs, (2, 1)), inputs, ("zb-h1", "1f1b"))
    assert row.plan == run


@pytest.mark.parametrize("schedule", ["zb-h1", "adaptive"])
def test_layers_are_divided_for_the_order_that_runs(schedule: str) -> None:
    inputs = problem()
    roomy = [
        replace(group, type=replace(group.type, memory_bytes=1 << 40))
        for group in inputs.cluster.groups
    ]
    inputs = replace(inputs, cluster=replace(inputs.cluster, groups=tuple(roomy)))
    uneven = replace(as_run(plan_of(inputs, (1, 1))), schedule=schedule)
    before = predict(uneven, inputs).seconds
    plan, seconds = handed_over(uneven, before, inputs, 30)
    layers = inputs.model.num_layers
    every = [replace(plan, partition=(layers - n, n)) for n in range(1, layers)]
    assert seconds == min(predict(candidate, inputs).seconds for candidate in every) < before
    assert seconds == predict(plan, inputs).seconds


@pytest.mark.long
def test_weight_gradients_fill_the_waits_of_a_rule_that_separates_them() -> None:
    inputs = problem()
    # There are few microbatches and the stages are nearly equal, so ranks often wait.
    plan = replace(plan_of(inputs, (1, 1, 1), waves=3), partition=(3, 2, 2))
    stages = StageSums.of(plan, inputs, OURS)
    whole, forward = stages.durations_s[1:].sum(axis=0), stages.durations_s[0]
    assert stages.durations_s[2].all()
    joined = replace(stages, durations_s=np.array([forward, whole, 0 * whole]))
    split, unsplit = (
        [simulated(replace(plan, schedule=name), times).makespan_s for name in ("adaptive", "dfc")]
        for times in (stages, joined)
    )
    # The rule adaptive uses separate actions for weight gradients by default, but the rule dfc does
    # not.
    assert split[0] < 0.95 * unsplit[0]
    assert split[1] == pytest.approx(unsplit[1])


@pytest.mark.parametrize("change", [{"recompute": "full"}, {"overlap_reduce": True, "dp": 2}])
def test_weight_gradients_are_joined_where_the_trainer_joins_them(change: dict[str, Any]) -> None:
    """Checks that the planner does not split backward passes if the trainer does not.

    By default, the trainer does not split them with full recomputation or overlapping reductions.
    """
    inputs = problem()
    plan = replace(plan_of(inputs, (1, 1, 1), waves=3), partition=(3, 2, 2), schedule="adaptive")
    stages = StageSums.of(plan, inputs, OURS)
    whole, forward = stages.durations_s[1:].sum(axis=0), stages.durations_s[0]
    joined = replace(stages, durations_s=np.array([forward, whole, 0 * whole]))
    assert simulated(plan, stages).makespan_s < 0.95 * simulated(plan, joined).makespan_s
    plan = replace(plan, global_batch=plan.global_batch * change.get("dp", 1), **change)
    expected = simulated(plan, joined).makespan_s
    assert simulated(plan, stages).makespan_s == pytest.approx(expected)


def test_a_rule_with_full_recomputation_keeps_nothing_for_weight_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = problem()
    plan = replace(plan_of(inputs, (1, 1, 1)), schedule="adaptive", recompute="full")
    expected = StageSums.of(plan, inputs, OURS).memory
    monkeypatch.setattr(cost, "waiting", lambda *_: (1000.0,) * plan.pp)
    assert StageSums.of(plan, inputs, OURS).memory == expected


def test_the_work_of_a_stage_is_divided_by_its_width() -> None:
    inputs = problem()
    run = as_run(plan_of(inputs, (2, 1), waves=40))
    wide = predict(run, inputs)
    stage = wide.stages[0]
    busy = (1 - stage.bubble) * 40 * (stage.forward_s + stage.backward_s)
    assert busy <= wide.seconds
    # A step has 80 microbatches, and each of the two replicas of the first stage runs 40.
    assert run.num_microbatches == 40


def test_the_trainer_and_the_launcher_take_the_plan() -> None:
    inputs = problem()
    run = as_run(plan_of(inputs, (2, 1)))
    seen = predict(run, inputs)
    document = plan_document(run, inputs, seen)
    assert world_size_of(document) == 3
    flags = plan_flags(document, "plan.json")
    assert flags[flags.index("--stage-data-parallel-sizes") + 1] == "2-1"
    assert flags[flags.index("--micro-batch-size") + 1] == "1"
    lines = conf_text(document).splitlines()
    assert "STAGE_DP_SIZES=2-1" in lines
    assert not any(line.startswith("DP_SIZE=") for line in lines)


def test_proposed_plans_are_in_the_order_in_which_they_run() -> None:
    inputs = problem()
    options = replace(
        inputs.options, unequal=True, tp=(1,), distributed_optimizer=(False,), top=8
    )  # fmt: skip
    request = Request(global_batch=inputs.global_batch, options=options)
    rows = propose(inputs, request).rows
    seconds = [row.prediction.seconds for row in rows]
    assert seconds == sorted(seconds)
    for row in rows:
        if not row.plan.uniform:
            assert dealt_widths(row.plan) is not None
            again = predict(row.plan, inputs)
            assert again.seconds == pytest.approx(row.prediction.seconds)
