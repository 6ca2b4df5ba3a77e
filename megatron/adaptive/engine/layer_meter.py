"""Measures the time of each transformer layer in traced steps, for ``--trace-detail layers``.

A forward pass of a layer begins and ends with the call of the layer. Its backward pass begins when
the gradient of its output is known, and ends when the gradient of its input is::

    layer 0 ── hidden states ── layer 1 ── hidden states ── layer 2
                gradient known             gradient known
                     └──── backward of layer 1 ────┘

Weight gradients that a schedule computes later are not part of this. Forward passes that are
repeated during the backward pass (activation recomputation) are not counted. Layers of which the
model calls only parts, as with overlapped exchanges of experts' tokens, have no times.

Times are added up over the microbatches of a step, so a trace has a few numbers per layer and step.
For timelines it also has start and end of each layer's first forward and backward pass in the step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import get_model_config

_PREDICTING = re.compile(r"\bmtp\.layers\.(\d+)")
MOST_LAYERS = 64
"""Maximum number of measured layers of a rank, so that a step's times have at most 3 KB."""

MOST_DRAWN = 32
"""Maximum number of layers of a rank whose first passes have their start and end in the trace."""

_FORWARD, _BACKWARD = 0, 1


class LayerMeter:
    """Measures the layers of this rank. All methods must be called from one thread.

    Args:
        chunks: Model chunks of this rank. Hooks stay attached to their layers.
        clock: Clock that makes marks on the device.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], clock: Any) -> None:
        self._clock = clock
        self._is_traced = False
        self._numbers: list[int] = []
        self._marks: list[tuple[int, int, Any, Any]] = []  # layer's index, pass, start, end
        self._begun: dict[int, tuple[Any, torch.Tensor | None]] = {}
        self._first_passes: dict[tuple[int, int], tuple[int, int]] = {}
        for chunk in chunks:
            num_layers = int(get_model_config(chunk).num_layers)
            for name, layer in chunk.named_modules():
                if isinstance(layer, BaseTransformerLayer) and len(self._numbers) < MOST_LAYERS:
                    self._attach(layer, _number_of(layer, name, num_layers))

    def begin(self, *, is_traced: bool) -> None:
        """Begins a step.

        Args:
            is_traced: Whether to measure the step.
        """
        self._is_traced = is_traced
        self._marks = []
        self._begun = {}

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Returns the times of the step that ends, and waits until the device has done its work.

        Returns:
            For each layer: index of the layer in the model, time in ns of all forward passes, of
            all backward passes, and number of forward passes.
        """
        if self._marks:
            self._clock.wait(self._marks[-1][3])
        sums: dict[int, list[int]] = {}
        self._first_passes = {}
        for index, kind, start, end in self._marks:
            row = sums.setdefault(index, [0, 0, 0])
            start_ns = self._clock.resolve_ns(start)
            end_ns = self._clock.resolve_ns(end)
            self._first_passes.setdefault((index, kind), (start_ns, end_ns))
            row[kind] += end_ns - start_ns
            row[2] += kind == _FORWARD
        self._marks = []
        self._is_traced = False
        return [
            (self._numbers[index], forward_ns, backward_ns, count)
            for index, (forward_ns, backward_ns, count) in sorted(sums.items())
        ]

    def passes(self) -> list[tuple[int, int, int, int]]:
        """Returns the first passes of some layers in the step of the last call of :meth:`rows`.

        Returns:
            Rows of index of the layer in the model, 0 for a forward or 1 for a backward pass, start
            and end in ns. If there are many layers, those of an evenly spaced sample.
        """
        every = max(1, -(-len(self._numbers) // MOST_DRAWN))
        return [
            (self._numbers[index], kind, start_ns, end_ns)
            for (index, kind), (start_ns, end_ns) in sorted(self._first_passes.items())
            if index % every == 0
        ]

    def _attach(self, layer: torch.nn.Module, number: int) -> None:
        index = len(self._numbers)
        self._numbers.append(number)

        def begins(_: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
            if self._is_traced:
                hidden = named.get("hidden_states", arguments[0] if arguments else None)
                self._begun[index] = (self._clock.mark(), hidden)

        def ends(_: Any, arguments: Any, output: Any) -> None:
            if not self._is_traced or index not in self._begun:
                return
            start, received = self._begun.pop(index)
            if not _is_in_backward():
                self._marks.append((index, _FORWARD, start, self._clock.mark()))
            result = output[0] if isinstance(output, tuple) else output
            self._watch_backward(index, received, result)

        layer.register_forward_pre_hook(begins, with_kwargs=True)
        layer.register_forward_hook(ends)

    def _watch_backward(self, index: int, received: Any, result: Any) -> None:
        """Measures the time between the gradients of a layer's output and input."""
        if not all(isinstance(t, torch.Tensor) and t.requires_grad for t in (received, result)):
            return
        starts: list[Any] = []

        def begins(_: torch.Tensor) -> None:
            if self._is_traced:
                starts.append(self._clock.mark())

        def ends(_: torch.Tensor) -> None:
            if self._is_traced and starts:
                self._marks.append((index, _BACKWARD, starts.pop(), self._clock.mark()))

        result.register_hook(begins)
        received.register_hook(ends)


def _number_of(layer: Any, name: str, num_layers: int) -> int:
    """Returns the index of a layer in the model; layers of multi-token prediction come last."""
    predicting = _PREDICTING.search(name)
    if predicting is not None:
        return num_layers + int(predicting[1])
    return int(layer.layer_number) - 1


def _is_in_backward() -> bool:
    """Returns whether autograd runs a backward pass in this thread, perhaps a recomputation."""
    return int(torch._C._current_graph_task_id()) != -1
