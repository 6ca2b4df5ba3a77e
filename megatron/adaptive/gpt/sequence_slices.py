"""Runs the sequences of a microbatch slice by slice: cuts batches, keeps keys and values.

A step with n slices per microbatch runs *items*: item ``microbatch * n + slice``. On each chunk the
forward passes of a microbatch's slices run in ascending order, and their backward passes in
descending order::

    F0  F1  F2  F3        B3  B2  B1  B0          4 slices of one microbatch on one chunk
    |   |   |   |          |   |   |   |
    k0  k1  k2  k3  keys   |   |   |   |
    +---+---+---+--------->|   |   |   |          F of a slice reads the keys of earlier slices;
    g0  g1  g2  g3 <-------+---+---+---+          B adds to their gradients, and B of the slice
                                                  itself passes the sum on to its layers

Each attention layer has one buffer for the keys and one for the values of a microbatch. A slice
writes its part, and attends to the buffer up to its own end. Its backward pass computes gradients
of that whole part of the buffer. It returns those of its own tokens, including what later slices
have added, and adds the others to the gathered gradients. So autograd never sees one slice's graph
from another slice's, and each graph is freed by its own backward pass.

Where a layer recomputes its forward pass, it writes the same keys and values again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.adaptive.errors import ConfigError

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that computes attention from queries, keys and values.

The queries belong to the last tokens of the keys.
"""


class KeysAndValues:
    """Holds the keys and values of one microbatch in one layer, and their gathered gradients.

    Args:
        like: Keys and values of a slice ``[s, b, heads, width]``, for shapes and types.
        length: Number of tokens in all slices.
    """

    def __init__(self, like: Sequence[torch.Tensor], length: int) -> None:
        self._whole = [tensor.new_empty((length, *tensor.shape[1:])) for tensor in like]
        self._gradients: list[torch.Tensor] | None = None

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Returns the buffers of keys and values, ``[length, b, heads, width]`` each."""
        return self._whole

    def write(self, start: int, parts: Sequence[torch.Tensor]) -> None:
        """Stores keys and values of the slice whose first token is at ``start``."""
        for whole, part in zip(self._whole, parts, strict=True):
            whole.data[start : start + len(part)].copy_(part.detach())

    def read(self, first: int, end: int) -> list[torch.Tensor]:
        """Returns keys and values of the tokens from ``first`` up to ``end``, without copying.

        Later calls of :meth:`write` do not invalidate what autograd has saved of them, because they
        write to other tokens.
        """
        return [whole.data[first:end] for whole in self._whole]

    def exchange(
        self, first: int, start: int, gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Gathers gradients of earlier slices' tokens, and returns the slice's own, complete.

        Gradients of 16-bit tensors are gathered in 32 bits.

        Args:
            first: Position of the first token that the slice attends to.
            start: Position of the slice's first token.
            gradients: Gradients of keys and values from ``first`` up to the slice's end.
        """
        earlier = start - first
        end = first + len(gradients[0])
        complete = [gradient[earlier:] for gradient in gradients]
        if self._gradients is not None:
            complete = [
                (part + gathered[start:end]).to(part.dtype)
                for part, gathered in zip(complete, self._gradients, strict=True)
            ]
        if earlier == 0:
            return complete
        if self._gradients is None:
            self._gradients = [
                torch.zeros(
                    (start, *part.shape[1:]),
                    dtype=torch.promote_types(part.dtype, torch.float32),
                    device=part.device,
                )
                for part in complete
            ]
        for gathered, gradient in zip(self._gradients, gradients, strict=True):
            gathered[first:start] += gradient[:earlier]
        return complete


