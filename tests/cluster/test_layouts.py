"""Shapes for the processes that are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.adaptive.cluster.layouts import ParallelLayout, choose_layout, is_better
from megatron.adaptive.cluster.membership import Node
from megatron.adaptive.cluster.ranks import Start, TrainerProgram, assign
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.errors import ConfigError

FLAGS = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --save checkpoints "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 9 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --save-interval 3"
).split()


def chosen(slots: list[int], *extra: str) -> ParallelLayout:
    layout = choose_layout([*FLAGS, *extra], slots)
    assert layout is not None
    return layout


def test_as_many_processes_as_batch_and_layers_allow_near_the_pipeline_asked_for() -> None:
    found = {
        count: chosen([1] * count, "--pipeline-model-parallel-size", "2") for count in range(1, 10)
    }
    degrees = {count: (layout.pipeline, layout.data) for count, layout in found.items()}
    assert degrees == {
        1: (1, 1),
        2: (2, 1),
        3: (3, 1),
        4: (2, 2),
        5: (5, 1),
        6: (3, 2),
        7: (3, 2),  # seven stages have no layers, seven replicas no batch
        8: (2, 4),
        9: (2, 4),
    }
    assert found[5].partition == (1, 1, 2, 1, 1)
    for layout in found.values():
        config = parse([*FLAGS, *layout.flags], world_size=layout.world_size, last_wins=True)
        assert config.layers_per_stage == layout.partition
        assert config.batch.global_batch_size == 8


def test_tensor_parallel_groups_stay_on_their_nodes() -> None:
    layout = chosen([3, 2, 1], "--tensor-model-parallel-size", "2")
    assert (layout.tensor, layout.world_size) == (2, 4)
    nodes = [Node(name=name, slots=slots) for name, slots in (("a", 3), ("b", 1), ("c", 2))]
    places = assign(nodes, layout)
    assert [place.node.name for place in places] == ["a", "a", "c", "c"]
    assert [place.node_rank for place in places] == [0, 0, 1, 1]
    assert places[3].variables(3, 4) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert choose_layout([*FLAGS, "--tensor-model-parallel-size", "2"], [1, 1, 1]) is None


def test_a_job_moves_where_that_is_worth_it() -> None:
    three, four = chosen([1] * 3), chosen([1] * 4)
    assert is_better(four, three)
    assert not is_better(three, four)
    planned, quicker = replace(three, step_s=1.0), replace(four, step_s=0.98)
    assert not is_better(quicker, planned)
    assert is_better(replace(quicker, step_s=0.95), planned)
    assert is_better(planned, four)  # the planner had no answer in time before
    assert not is_better(planned, three)


def test_chunks_are_kept_where_they_fit() -> None:
    extra = ("--pipeline-model-parallel-size", "3", "--model-chunks", "2")
    assert chosen([3], *extra).partition == (1,) * 6
    assert chosen([4], *extra).partition == (1, 2, 2, 1)
    assert chosen([1], *extra).partition == (6,)


def test_arguments_that_are_wrong_in_every_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="--hidden-size"):
        choose_layout([*FLAGS, "--hidden-size", "33"], [2])


def test_an_epoch_goes_on_from_the_jobs_own_checkpoint() -> None:
    given = [*FLAGS, "--load", "other", "--finetune", "--ckpt-step", "5", "--trace-dir=traces"]
    layout = chosen([2])

    def told(resumed: int) -> list[str]:
        start = Start(layout=layout, incarnation=3, resumed=resumed, progress=Path("progress"))
        return TrainerProgram(given, Path("own")).told(start)[0]

    first = parse(told(0), world_size=2, last_wins=True).checkpoint
    assert (first.load, first.save, first.finetune, first.ckpt_step) == ("other", "own", True, 5)
    later = parse(told(7), world_size=2, last_wins=True)
    assert (later.checkpoint.load, later.checkpoint.finetune) == ("own", False)
    assert later.checkpoint.ckpt_step is None
    assert later.schedule.trace_dir == "traces/epoch-3"
    assert later.progress_dir == "progress"
