"""Measures what mixtures of experts do in a step: tokens of each expert, and time in exchanges.

An exchange is a collective of the expert-parallel ranks within a forward or a backward: tokens on
their way to experts and back (all-to-all, or all-gather and reduce-scatter), and how many they are.
Its time is what the action stands in it; where it hands its turn over (``lanes``) that is only what
is left when its turn is back. Ranks whose experts have more tokens than others come late to the
exchange behind them, so that the others' times say what the load costs.

Nothing is measured without experts, nor where nobody asks: a count adds a short vector per layer
and forward, on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_model_config

from megatron.adaptive.accelerator import Accelerator

_PREDICTING = re.compile(r"\bmtp\.layers\.(\d+)")


def measured_experts(
    chunks: Sequence[torch.nn.Module], accelerator: Accelerator
) -> ExpertLoad | None:
    """Returns what measures the experts of this rank's chunks, ``None`` for a model without."""
    if not getattr(get_model_config(chunks[0]), "num_moe_experts", None):
        return None
    return ExpertLoad(chunks, accelerator.clock())


class ExpertLoad:
    """The tokens of this rank's experts, and the time of their exchanges, step by step.

    Args:
        chunks: this rank's model chunks; counts are taken from now on, in forwards that gradients
            are wanted of.
        clock: of the device.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], clock: Any) -> None:
        self._clock = clock
        self._places: list[tuple[int, int]] = []  # of each layer of experts: its number, the first
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
                    counter = self._counter(len(self._places))
                    self._hooks.append(layer.experts.register_forward_pre_hook(counter))
                    self._places.append((number, layer.local_expert_indices[0]))
                    self._tokens.append(None)

    def begin(self, *, is_traced: bool) -> None:
        """Begin a step: counts start at 0, and exchanges are timed if it is traced."""
        self._watching.close()
        self._tokens = [None] * len(self._places)
        if is_traced and self._places:
            self._watching.enter_context(self._watching_exchanges())

    def close(self) -> None:
        """Measure no more."""
        self._watching.close()
        for hook in self._hooks:
            hook.remove()

    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Returns the counts of the step; waits for the device.

        Returns:
            Of each layer of experts: its number in the model from 0, predicting layers behind the
            others; its first expert on this rank; the tokens of each expert on this rank.
        """
        return tuple(
            (*place, *map(int, counts.tolist()))
            for place, counts in zip(self._places, self._tokens, strict=True)
            if counts is not None
        )

    def exchange_ns(self) -> int:
        """Returns the time of the step's exchanges, once; waits for the device."""
        self._watching.close()
        marks, self._marks = self._marks, []
        for _, end in marks:
            self._clock.wait(end)
        resolve = self._clock.resolve_ns
        return sum(max(0, int(resolve(end) - resolve(start))) for start, end in marks)

    def _counter(self, place: int) -> Callable[..., None]:
        def count(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
            # Neither in an evaluation nor in a forward that is done again.
            if torch.is_grad_enabled() and len(given) > 1:
                counts, before = given[1].detach(), self._tokens[place]
                self._tokens[place] = counts.clone() if before is None else before + counts

        return count

    @contextmanager
    def _watching_exchanges(self) -> Iterator[None]:
        """Takes the time of the groups' collectives while it lasts."""
        groups = {
            id(group)
            for group in (
                parallel_state.get_expert_model_parallel_group(),
                parallel_state.get_expert_tensor_parallel_group(),
                parallel_state.get_expert_tensor_and_model_parallel_group(),
            )
            if group.size() > 1
        }

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def exchange(output: Any, given: Any, *more: Any, **named: Any) -> Any:
                if not any(id(one) in groups for one in (*more, *named.values())):
                    return function(output, given, *more, **named)
                start = self._clock.mark()
                work = function(output, given, *more, **named)
                if work is not None:
                    return _TimedWork(work, self._clock, self._marks)
                self._marks.append((start, self._clock.mark()))
                return None

            return exchange

        places = (
            *((dist, "all_to_all_single"), (mappings, "dist_all_gather_func")),
            (mappings, "dist_reduce_scatter_func"),
        )
        plain = [getattr(module, name) for module, name in places]
        for (module, name), function in zip(places, plain, strict=True):
            setattr(module, name, timed(function))
        try:
            yield
        finally:
            for (module, name), function in zip(places, plain, strict=True):
                setattr(module, name, function)


class _TimedWork:
    """An exchange under way, whose wait is timed."""

    def __init__(self, work: Any, clock: Any, marks: list[tuple[Any, Any]]) -> None:
        self._work, self._clock, self._marks = work, clock, marks

    def wait(self) -> Any:
        """Waits for the exchange."""
        start = self._clock.mark()
        result = self._work.wait()
        self._marks.append((start, self._clock.mark()))
        return result
