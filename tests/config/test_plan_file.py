"""Tests that ``--plan FILE`` has the same effect on the trainer as the flags of the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
MODEL += "--max-position-embeddings 32 --train-iters 1 --lr 1e-4 --mock-data --vocab-size 100"
PLAN: dict[str, Any] = {
    "format": 1,
    "model": "small",
    "precision": "bf16",
    "degrees": {"tensor": 2, "pipeline": 3, "data": 2, "chunks": 1},
    "placement": [{"type": "a10", "nodes": 3, "processes_per_node": 4}],
    "partition": [3, 3, 2],
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "schedule": "1f1b",
    "recompute": "full",
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "sequence_parallel": False,
    "prediction": {"step_s": 1.0},
}
FLAGS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --partition 3-3-2 "
    "--micro-batch-size 2 --global-batch-size 32 --pipeline-schedule 1f1b "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --bf16"
)


Planned = Callable[..., TrainerConfig]


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """Returns a function that parses a plan file together with flags for the model."""

    def run(plan: dict[str, Any], flags: str = "", processes: int = 12) -> TrainerConfig:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan))
        plan_flags = [f"--plan={path}"] if flags else ["--plan", str(path)]
        return parse([*MODEL.split(), *plan_flags, *flags.split()], world_size=processes)

    return run


def test_a_plan_equals_its_flags(planned: Planned) -> None:
    by_plan = planned(PLAN)
    assert by_plan == parse([*MODEL.split(), *FLAGS.split()], world_size=12)
    assert by_plan.layers_per_stage == (3, 3, 2)
    assert planned(PLAN, "--bf16") == by_plan


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_chunks_and_recompute(recompute: str, planned: Planned) -> None:
    degrees = {"pipeline": 2, "chunks": 2}
    plan = {"format": 1, "degrees": degrees, "micro_batch_size": 1, "recompute": recompute}
    config = planned(plan, processes=2)
    assert config.parallel.num_chunks == 2
    assert config.recompute.recompute_granularity == (None if recompute == "none" else recompute)


@pytest.mark.parametrize(
    ("flags", "processes", "message"),
    [
        ("--micro-batch-size 1", 12, "--micro-batch-size 1 contradicts --plan .* sets 2; remove"),
        ("--partition 2-3-3", 12, "--partition 2-3-3 contradicts --plan .* sets 3-3-2"),
        ("--fp16", 12, "--fp16 contradicts --plan .* bf16"),
        ("--plan other.json", 12, "--plan is given twice"),
        ("", 6, "needs 12 processes, but this run has 6"),
    ],
)
def test_what_contradicts_the_plan_is_named(
    flags: str, processes: int, message: str, planned: Planned
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(PLAN, flags, processes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recompute": "some"}, "recompute must be one of none, selective, full.*got 'some'"),
        ({"distributed_optimizer": 1}, "distributed_optimizer must be true or false.*got 1"),
        ({"shedule": "1f1b"}, "shedule is not a key; the nearest is schedule"),
        ({"stages": []}, "stages must have at least one entry, got 0"),
        ({"stages": [{"tensor": [2]}, {"tensor": [1, 1]}]}, "stages.0..tensor is .2., but the"),
        ({"stages": [{"width": 2}]}, "stages.0..width is not a key"),
        (
            {
                "stages": [
                    {"tensor": [1, 1], "micro_batch_size": 1},
                    {"tensor": [1], "micro_batch_size": 2},
                ]
            },
            "stages have microbatches of 1, 2 samples",
        ),
        ({"format": 9}, "format must be 1.*got 9"),
        ({"degrees": {"tensor": 0}}, "degrees.tensor must be .* got 0"),
        ({"partition": [1, -1]}, r"partition\[1\] must be .* got -1"),
        ({"placement": []}, "placement must have .* got 0"),
        ({"placement": [{"nodes": 1}]}, r"placement\[0\].processes_per_node is missing"),
    ],
)
def test_a_bad_plan_is_named(change: dict[str, Any], message: str, planned: Planned) -> None:
    with pytest.raises(ConfigError, match=message):
        planned({**PLAN, **change})


def test_a_plan_of_unequal_stages(planned: Planned) -> None:
    plan = {
        "format": 1,
        "degrees": {"tensor": 1, "pipeline": 2, "data": 2, "chunks": 1},
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "partition": [5, 3],
        "schedule": "1f1b",
        "stages": [
            {"tensor": [1, 1], "nodes": [0, 1], "micro_batch_size": 2},
            {"tensor": [1], "nodes": [2], "micro_batch_size": 2},
        ],
    }
    flags = "--pipeline-model-parallel-size 2 --stage-data-parallel-sizes 2-1 --partition 5-3 "
    flags += "--micro-batch-size 2 --global-batch-size 8 --pipeline-schedule 1f1b"
    assert planned(plan, processes=3) == parse([*MODEL.split(), *flags.split()], world_size=3)
    with pytest.raises(ConfigError, match="needs 3 processes, but this run has 4"):
        planned(plan, processes=4)


def test_a_plan_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="nowhere.json: No such file"):
        parse([*MODEL.split(), "--plan", "nowhere.json"], world_size=1)
    with pytest.raises(ConfigError, match="--plan: expected one argument"):
        parse([*MODEL.split(), "--plan"], world_size=1)
