"""Places megatron-core's GPT on ranks: layers, tied embeddings, stages of unequal width.

megatron-core has one placement, the loop. Layer numbers, and with them names in checkpoints and
initial weights, follow from the layout in its configuration, so a V needs only another layout. The
code that builds the model marks the first and last stage.

**Tied embeddings.** The first stage looks tokens up in the embedding, and the last one multiplies
with it. If these stages are on different ranks, megatron-core makes a copy for the last stage. It
adds the gradients of both over an embedding group of two ranks, and leaves the copy out of norms.
In a V with an even number of chunks both stages are on the first rank::

    2 ranks, 2 chunks     loop               v
    rank 0                E: 0   2           E: 0   3 :E'      both copies
    rank 1                   1   3 :E'          1   2

The group then has one rank, and this module does between the chunks what megatron-core does between
ranks: it copies the initial weights and gives both copies the sum of their gradients. They remain
two parameters, each in the gradient buffer of its chunk, so that a chunk's reduction over
data-parallel ranks does not wait for another chunk.

**Unequal stages.** megatron-core's parallel state is a grid. If stages have unequal numbers of
ranks, its groups are set by hand, as if every rank were in a grid of its own width::

    widths 2-1             pipeline     replicas     norm
    stage 0, rank 0        0, 2         0, 1         all ranks
             rank 1        1, 2         0, 1         all ranks
    stage 1, rank 2        0, 2         2            all ranks

- The pipeline group only gives positions: rank 2 is in the pipelines of ranks 0 and 1, and has the
  group of one of them. No communication may use it.
- Gradients are summed over a stage's ranks, not averaged: the loss is already divided by the number
  of microbatches of the whole step.
- Gradient norm and zeros are counted over all ranks. Parameters of a stage's further replicas are
  marked as shared, so that each counts once.
- There is no embedding group. Both copies of a tied embedding are summed after their stages'
  gradients: the first rank of each stage contributes the sum, the others zeros, and all receive the
  total.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.unequal_widths import Widths, chosen


def placement_of(config: TrainerConfig) -> Placement:
    """Returns the placement of a run's stages."""
    return Placement(
        num_ranks=config.parallel.pipeline_model_parallel_size,
        num_chunks=config.parallel.num_chunks,
        kind=config.placement_kind,
    )


def widths_of(config: TrainerConfig) -> Widths | None:
    """Returns the number of ranks of each stage if stages are unequal, else ``None``."""
    return chosen(config.parallel.stage_data_parallel_sizes)


class PlacedLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """Gives megatron-core the layers of each stage, by pipeline rank and chunk.

    It has the methods of megatron-core's layout: ``get_num_layers_to_build``, ``get_layer_offset``,
    ``get_layer_id_list``.

    ::

        layers 2-1-0-3 on 2 ranks      loop                      v
        rank 0                         E 0 1 | (none)            E 0 1 | 3 4 5 L
        rank 1                         2     | 3 4 5 L           2     | (none)

    Args:
        placement: Placement of the stages.
        stages: Kinds of the layers of each stage in pipeline order, see :func:`stages_of`.
    """

    def __init__(self, placement: Placement, stages: Sequence[list[str]]) -> None:
        # megatron-core places the stages in a loop; self._stages has them in pipeline order.
        super().__init__(list(stages), placement.num_ranks)
        in_loop = Placement(num_ranks=placement.num_ranks, num_chunks=placement.num_chunks)
        places = [in_loop.locate(stage) for stage in range(placement.num_stages)]
        self.placement = placement
        self._stages = [self.layout[rank][chunk] for rank, chunk in places]
        self.layout: list[list[list[LayerType]]] = [
            [self._stages[self._stage_of(rank, chunk)] for chunk in range(placement.num_chunks)]
            for rank in range(placement.num_ranks)
        ]

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Returns the number of layers of a kind in a chunk; see :meth:`get_layer_offset`."""
        return self._stages[self._stage_of(pp_rank, vp_stage)].count(layer_type)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Returns the number of layers of a kind that come before those of a chunk.

        Args:
            layer_type: Kind of layer to count.
            vp_stage: Index of the chunk, ``None`` if ranks have one.
            pp_rank: Pipeline rank, by default this process's.
        """
        before = self._stages[: self._stage_of(pp_rank, vp_stage)]
        return sum(layers.count(layer_type) for layers in before)

    def _stage_of(self, pp_rank: int | None, vp_stage: int | None) -> int:
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        if vp_stage is None:
            assert self.placement.num_chunks == 1
            vp_stage = 0
        return self.placement.stage_of(pp_rank, vp_stage)


