"""Traces iterations, work outside of a step's actions, and training loops of other programs.

If tracing is off, or an iteration is not traced, all calls return immediately.

megatron-core's training loop is timed from the outside. A wrapper of its ``forward_step_func``
times the forward pass of each microbatch and registers a hook on the output. Autograd calls the
hook when the backward pass of this output begins, and a callback when the backward pass has ended.
Waits and messages between these passes are not traced::

    loop:  forward_step_func ── F ──┐    recv, send    autograd: hook ── B ── callback
                                    └─ output.register_hook

If the loop computes a loss from the output, this computation is not traced.

Training loops that do not use this package are recorded with torch.profiler (see
:func:`record_trace`).
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
from megatron.adaptive.trace.machine_counters import MachineCounters
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import KINDS, Lengths, SpanRow

# Importing these modules loads megatron-core, which other programs may not have installed.
if TYPE_CHECKING:
    from megatron.adaptive.engine.collective_meter import CollectiveMeter
    from megatron.adaptive.engine.expert_load import ExpertLoad
    from megatron.adaptive.engine.kernel_recorder import KernelRecorder
    from megatron.adaptive.engine.layer_times import LayerSums

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DATA = KINDS.index("data")
_STEP = KINDS.index("step")


@dataclass(frozen=True, slots=True)
class _Iteration:
    """Index of an iteration, and its number of microbatches."""

    number: int = 0
    num_microbatches: int = 0


class _DeviceSpan(NamedTuple):
    """Span of work on the device. Its start and end times may not be known yet."""

    iteration: _Iteration
    kind: int
    chunk: int
    microbatch: int
    start: Any
    end: Any


class Tracing:
    """Traces the iterations of this process, and spans of work within these iterations.

    The start and end of a span on the device are marks, which are events on a GPU. Their times are
    read after the device has passed the marks, possibly in a later iteration, so that no call waits
    for the device. All methods except :meth:`data_read` must be called from the same thread.

    Args:
        recorder: Recorder that stores spans, or ``None`` if tracing is off.
        clock: Clock that records time marks on the device, or ``None`` for the clock of the host.
        sync: Object that compares this rank's clock with the clocks of other ranks, or ``None``. It
            is closed with the trace.
        counters: Counters of this rank's machine, or ``None`` for counters without a GPU. They are
            closed with the trace.

    Attributes:
        experts: Object that measures the load of this rank's experts, or ``None`` if the load is
            not measured.
        layers: Object that measures the times of this rank's layers, or ``None`` if these are not
            measured.
        collectives: Object that measures this rank's collectives, or ``None`` if these are not
            measured.
        kernels: Object that records this rank's kernels, or ``None`` if these are not recorded.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        clock: CpuClock | CudaClock | None = None,
        sync: ExitStack | None = None,
        counters: MachineCounters | None = None,
    ) -> None:
        self.recorder = recorder
        self._clock: Any = clock or CpuClock()
        self._sync = sync
        self.experts: ExpertLoad | None = None
        self.layers: LayerSums | None = None
        self.collectives: CollectiveMeter | None = None
        self.kernels: KernelRecorder | None = None
        # Current iteration, or ``None`` if it is not traced.
        self._traced: _Iteration | None = None
        # Current or most recent iteration, even if it is not traced.
        self._iteration = _Iteration()
        self._doing = ""
        self._in_step = False
        self._begun_ns = 0
        self._unresolved: list[_DeviceSpan] = []
        self._counters = None if recorder is None else counters or MachineCounters()
        self._snapshot: Callable[[], dict[str, Any]] | None = None

    def watch(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        """Makes the recorder publish the current activity of this rank for other programs.

        Args:
            snapshot: Function that returns this rank's activity in the pipeline's step, as fields
                of ``trace.status_files.Now``. It is called from another thread.
        """
        self._snapshot = snapshot
        if self.recorder is not None:
            self.recorder.watch(lambda: {**self.now(), **snapshot()})

    def now(self) -> dict[str, Any]:
        """Returns the current iteration and kind of work. Can be called from any thread."""
        return {
            "iteration": self._iteration.number,
            "num_microbatches": self._iteration.num_microbatches,
            "doing": self._doing,
            "in_step": self._in_step,
        }

    def begin_iteration(
        self,
        iteration: int,
        num_microbatches: int,
        *,
        is_traced: bool,
        lengths: Lengths = (),
        slices: tuple[int, ...] = (),
        sizes: tuple[int, ...] = (),
        frozen_stages: int = -1,
    ) -> None:
        """Begins an iteration. All later spans belong to this iteration.

        Args:
            iteration: Index of the iteration.
            num_microbatches: Number of microbatches in the iteration.
            is_traced: Whether to trace this iteration.
            lengths: Length of each microbatch in tokens, or empty if all microbatches have the same
                length.
            slices: Number of slices of each microbatch, or empty if the trace's header contains the
                number.
            sizes: Approximate size in bytes of the activations of each microbatch, or empty if all
                microbatches have the same size.
            frozen_stages: Number of leading stages that run no backward passes in the iteration, or
                -1 if the trace's header contains the number.
        """
        self._traced = None
        self._in_step = True
        self._iteration = _Iteration(iteration, num_microbatches)
        is_traced = is_traced and self.recorder is not None
        if self.experts is not None:
            self.experts.begin(is_traced=is_traced)
        if self.layers is not None:
            self.layers.begin(is_traced=is_traced)
        if self.collectives is not None:
            self.collectives.begin(iteration, is_traced=is_traced)
        if self.kernels is not None:
            self.kernels.begin(iteration, is_traced=is_traced)
        if self.recorder is None or not is_traced:
            return
        self._begun_ns = time.monotonic_ns()
        self.recorder.begin_iteration(
            iteration,
            num_microbatches,
            start_ns=self._begun_ns,
            lengths=lengths,
            slices=slices,
            sizes=sizes,
            frozen_stages=frozen_stages,
        )
        if self.recorder.is_recording:
            self._traced = self._iteration
            if self._counters is not None:
                self._counters.begin()

    def end_iteration(self) -> None:
        """Ends the iteration. Spans between two iterations belong to the earlier one."""
        self._in_step = False
        if self.recorder is None:
            return
        if self.recorder.is_recording:
            self.recorder.extend([_row(_STEP, self._begun_ns, time.monotonic_ns())])
            self._resolve()
            if self.experts is not None and (tokens := self.experts.tokens()):
                self.recorder.add_experts(self.experts.exchange_ns(), tokens)
            if self.layers is not None:
                self.recorder.add_layers(self.layers.rows(), self.layers.passes())
            if self.collectives is not None:
                self.recorder.add_collectives(self.collectives.rows())
            if self._counters is not None:
                self.recorder.add_machine(self._counters.end())
        if self.kernels is not None:
            self.kernels.end(self._rows)
        self.recorder.end_iteration()

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Returns a context manager that traces the device's work as a span of ``kind``."""
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
        """Returns whether the current iteration is traced."""
        return self._traced is not None

    def mark(self) -> Any:
        """Returns a time mark at the current point of the device's work.

        Two such marks are the start and the end of a :meth:`device_span`.
        """
        return self._clock.mark()

    def device_span(
        self, kind: str, start: Any, end: Any, chunk: int = -1, microbatch: int = -1
    ) -> None:
        """Traces the device's work between two marks, if the current iteration is traced.

        ``kind`` is the kind of the span. ``chunk`` and ``microbatch`` are those to which the span
        belongs, or -1 if the span belongs to no microbatch.

        ``start`` and ``end`` are results of :meth:`mark`.
        """
        if self._traced is not None:
            self._unresolved.append(
                _DeviceSpan(self._traced, KINDS.index(kind), chunk, microbatch, start, end)
            )

    def around(self, kind: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Returns a wrapper of ``function`` that traces every call as a span of ``kind``.

        Returns ``function`` unchanged if tracing is off.
        """
        if self.recorder is None:
            return function

        @functools.wraps(function)
        def traced(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self.span(kind):
                return function(*args, **kwargs)

        return traced

    @contextlib.contextmanager
    def host_span(self, kind: str) -> Iterator[None]:
        """Returns a context manager that traces its block as a span, timed with the host's clock.

        ``kind`` is the kind of the span.

        The context manager can also be used between two iterations.
        """
        start_ns = time.monotonic_ns()
        self._doing = kind
        try:
            yield
        finally:
            self._doing = ""
            self._add(self._traced, [_row(KINDS.index(kind), start_ns, time.monotonic_ns())])

    def data_read(self, microbatch: int, start_ns: int, end_ns: int) -> None:
        """Records that the host read the data of ``microbatch`` from ``start_ns`` to ``end_ns``."""
        if self.recorder is not None:
            self.recorder.extend([_row(_DATA, start_ns, end_ns, microbatch)])

    def close(self) -> None:
        """Writes all remaining spans and closes the trace. Safe to call more than once."""
        if self.recorder is None:
            return
        for last in self._unresolved[-1:]:
            self._clock.wait(last.end)  # All earlier spans have ended when the last one ends.
        self._resolve()
        if self.collectives is not None:
            self.collectives.close()
        if self.kernels is not None:
            self.kernels.close()
        if self._counters is not None:
            self._counters.close()
        if self._sync is not None:
            self._sync.close()
        self.recorder.close()

    def adopt(self, other: Tracing) -> None:
        """Continues this trace in the files of ``other``, which must not be used afterwards.

        Call :meth:`close` on this trace first. References to this object remain valid.
        """
        self.recorder = other.recorder
        self._clock = other._clock
        self._sync = other._sync
        self._counters = other._counters
        self.experts = other.experts
        self.layers = other.layers
        self.collectives = other.collectives
        self.kernels = other.kernels
        self._traced = None
        if self._snapshot is not None:
            self.watch(self._snapshot)

    def _resolve(self) -> None:
        """Records all spans that the device has finished, and keeps the others for a later call."""
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

    def _rows(self) -> tuple[SpanRow, ...]:
        """Returns the current iteration's spans that the device has finished."""
        self._resolve()
        return () if self.recorder is None else self.recorder.rows

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
    """Wraps megatron-core's function that runs a step, to trace forward and backward passes.

    Args:
        function: Function of megatron-core that runs a step.
        tracing: Trace to which the spans are added.
    """

    def __init__(self, function: Callable[..., list[Any]], tracing: Tracing) -> None:
        self._function = function
        self._tracing = tracing
        self._doing: dict[str, Any] = {}
        self._done = [0, 0, 0]

    def __call__(self, **arguments: Any) -> list[Any]:
        """Runs a step, with the arguments and the result of the wrapped function."""
        if arguments.get("forward_only", False) or not self._tracing.is_traced:
            return self._function(**arguments)
        self._done = [0, 0, 0]
        traced = self._traced(arguments["forward_step_func"], arguments["model"])
        try:
            return self._function(**{**arguments, "forward_step_func": traced})
        finally:
            self._doing = {}

    def snapshot(self) -> dict[str, Any]:
        """Returns this rank's activity in the step, as fields of ``trace.status_files.Now``."""
        return {**self._doing, "done": list(self._done)} if self._doing else {}

    def _traced(self, function: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Returns a wrapper of ``function`` that times forward and backward passes.

        ``function`` is the user's ``forward_step_func``, and ``model`` contains the model's chunks.
        """
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        chunk_of = {id(part): chunk for chunk, part in enumerate(models)}
        forwards = [0] * len(models)

        def forward_step(data_iterator: Any, model: Any, *more: Any, **plan: Any) -> Any:
            # megatron-core's combined 1F1B passes these keyword arguments to get the parts of a
            # forward pass, and then runs these parts itself.
            if plan:
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
        """Begins a span of ``kind``, and returns a function that ends the span.

        The span belongs to ``microbatch`` in ``chunk``.
        """
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
    """Records steps of any training loop with torch.profiler, to one file per rank.

    The command ``trace import`` reads these files. No rank waits for another rank. An example::

        with record_trace("traces/mine", model) as step:
            for batch in loader:
                train(batch)  # as before
                step()

    Args:
        folder: Folder for the files ``rank0.json.gz`` and so on. All ranks must pass the same
            folder, which is created if it does not exist.
        model: Model whose forward and backward passes get names in the trace, or ``None`` for loops
            that name the passes themselves, such as those of ``torch.distributed.pipelining`` and
            Megatron-LM.
        skip: Number of steps before the first recorded step, at least 1. The profiler warms up in
            the last of these steps.
        steps: Number of steps to record.

    Yields:
        Function to call at the end of each step.

    Raises:
        ConfigError: ``skip`` or ``steps`` is less than 1.
        TraceError: The folder cannot be created.
    """
    if skip < 1 or steps < 1:
        raise ConfigError(
            f"skip and steps of record_trace must be at least 1, got skip={skip}, steps={steps}"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(f"cannot create the trace folder {folder}: {error.strerror}") from None
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
    """Marks each forward and backward pass of ``model`` as a named range in the profiler.

    The hooks that are added to ``model`` are removed when ``hooks`` is closed.

    The names are the same as in Megatron-LM and ``torch.distributed.pipelining``.
    """
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
    """Begins a profiler range called ``name``, and returns a function that ends the range."""
    entered = profiler.record_function(name)
    entered.__enter__()
    return lambda: entered.__exit__(None, None, None)


def _around_backward(output: Any, begins: Callable[[], Callable[[], None]]) -> None:
    """Calls ``begins`` when the backward pass of ``output`` begins.

    ``begins`` returns a function. This function is called when the backward pass has ended.
    """
    running: list[Callable[[], None]] = []

    def first(_: torch.Tensor) -> None:
        if not running:
            running.append(begins())
            engine: Any = Variable._execution_engine
            engine.queue_callback(lambda: running.pop()())

    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(first)
