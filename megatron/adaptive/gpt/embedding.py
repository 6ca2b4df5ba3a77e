"""Tied embeddings: where the two copies of the matrix live, and how they stay equal.

The first stage looks tokens up in the embedding, the last one multiplies with it. Where they are
apart, megatron-core makes a copy for the last stage, adds the gradients of both over an embedding
group of two ranks, and counts the copy in no norm. In a V with an even number of chunks both
stages are on the first rank::

    2 ranks, 2 chunks     loop               v
    rank 0                E: 0   2           E: 0   3 :E'      both copies
    rank 1                   1   3 :E'          1   2

There the group has that one rank, and what megatron-core does between ranks is done here between
the chunks: same first weights, and the sum of both gradients for both. They remain two parameters,
each in the gradient buffer of its chunk, so that a chunk's reduction over data-parallel ranks waits
for no other chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import unwrap_model

from megatron.adaptive.schedule.placement import Placement

__all__ = ["embedding_ranks", "finalize_gradients", "local_copies", "start_equal"]


def embedding_ranks(placement: Placement) -> Callable[[list[int]], list[int]]:
    """Return the function that tells megatron-core the embedding group of a pipeline.

    It takes the global ranks of a pipeline and returns those that hold the first or last stage.
    """
    first, _ = placement.locate(0)
    last, _ = placement.locate(placement.num_stages - 1)
    return lambda pp_ranks: [pp_ranks[position] for position in sorted({first, last})]


def local_copies(chunks: Sequence[torch.nn.Module]) -> tuple[Any, Any] | None:
    """Return both copies of a tied embedding, ``None`` on a rank that does not hold two.

    Args:
        chunks: this rank's model chunks, wrapped or not.
    """
    models = unwrap_model(list(chunks))
    first = next((model for model in models if model.pre_process), None)
    last = next((model for model in models if model.post_process), None)
    if first is None or last is None or first is last:
        return None
    if not first.share_embeddings_and_output_weights:
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def start_equal(chunks: Sequence[torch.nn.Module]) -> None:
    """Give the copy on the last stage the weights of the first, where this rank holds both."""
    copies = local_copies(chunks)
    if copies is not None:
        embedding, output = copies
        output.data.copy_(embedding.data)


def finalize_gradients(
    chunks: Sequence[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Do what megatron-core's ``finalize_model_grads`` does, for every placement.

    The data-parallel reduction is over when the two gradients are added. With the distributed
    optimizer a rank's share of them is valid, and is the same share in both: megatron-core puts
    each copy in a bucket of its own.

    Args:
        chunks: this rank's model chunks, wrapped for data parallelism.
        num_tokens: must be ``None``: megatron-core would ask the last rank of the pipeline, which
            need not hold the last stage.
        pg_collection: process groups, by default megatron-core's global ones.
        force_all_reduce: as in megatron-core.
    """
    assert num_tokens is None
    finalize_model_grads(
        list(chunks), pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )
    copies = local_copies(chunks)
    if copies is not None:
        embedding, output = (weight.main_grad for weight in copies)
        embedding.add_(output)
        output.copy_(embedding)
