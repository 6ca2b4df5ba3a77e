"""Traces iterations and spans around the actions of a step, and loops of other programs.

Without a trace, and in iterations that are not traced, every call returns at once.

megatron-core's own loop is timed from outside. It gets another ``forward_step_func``, which times
the forward of each microbatch and registers a hook on its output. Autograd calls the hook when the
backward of this output begins, and a callback when the backward has ended. Waits and messages
between them are not traced::

    loop:  forward_step_func ── F ──┐    recv, send    autograd: hook ── B ── callback
                                    └─ output.register_hook

If the loop itself computes a loss from the output, that is part of neither.

Loops that do not use this package are recorded with torch.profiler (see :func:`record_trace`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import profiler
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from megatron.adaptive.accelerator import CpuClock, CudaClock
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import KINDS, Lengths, SpanRow

if TYPE_CHECKING:  # it imports megatron-core, which is not needed to trace another program
    from megatron.adaptive.engine.expert_load import ExpertLoad

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DATA = KINDS.index("data")
_STEP = KINDS.index("step")


@dataclass(frozen=True, slots=True)
class _Iteration:
    """Identifies an iteration for the recorder."""

    number: int = 0
    num_microbatches: int = 0


class _DeviceSpan(NamedTuple):
    """Records a span on the device that may not have ended."""

    iteration: _Iteration
    kind: int
    chunk: int
    microbatch: int
    start: Any
    end: Any


class Tracing:
    """Traces this process.

    Spans on the device are marked by its clock. Their times are read after the device has passed
    the marks, perhaps in a later iteration, so nothing waits for the device. One thread calls all
    methods except :meth:`data_read`.

    Args:
        recorder: Recorder of the spans, ``None`` for no trace.
        clock: Clock of the device, ``None`` for the clock of the host.
        sync: Thread and channels that compare this rank's clock with others, closed with the trace.

    Attributes:
        experts: Meter of the rank's experts; ``None`` if there are none or nothing needs it.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        clock: CpuClock | CudaClock | None = None,
        sync: ExitStack | None = None,
    ) -> None:
        self.recorder = recorder
        self._clock: Any = clock or CpuClock()
        self._sync = sync
        self.experts: ExpertLoad | None = None
        self._traced: _Iteration | None = None  # the present iteration if it is traced
        self._iteration = _Iteration()  # the present or last iteration, traced or not
        self._doing = ""
        self._in_step = False
        self._begun_ns = 0
        self._unresolved: list[_DeviceSpan] = []

    def watch(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        """Lets the recorder publish the activity of this rank for other programs.

        Args:
            snapshot: Function that returns the activity within the pipeline's step, in fields of
                ``trace.status_files.Now``. Another thread calls it.
        """
        if self.recorder is not None:
            self.recorder.watch(lambda: {**self.now(), **snapshot()})

    def now(self) -> dict[str, Any]:
        """Returns the present iteration and span; other threads may call it."""
        return {
            "iteration": self._iteration.number,
            "num_microbatches": self._iteration.num_microbatches,
            "doing": self._doing,
            "in_step": self._in_step,
        }

    def begin_iteration(
        self, iteration: int, num_microbatches: int, *, is_traced: bool, lengths: Lengths = ()
    ) -> None:
        """Begins an iteration.

        Args:
            iteration: Number of the iteration.
            num_microbatches: Number of its microbatches.
            is_traced: Whether to trace it.
            lengths: Lengths of its microbatches, empty if all are equal.
        """
        self._traced = None
        self._in_step = True
        self._iteration = _Iteration(iteration, num_microbatches)
        is_traced = is_traced and self.recorder is not None
        if self.experts is not None:
            self.experts.begin(is_traced=is_traced)
        if self.recorder is None or not is_traced:
            return
        self._begun_ns = time.monotonic_ns()
        self.recorder.begin_iteration(
            iteration, num_microbatches, start_ns=self._begun_ns, lengths=lengths
        )
        if self.recorder.is_recording:
            self._traced = self._iteration

    def end_iteration(self) -> None:
        """Ends the iteration; spans before the next one still count for it."""
        self._in_step = False
        if self.recorder is None:
            return
        if self.recorder.is_recording:
            self.recorder.extend([_row(_STEP, self._begun_ns, time.monotonic_ns())])
            self._resolve()
            if self.experts is not None and (tokens := self.experts.tokens()):
                self.recorder.add_experts(self.experts.exchange_ns(), tokens)
        self.recorder.end_iteration()

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Traces the work of the block on the device, as a span of ``kind``."""
        if self._traced is None:
            yield
            return
        start = self._clock.mark()
        self._doing = kind
        try:
            yield
        finally:
            self._doing = ""
            self.device_span(kind, start, self._clock.mark())

    @property
    def is_traced(self) -> bool:
        """Returns whether the present iteration is traced."""
        return self._traced is not None

    def mark(self) -> Any:
        """Returns a mark of the present time on the device's clock, for :meth:`device_span`."""
        return self._clock.mark()

    def device_span(
        self, kind: str, start: Any, end: Any, chunk: int = -1, microbatch: int = -1
    ) -> None:
        """Traces the work of the device between two marks, if the iteration is traced."""
        if self._traced is not None:
            self._unresolved.append(
                _DeviceSpan(self._traced, KINDS.index(kind), chunk, microbatch, start, end)
            )

    def around(self, kind: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Returns ``function`` with every call traced as a span; unchanged without a trace."""
        if self.recorder is None:
            return function

        @functools.wraps(function)
        def traced(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self.span(kind):
                return function(*args, **kwargs)

        return traced

    @contextlib.contextmanager
    def host_span(self, kind: str) -> Iterator[None]:
        """Traces the block by the host's clock, also between two iterations."""
        start_ns = time.monotonic_ns()
        self._doing = kind
        try:
            yield
        finally:
            self._doing = ""
            self._add(self._traced, [_row(KINDS.index(kind), start_ns, time.monotonic_ns())])

    def data_read(self, microbatch: int, start_ns: int, end_ns: int) -> None:
        """Traces the read of a microbatch on the host."""
        if self.recorder is not None:
            self.recorder.extend([_row(_DATA, start_ns, end_ns, microbatch)])

    def close(self) -> None:
        """Writes all remaining spans; idempotent."""
        if self.recorder is None:
            return
        for last in self._unresolved[-1:]:
            self._clock.wait(last.end)  # earlier spans on the device end before it
        self._resolve()
        if self._sync is not None:
            self._sync.close()
        self.recorder.close()

    def _resolve(self) -> None:
        """Records the spans that the device has passed, and keeps the others for a later call."""
        clock = self._clock
        waiting = self._unresolved
        self._unresolved = []
        for span in waiting:
            if clock.is_passed(span.end):
                start_ns = clock.resolve_ns(span.start)
                end_ns = clock.resolve_ns(span.end)
                row = _row(span.kind, start_ns, end_ns, span.microbatch, span.chunk)
                self._add(span.iteration, [row])
            else:
                self._unresolved.append(span)

    def _add(self, iteration: _Iteration | None, rows: list[SpanRow]) -> None:
        if self.recorder is None or iteration is None:
            return
        if self.recorder.is_recording and iteration == self._traced:
            self.recorder.extend(rows)
        else:
            self.recorder.add_late(iteration.number, iteration.num_microbatches, rows)


def _row(kind: int, start_ns: int, end_ns: int, microbatch: int = -1, chunk: int = -1) -> SpanRow:
    return SpanRow(kind, chunk, microbatch, start_ns=start_ns, end_ns=end_ns)


class OutsideTrace:
    """Wraps megatron-core's function that runs a step, and traces its forwards and backwards.

    Args:
        function: Function of megatron-core.
        tracing: Trace of this process.
    """

    def __init__(self, function: Callable[..., list[Any]], tracing: Tracing) -> None:
        self._function = function
        self._tracing = tracing
        self._doing: dict[str, Any] = {}
        self._done = [0, 0, 0]

    def __call__(self, **arguments: Any) -> list[Any]:
        """Runs a step; arguments and result are those of megatron-core's function."""
        if arguments.get("forward_only", False) or not self._tracing.is_traced:
            return self._function(**arguments)
        self._done = [0, 0, 0]
        traced = self._traced(arguments["forward_step_func"], arguments["model"])
        try:
            return self._function(**{**arguments, "forward_step_func": traced})
        finally:
            self._doing = {}

    def snapshot(self) -> dict[str, Any]:
        """Returns the activity of this rank in its step (see ``Executor.snapshot``)."""
        return {**self._doing, "done": list(self._done)} if self._doing else {}

    def _traced(self, function: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Returns the ``forward_step_func`` of one step, which times forwards and backwards."""
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        chunk_of = {id(part): chunk for chunk, part in enumerate(models)}
        forwards = [0] * len(models)

        def forward_step(data_iterator: Any, model: Any, *more: Any, **plan: Any) -> Any:
            if plan:  # combined 1F1B gets the parts of a forward and runs them itself
                return function(data_iterator, model, *more, **plan)
            chunk = chunk_of[id(model)]
            microbatch = forwards[chunk]
            forwards[chunk] += 1
            ends = self._begins("F", chunk, microbatch)
            result = function(data_iterator, model, *more)
            ends()
            _around_backward(result[0], lambda: self._begins("B", chunk, microbatch))
            return result

        return forward_step

    def _begins(self, kind: str, chunk: int, microbatch: int) -> Callable[[], None]:
        """Begins a span for an action; returns a function that ends it."""
        self._doing = {"doing": kind, "chunk": chunk, "microbatch": microbatch}
        start = self._tracing.mark()

        def ends() -> None:
            self._tracing.device_span(kind, start, self._tracing.mark(), chunk, microbatch)
            self._done[0 if kind == "F" else 1] += 1
            self._doing = {"doing": "wait"}

        return ends


@contextlib.contextmanager
def record_trace(
    folder: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    *,
    skip: int = 2,
    steps: int = 5,
) -> Iterator[Callable[[], None]]:
    """Records steps of any training loop with torch.profiler, in a file per rank.

    ``trace import`` reads these files. Nothing is recorded before and after these steps, and no
    rank waits for others::

        with record_trace("traces/mine", model) as step:
            for batch in loader:
                train(batch)  # as before
                step()

    Args:
        folder: Folder of ``rank0.json.gz`` and so on, the same on all ranks; made if it is missing.
        model: Model whose forwards and backwards get names in the trace; ``None`` if the loop
            already names them, like ``torch.distributed.pipelining`` and Megatron-LM.
        skip: Number of steps before the first recorded one, at least 1, to warm up the profiler.
        steps: Number of recorded steps.

    Yields:
        Function to call at the end of each step.

    Raises:
        ConfigError: A number is below 1.
        TraceError: The folder cannot be made.
    """
    if skip < 1 or steps < 1:
        raise ConfigError(f"record_trace with skip={skip}, steps={steps}: give 1 or more each")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(f"cannot make {folder} for traces: {error.strerror}") from None
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    path = str(Path(folder, f"rank{rank}.json.gz"))
    recording = profiler.profile(
        schedule=profiler.schedule(wait=skip - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(path),
    )
    with recording, ExitStack() as hooks:
        if model is not None:
            _name_ranges(model, hooks)
        yield recording.step


def _name_ranges(model: torch.nn.Module, hooks: ExitStack) -> None:
    """Names each forward and backward of a model with the ranges that other loops use."""
    forwards: list[Callable[[], None]] = []

    def begins(*_: Any) -> None:
        forwards.append(_range("forward_step"))

    def ends(_: Any, __: Any, output: Any) -> None:
        forwards.pop()()
        _around_backward(output, lambda: _range("backward_step"))

    for handle in (
        model.register_forward_pre_hook(begins),
        model.register_forward_hook(ends, always_call=True),
    ):
        hooks.callback(handle.remove)


def _range(name: str) -> Callable[[], None]:
    """Begins a range of the profiler; returns a function that ends it."""
    entered = profiler.record_function(name)
    entered.__enter__()
    return lambda: entered.__exit__(None, None, None)


def _around_backward(output: Any, begins: Callable[[], Callable[[], None]]) -> None:
    """Calls ``begins`` when the backward of an output begins, and its result when that ends."""
    running: list[Callable[[], None]] = []

    def first(_: torch.Tensor) -> None:
        if not running:
            running.append(begins())
            engine: Any = Variable._execution_engine
            engine.queue_callback(lambda: running.pop()())

    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(first)
