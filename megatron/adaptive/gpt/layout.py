"""Which layers a rank builds: megatron-core's layer layout for any placement of stages.

megatron-core knows one placement, the loop. Layer numbers (and with them names in checkpoints and
the first weights) follow from the layout that its configuration holds, so a V needs only another
layout; first and last stage are told apart where the model is built.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.widths import Widths, chosen

__all__ = ["PlacedLayout", "placement_of", "widths_of"]


def placement_of(config: TrainerConfig) -> Placement:
    """Return where the stages of a run live."""
    return Placement(
        num_ranks=config.parallel.pipeline_model_parallel_size,
        num_chunks=config.parallel.num_chunks,
        kind=config.placement_kind,
    )


def widths_of(config: TrainerConfig) -> Widths | None:
    """Return the ranks of each stage where stages are unequal, else ``None``."""
    return chosen(config.parallel.stage_data_parallel_sizes)


class PlacedLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """The layers of each stage, found by the pipeline rank and chunk that hold it.

    The first stage also holds the embedding and the last one the loss. Ask it as megatron-core's
    own: ``get_num_layers_to_build``, ``get_layer_offset``, ``get_layer_id_list``.

    ::

        layers 2-1-0-3 on 2 ranks      loop                      v
        rank 0                         E 0 1 | (none)            E 0 1 | 3 4 5 L
        rank 1                         2     | 3 4 5 L           2     | (none)

    Args:
        placement: where stages live.
        layers_per_stage: transformer layers of each stage in pipeline order, 0 allowed.
    """

    def __init__(self, placement: Placement, layers_per_stage: Sequence[int]) -> None:
        stages = [["decoder"] * layers for layers in layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        # megatron-core lays the stages in a loop and notes down their pipeline order.
        super().__init__(stages, placement.num_ranks)
        in_loop = Placement(num_ranks=placement.num_ranks, num_chunks=placement.num_chunks)
        places = [in_loop.locate(stage) for stage in range(placement.num_stages)]
        self._placement = placement
        self._stages = [self.layout[rank][chunk] for rank, chunk in places]
        self.layout: list[list[list[LayerType]]] = [
            [self._stages[placement.stage_of(rank, chunk)] for chunk in range(placement.num_chunks)]
            for rank in range(placement.num_ranks)
        ]

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return how many layers of a kind a chunk holds; see :meth:`get_layer_offset`."""
        return self._stages[self._stage_of(pp_rank, vp_stage)].count(layer_type)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return how many layers of a kind come before those of a chunk.

        Args:
            layer_type: the kind of layer that is counted.
            vp_stage: the chunk, ``None`` where ranks hold one.
            pp_rank: the pipeline rank, by default this process's.
        """
        before = self._stages[: self._stage_of(pp_rank, vp_stage)]
        return sum(layers.count(layer_type) for layers in before)

    def _stage_of(self, pp_rank: int | None, vp_stage: int | None) -> int:
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        if vp_stage is None:
            assert self._placement.num_chunks == 1
            vp_stage = 0
        return self._placement.stage_of(pp_rank, vp_stage)