class SequenceSlices:
    """Knows the slice that runs now, and keeps keys and values of each chunk and microbatch.

    The engine calls :meth:`begin` and :meth:`end` around each action, and :meth:`finish` at the end
    of a step. Not thread-safe, but autograd's thread may read it while the calling thread waits.

    Args:
        ends: Position after the last token of each slice, ascending.

    Attributes:
        count: Number of slices per microbatch.
        start: Position of the current slice's first token.
        end: Position after the current slice's last token.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._bounds = list(zip((0, *ends[:-1]), ends, strict=True))
        self.count = len(ends)
        self.start = 0
        self.end = 0
        self._key = (-1, -1)
        self._kept: dict[tuple[int, int], dict[int, KeysAndValues]] = {}
        self._kept_bytes: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Returns the number of tokens in all slices."""
        return self._bounds[-1][1]

    def share(self, item: int) -> float:
        """Returns the number of tokens of an item's slice, relative to the whole sequence."""
        start, end = self._bounds[item % self.count]
        return (end - start) / self.length

    def begin(self, chunk: int, item: int) -> None:
        """Makes an item's slice the current one, before its forward or backward pass."""
        microbatch, index = divmod(item, self.count)
        self.start, self.end = self._bounds[index]
        self._key = (chunk, microbatch)

    def release(self, chunk: int, item: int) -> None:
        """Frees the keys and values of an item's microbatch, which no slice needs any more."""
        self._kept.pop((chunk, item // self.count), None)

    def finish(self) -> None:
        """Frees everything at the end of a step, also after an error."""
        self._kept.clear()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields the buffers of the current chunk and microbatch."""
        for kept in self._kept.get(self._key, {}).values():
            yield from kept.buffers

    def kept_bytes(self, chunk: int) -> int:
        """Returns the size in bytes of keys and values that a chunk keeps for a microbatch.

        It is measured after the chunk's first forward pass; before that it is 0.
        """
        if chunk not in self._kept_bytes:
            layers = self._kept.get((chunk, 0), {})
            nbytes = sum(whole.nbytes for kept in layers.values() for whole in kept.buffers)
            if not nbytes:
                return 0
            self._kept_bytes[chunk] = nbytes
        return self._kept_bytes[chunk]

    def attach(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Makes the layers of ``chunks`` attend to earlier slices, and positions continue.

        Raises:
            ConfigError: A layer has an attention that cannot attend to earlier slices.
        """
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    self._attach_to(module)
                elif isinstance(module, RotaryEmbedding):
                    module.register_forward_pre_hook(self._shift, with_kwargs=True)

    def _attach_to(self, layer: Any) -> None:
        attention = getattr(layer.self_attention, "core_attention", None)
        if attention is None:  # the layer has no attention, and each token is computed alone
            return
        if not hasattr(attention, "slices"):
            raise ConfigError(
                f"--sequence-slices {self.count} is given, and layer {layer.layer_number} computes "
                f"attention by {type(attention).__name__}, which does not attend to earlier "
                "slices: drop it, or choose a model with plain attention"
            )
        attention.slices = self

    def _shift(
        self, _module: Any, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, {**options, "offset": self.start}

    def parts(self, batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Cuts a microbatch into slices.

        Args:
            batch: Tensors ``[b, s]``, and possibly ``attention_mask [b, 1, s, s]``.

        Yields:
            The tensors of each slice. ``whole_tokens`` is the number of tokens in the whole
            microbatch whose losses are included.
        """
        tokens = batch["loss_mask"].sum()
        for start, end in self._bounds:
            part = {key: tensor[:, start:end] for key, tensor in batch.items() if tensor.dim() == 2}
            if (mask := batch.get("attention_mask")) is not None:
                part["attention_mask"] = mask[:, :, start:end, :end]
            yield {**part, "whole_tokens": tokens}

    def attend(
        self,
        layer: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attend: Attend,
        window: int | None,
    ) -> torch.Tensor:
        """Computes attention of the current slice to itself and to earlier slices.

        Args:
            layer: Attention layer that calls.
            query: Queries of the slice ``[s, b, heads, width]``.
            key: Keys of the slice ``[s, b, groups, width]``.
            value: Values of the slice, in the same form.
            attend: Function that computes attention.
            window: Number of earlier tokens that a token attends to, ``None`` for all.
        """
        layers = self._kept.setdefault(self._key, {})
        kept = layers.get(id(layer))
        if kept is None:
            kept = layers[id(layer)] = KeysAndValues((key, value), self.length)
        first = 0 if window is None else max(0, self.start - window)
        arguments = (query, key, value, attend, kept, (first, self.start, self.end))
        if torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value)):
            function: Any = _AttendSlice  # torch declares no types for apply()
            output: torch.Tensor = function.apply(*arguments)
            return output
        kept.write(self.start, (key, value))
        return attend(query, *kept.read(first, self.end))


class _AttendSlice(torch.autograd.Function):
    """Attends to the buffer of keys and values; its backward pass gathers their gradients.

    The attention itself is differentiated by autograd, in a graph of its own that begins at the
    queries and at the buffer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attend,
        kept: KeysAndValues,
        bounds: tuple[int, int, int],
    ) -> torch.Tensor:
        first, start, end = bounds
        kept.write(start, (key, value))
        leaves = [part.detach().requires_grad_() for part in (query, *kept.read(first, end))]
        with torch.enable_grad():
            output = attend(*leaves)
        ctx.leaves = leaves
        ctx.output = output
        ctx.kept = kept
        ctx.bounds = bounds
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        output, leaves = ctx.output, ctx.leaves
        ctx.output = ctx.leaves = None
        for_query, *for_buffer = torch.autograd.grad(output, leaves, gradients)
        first, start, _ = ctx.bounds
        return (for_query, *ctx.kept.exchange(first, start, for_buffer), None, None, None)
