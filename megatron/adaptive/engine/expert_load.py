"""Measures the load of experts in a step: tokens per expert, and time for exchanging tokens.

An exchange is a collective of the expert-parallel ranks during a forward or backward pass. It
transfers tokens to experts and back (all-to-all, or all-gather and reduce-scatter), or it transfers
token counts. The exchange time is how long an action waits for the exchange. If another action runs
during the exchange (see ``lanes``), only the wait after that action counts. Ranks whose experts
have more tokens start the next exchange late, so long exchange times on the other ranks show the
cost of an unequal load.

Measurements are only made if the model has experts and a trace or monitor needs them. Counting
costs one addition of short vectors on the device per layer and forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_model_config

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.engine.model_groups import ModelGroups

_PREDICTING = re.compile(r"\bmtp\.layers\.(\d+)")


def measured_experts(
    chunks: Sequence[torch.nn.Module],
    accelerator: Accelerator,
    model_groups: ModelGroups | None = None,
) -> ExpertLoad | None:
    """Returns an object that measures experts in ``chunks``, or ``None`` if there are no experts.

    The clock of ``accelerator`` measures the exchanges of tokens between the ranks of
    ``model_groups``.
    """
    if not getattr(get_model_config(chunks[0]), "num_moe_experts", None):
        return None
    return ExpertLoad(chunks, accelerator.clock(), model_groups or ModelGroups())


class ExpertLoad:
    """Counts the tokens that each expert on this rank processes in a step, and times exchanges.

    Args:
        chunks: Model chunks of this rank. Hooks on their expert layers count the tokens of all
            later forward passes that run with gradients enabled.
        clock: Clock that records time marks on the device, for timing exchanges.
        model_groups: Process groups of the model.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], clock: Any, model_groups: ModelGroups
    ) -> None:
        self._clock = clock
        self._groups = model_groups
        # Each entry contains an MoE layer's index in the model, and the index of its first expert
        # on this rank.
        self._layers: list[tuple[int, int]] = []
        self._tokens: list[torch.Tensor | None] = []
        self._marks: list[tuple[Any, Any]] = []
        self._watching = ExitStack()
        self._hooks: list[Any] = []
        for chunk in chunks:
            config = get_model_config(chunk)
            for name, layer in chunk.named_modules():
                if isinstance(layer, MoELayer):
                    predicting = _PREDICTING.search(name)
                    number = (
                        layer.layer_number - 1
                        if predicting is None
                        else config.num_layers + int(predicting[1])
                    )
                    counter = self._counter(len(self._layers))
                    self._hooks.append(layer.experts.register_forward_pre_hook(counter))
                    self._layers.append((number, layer.local_expert_indices[0]))
                    self._tokens.append(None)

    def begin(self, *, is_traced: bool) -> None:
        """Begins a step with all counts at 0. Exchanges are timed if ``is_traced`` is true."""
        self._watching.close()
        self._tokens = [None] * len(self._layers)
        if is_traced and self._layers:
            self._watching.enter_context(self._watching_exchanges())

    def close(self) -> None:
        """Stops all measurements, and removes the hooks from the model."""
        self._watching.close()
        for hook in self._hooks:
            hook.remove()

    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Waits for the device and returns the number of tokens of each expert in the step.

        Returns:
            One tuple per MoE layer. It contains the layer's index in the model from 0, the index of
            the layer's first expert on this rank, and the number of tokens of each expert on this
            rank. Multi-token prediction layers are numbered after all other layers.
        """
        return tuple(
            (*layer, *map(int, counts.tolist()))
            for layer, counts in zip(self._layers, self._tokens, strict=True)
            if counts is not None
        )

    def exchange_ns(self) -> int:
        """Waits for the device and returns the total time of the step's exchanges in nanoseconds.

        A second call in the same step returns 0.
        """
        self._watching.close()
        marks = self._marks
        self._marks = []
        for _, end in marks:
            self._clock.wait(end)
        resolve = self._clock.resolve_ns
        return sum(max(0, int(resolve(end) - resolve(start))) for start, end in marks)

    def _counter(self, index: int) -> Callable[..., None]:
        def count(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            # Count only if gradients are enabled. Gradients are disabled in an evaluation, and in
            # the first forward pass of a recomputed layer, whose tokens would otherwise be counted
            # twice.
            if torch.is_grad_enabled() and len(arguments) > 1:
                counts = arguments[1].detach()
                before = self._tokens[index]
                self._tokens[index] = counts.clone() if before is None else before + counts

        return count

    @contextmanager
    def _watching_exchanges(self) -> Iterator[None]:
        """Times the collectives of expert-parallel groups until the context exits."""
        groups = {id(group) for group in self._groups.experts if group.size() > 1}

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def exchange(output: Any, sent: Any, *more: Any, **named: Any) -> Any:
                if not any(id(argument) in groups for argument in (*more, *named.values())):
                    return function(output, sent, *more, **named)
                start = self._clock.mark()
                work = function(output, sent, *more, **named)
                if work is not None:
                    return _TimedWork(work, self._clock, self._marks)
                self._marks.append((start, self._clock.mark()))
                return None

            return exchange

        collectives = (
            (dist, "all_to_all_single"),
            (mappings, "dist_all_gather_func"),
            (mappings, "dist_reduce_scatter_func"),
        )
        plain = [getattr(module, name) for module, name in collectives]
        for (module, name), function in zip(collectives, plain, strict=True):
            setattr(module, name, timed(function))
        try:
            yield
        finally:
            for (module, name), function in zip(collectives, plain, strict=True):
                setattr(module, name, function)


class _TimedWork:
    """Wraps the handle of a running exchange, and measures how long ``wait`` takes."""

    def __init__(self, work: Any, clock: Any, marks: list[tuple[Any, Any]]) -> None:
        self._work = work
        self._clock = clock
        self._marks = marks

    def wait(self) -> Any:
        """Waits until the exchange has finished, and records the duration of this wait."""
        start = self._clock.mark()
        result = self._work.wait()
        self._marks.append((start, self._clock.mark()))
        return result
