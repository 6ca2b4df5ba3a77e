"""Attends within each of several documents that are packed into one row.

Transformer Engine has kernels for that, torch one for GPUs in half precision. Elsewhere the
documents of a row are attended to one after the other: the blocks of a block-diagonal mask, without
the rest of the square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.adaptive.gpt.local_layers import LocalAttention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None  # type: ignore[assignment]


@dataclass
class Documents(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's parameters of a packed row, with the lengths on the host.

    Attributes:
        lengths: tokens of each document, in order.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, lengths: torch.Tensor, to_device: Callable[[torch.Tensor], torch.Tensor]
    ) -> Documents:
        """Returns the parameters of documents of ``lengths [n]``, a tensor of the host."""
        ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        ends, longest = to_device(ends), int(lengths.max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths.tolist()),
        )


class PackedAttention(LocalAttention):
    """megatron-core's own attention, for packed rows as well."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *more: Any,
        packed_seq_params: Documents | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attends; packed where queries, keys and values are ``[t, heads, width]``."""
        attend = super().forward
        if packed_seq_params is None:
            return attend(query, key, value, attention_mask, *more, **options)
        if self._has_kernel(query):
            return self._by_kernel(query, key, value, packed_seq_params)
        lengths = list(packed_seq_params.lengths)
        rows = zip(*(one.unsqueeze(1).split(lengths) for one in (query, key, value)), strict=True)
        return torch.cat([attend(*row, None, *more, **options) for row in rows])

    def _has_kernel(self, query: torch.Tensor) -> bool:
        drops = self.training and self.attention_dropout.p > 0
        is_half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
        plain = self.softmax_offset is None and self.scale_mask_softmax.window_size is None
        plain = plain and not getattr(self.config, "attention_softcap", None)
        return varlen_attn is not None and is_half and plain and not drops

    def _by_kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Documents
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
        ends, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        found: Any = varlen_attn(
            *(query, key, value, ends, ends, longest, longest), scale=scale, window_size=(-1, 0)
        )
        return found.flatten(1).unsqueeze(1)  # type: ignore[no-any-return]
