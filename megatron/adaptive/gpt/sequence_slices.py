"""Cuts microbatches into slices of their sequences, and stores keys and values for later slices.

A step runs the slices of all microbatches, which are called *items*. The number of slices may
differ between microbatches. On each chunk, the forward passes (F) of a microbatch's slices run in
ascending order, and the backward passes (B) in descending order::

    F0  F1  F2  F3        B3  B2  B1  B0          4 slices of one microbatch on one chunk
    |   |   |   |          |   |   |   |
    k0  k1  k2  k3  keys   |   |   |   |
    +---+---+---+--------->|   |   |   |          F of a slice reads the keys of earlier slices;
    g0  g1  g2  g3 <-------+---+---+---+          B of a slice adds to the gradients of these keys,
                                                  and B of the earlier slice uses the sums

Each attention layer has one buffer for the keys and one for the values of a microbatch. A slice
writes its keys and values to the buffers, and attends to all tokens in them up to its own last
token. The slice's backward pass computes the gradients of all these keys and values. For its own
tokens, it adds the accumulated gradients of later slices and returns the sum. The gradients of
earlier tokens are accumulated for the backward passes of their slices. The autograd graph of a
slice therefore never contains the graph of another slice, and each graph is freed by its own
backward pass.

Recomputing the forward pass of a layer writes the same keys and values again.

**Windows.** In a layer with a sliding window of w tokens, a slice attends to at most w keys of
earlier slices, so gradients are accumulated for only w tokens. In evaluation, and in a recomputed
layer, only the last w keys of each slice are kept instead of a buffer. Evaluation drops these keys
as soon as later slices no longer attend to them. In all other cases, a buffer is used: the backward
passes need all keys anyway, and the buffer stores each key only once for all slices.

**Packed documents.** If a microbatch is a row of documents, only documents that extend over several
slices have buffers. A slice attends to earlier slices only within the document in which it begins.
Documents that lie within a single slice are processed as if there were no slices. Positions are
counted from the first token of each document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.adaptive.accelerator import to_device
from megatron.adaptive.config.sequence_slices import Cut, DocumentPart, SliceRule
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.action import SliceCounts, item_count, place_of

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that computes attention from queries, keys and values.

If there are more keys than queries, the queries belong to the last tokens.
"""


class Attention(NamedTuple):
    """Describes a call of an attention layer.

    Attributes:
        layer: Attention layer that is called.
        attend: Function that computes attention of one document.
        attend_documents: Function that computes attention of a row of several whole documents from
            queries, keys and values ``[s, 1, heads, width]`` and the lengths of the documents.
        window: Number of earlier tokens that a token attends to, or ``None`` for all earlier
            tokens.
    """

    layer: torch.nn.Module
    attend: Attend
    attend_documents: Callable[..., torch.Tensor]
    window: int | None