def stages_of(
    layers_per_stage: Sequence[int], mtp_layers: int = 0, mtp_stage: int | None = None
) -> list[list[str]]:
    """Returns the layers of each stage, with the embedding in the first and the loss in the last.

    Args:
        layers_per_stage: Number of transformer layers of each stage in pipeline order, from 0.
        mtp_layers: Number of layers of multi-token prediction, which come before the loss.
        mtp_stage: Stage that has them, by default the last.
    """
    stages = [["decoder"] * layers for layers in layers_per_stage]
    stages[0].insert(0, "embedding")
    stages[-1 if mtp_stage is None else mtp_stage] += ["mtp"] * mtp_layers
    stages[-1].append("loss")
    return stages


def layout_of(config: TrainerConfig) -> PlacedLayout:
    """Returns the layers of each stage of a run, with their placement."""
    stages = stages_of(config.layers_per_stage, config.model.mtp_num_layers or 0, config.mtp_stage)
    return PlacedLayout(placement_of(config), stages)


def embedding_ranks(config: TrainerConfig) -> Callable[[list[int]], list[int]]:
    """Returns the function by which megatron-core finds the embedding group of a pipeline.

    The function takes the global ranks of a pipeline. It returns those with the first or last
    stage, or with multi-token prediction, which looks tokens up as well.
    """
    placement = placement_of(config)
    stages = {0, placement.num_stages - 1}
    if config.mtp_stage is not None:
        # A separate output matrix is no copy, but megatron-core would sum its gradient too.
        stages = {0, config.mtp_stage} | (
            set() if config.model.untie_embeddings_and_output_weights else stages
        )
    positions = sorted({placement.locate(stage)[0] for stage in stages})
    return lambda pp_ranks: [pp_ranks[position] for position in positions]


def local_copies(chunks: Sequence[torch.nn.Module]) -> tuple[Any, Any] | None:
    """Returns both copies of a tied embedding, ``None`` on a rank without two copies.

    Args:
        chunks: Model chunks of this rank, wrapped or not.
    """
    models = unwrap_model(list(chunks))
    first = next((model for model in models if model.pre_process), None)
    last = next((model for model in models if model.post_process), None)
    if first is None or last is None or first is last:
        return None
    # A layer of multi-token prediction looks tokens up as well.
    if not (
        first.share_embeddings_and_output_weights or getattr(first.config, "mtp_num_layers", None)
    ):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def start_equal(chunks: Sequence[torch.nn.Module]) -> None:
    """Copies the first stage's embedding to the last stage, if this rank has both."""
    copies = local_copies(chunks)
    if copies is not None:
        embedding, output = copies
        output.data.copy_(embedding.data)


def add_up_copies(chunks: Sequence[torch.nn.Module]) -> None:
    """Gives both copies of an embedding the sum of their gradients, if this rank has both.

    Call it after the data-parallel reduction. With the distributed optimizer only a rank's share of
    the gradients is valid then. It is the same share in both copies, because megatron-core puts
    each copy in a separate bucket.

    Args:
        chunks: Model chunks of this rank, wrapped for data parallelism.
    """
    copies = local_copies(chunks)
    if copies is not None and copies[0].requires_grad:
        embedding, output = (weight.main_grad for weight in copies)
        embedding.add_(output)
        output.copy_(embedding)


def finalize_gradients(
    chunks: Sequence[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
    *,
    widths: Widths | None = None,
) -> None:
    """Does the work of megatron-core's ``finalize_model_grads`` for every placement.

    Args:
        chunks: Model chunks of this rank, wrapped for data parallelism.
        num_tokens: Number of tokens of the loss on the rank of the last stage, 0 on others, if
            gradients are to be divided by it. megatron-core would ask the last rank of the
            pipeline, which need not have the last stage.
        pg_collection: Process groups, by default megatron-core's global ones.
        force_all_reduce: Whether to all-reduce instead of reduce-scatter, as in megatron-core.
        widths: Widths of the stages if they are unequal.
    """
    finalize_model_grads(
        list(chunks), pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )
    if widths is None:
        add_up_copies(chunks)
        if num_tokens is not None:
            dist.all_reduce(num_tokens, group=parallel_state.get_pipeline_model_parallel_group())
            everybody = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(num_tokens, group=everybody)
            for chunk in chunks:
                chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))  # type: ignore[operator]
        return
    weight = _tied_weight(chunks)
    if weight is not None and weight.requires_grad:
        gradient: torch.Tensor = weight.main_grad
        if widths.place_of(dist.get_rank())[1]:
            gradient.zero_()
        dist.all_reduce(gradient, group=_ends_group)


