"""Times the work of megatron-core's own loop from outside, so that it has a trace as well.

The loop is given another ``forward_step_func``, which times the forward of each microbatch, and
leaves a hook on its output: autograd calls it when the backward of that output begins, and once
more when it is through. What the loop does in between, waiting and sending, is not seen::

    loop:  forward_step_func ── F ──┐    recv, send    autograd: hook ── B ── callback
                                    └─ output.register_hook

A loss that the loop computes from the output is part of neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from megatron.adaptive.engine.tracing import Tracing

__all__ = ["OutsideTrace"]


class OutsideTrace:
    """Stands for megatron-core's function that runs a step.

    Args:
        function: that function.
        tracing: where spans go.
    """

    def __init__(self, function: Callable[..., list[Any]], tracing: Tracing) -> None:
        self._function = function
        self._tracing = tracing
        self._doing: dict[str, Any] = {}
        self._done = [0, 0, 0]

    def __call__(self, **given: Any) -> list[Any]:
        """Run a step; arguments and result are those of megatron-core's function."""
        if given.get("forward_only", False) or not self._tracing.is_traced:
            return self._function(**given)
        self._done = [0, 0, 0]
        step = _Step(self, given["forward_step_func"], given["model"])
        try:
            return self._function(**{**given, "forward_step_func": step})
        finally:
            self._doing = {}

    def look(self) -> dict[str, Any]:
        """What this rank does in its step, for another thread; see ``Executor.look``."""
        return {**self._doing, "done": list(self._done)} if self._doing else {}

    def begins(self, kind: str, chunk: int, microbatch: int) -> Any:
        """An action starts; returns the mark of the moment."""
        self._doing = {"doing": kind, "chunk": chunk, "microbatch": microbatch}
        return self._tracing.mark()

    def ends(self, kind: str, chunk: int, microbatch: int, start: Any) -> None:
        """An action ended that started at a mark."""
        self._tracing.device_span(kind, start, self._tracing.mark(), chunk, microbatch)
        self._done[0 if kind == "F" else 1] += 1
        self._doing = {"doing": "wait"}


class _Step:
    """The ``forward_step_func`` of one step."""

    def __init__(self, trace: OutsideTrace, function: Callable[..., Any], model: Any) -> None:
        self._trace = trace
        self._function = function
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._chunks = {id(one): chunk for chunk, one in enumerate(models)}
        self._forwards = [0] * len(models)

    def __call__(self, data_iterator: Any, model: Any, *more: Any) -> Any:
        trace, chunk = self._trace, self._chunks[id(model)]
        microbatch = self._forwards[chunk]
        self._forwards[chunk] += 1
        start = trace.begins("F", chunk, microbatch)
        result = self._function(data_iterator, model, *more)
        trace.ends("F", chunk, microbatch, start)
        output = result[0]
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(_Backward(trace, chunk, microbatch))
        return result


class _Backward:
    """Hears of the gradient of an output, which is where its backward begins."""

    def __init__(self, trace: OutsideTrace, chunk: int, microbatch: int) -> None:
        self._trace = trace
        self._place = (chunk, microbatch)

    def __call__(self, gradient: torch.Tensor) -> None:
        start = self._trace.begins("B", *self._place)
        engine: Any = Variable._execution_engine
        engine.queue_callback(lambda: self._trace.ends("B", *self._place, start))