class KeysAndValues:
    """Stores the keys and values of a document in one layer, and accumulates their gradients.

    Positions are relative to the document's first token.

    Args:
        like: Keys and values of one slice ``[s, b, heads, width]``, which determine the shapes and
            dtypes of the buffers.
        length: Number of tokens of the document.
    """

    def __init__(self, like: Sequence[torch.Tensor], length: int) -> None:
        self._gathered: list[torch.Tensor] | None = None
        self._gathered_first = 0
        self._buffers = [part.new_empty((length, *part.shape[1:])) for part in like]
        self.bytes_per_token = sum(part.nbytes / len(part) for part in like)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Returns the tensors that store the keys and values."""
        return self._buffers

    def extend(self, first: int, start: int, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Stores a slice's keys and values, and returns all keys and values that it attends to.

        The returned tensors are views of the buffers. Views that autograd has saved stay valid,
        because later calls write to other tokens.

        Args:
            first: Position of the first token that the slice attends to.
            start: Position of the slice's first token.
            parts: Keys and values of the slice.
        """
        end = start + len(parts[0])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.data[start:end].copy_(part.detach())
        return [buffer.data[first:end] for buffer in self._buffers]

    def exchange(
        self, first: int, start: int, gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Accumulates gradients of earlier tokens, and returns the complete gradients of a slice.

        The backward passes of all later slices must have called this method before. Gradients of
        16-bit tensors are summed in 32 bits.

        Args:
            first: Position of the first token that the slice attends to.
            start: Position of the slice's first token.
            gradients: Gradients of the keys and values, from position ``first`` to the end of the
                slice.
        """
        earlier = start - first
        complete = [gradient[earlier:] for gradient in gradients]
        later, later_first = self._gathered, self._gathered_first
        if later is not None:
            complete = [
                _sum_at_end(part, gathered[max(0, start - later_first) :])
                for part, gathered in zip(complete, later, strict=True)
            ]
        self._gathered = None
        # The first slice of the document is the last to run backward, so free the buffers.
        if not start:
            self._buffers = []
        if not earlier:
            return complete
        if later is None or later_first > first:
            wider = [
                torch.zeros(
                    (earlier, *part.shape[1:]),
                    dtype=torch.promote_types(part.dtype, torch.float32),
                    device=part.device,
                )
                for part in complete
            ]
            for whole, gathered in zip(wider, later or (), strict=False):
                overlap = whole[max(0, later_first - first) :]
                overlap += gathered[: len(overlap)]
            later = wider
        self._gathered = [gathered[:earlier] for gathered in later]
        self._gathered_first = first
        for gathered, gradient in zip(self._gathered, gradients, strict=True):
            gathered += gradient[:earlier]
        return complete


def _sum_at_end(part: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
    """Adds ``gathered`` to the last tokens of ``part``, and returns a tensor of the same dtype."""
    if len(gathered) == len(part):
        return (part + gathered).to(part.dtype)
    start = len(part) - len(gathered)
    return torch.cat([part[:start], (part[start:] + gathered).to(part.dtype)])


class LastKeysAndValues(KeysAndValues):
    """Stores only those keys and values of each slice that are in the window of later slices.

    Args:
        like: Keys and values of one slice, which determine shapes and dtypes.
        window: Number of earlier tokens that a token attends to.
        forgets: Whether to drop keys and values as soon as the next slice does not attend to them.
            Must be false if layers are recomputed; the backward passes then drop the keys and
            values.
    """

    def __init__(self, like: Sequence[torch.Tensor], window: int, *, forgets: bool) -> None:
        super().__init__(like, 0)
        self._window = window
        self._forgets = forgets
        # Keys and values of each part, keyed by the position of the part's first token. The
        # positions are in ascending order.
        self._parts: dict[int, list[torch.Tensor]] = {}
        self.bytes_per_token *= min(window, len(like[0])) / len(like[0])

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [part for parts in self._parts.values() for part in parts]

    def extend(self, first: int, start: int, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        end = start + len(parts[0])
        begin = max(start, end - self._window)
        earlier = [(position, kept) for position, kept in self._parts.items() if position < start]
        if begin not in self._parts:
            self._parts[begin] = [part[begin - start :].detach().clone() for part in parts]
        if self._forgets:
            for position, kept in earlier:
                if position + len(kept[0]) <= end - self._window:
                    del self._parts[position]
        seen = [
            [part[max(0, first - position) :] for part in kept]
            for position, kept in earlier
            if position + len(kept[0]) > first
        ]
        return [torch.cat(each) for each in zip(*seen, parts, strict=True)]

    def exchange(
        self, first: int, start: int, gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        for position in [position for position in self._parts if position >= start]:
            del self._parts[position]
        return super().exchange(first, start, gradients)


class SequenceSlices:
    """Tracks the current slice, and stores the keys and values of each chunk and microbatch.

    The engine calls :meth:`begin` before each forward or backward pass, and :meth:`finish` at the
    end of a step. The class is not thread-safe, except that autograd's thread may use it while the
    calling thread waits.

    Args:
        ends: Token position at which each slice ends, in ascending order. Microbatches are cut at
            these positions unless there is a ``rule``.
        rule: Rule for cutting microbatches, or ``None`` if all microbatches are cut in the same
            way.

    Attributes:
        count: Number of slices of each microbatch in the current step.
    """

    def __init__(self, ends: Sequence[int], rule: SliceRule | None = None) -> None:
        self._equal = Cut(tuple(ends))
        self._rule = rule
        self._cuts: list[Cut] = []
        self.count: SliceCounts = len(ends)
        tokens = rule and rule.tokens
        self._most = -(-ends[-1] // tokens) if tokens else len(ends)
        self._pieces: list[DocumentPart] = []
        self._positions: torch.Tensor | None = None
        self._key = (-1, -1)
        self._kept: dict[tuple[int, int], dict[tuple[int, int], KeysAndValues]] = {}
        self._bytes_per_token: dict[int, float] = {}
        self._longest = max(ends[-1], (rule and rule.tokens) or 0)

    def plan(self, contents: Sequence[Sequence[int]]) -> None:
        """Cuts the microbatches of a step, unless all microbatches are cut in the same way.

        Args:
            contents: One list of numbers per microbatch: the number of token positions including
                padding, followed by the number of tokens of each document.
        """
        if (rule := self._rule) is None:
            return
        self._cuts = [
            rule.cut(positions if rule.is_packed else positions // len(documents), documents)
            for positions, *documents in contents
        ]
        counts = tuple(len(cut.ends) for cut in self._cuts)
        self.count = counts[0] if len(set(counts)) == 1 else counts

    @property
    def stride(self) -> int:
        """Returns the maximum number of slices per microbatch, which is equal on all ranks."""
        if isinstance(self.count, int) and (self._rule is None or not self._rule.varies):
            return self.count
        return self._most

    @property
    def sizes(self) -> list[int] | None:
        """Returns the token counts of all slices.

        The result is ``None`` if all microbatches are cut in the same way.
        """
        if self._rule is None:
            return None
        return [self.tokens(item) for item in range(item_count(len(self._cuts), self.count))]

    @property
    def num_microbatches(self) -> int:
        """Returns the number of microbatches with separate cuts, or 0 if all have the same cuts."""
        return len(self._cuts)

    def work(self, item: int) -> tuple[int, int]:
        """Returns the numbers of tokens and of token pairs in the slice with the index ``item``."""
        microbatch, index, _ = place_of(item, self.count)
        return self._cut(microbatch).work(index)

    def tokens(self, item: int) -> int:
        """Returns the number of tokens in the slice with the index ``item``."""
        microbatch, index, _ = place_of(item, self.count)
        start, end = self._cut(microbatch).bounds(index)
        return end - start

    def _cut(self, microbatch: int) -> Cut:
        return self._equal if self._rule is None else self._cuts[microbatch]

    def begin(self, chunk: int, item: int) -> None:
        """Makes ``item`` the current slice, before a forward or backward pass of ``chunk``."""
        microbatch, index, _ = place_of(item, self.count)
        self._pieces = self._cut(microbatch).pieces(index)
        self._positions = None
        self._key = (chunk, microbatch)

    def release(self, chunk: int, item: int) -> None:
        """Frees the keys and values of ``chunk`` for the microbatch of the slice ``item``."""
        self._kept.pop((chunk, place_of(item, self.count).microbatch), None)

    def finish(self) -> None:
        """Frees all keys and values at the end of a step, even after an error."""
        self._kept.clear()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields the tensors that store the keys and values of the current chunk and microbatch."""
        for kept in self._kept.get(self._key, {}).values():
            yield from kept.buffers

    def kept_bytes(self, chunk: int, item: int) -> float:
        """Returns how many bytes of keys and values ``chunk`` keeps for the slice ``item``.

        The size per token is measured when the chunk first keeps keys and values. The result is 0
        before that.
        """
        microbatch, index, _ = place_of(item, self.count)
        tokens = self._cut(microbatch).kept_tokens(index)
        if tokens and chunk not in self._bytes_per_token:
            layers: dict[int, float] = {}
            for (layer, _), kept in self._kept.get((chunk, microbatch), {}).items():
                layers[layer] = kept.bytes_per_token
            if not layers:
                return 0.0
            self._bytes_per_token[chunk] = sum(layers.values())
        return tokens * self._bytes_per_token.get(chunk, 0.0)

    def attach(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Makes the layers of ``chunks`` attend to earlier slices and use the right positions.

        Raises:
            ConfigError: If a layer has a kind of attention that cannot attend to earlier slices.
        """
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    self._attach_to(module)
                elif isinstance(module, RotaryEmbedding):
                    module.register_forward_pre_hook(self._ask_positions, with_kwargs=True)
                    module.register_forward_hook(self._pick_positions)

    def _attach_to(self, layer: Any) -> None:
        attention = getattr(layer.self_attention, "core_attention", None)
        # Layers without attention need no change, because their tokens do not depend on each other.
        if attention is None:
            return
        if not hasattr(attention, "slices"):
            raise ConfigError(
                f"--sequence-slices {self._most} is not supported by the attention of layer "
                f"{layer.layer_number} ({type(attention).__name__}), which cannot attend to "
                "earlier slices; remove the flag, or use a model with standard attention"
            )
        attention.slices = self

    def _ask_positions(
        self, _module: Any, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes rotary embeddings start at the position of the slice's first token.

        If the slice contains parts of several documents, this hook requests the embeddings of all
        positions, and :meth:`_pick_positions` selects those that are needed.
        """
        pieces = self._pieces
        if len(pieces) == 1:
            return inputs, {**options, "offset": pieces[0].start - pieces[0].begin}
        return (self._longest, *inputs[1:]), options

    def _pick_positions(self, _module: Any, _inputs: Any, output: Any) -> Any:
        """Selects from ``output`` the rotary embeddings for the positions of the slice's tokens."""
        pieces = self._pieces
        if len(pieces) == 1:
            return output
        rotation, *more = output if isinstance(output, tuple) else (output,)
        if self._positions is None:
            ranges = [torch.arange(p.start - p.begin, p.end - p.begin) for p in pieces]
            self._positions = to_device(torch.cat(ranges), rotation.device)
        picked = rotation[self._positions]
        return (picked, *more) if more else picked  # YaRN also returns a scaling factor.

    def parts(
        self, microbatch: int, batch: Mapping[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Cuts the microbatch ``batch`` into slices.

        Args:
            microbatch: Index of the microbatch in the step.
            batch: Tensors ``[b, s]``, and possibly ``attention_mask [b, 1, s, s]``; empty on a rank
                that does not need data.

        Yields:
            Tensors of each slice. ``whole_tokens`` is the number of unmasked tokens in the whole
            microbatch, and is missing if ``batch`` has no loss mask.
        """
        cut = self._cut(microbatch)
        tokens = batch["loss_mask"].sum() if "loss_mask" in batch else None
        for index in range(len(cut.ends)):
            start, end = cut.bounds(index)
            part = {key: tensor[:, start:end] for key, tensor in batch.items() if tensor.dim() == 2}
            if (mask := batch.get("attention_mask")) is not None:
                part["attention_mask"] = mask[:, :, start:end, :end]
            yield part if tokens is None else {**part, "whole_tokens": tokens}

    def attend(
        self, call: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Computes the attention of the current slice to itself and to earlier slices.

        Args:
            call: Attention layer that is called, with its attention functions and its window.
            query: Queries of the slice ``[s, b, heads, width]``.
            key: Keys of the slice ``[s, b, groups, width]``.
            value: Values of the slice, in the same layout as ``key``.
        """
        pieces = self._pieces
        origin = pieces[0].start
        outputs = []
        for is_whole, group in groupby(pieces, lambda piece: piece.is_whole):
            parts = list(group)
            tokens = slice(parts[0].start - origin, parts[-1].end - origin)
            tensors = query[tokens], key[tokens], value[tokens]
            if len(parts) > 1 and is_whole:
                lengths = [piece.end - piece.start for piece in parts]
                outputs.append(call.attend_documents(*tensors, lengths))
            elif is_whole:
                outputs.append(call.attend(*tensors))
            else:
                for piece in parts:
                    tokens = slice(piece.start - origin, piece.end - origin)
                    tensors = query[tokens], key[tokens], value[tokens]
                    outputs.append(self._continue(call, piece, *tensors))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _continue(
        self,
        call: Attention,
        piece: DocumentPart,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Computes attention of ``piece``, a part of a document that extends over several slices.

        ``query``, ``key`` and ``value`` contain only the tokens of this part. The keys and values
        of earlier parts of the document are stored for ``call.layer``.
        """
        start, window = piece.start - piece.begin, call.window
        layers = self._kept.setdefault(self._key, {})
        kept = layers.get((id(call.layer), piece.begin))
        makes_graph = torch.is_grad_enabled()
        if kept is None:
            if window is None or makes_graph:
                kept = KeysAndValues((key, value), piece.close - piece.begin)
            else:
                kept = LastKeysAndValues((key, value), window, forgets=not call.layer.training)
            layers[id(call.layer), piece.begin] = kept
        first = 0 if window is None else max(0, start - window)
        arguments = (query, key, value, call.attend, kept, (first, start))
        if makes_graph and any(part.requires_grad for part in (query, key, value)):
            function: Any = _AttendSlice  # torch does not declare the types of apply().
            output: torch.Tensor = function.apply(*arguments)
            return output
        if piece.end == piece.close and not call.layer.training:
            del layers[id(call.layer), piece.begin]
        return call.attend(query, *kept.extend(first, start, (key, value)))


class _AttendSlice(torch.autograd.Function):
    """Attends to stored keys and values. The backward pass accumulates their gradients.

    Autograd differentiates the attention in a separate graph. The inputs of this graph are the
    queries and the stored keys and values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attend,
        kept: KeysAndValues,
        bounds: tuple[int, int],
    ) -> torch.Tensor:
        seen = kept.extend(*bounds, (key, value))
        leaves = [part.detach().requires_grad_() for part in (query, *seen)]
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
        return (for_query, *ctx.kept.exchange(*ctx.bounds, for_buffer), None, None, None)
