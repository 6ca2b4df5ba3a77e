"""Tests which layers belong to each chunk of each rank, for all placements of stages."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core.transformer.enums import LayerType  # noqa: E402
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # noqa: E402

from megatron.adaptive.gpt.model_placement import PlacedLayout, stages_of  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind  # noqa: E402

KINDS: tuple[PlacementKind, ...] = ("loop", "v")


def shapes() -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Yields pairs of a placement and the numbers of layers per stage, including empty stages."""
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
    """Checks that each layer is in one stage, with the embedding first and the loss last."""
    layout = PlacedLayout(placement, stages_of(layers_per_stage))
    seen: list[int] = []
    for stage, layers in enumerate(layers_per_stage):
        rank, chunk = placement.locate(stage)
        assert layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=rank) == layers
        assert layout.get_layer_offset(vp_stage=chunk, pp_rank=rank) == len(seen)
        seen += layout.get_layer_id_list(vp_stage=chunk, pp_rank=rank)
        assert layout.layout[rank][chunk].count(LayerType.decoder) == layers
        for kind, holder in ((LayerType.embedding, 0), (LayerType.loss, placement.num_stages - 1)):
            assert layout.get_num_layers_to_build(kind, chunk, rank) == (stage == holder)
    assert seen == list(range(sum(layers_per_stage)))
    assert not layout.validate_layer_layout(len(seen), None)
    # For a loop placement, the layout must equal the one that megatron-core computes.
    if placement.kind == "loop":
        stages = [["decoder"] * layers for layers in layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        other = PipelineParallelLayerLayout(stages, placement.num_ranks)
        for name in ("layout", "flatten_layout", "pipeline_model_parallel_size"):
            assert getattr(layout, name) == getattr(other, name)
