"""Layers of each rank and chunk, for every placement of stages."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.enums import LayerType  # noqa: E402
from megatron.core.transformer.pipeline_parallel_layer_layout import (  # noqa: E402
    PipelineParallelLayerLayout,
)

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.gpt.placement import PlacedLayout, placement_of  # noqa: E402
from megatron.adaptive.schedule.placement import Placement, PlacementKind  # noqa: E402

KINDS: tuple[PlacementKind, ...] = ("loop", "v")


def shapes() -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Placements with even and uneven partitions, those with empty stages among them."""
    draw = random.Random(1)
    for kind in KINDS:
        for ranks in (1, 2, 3, 4):
            for chunks in (1, 2, 3, 4):
                placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)
                stages = placement.num_stages
                yield placement, (2,) * stages
                yield placement, (*(draw.randrange(4) for _ in range(stages - 1)), 1)
                yield placement, (0,) * (stages - 1) + (5,)


SHAPES = list(shapes())


def name_of(value: object) -> str:
    if isinstance(value, Placement):
        return f"{value.kind}-{value.num_ranks}x{value.num_chunks}"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("placement", "layers_per_stage"), SHAPES, ids=name_of)
def test_every_layer_is_once_in_its_stage(
    placement: Placement, layers_per_stage: tuple[int, ...]
) -> None:
    layout = PlacedLayout(placement, layers_per_stage)
    seen: list[int] = []
    for stage, layers in enumerate(layers_per_stage):
        rank, chunk = placement.locate(stage)
        assert layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=rank) == layers
        assert layout.get_layer_offset(vp_stage=chunk, pp_rank=rank) == len(seen)
        seen += layout.get_layer_id_list(vp_stage=chunk, pp_rank=rank)
        assert layout.layout[rank][chunk].count(LayerType.decoder) == layers
    assert seen == list(range(sum(layers_per_stage)))
    assert not layout.validate_layer_layout(len(seen), None)


@pytest.mark.parametrize(("placement", "layers_per_stage"), SHAPES, ids=name_of)
def test_embedding_and_loss_are_in_the_first_and_last_stage(
    placement: Placement, layers_per_stage: tuple[int, ...]
) -> None:
    layout = PlacedLayout(placement, layers_per_stage)
    for kind, stage in ((LayerType.embedding, 0), (LayerType.loss, placement.num_stages - 1)):
        held = {
            (rank, chunk): layout.get_num_layers_to_build(kind, chunk, rank)
            for rank in range(placement.num_ranks)
            for chunk in range(placement.num_chunks)
        }
        assert {place for place, count in held.items() if count} == {placement.locate(stage)}


@pytest.mark.parametrize(
    ("placement", "layers_per_stage"),
    [shape for shape in SHAPES if shape[0].kind == "loop"],
    ids=name_of,
)
def test_a_loop_is_megatron_core_s_own_layout(
    placement: Placement, layers_per_stage: tuple[int, ...]
) -> None:
    mine = PlacedLayout(placement, layers_per_stage)
    stages = [["decoder"] * layers for layers in layers_per_stage]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    other = PipelineParallelLayerLayout(stages, placement.num_ranks)
    assert mine.layout == other.layout
    assert mine.flatten_layout == other.flatten_layout
    sizes = (placement.num_ranks, placement.num_chunks)
    for layout in (mine, other):
        assert layout.pipeline_model_parallel_size == sizes[0]
        assert layout.virtual_pipeline_model_parallel_size == sizes[1]
    if placement.num_chunks > 1:
        return  # the original then asks its global state
    for rank in range(placement.num_ranks):
        assert mine.get_layer_id_list(pp_rank=rank) == other.get_layer_id_list(pp_rank=rank)


def test_this_process_is_the_default() -> None:
    layout = PlacedLayout(Placement(num_ranks=2, num_chunks=2, kind="v"), (1, 2, 3, 4))
    parallel_state.set_pipeline_model_parallel_rank(1)
    try:
        assert layout.get_layer_id_list(vp_stage=0) == [1, 2]
        assert layout.get_layer_id_list(vp_stage=1) == [3, 4, 5]
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)


def test_the_placement_is_the_settings_one() -> None:
    flags = (
        "--num-layers 8 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 "
        "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --mock-data "
        "--vocab-size 100 --pipeline-model-parallel-size 2 --model-chunks 4"
    ).split()
    for kind in KINDS:
        config = parse([*flags, "--pipeline-placement", kind], world_size=2)
        assert placement_of(config) == Placement(num_ranks=2, num_chunks=4, kind=kind)
