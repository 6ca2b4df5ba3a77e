"""What differs where stages have unequal numbers of ranks: groups, gradients, tied embeddings.

megatron-core's parallel state is a grid. Here its groups are set by hand, as if every rank stood in
a grid of its own width::

    widths 2-1             pipeline     replicas     norm
    stage 0, rank 0        0, 2         0, 1         all ranks
             rank 1        1, 2         0, 1         all ranks
    stage 1, rank 2        0, 2         2            all ranks

- The pipeline group only tells positions: rank 2 is in the pipelines of ranks 0 and 1 and can use
  the group of one. Nothing may communicate in it.
- Gradients are summed over a stage's ranks, not averaged: the loss is divided by the microbatches
  of the whole step where it is computed.
- Gradient norm and zeros are counted over all ranks, in which parameters of a stage's further
  replicas are marked as shared, so that each counts once.
- There is no embedding group. Both copies of a tied embedding meet once their stages' gradients are
  summed: the first rank of each stage brings the sum, the others bring zeros, all take the total.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import unwrap_model

from megatron.adaptive.schedule.widths import Widths

__all__ = ["UnequalGradients", "set_up_unequal_mesh", "start_unequal", "sum_gradients"]

_REPLICA_GROUPS = (
    *("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"),
    *("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "_EXPERT_DATA_PARALLEL_GROUP"),
    *("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
)
_REPLICA_GROUPS_GLOO = (
    *("_DATA_PARALLEL_GROUP_GLOO", "_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
    *("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO", "_EXPERT_DATA_PARALLEL_GROUP_GLOO"),
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO",
)
# The ranks that may have a copy of the embedding; lasts as long as the groups of parallel_state.
_ends_group: Any = None


def set_up_unequal_mesh(widths: Widths, timeout_minutes: int) -> None:
    """Make megatron-core's process groups for stages of unequal widths. Collective over all ranks.

    Args:
        widths: of the stages.
        timeout_minutes: limit of a collective.
    """
    # One stage over all ranks, whose groups are then replaced.
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
        # Another version of megatron-core may know a group by another name.
        assert hasattr(parallel_state, name), f"megatron-core has no {name}"
        setattr(parallel_state, name, value)


def start_unequal(chunks: Sequence[torch.nn.Module], widths: Widths) -> None:
    """Give the copy of a tied embedding on the last stage the weights of the first. Collective.

    Also marks the parameters of a stage's further replicas as shared.

    Args:
        chunks: this rank's one chunk, not wrapped.
        widths: of the stages.
    """
    weight = _tied_weight(chunks)
    if weight is not None:
        dist.broadcast(weight.data, src=_end_ranks(widths)[0], group=_ends_group)
    if widths.place_of(dist.get_rank())[1] > 0:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.shared = True  # type: ignore[attr-defined]


def sum_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Let megatron-core's data-parallel wrappers sum gradients instead of averaging them."""
    for chunk in chunks:
        wrapper: Any = chunk
        for buffer in wrapper.buffers:
            buffer.gradient_scaling_factor = 1.0
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0


class UnequalGradients:
    """Does what megatron-core's ``finalize_model_grads`` does.

    Args:
        widths: of the stages.
    """

    def __init__(self, widths: Widths) -> None:
        self._brings = widths.place_of(dist.get_rank())[1] == 0

    def __call__(
        self,
        chunks: Sequence[torch.nn.Module],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Reduce the gradients of a step; see :func:`embedding.finalize_gradients`."""
        assert num_tokens is None
        finalize_model_grads(
            list(chunks), pg_collection=pg_collection, force_all_reduce=force_all_reduce
        )
        weight = _tied_weight(chunks)
        if weight is not None:
            gradient: torch.Tensor = weight.main_grad
            if not self._brings:
                gradient.zero_()
            dist.all_reduce(gradient, group=_ends_group)


def _end_ranks(widths: Widths) -> list[int]:
    return [*widths.ranks_of(0), *widths.ranks_of(widths.num_stages - 1)]


def _tied_weight(chunks: Sequence[torch.nn.Module]) -> Any:
    """This rank's copy of a tied embedding, ``None`` without one."""
    (model,) = unwrap_model(list(chunks))
    if not model.share_embeddings_and_output_weights:
        return None
    if model.pre_process == model.post_process:
        return None
    return model.shared_embedding_or_output_weight()
