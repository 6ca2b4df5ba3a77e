"""Traces what happens around the actions of a step: iterations, spans, and a loop that is not ours.

Without a trace, and in iterations that are not traced, every call returns at once.

megatron-core's own loop is timed from outside. It is given another ``forward_step_func``, which
times the forward of each microbatch and leaves a hook on its output: autograd calls it when the
backward of that output begins, and once more when it is through. Waits and messages between them
are not seen::

    loop:  forward_step_func ── F ──┐    recv, send    autograd: hook ── B ── callback
                                    └─ output.register_hook

A loss that the loop computes from the output is part of neither.

A loop in which nothing of ours runs is recorded by torch.profiler, see :func:`record_trace`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import profiler
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from megatron.adaptive.accelerator import CpuClock, CudaClock
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import KINDS, Lengths, SpanRow

if TYPE_CHECKING:  # needs megatron-core, which a trace of another program does without
    from megatron.adaptive.engine.expert_load import ExpertLoad

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DATA, _STEP = KINDS.index("data"), KINDS.index("step")


class Tracing:
    """The trace of this process.

    Spans of work on the device are taken by its clock and resolved once it has passed them, which
    may be in a later iteration: nothing waits for it. All methods but :meth:`data_read` belong to
    one thread.

    Args:
        recorder: where spans go, ``None`` for no trace.
        clock: of the device.
        sync: compares this rank's clock with others, closed with this.

    Attributes:
        experts: measures the rank's experts, ``None`` where nobody asks or there are none.
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
        self._present: tuple[int, int] | None = None  # iteration and microbatches, if traced
        self._place = (0, 0)  # the same of any iteration
        self._doing = ""
        self._in_step = False
        self._begun_ns = 0
        # Iteration and microbatches; kind, chunk and microbatch; two marks.
        self._unresolved: list[tuple[tuple[int, int], tuple[int, int, int], Any, Any]] = []

    def watch(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        """Shows programs that look on what this rank does.

        Args:
            snapshot: returns what it does within the pipeline's step, in fields of
                ``trace.status_files.Now``; called from another thread.
        """

        if self.recorder is not None:
            self.recorder.watch(lambda: {**self.now(), **snapshot()})

    def now(self) -> dict[str, Any]:
        """Returns iteration and span of this moment, for another thread."""
        iteration, num_microbatches = self._place
        known = {"iteration": iteration, "num_microbatches": num_microbatches}
        return {**known, "doing": self._doing, "in_step": self._in_step}

    def begin_iteration(
        self, iteration: int, num_microbatches: int, *, is_traced: bool, lengths: Lengths = ()
    ) -> None:
        """Begin an iteration, with the lengths of its microbatches where they differ."""
        self._present = None
        self._in_step = True
        self._place = (iteration, num_microbatches)
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
            self._present = (iteration, num_microbatches)

    def end_iteration(self) -> None:
        """End the iteration; what comes before the next one still counts to it."""
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
        """Trace what the block does on the device, as a span of ``kind``."""
        if self._present is None:
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
        """Whether the present iteration is."""
        return self._present is not None

    def mark(self) -> Any:
        """This moment on the device's clock, for :meth:`device_span`."""
        return self._clock.mark()

    def device_span(
        self, kind: str, start: Any, end: Any, chunk: int = -1, microbatch: int = -1
    ) -> None:
        """Trace what the device does between two marks, in an iteration that is traced."""
        if self._present is not None:
            self._unresolved.append(
                (self._present, (KINDS.index(kind), chunk, microbatch), start, end)
            )

    def around(self, kind: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return ``function`` with every call traced as a span of ``kind``; itself untraced."""
        if self.recorder is None:
            return function

        @functools.wraps(function)
        def traced(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self.span(kind):
                return function(*args, **kwargs)

        return traced

    @contextlib.contextmanager
    def host_span(self, kind: str) -> Iterator[None]:
        """Trace the block by the host's clock, also between two iterations."""
        start_ns = time.monotonic_ns()
        self._doing = kind
        try:
            yield
        finally:
            self._doing = ""
            self._add(self._present, [_row(KINDS.index(kind), start_ns, time.monotonic_ns())])

    def data_read(self, microbatch: int, start_ns: int, end_ns: int) -> None:
        """A microbatch was read, on the host."""
        if self.recorder is not None:
            self.recorder.extend([_row(_DATA, start_ns, end_ns, microbatch)])

    def close(self) -> None:
        """Write everything that is left; idempotent."""
        if self.recorder is None:
            return
        for *_, end in self._unresolved[-1:]:
            self._clock.wait(end)  # it is the last one on the device
        self._resolve()
        if self._sync is not None:
            self._sync.close()
        self.recorder.close()

    def _resolve(self) -> None:
        """Hand over the spans that the device has passed; the others wait for another time."""
        clock, waiting = self._clock, self._unresolved
        self._unresolved = []
        for place, what, start, end in waiting:
            if clock.is_passed(end):
                kind, chunk, microbatch = what
                times = (clock.resolve_ns(start), clock.resolve_ns(end))
                self._add(place, [_row(kind, *times, microbatch, chunk)])
            else:
                self._unresolved.append((place, what, start, end))

    def _add(self, place: tuple[int, int] | None, rows: list[SpanRow]) -> None:
        if self.recorder is None or place is None:
            return
        if self.recorder.is_recording and place == self._present:
            self.recorder.extend(rows)
        else:
            self.recorder.add_late(*place, rows)


def _row(kind: int, start_ns: int, end_ns: int, microbatch: int = -1, chunk: int = -1) -> SpanRow:
    return SpanRow(kind, chunk, microbatch, start_ns=start_ns, end_ns=end_ns)


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
        traced = self._traced(given["forward_step_func"], given["model"])
        try:
            return self._function(**{**given, "forward_step_func": traced})
        finally:
            self._doing = {}

    def snapshot(self) -> dict[str, Any]:
        """Returns what this rank does in its step; see ``Executor.snapshot``."""
        return {**self._doing, "done": list(self._done)} if self._doing else {}

    def _traced(self, function: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Returns the ``forward_step_func`` of one step, which times forwards and backwards."""
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        chunks = {id(one): chunk for chunk, one in enumerate(models)}
        forwards = [0] * len(models)

        def forward_step(data_iterator: Any, model: Any, *more: Any, **plan: Any) -> Any:
            if plan:  # combined 1F1B asks for the parts of a forward, and runs them by itself
                return function(data_iterator, model, *more, **plan)
            chunk = chunks[id(model)]
            place = (chunk, forwards[chunk])
            forwards[chunk] += 1
            ends = self._begins("F", *place)
            result = function(data_iterator, model, *more)
            ends()
            _around_backward(result[0], lambda: self._begins("B", *place))
            return result

        return forward_step

    def _begins(self, kind: str, chunk: int, microbatch: int) -> Callable[[], None]:
        """An action starts; returns what to call at its end."""
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
    """Records some steps of any loop with torch.profiler, a file per rank for ``trace import``.

    Nothing is recorded before and after these steps, and nothing waits for other ranks::

        with record_trace("traces/mine", model) as step:
            for batch in loader:
                train(batch)  # as before
                step()

    Args:
        folder: of ``rank0.json.gz`` and so on, the same on all ranks; made if it is missing.
        model: whose forwards and backwards are to be found again; ``None`` where the loop names
            them, as ``torch.distributed.pipelining`` and Megatron-LM do.
        skip: steps before the first that is recorded, 1 at least: it warms the profiler up.
        steps: recorded steps.

    Yields:
        A function to call at the end of each step.

    Raises:
        ConfigError: a number is wrong.
        TraceError: the folder cannot be made.
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
    """Puts the ranges of other loops around each forward of a model and its backward."""
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
    """Begins a range; returns what ends it."""
    entered = profiler.record_function(name)
    entered.__enter__()
    return lambda: entered.__exit__(None, None, None)


def _around_backward(output: Any, begins: Callable[[], Callable[[], None]]) -> None:
    """Calls a function when the backward of an output begins, and at its end what that returned."""
    running: list[Callable[[], None]] = []

    def first(_: torch.Tensor) -> None:
        if not running:
            running.append(begins())
            engine: Any = Variable._execution_engine
            engine.queue_callback(lambda: running.pop()())

    for one in tree_leaves(output):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            one.register_hook(first)
