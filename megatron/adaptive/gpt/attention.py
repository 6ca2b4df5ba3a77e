"""Computes attention in layers that megatron-core builds without Transformer Engine.

megatron-core's own attention computes and stores the scores of all pairs of tokens. It does not
support latent attention (keys and values of different widths), context parallelism (sequences
divided among ranks), several documents in one row, or a soft cap on scores. Where possible, this
module uses one of torch's fused kernels instead. :mod:`megatron.adaptive.config.attention` chooses
the kernel.

**Context parallelism.** A sequence is divided into two parts per rank. Rank r of n has parts r and
2n-1-r, so that causal attention costs the same on all ranks::

    2 ranks     part 0   part 1   part 2   part 3
    rank 0      x                          x
    rank 1               x        x

An all-gather collects the keys and values of all ranks, which are then put in the order of the
tokens. The results are the same as on a single rank. Ring attention, which is not implemented,
would need less memory.

**Packed documents.** One row contains several documents, and tokens attend only to tokens of the
same document. If torch's kernel for packed rows (``varlen_attn``) can be used, it processes the
whole row. Otherwise, this module processes one document after another. In both cases, no scores
between different documents are computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import get_sliding_window_causal_mask
from torch.nn.attention.bias import causal_lower_right

from megatron.adaptive.accelerator import to_device
from megatron.adaptive.config.attention import AttentionCase, Kernel, Mask, kernel_for, shares_keys
from megatron.adaptive.gpt.sequence_slices import Attention, SequenceSlices

varlen_attn: Any = None
with contextlib.suppress(ImportError):  # Older releases of torch do not have this kernel.
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn


SCORE_BLOCK = 256
"""Minimum number of queries per block when attention is computed in blocks."""


def has_packed_kernel() -> bool:
    """Returns whether torch has a kernel for packed rows that accepts the parameters used here."""
    if varlen_attn is None:
        return False
    # Early versions of the kernel have no sliding windows and no scale, so check the signature.
    return {"window_size", "scale"} <= set(inspect.signature(varlen_attn).parameters)


_HAS_PACKED_KERNEL = has_packed_kernel()


@dataclasses.dataclass
class Documents(PackedSeqParams):
    """Adds the document lengths, as a tuple, to megatron-core's parameters of a packed row.

    Attributes:
        lengths: Number of tokens of each document, in the order of the row.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, lengths: torch.Tensor, to_device: Callable[[torch.Tensor], torch.Tensor]
    ) -> Documents:
        """Creates the parameters for documents whose lengths are in the CPU tensor ``lengths [n]``.

        ``to_device`` copies a tensor to the device.
        """
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


