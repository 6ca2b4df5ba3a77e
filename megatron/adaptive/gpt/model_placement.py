"""Places GPT layers on ranks in ways that megatron-core does not support.

**Placements.** megatron-core places stages round-robin (loop). It numbers the layers according to
the layout in its configuration. The initial weights and the names in checkpoints depend on these
numbers. A V-shaped placement therefore only requires a different layout. The code that builds the
model decides which stage is the first and which is the last.

**Tied embeddings.** The first stage looks up tokens in the embedding, and the last stage uses the
same weight as the output matrix. If these stages are on different ranks, megatron-core creates a
second copy for the last stage. It sums the gradients of both copies over a process group of the two
ranks, and ignores the second copy in the gradient norm. In a V-shaped placement with an even number
of chunks, both stages are on the first rank::

    2 ranks, 2 chunks     loop               v
    rank 0                E: 0   2           E: 0   3 :E'      both copies
    rank 1                   1   3 :E'          1   2

The process group then has only one rank, so megatron-core does not synchronize the copies. Instead,
this module copies the initial weight from the first to the last chunk, and sums the gradients of
both copies. The copies remain two parameters, each in the gradient buffer of its own chunk, so that
the data-parallel reduction of one chunk does not wait for the other chunk.

**Unequal stages.** megatron-core requires the same number of ranks (width) for each stage. If the
widths differ, this module sets megatron-core's process groups itself::

    widths 2-1             pipeline     replicas     norm
    stage 0, rank 0        0, 2         0, 1         all ranks
             rank 1        1, 2         0, 1         all ranks
    stage 1, rank 2        0, 2         2            all ranks

- The pipeline group only serves to look up a rank's stage index. Communication must not use the
  group: rank 2 belongs to the pipelines of both rank 0 and rank 1, but its group contains only one
  of these pipelines.
- Gradients are summed over the ranks of a stage, not averaged, because the loss is already divided
  by the number of microbatches in the whole step.
- The gradient norm and the number of zeros are computed over all ranks. To count each parameter
  only once, the parameters on all replicas of a stage except the first are marked as shared.
- There is no embedding group. The gradients of the two copies of a tied embedding are summed first
  within each stage, and then over both stages. In the second sum, the first rank of each stage
  contributes the sum of its stage and the other ranks contribute zeros. All ranks receive the
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
    """Returns the placement in ``config``, which assigns stages to pipeline ranks."""
    return Placement(
        num_ranks=config.parallel.pipeline_model_parallel_size,
        num_chunks=config.parallel.num_chunks,
        kind=config.placement_kind,
    )


def widths_of(config: TrainerConfig) -> Widths | None:
    """Returns the number of ranks of each stage, or ``None`` if it is the same for all stages."""
    return chosen(config.parallel.stage_data_parallel_sizes)


class PlacedLayout(PipelineParallelLayerLayout):
    """Layout for megatron-core's configuration: the layers of each chunk on each pipeline rank.

    In this example, the stages have 2, 1, 0 and 3 layers. E is the embedding, and L is the loss::

        layers 2-1-0-3 on 2 ranks      loop                      v
        rank 0                         E 0 1 | (none)            E 0 1 | 3 4 5 L
        rank 1                         2     | 3 4 5 L           2     | (none)

    Args:
        placement: Assignment of stages to pipeline ranks.
        stages: Layer kinds of each stage in pipeline order, as returned by :func:`stages_of`.
    """

    def __init__(self, placement: Placement, stages: Sequence[list[str]]) -> None:
        # The base class assigns the stages to ranks round-robin. The code below restores the
        # pipeline order.
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
        """Returns the number of layers of kind ``layer_type`` in a chunk.

        Args:
            layer_type: Kind of layer to count.
            vp_stage: Index of the chunk, or ``None`` if each rank has only one chunk.
            pp_rank: Pipeline rank, or ``None`` for the rank of this process.
        """
        return self._stages[self._stage_of(pp_rank, vp_stage)].count(layer_type)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Returns the number of layers of kind ``layer_type`` on the stages before a chunk.

        Args:
            layer_type: Kind of layer to count.
            vp_stage: Index of the chunk, or ``None`` if each rank has only one chunk.
            pp_rank: Pipeline rank, or ``None`` for the rank of this process.
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
    """Lists the kinds of the layers of each stage, in megatron-core's notation.

    The first stage includes the embedding, and the last stage includes the loss.

    Args:
        layers_per_stage: Number of transformer layers of each stage, in pipeline order. May be 0
            for a stage.
        mtp_layers: Number of multi-token prediction layers, which come before the loss.
        mtp_stage: Index of the stage with multi-token prediction layers, or ``None`` for the last
            stage.
    """
    stages = [["decoder"] * layers for layers in layers_per_stage]
    stages[0].insert(0, "embedding")
    stages[-1 if mtp_stage is None else mtp_stage] += ["mtp"] * mtp_layers
    stages[-1].append("loss")
    return stages


def layout_of(config: TrainerConfig) -> PlacedLayout:
    """Returns the layout of the model's layers, for megatron-core's configuration."""
    stages = stages_of(config.layers_per_stage, config.model.mtp_num_layers or 0, config.mtp_stage)
    return PlacedLayout(placement_of(config), stages)


def embedding_ranks(config: TrainerConfig) -> Callable[[list[int]], list[int]]:
    """Returns a function that selects those ranks of a pipeline that need the embedding.

    ``config`` contains the settings of the run.

    megatron-core calls the returned function with the global ranks of each pipeline. Ranks with the
    first stage, the last stage or multi-token prediction layers need a copy of the embedding.
    """
    placement = placement_of(config)
    stages = {0, placement.num_stages - 1}
    if config.mtp_stage is not None:
        # If the output matrix is not tied to the embedding, exclude the last stage, so that
        # megatron-core does not add the gradient of this matrix to that of the embedding.
        stages = {0, config.mtp_stage} | (
            set() if config.model.untie_embeddings_and_output_weights else stages
        )
    positions = sorted({placement.locate(stage)[0] for stage in stages})
    return lambda pp_ranks: [pp_ranks[position] for position in positions]


def local_copies(chunks: Sequence[torch.nn.Module]) -> tuple[Any, Any] | None:
    """Returns both copies of a tied embedding if both are on this rank, otherwise ``None``.

    Args:
        chunks: Model chunks of this rank, with or without the data-parallel wrapper.
    """
    models = unwrap_model(list(chunks))
    first = next((model for model in models if model.pre_process), None)
    last = next((model for model in models if model.post_process), None)
    if first is None or last is None or first is last:
        return None
    # Two copies exist only if the embedding is tied, or if multi-token prediction layers also look
    # up tokens.
    if not (
        first.share_embeddings_and_output_weights or getattr(first.config, "mtp_num_layers", None)
    ):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def start_equal(chunks: Sequence[torch.nn.Module]) -> None:
    """Copies the first stage's embedding to the last stage, if ``chunks`` contains both stages."""
    copies = local_copies(chunks)
    if copies is not None:
        embedding, output = copies
        output.data.copy_(embedding.data)


