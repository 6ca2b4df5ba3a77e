"""Completes the layers that megatron-core builds without Transformer Engine.

Its own attention takes neither keys and values of different widths (latent attention) nor a part of
a sequence (context parallelism); its norms take no sequence parallelism.

**Context parallelism.** A sequence is cut into two parts for each rank, and rank r of n holds parts
r and 2n-1-r, so that causal attention is as much work on every rank::

    2 ranks     part 0   part 1   part 2   part 3
    rank 0      x                          x
    rank 1               x        x

Keys and values are gathered from all ranks, put in order, and a rank's queries attend to those
before them. Numbers are those of one rank; a ring would keep less memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

if not transformer_engine.HAVE_TE:
    # It takes its own import of the extension for the package, and asks for classes of it.
    multi_latent_attention.HAVE_TE = False
    # The router asks for this name, which it imports only with the package.
    moe_utils.te_general_gemm = None


class LocalAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's attention, for values of another width and for parts of sequences.

    Args:
        config: of the model.
        k_channels: width of a head's keys; its base class needs only the scale.
        v_channels: width of a head's values, by default that of its queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._parts = config.context_parallel_size
        config.context_parallel_size = 1  # all that the base class accepts
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.context_parallel_size = self._parts
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Attends to all tokens before each.

        Args:
            query, key, value: ``[s / n, b, heads, width]``, the parts of this of n ranks.
            *args, **kwargs: the mask, which is causal, and more; see megatron-core.
        """
        if self._parts == 1:
            return super().forward(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        group = parallel_state.get_context_parallel_group()
        here = torch.arange(query.shape[0], device=query.device)
        size, half = 2 * self._parts, query.shape[0] // 2
        first = group.rank() * half
        second = (size - 1 - group.rank()) * half - half
        here = here + torch.where(here < half, first, second)
        everywhere = torch.arange(size * half, device=query.device)
        mask = (everywhere[None, :] > here[:, None])[None, None]
        kwargs["attention_mask"] = mask
        return super().forward(  # type: ignore[no-any-return]
            query, self._all(key, group), self._all(value, group), *args[1:], **kwargs
        )

    def _all(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """Gathers all parts in their order; gradients are added up on the way back."""
        parts = gather_from_sequence_parallel_region(tensor, group=group).chunk(2 * self._parts)
        return torch.cat([*parts[::2], *parts[1::2][::-1]])


class LocalNorm:
    """A norm of torch whose weights' gradients megatron-core adds up over parts of a sequence."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> Any:
        """Returns the norm that megatron-core would, if it took parts of sequences."""
        split = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = WrappedTorchNorm(config, hidden_size, eps, **kwargs)
        finally:
            config.sequence_parallel = split
        for parameter in norm.parameters():
            parameter.sequence_parallel = split
        return norm


class ParallelLayer(TransformerLayer):  # type: ignore[misc]
    """Feeds the feed-forward block with the layer's own input, beside attention.

    What both add to the input is summed up as in other layers.
    """

    def _forward_attention(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._own_input: torch.Tensor | None = hidden_states
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_pre_mlp_layernorm(self, hidden_states: torch.Tensor) -> Any:
        own, self._own_input = self._own_input, None
        return super()._forward_pre_mlp_layernorm(own)


_INSTEAD: Mapping[type, type] = {DotProductAttention: LocalAttention, WrappedTorchNorm: LocalNorm}


def completed(part: Any, instead: Mapping[type, type] = _INSTEAD) -> Any:
    """Returns a description of layers with other classes in place of megatron-core's.

    Args:
        part: a class, or a specification of megatron-core's that holds such.
        instead: the classes, by default those of this module.
    """
    if isinstance(part, ModuleSpec) or type(part).__name__.endswith("Submodules"):
        fields = dataclasses.fields(part)
        return dataclasses.replace(
            part, **{one.name: completed(getattr(part, one.name), instead) for one in fields}
        )
    return instead.get(part, part) if isinstance(part, type) else part