_REPLICA_GROUPS = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
)
_REPLICA_GROUPS_GLOO = (
    "_DATA_PARALLEL_GROUP_GLOO",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
)
# Process group of the ranks that may have a copy of the embedding. It lives as long as the groups
# of parallel_state, which are global too.
_ends_group: Any = None


def set_up_unequal_mesh(widths: Widths, timeout_minutes: int) -> None:
    """Makes megatron-core's groups for stages of unequal widths. Collective over all ranks."""
    # Start with one stage over all ranks, and replace its groups below.
    parallel_state.initialize_model_parallel(1, 1, distributed_timeout_minutes=timeout_minutes)
    everybody = parallel_state.get_data_parallel_group()
    limit = datetime.timedelta(minutes=timeout_minutes)
    for stage in range(widths.num_stages):
        ranks = list(widths.ranks_of(stage))
        group = dist.new_group(ranks, timeout=limit)
        gloo = dist.new_group(ranks, timeout=limit, backend="gloo")
        if dist.get_rank() in ranks:
            _set(_REPLICA_GROUPS, group)
            _set(_REPLICA_GROUPS_GLOO, gloo)
            _set(("_DATA_PARALLEL_GLOBAL_RANKS", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"), ranks)
    _, replica = widths.place_of(dist.get_rank())
    for first in range(max(widths.sizes)):
        ranks = widths.pipeline_of(first)
        group = dist.new_group(ranks, timeout=limit)
        if replica == first:
            _set(("_PIPELINE_MODEL_PARALLEL_GROUP",), group)
            _set(("_PIPELINE_GLOBAL_RANKS",), ranks)
    _set(("_MODEL_PARALLEL_GROUP",), everybody)
    _set(("_MODEL_PARALLEL_GLOBAL_RANKS",), list(range(widths.num_ranks)))
    for name in ("_EMBEDDING", "_POSITION_EMBEDDING"):
        _set((f"{name}_GROUP", f"{name}_GLOBAL_RANKS"), None)
    global _ends_group
    _ends_group = dist.new_group(_end_ranks(widths), timeout=limit)


def _set(names: Sequence[str], value: Any) -> None:
    for name in names:
        # Other versions of megatron-core may have other names for a group.
        assert hasattr(parallel_state, name), f"megatron-core has no {name}"
        setattr(parallel_state, name, value)


def start_unequal(chunks: Sequence[torch.nn.Module], widths: Widths) -> None:
    """Copies the first stage's tied embedding to the last stage. Collective.

    Also marks the parameters of a stage's further replicas as shared.

    Args:
        chunks: The one chunk of this rank, not wrapped.
        widths: Widths of the stages.
    """
    weight = _tied_weight(chunks)
    if weight is not None:
        dist.broadcast(weight.data, src=_end_ranks(widths)[0], group=_ends_group)
    if widths.place_of(dist.get_rank())[1] > 0:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.shared = True  # type: ignore[attr-defined]


def sum_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Makes megatron-core's data-parallel wrappers sum gradients instead of averaging them."""
    for chunk in chunks:
        wrapper: Any = chunk
        for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
            buffer.gradient_scaling_factor = 1.0
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0


def _end_ranks(widths: Widths) -> list[int]:
    return [*widths.ranks_of(0), *widths.ranks_of(widths.num_stages - 1)]


def _tied_weight(chunks: Sequence[torch.nn.Module]) -> Any:
    """Returns this rank's copy of a tied embedding, ``None`` without one."""
    (model,) = unwrap_model(list(chunks))
    if not model.share_embeddings_and_output_weights:
        return None
    if model.pre_process == model.post_process:
        return None
    return model.shared_embedding_or_output_weight()