def add_up_copies(chunks: Sequence[torch.nn.Module]) -> None:
    """Replaces the gradients of both copies of an embedding by their sum, if this rank has both.

    This function must be called after the data-parallel reduction. With the distributed optimizer,
    only a part of each gradient is valid on a rank after the reduction. This part is the same for
    both copies, because megatron-core puts each copy in a bucket of its own.

    Args:
        chunks: Model chunks of this rank, in the data-parallel wrapper.
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
    """Reduces the gradients after the backward passes of a step, for any placement of stages.

    The function first calls megatron-core's ``finalize_model_grads``. All ranks must call this
    function.

    Args:
        chunks: Model chunks of this rank, in the data-parallel wrapper.
        num_tokens: Number of tokens in the loss on a rank of the last stage, and 0 on other ranks.
            The gradients are divided by the sum of this value over all ranks. With ``None``, they
            are not divided. megatron-core itself would use the value of the last pipeline rank,
            which may not have the last stage.
        pg_collection: Process groups, or ``None`` to use megatron-core's global groups.
        force_all_reduce: Whether to use all-reduce instead of reduce-scatter. Passed on to
            megatron-core.
        widths: Number of ranks of each stage, or ``None`` if all stages have the same number.
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
            chunk: Any  # megatron-core does not declare the types of its wrapper.
            for chunk in chunks:
                chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))
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
# Process group of all ranks of the first and the last stage, which have copies of a tied embedding.
# The group is a global variable, like the process groups of parallel_state.
_ends_group: Any = None


def set_up_unequal_mesh(widths: Widths, timeout_minutes: int) -> None:
    """Sets megatron-core's process groups if stages have unequal numbers of ranks.

    ``widths`` contains the number of ranks of each stage. Collectives in the groups fail after
    ``timeout_minutes`` minutes. All ranks must call this.
    """
    # First create the groups as if all ranks had the same stage. The code below replaces most of
    # them.
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
        # Fail if the installed megatron-core has renamed the variable.
        assert hasattr(parallel_state, name), f"parallel_state of megatron-core has no {name}"
        setattr(parallel_state, name, value)


def start_unequal(chunks: Sequence[torch.nn.Module], widths: Widths) -> None:
    """Prepares a model whose stages have unequal numbers of ranks. All ranks must call this.

    Copies the first stage's tied embedding to the last stage. Marks the parameters on all replicas
    of a stage except the first as shared, so that norms count each parameter only once.

    Args:
        chunks: List with this rank's only chunk, without the data-parallel wrapper.
        widths: Number of ranks of each stage.
    """
    weight = _tied_weight(chunks)
    if weight is not None:
        dist.broadcast(weight.data, src=_end_ranks(widths)[0], group=_ends_group)
    if widths.place_of(dist.get_rank())[1] > 0:
        parameter: Any  # megatron-core does not declare the attribute set below.
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.shared = True


def sum_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Makes the data-parallel wrappers in ``chunks`` sum gradients instead of averaging them."""
    for chunk in chunks:
        wrapper: Any = chunk
        for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
            buffer.gradient_scaling_factor = 1.0
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0


def _end_ranks(widths: Widths) -> list[int]:
    return [*widths.ranks_of(0), *widths.ranks_of(widths.num_stages - 1)]


def _tied_weight(chunks: Sequence[torch.nn.Module]) -> Any:
    """Returns this rank's copy of a tied embedding, or ``None`` if the rank has no copy."""
    (model,) = unwrap_model(list(chunks))
    if not model.share_embeddings_and_output_weights:
        return None
    if model.pre_process == model.post_process:
        return None
    return model.shared_embedding_or_output_weight()
