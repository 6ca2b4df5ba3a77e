"""Measures the time of each transformer layer in traced steps, for ``--trace-detail layers``.

The forward pass of a layer begins and ends with the call of the layer. The backward pass begins
when the gradient of the layer's output is known, and ends when the gradient of the layer's input is
known::

    layer 0 ── hidden states ── layer 1 ── hidden states ── layer 2
                gradient known             gradient known
                     └──── backward of layer 1 ────┘

Weight gradients that a schedule computes later do not count as part of a layer's backward pass.
Forward passes that are repeated during the backward pass (activation recomputation) are not counted
either. If the model calls only parts of a layer, nothing is recorded for this layer. megatron-core
calls parts of layers when it overlaps exchanges of experts' tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import get_model_config

from megatron.adaptive.engine.layer_times import BACKWARD, FORWARD, MOST_LAYERS, LayerSums

_PREDICTING = re.compile(r"\bmtp\.layers\.(\d+)")


class LayerMeter(LayerSums):
    """Measures the time of each transformer layer of this rank.

    All methods must be called from the same thread.

    Args:
        chunks: Model chunks of this rank. Hooks are added to their layers, and are never removed.
        clock: Clock that records time marks on the device.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], clock: Any) -> None:
        super().__init__((), clock)
        self._begun: dict[int, tuple[Any, torch.Tensor | None]] = {}
        for chunk in chunks:
            num_layers = int(get_model_config(chunk).num_layers)
            for name, layer in chunk.named_modules():
                if isinstance(layer, BaseTransformerLayer) and len(self._numbers) < MOST_LAYERS:
                    self._attach(layer, _number_of(layer, name, num_layers))

    def begin(self, *, is_traced: bool) -> None:
        super().begin(is_traced=is_traced)
        self._begun = {}

    def _attach(self, layer: torch.nn.Module, number: int) -> None:
        index = len(self._numbers)
        self._numbers.append(number)

        def begins(_: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
            if self.is_traced:
                hidden = named.get("hidden_states", arguments[0] if arguments else None)
                self._begun[index] = (self.mark(), hidden)

        def ends(_: Any, arguments: Any, output: Any) -> None:
            if not self.is_traced or index not in self._begun:
                return
            start, received = self._begun.pop(index)
            if not _is_in_backward():
                self.add(index, FORWARD, start, self.mark())
            result = output[0] if isinstance(output, tuple) else output
            self._watch_backward(index, received, result)

        layer.register_forward_pre_hook(begins, with_kwargs=True)
        layer.register_forward_hook(ends)

    def _watch_backward(self, index: int, received: Any, result: Any) -> None:
        """Adds hooks that measure the backward pass of the layer with the index ``index``.

        The pass begins when the gradient of the layer's output ``result`` is known. It ends when
        the gradient of the layer's input ``received`` is known.
        """
        if not all(isinstance(t, torch.Tensor) and t.requires_grad for t in (received, result)):
            return
        starts: list[Any] = []

        def begins(_: torch.Tensor) -> None:
            if self.is_traced:
                starts.append(self.mark())

        def ends(_: torch.Tensor) -> None:
            if self.is_traced and starts:
                self.add(index, BACKWARD, starts.pop(), self.mark())

        result.register_hook(begins)
        received.register_hook(ends)


def _number_of(layer: Any, name: str, num_layers: int) -> int:
    """Returns the index of ``layer`` in the model, counting multi-token prediction layers last.

    ``name`` is the name of the layer in its chunk, and ``num_layers`` is the number of other layers
    in the model.
    """
    predicting = _PREDICTING.search(name)
    if predicting is not None:
        return num_layers + int(predicting[1])
    return int(layer.layer_number) - 1


def _is_in_backward() -> bool:
    """Returns whether this thread is running a backward pass, for example to recompute a layer."""
    return int(torch._C._current_graph_task_id()) != -1