class LocalAttention(DotProductAttention):
    """Computes attention with torch's fused kernels if possible, otherwise with megatron-core.

    Args:
        config: megatron-core's configuration of the model.
        k_channels: Width of a head's keys. Ignored, because the width is read from the tensors.
        v_channels: Width of a head's values, or ``None`` if it equals the width of the queries.

    Attributes:
        case: Properties that determine the kernel. Each forward pass copies this object and
            adds the properties of the queries, keys and values in that pass.
        slices: Object that stores keys and values, so that later slices of a sequence can attend to
            earlier ones, or ``None`` if sequences are not cut into slices.
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
        config.context_parallel_size = 1  # The base class rejects other values.
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.context_parallel_size = self._parts
        cap = getattr(config, "attention_softcap", None)
        if cap:
            self.scale_mask_softmax.register_forward_pre_hook(functools.partial(bound_first, cap))
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        # Do not use megatron-core's fused softmax, which needs another package and supports neither
        # sliding windows nor partial sequences.
        self.scale_mask_softmax.scaled_masked_softmax_fusion = False
        self._window: tuple[int, int] | None = self.scale_mask_softmax.window_size
        self.case = AttentionCase(
            backend=getattr(config, "local_attention", config.attention_backend.name),
            has_sinks=self.softmax_offset is not None,
            has_bound=bool(cap),
            has_packed_kernel=_HAS_PACKED_KERNEL,
        )
        self.slices: SequenceSlices | None = None

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
        """Computes attention with a causal mask, or with ``attention_mask`` if there is one.

        Args:
            query: Queries ``[s / n, b, heads, width]`` if n ranks share the sequence (context
                parallelism), or ``[t, heads, width]`` for packed documents.
            key: Keys, in the same layout as ``query``.
            value: Values, in the same layout as ``query``.
            attention_mask: Mask ``[b, 1, s, s] bool``, true where a token must not attend, or
                ``None`` for causal attention. Ignored with a sliding window or context parallelism,
                because this class then creates the mask itself.
            *more: Further positional arguments of megatron-core's attention.
            packed_seq_params: Documents of a packed row, or ``None`` if the row is not packed.
            **options: Further keyword arguments of megatron-core's attention.

        Returns:
            Output ``[s / n, b, heads * value width]``; b is 1 for packed documents.
        """
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, *more, **options)
        if self.slices is not None:
            call = Attention(
                layer=self,
                attend=lambda *parts: self._attend_by_blocks(
                    *parts, attention_mask, *more, **options
                ),
                attend_documents=lambda *row: self._row(*row, *more, **options),
                window=None if self._window is None else self._window[0],
            )
            return self.slices.attend(call, query, key, value)
        return self._attend(query, key, value, attention_mask, *more, **options)

    def _attend_by_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention of a slice, in blocks of queries if the kernel stores scores.

        The queries belong to the last tokens of ``key`` and ``value``. Scores between a block and
        later tokens are not computed. Without blocks, the kernel would also compute and store the
        masked half of the scores between the tokens of the slice.
        """
        count = max(1, len(query) // SCORE_BLOCK)
        mask = self._own_mask if attention_mask is None else Mask.GIVEN
        stores_scores = kernel_for(self._case_of(query, value, mask)) is Kernel.SCORES
        # Blocks are useless with a sliding window, which already limits the number of keys. If
        # several heads share keys, each block would keep its own copy of the keys, so do not use
        # blocks in this case either.
        is_shared = query.shape[2] != key.shape[2]
        if count == 1 or not stores_scores or self._window is not None or is_shared:
            return self._attend(query, key, value, attention_mask, *more, **options)
        earlier = len(key) - len(query)
        ends = [len(query) * number // count for number in range(count + 1)]
        outputs = []
        for first, last in itertools.pairwise(ends):
            end = earlier + last
            hidden = None if attention_mask is None else attention_mask[:, :, first:last, :end]
            tensors = query[first:last], key[:end], value[:end]
            outputs.append(self._attend(*tensors, hidden, *more, **options))
        return torch.cat(outputs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention for ``query``, which contains the last tokens of a document.

        ``key`` and ``value`` contain these tokens and all earlier tokens of the document.
        """
        pattern = None
        if self._parts > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = self._all_parts(key, group), self._all_parts(value, group)
            pattern = self._pattern(query, key, rank=group.rank())
        elif self._window is not None:
            pattern = self._pattern(query, key)
        mask = self._own_mask
        if attention_mask is not None and pattern is None:
            mask = Mask.GIVEN
        case = self._case_of(query, value, mask)
        kernel = kernel_for(case)
        is_later = len(key) > len(query) and pattern is None and attention_mask is None
        if is_later and kernel is not Kernel.CAUSAL:
            pattern = dataclasses.replace(self._pattern(query, key), window=(len(key), 0))
        if kernel is Kernel.SCORES or options.get("attention_bias") is not None:
            # The base class applies the mask of a sliding window itself.
            if pattern is not None and self._window is None:
                attention_mask = _hidden(pattern)
            output: torch.Tensor = super().forward(
                query, key, value, attention_mask, *more, **options
            )
            return output
        if kernel is Kernel.PACKED:
            return self._by_rows(query, key, value)
        if not shares_keys(case):
            key, value = self._repeated(query, key, value)
        if pattern is not None:
            attention_mask = _shared_additive(pattern, query.dtype)
        elif attention_mask is not None:
            attention_mask = _additive(attention_mask, query.dtype)
        return self._by_heads(query, key, value, attention_mask)

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Documents,
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention within each document of a packed row.

        The tensors ``query``, ``key`` and ``value`` contain the tokens of the row, and
        ``documents`` contains the lengths of the documents.
        """
        case = self._case_of(query, value, self._own_mask, is_packed=True)
        if kernel_for(case) is Kernel.PACKED:
            return self._by_rows(
                query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), documents
            )
        lengths = list(documents.lengths)
        tensors = (tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value))
        rows = zip(*tensors, strict=True)
        return torch.cat([self._attend(*row, None, *more, **options) for row in rows])

    def _row(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: Sequence[int],
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention within each document of a row that contains only whole documents.

        The tensors have the layout ``[s, 1, ...]``, and ``lengths`` contains the number of tokens
        of each document.
        """
        documents = _documents(tuple(lengths), query.device)
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        return self._packed(query, key, value, documents, *more, **options)

    def _case_of(
        self, query: torch.Tensor, value: torch.Tensor, mask: Mask, *, is_packed: bool = False
    ) -> AttentionCase:
        device = query.device
        capability = torch.cuda.get_device_capability(device)[0] if query.is_cuda else 0
        return dataclasses.replace(
            self.case,
            device=device.type,
            dtype=str(query.dtype).partition(".")[2],
            mask=mask,
            is_packed=is_packed,
            query_width=query.shape[-1],
            value_width=value.shape[-1],
            has_dropout=self._dropout > 0,
            capability=capability,
        )

    @property
    def _own_mask(self) -> Mask:
        if self._window is not None:
            return Mask.WINDOW
        return Mask.CAUSAL if self._parts == 1 else Mask.GIVEN

    def _pattern(self, query: torch.Tensor, key: torch.Tensor, rank: int = 0) -> _Pattern:
        return _Pattern(
            queries=query.shape[0],
            keys=key.shape[0],
            device=query.device,
            window=self._window,
            rank=rank,
        )

    @property
    def _dropout(self) -> float:
        return float(self.attention_dropout.p) if self.training else 0.0

    @property
    def _whole_scale(self) -> float:
        # If --apply-query-key-layer-scaling is set, the second factor differs from 1, because
        # megatron-core then applies a part of the scaling in the softmax.
        return float(self.softmax_scale * (self.scale_mask_softmax.scale or 1.0))

    def _all_parts(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """Gathers the parts of a sequence from the ranks of ``group``, in the order of the tokens.

        ``tensor`` contains the two parts on this rank. The backward pass sums the gradients over
        the ranks.
        """
        parts = gather_from_sequence_parallel_region(tensor, group=group).chunk(2 * self._parts)
        return torch.cat([*parts[::2], *parts[1::2][::-1]])

    def _repeated(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Repeats ``key`` and ``value``, so that each head of ``query`` has its own copy."""
        groups = query.shape[2] // key.shape[2]
        if groups == 1:
            return key, value
        return key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)

    def _by_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes attention with torch's ``scaled_dot_product_attention``.

        Args:
            query: Queries ``[s, b, heads, width]``.
            key: Keys ``[keys, b, heads, width]``. If there are more keys than queries, the queries
                belong to the same tokens as the last keys.
            value: Values, in the same layout as ``key``.
            mask: Additive mask, ``[queries, keys]`` for all samples or ``[b, 1, s, s]``, or
                ``None`` for causal attention.
        """
        length, samples = query.shape[:2]
        # Treat the samples as additional heads, so that the output already has the memory layout
        # that the next layer needs. This is not possible if each sample has its own mask.
        rows = 1 if mask is None or mask.dim() == 2 else samples
        query, key, value = (
            tensor.reshape(tensor.shape[0], rows, -1, tensor.shape[-1]).permute(1, 2, 0, 3)
            for tensor in (query, key, value)
        )
        earlier = key.shape[2] - query.shape[2] if mask is None else 0
        if earlier and query.device.type == "cpu":
            output = attend_to_earlier(query, key, value, self._whole_scale)
            return output.permute(2, 0, 1, 3).reshape(length, samples, -1)
        last = causal_lower_right(query.shape[2], key.shape[2]) if earlier else mask
        with self._split_generator():
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=last,
                dropout_p=self._dropout,
                is_causal=last is None,
                scale=self._whole_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.permute(2, 0, 1, 3).reshape(length, samples, -1)

    def _split_generator(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that selects the random generator for tensors split over ranks."""
        if self._dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        fork: contextlib.AbstractContextManager[Any] = get_cuda_rng_tracker().fork()
        return fork

    def _by_rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Computes attention with torch's kernel for packed rows.

        Args:
            query: Queries ``[s, b, heads, width]``; b is 1 if ``documents`` is not ``None``.
            key: Keys, in the same layout as ``query``.
            value: Values, in the same layout as ``query``.
            documents: Parameters of the documents in the row, or ``None`` if each row is a single
                document.
        """
        key, value = self._repeated(query, key, value)
        length, samples = query.shape[:2]
        num_keys = len(key)
        if documents is None:  # Treat the samples as additional heads.
            ends, ends_of_keys = (_ends(number, query.device) for number in (length, num_keys))
            longest = length
            longest_keys = num_keys
        else:
            ends = ends_of_keys = documents.cu_seqlens_q
            longest = longest_keys = documents.max_seqlen_q
        output: Any = varlen_attn(
            query.reshape(length, -1, query.shape[-1]),
            key.reshape(num_keys, -1, key.shape[-1]),
            value.reshape(num_keys, -1, value.shape[-1]),
            ends,
            ends_of_keys,
            longest,
            longest_keys,
            scale=self._whole_scale,
            window_size=self._window or (-1, 0),
        )
        rows: torch.Tensor = output.reshape(length, samples, -1)
        return rows


class _AttendToEarlier(torch.autograd.Function):
    """Computes attention of the last tokens of a sequence with torch's kernel for CPUs.

    The kernel applies a causal mask only if there are as many keys as queries. With an explicit
    mask, it would also compute the masked scores. This class therefore runs the kernel twice, once
    for the keys of earlier tokens and once for the keys of the last tokens. It combines the two
    results using the log-sum-exp of their scores.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        (before, logs), (recent, recent_logs) = (
            attend(query, key[:, :, keys], value[:, :, keys], 0.0, is_causal, scale=scale)
            for keys, is_causal in _parts_of(query, key)
        )
        joined = torch.logaddexp(logs, recent_logs)
        share = torch.exp(recent_logs - joined).unsqueeze(-1).to(before.dtype)
        output: torch.Tensor = before.lerp(recent, share)
        ctx.save_for_backward(query, key, value, output, joined)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, joined = ctx.saved_tensors
        derive: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        (for_query, *before), (for_recent_query, *recent) = (
            derive(
                gradients[0],
                query,
                key[:, :, keys],
                value[:, :, keys],
                output,
                joined,
                0.0,
                is_causal,
                scale=ctx.scale,
            )
            for keys, is_causal in _parts_of(query, key)
        )
        for_key, for_value = (torch.cat(pair, dim=2) for pair in zip(before, recent, strict=True))
        return for_query + for_recent_query, for_key, for_value, None


def _parts_of(query: torch.Tensor, key: torch.Tensor) -> tuple[tuple[slice, bool], ...]:
    """Returns the ranges of earlier and recent keys, and whether each needs a causal mask.

    The recent keys, at the end of ``key``, belong to the same tokens as ``query``.
    """
    earlier = key.shape[2] - query.shape[2]
    return (slice(earlier), False), (slice(earlier, None), True)


def attend_to_earlier(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Computes causal attention of a sequence's last tokens on a CPU.

    Args:
        query: Queries ``[b, heads, queries, width]`` of the last tokens.
        key: Keys ``[b, heads, keys, width]`` of earlier tokens and the last tokens.
        value: Values, in the same layout as ``key``.
        scale: Factor by which the scores are multiplied.

    Returns:
        Output, in the same layout as ``query``.
    """
    function: Any = _AttendToEarlier  # torch does not declare the types of apply().
    output: torch.Tensor = function.apply(query, key, value, scale)
    return output


def bound_first(cap: float, module: Any, *inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Applies a soft cap to a tensor: limits it smoothly to the range from ``-cap`` to ``cap``.

    The function can be registered as a hook of a module. As a forward pre-hook, it changes the
    module's first input. As a forward hook, it changes the module's first output.

    Args:
        cap: Largest absolute value of the result, a positive number.
        module: Module that calls the hook.
        *inputs: Tuple of the module's inputs, followed by the tuple of its outputs in a forward
            hook.
    """
    first, *others = inputs[-1]
    return cap * torch.tanh(first / cap), *others


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pattern:
    """Describes a mask for a sliding window or context parallelism. Serves as a cache key.

    Attributes:
        queries: Number of queries.
        keys: Number of keys.
        device: Device on which the mask is stored.
        window: Numbers of earlier and later tokens that a token attends to, or ``None`` for all
            earlier tokens.
        rank: Index of this rank among the ranks that share a sequence (context parallelism).
    """

    queries: int
    keys: int
    device: torch.device
    window: tuple[int, int] | None = None
    rank: int = 0


def _make_hidden(pattern: _Pattern) -> torch.Tensor:
    """Returns the mask ``[queries, keys] bool`` of ``pattern``.

    An element is true if the query must not attend to the key.
    """
    if pattern.window is not None:
        hidden: torch.Tensor = get_sliding_window_causal_mask(
            pattern.queries, pattern.keys, pattern.window
        )
        return hidden.to(pattern.device)
    half = pattern.queries // 2
    query = torch.arange(pattern.queries, device=pattern.device)
    first = pattern.rank * half
    second = pattern.keys - 2 * half - first
    query = query + torch.where(query < half, first, second)
    return torch.arange(pattern.keys, device=pattern.device)[None, :] > query[:, None]


# The next two functions cache their small results, because all layers need the same values for a
# slice.


@functools.lru_cache(maxsize=64)
def _ends(length: int, device: torch.device) -> torch.Tensor:
    """Returns the start and the end of a row of ``length`` tokens: ``[0, length] int32``.

    The values are computed on the device, because copying them from the host would block.
    """
    return torch.arange(0, length + 1, length, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=64)
def _documents(lengths: tuple[int, ...], device: torch.device) -> Documents:
    """Returns packed-row parameters on ``device`` for documents with the given ``lengths``."""
    return Documents.of(torch.tensor(lengths), functools.partial(to_device, device=device))


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``hidden`` as an additive mask of ``dtype``: minus infinity for true, 0 for false."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)


# Each mask stays in memory until the backward pass, so all layers and microbatches share cached
# masks. The cache has only a few entries, because the mask of a long sequence is large.


@functools.lru_cache(maxsize=2)
def _hidden(pattern: _Pattern) -> torch.Tensor:
    return _make_hidden(pattern)


@functools.lru_cache(maxsize=2)
def _shared_additive(pattern: _Pattern, dtype: torch.dtype) -> torch.Tensor:
    return _additive(_make_hidden(pattern), dtype)
