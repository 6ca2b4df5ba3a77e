"""The forward step of GPT training: batch in, loss out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.gpt.dropout import DropoutKeys

Microbatch = Mapping[str, torch.Tensor]
LOSS_NAME = "lm loss"


class ChunkFeed:
    """Hands a chunk its microbatches, in ascending order, with what names its random numbers.

    Args:
        microbatches: the step's microbatches, ``None`` on a rank that needs no data.
        count: microbatches of the step.
        step: iteration, part of the key.
    """

    def __init__(self, microbatches: Sequence[Microbatch] | None, *, count: int, step: int) -> None:
        self.step = step
        self._microbatches = microbatches
        self._indices = iter(range(count))

    def __iter__(self) -> Iterator[tuple[int, Microbatch | None]]:
        return self

    def __next__(self) -> tuple[int, Microbatch | None]:
        index = next(self._indices)
        return index, None if self._microbatches is None else self._microbatches[index]


class GptForward:
    """megatron-core's ``forward_step_func`` for GPT.

    Args:
        accelerator: where the batch goes.
        dropout: seeds the generators.
    """

    def __init__(self, accelerator: Accelerator, dropout: DropoutKeys) -> None:
        self._accelerator = accelerator
        self._dropout = dropout

    def __call__(self, feed: ChunkFeed, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run one microbatch through a chunk.

        Args:
            feed: gives the microbatch; ``tokens``, ``labels``, ``position_ids`` ``[b, s] int64``,
                ``loss_mask [b, s] float32``.
            model: the chunk.

        Returns:
            The chunk's output (losses ``[b, s]`` on the last stage) and the loss function.
        """
        index, batch = next(feed)
        if model.training:
            self._dropout.apply(step=feed.step, microbatch=index)
        if batch is None:
            return model(None, None, None, labels=None), None
        to_device = self._accelerator.to_device
        batch = get_batch_on_this_cp_rank({key: to_device(value) for key, value in batch.items()})
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch.get("attention_mask"),
            labels=batch["labels"],
        )
        return output, partial(masked_mean_loss, batch["loss_mask"])


def masked_mean_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the losses of a microbatch over its unmasked tokens.

    Args:
        loss_mask: ``[b, s] float32``.
        losses: ``[b, s] float32``.

    Returns:
        The loss to differentiate, scalar, and the same detached under its name for the log.
    """
    mask = loss_mask.reshape(-1).float()
    tokens = mask.sum()
    total = torch.sum(losses.reshape(-1).float() * mask)
    if parallel_state.get_context_parallel_world_size() > 1:
        group = parallel_state.get_context_parallel_group()
        tokens = tokens.clone()
        torch.distributed.all_reduce(tokens, group=group)
    loss = total / tokens.clamp(min=1.0)
    reported = loss.detach().clone()
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(reported, group=parallel_state.get_context_parallel_group())
    return loss, {LOSS_NAME: reported}
