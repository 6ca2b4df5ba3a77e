"""Measures the collectives of model-parallel groups, for ``--trace-detail collectives``.

A collective begins on a rank when all of the rank's input is available, and ends when the result is
available. Data is only transferred after the last member of the group has arrived. Each rank
records when the collective begins and ends on that rank. The trace reader converts the times of all
ranks to one clock, and separates waiting from transferring (see ``trace.collectives``)::

    rank 0   arrives ─────── waits ─────────┬─ transfer ─┐ end
    rank 1                          arrives ┴─ transfer ─┘ end

Every collective of torch calls a method of ``ProcessGroup``. This module patches these methods, but
only during traced steps. If steps of several models in one process overlap, their
:class:`CollectiveMeter` objects share one patch of each method, and the last object to finish
removes the patch. Collectives on tensors in host memory are timed with the host's clock, and
collectives on device tensors with device events.

A rank counts all collectives of a step, but keeps the times of at most :data:`MOST_KEPT` per group.
The choice depends only on the iteration and on the index of a collective, so all members keep the
times of the same collectives. Over many steps, each collective is chosen about equally often.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine.model_groups import ModelGroups
from megatron.adaptive.trace.trace_format import GroupCollectives

MOST_KEPT = 24
"""Maximum number of collectives per group and step whose times are kept."""

_OPERATIONS = {
    "allreduce": "all-reduce",
    "allreduce_coalesced": "all-reduce",
    "allgather": "all-gather",
    "allgather_coalesced": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "all_gather_single": "all-gather",
    "all_gather_single_coalesced": "all-gather",
    "_allgather_base": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_single_coalesced": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
"""Name of the collective that each method of a process group starts.

The methods of all supported releases of torch are listed.
"""


@dataclass(slots=True)
class _Call:
    """A call to a collective on this rank.

    Attributes:
        operation: Name of the collective.
        size_bytes: Total size in bytes of the inputs and outputs.
        clock: Clock that records ``start`` and ``end``.
        start: Time mark at the start of the call.
        takes_callback: Whether a callback on the collective's future can record ``end``.
        end: Time mark at the end of the collective, or ``None`` if it has not finished.
    """

    operation: str
    size_bytes: int
    clock: Any
    start: Any
    takes_callback: bool
    end: Any = None


_thread = threading.local()
"""Marks the threads in which a measured method of a process group is running."""


@dataclass(slots=True)
class _Group:
    """A process group of this rank, with its collectives in the current step."""

    kind: str
    ranks: Sequence[int]
    calls: list[_Call] = field(default_factory=list)


class CollectiveMeter:
    """Measures the collectives in which this rank takes part during a traced step.

    All methods must be called from the same thread.

    Args:
        groups: Process groups of this rank to measure, keyed by kind, such as ``tensor``.
        clock: Clock that records time marks on the device.
    """

    def __init__(self, groups: Mapping[str, Any], clock: Any) -> None:
        self._clock = clock
        self._host_clock = CpuClock()
        self._groups = {
            group.group_name: _Group(kind, sorted(dist.get_process_group_ranks(group)))
            for kind, group in groups.items()
        }
        self._watching = ExitStack()
        self._iteration = 0

    def begin(self, iteration: int, *, is_traced: bool) -> None:
        """Begins a step, and starts to measure the step's collectives if ``is_traced`` is true.

        Args:
            iteration: Iteration number, which must be the same on all members.
            is_traced: Whether to measure the step.
        """
        self.close()
        self._iteration = iteration
        for group in self._groups.values():
            group.calls = []
        if is_traced:
            for method in _OPERATIONS:
                self._watching.callback(_Replacement.of(method).join(self))

    def close(self) -> None:
        """Stops measuring. Safe to call more than once."""
        self._watching.close()

    def rows(self) -> list[GroupCollectives]:
        """Stops measuring, and returns a summary of the step's collectives per process group.

        This method waits for the device. A collective whose end was not recorded before the method
        was called is counted, but has no time.
        """
        self.close()
        measured = (group for group in self._groups.values() if group.calls)
        return [_summary(group, self._iteration) for group in measured]

    def call(self, operation: str, group: Any, arguments: Sequence[Any]) -> _Call | None:
        """Creates and returns the record of a collective that is about to start.

        The caller must store the end of the collective in the record. Returns ``None`` if this rank
        does not measure ``group``.

        Args:
            operation: Name of the collective.
            group: Process group that runs the collective.
            arguments: Positional arguments of the call to the process group's method.
        """
        own_group = self._groups.get(group.group_name)
        if own_group is None:
            return None
        tensors = list(_tensors(arguments[:2]))
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        clock = self._host_clock if gpu is None else self._clock
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # gloo runs callbacks in its own threads, whose current stream is not the caller's stream. A
        # callback can therefore read the host's clock, but cannot record an event on the caller's
        # stream.
        takes_callback = gpu is None or group._get_backend(gpu).name() == "nccl"
        call = _Call(operation, size_bytes, clock, clock.mark(), takes_callback)
        own_group.calls.append(call)
        return call


class _Replacement:
    """Patches a method of ``ProcessGroup`` while at least one :class:`CollectiveMeter` measures.

    Args:
        method: Name of the method. Nothing is patched if this release of torch does not have it.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        # Look the method up in the class's ``__dict__``, because getattr would return a plain
        # function, which could not be restored as a method.
        self._attribute = vars(dist.ProcessGroup).get(method)
        self._meters: list[CollectiveMeter] = []

    @classmethod
    def of(cls, method: str) -> _Replacement:
        """Returns the object that patches the method called ``method``, or else a new object."""
        present = getattr(vars(dist.ProcessGroup).get(method), "replacement", None)
        return present if isinstance(present, cls) else cls(method)

    def join(self, meter: CollectiveMeter) -> Callable[[], None]:
        """Starts to record calls in ``meter``, and returns a function that stops the recording."""
        if self._attribute is None:
            return lambda: None
        if not self._meters:
            setattr(dist.ProcessGroup, self._method, self._measured())
        self._meters.append(meter)
        return partial(self._leave, meter)

    def _leave(self, meter: CollectiveMeter) -> None:
        self._meters.remove(meter)
        if not self._meters:
            setattr(dist.ProcessGroup, self._method, self._attribute)

    def _measured(self) -> Callable[..., Any]:
        """Returns a wrapper of the patched method, which records each call in all joined meters.

        The wrapper does not record calls that another measured method makes. On GPUs that several
        ranks share, such calls replace a collective that gloo does not support (see
        ``device_collectives``), and that collective is already recorded.
        """
        original = getattr(dist.ProcessGroup, self._method)
        operation = _OPERATIONS[self._method]

        def measured(group: Any, *arguments: Any, **options: Any) -> Any:
            if getattr(_thread, "is_measuring", False):
                return original(group, *arguments, **options)
            calls = [meter.call(operation, group, arguments) for meter in self._meters]
            _thread.is_measuring = True
            try:
                work = original(group, *arguments, **options)
            finally:
                _thread.is_measuring = False
            is_waited = not _is_async(arguments, options)
            for call in calls:
                if call is None:
                    continue
                if work is None:
                    # The current stream waits for the collective that NCCL has queued, so the mark
                    # on this stream is reached when the collective ends.
                    call.end = call.clock.mark()
                elif is_waited or not call.takes_callback:
                    work = _TimedWork(work, call)
                else:
                    work = _timed(work, call)
            return work

        vars(measured)["replacement"] = self
        return measured


class _TimedWork:
    """Wraps the ``Work`` handle of a collective, and records when ``wait`` returns to the caller.

    A callback would cost more, because the thread that finishes the collective would have to
    acquire the GIL to run it. For GPU tensors, gloo would also run the callback in a thread without
    the caller's stream. Some collectives of gloo have no future to which a callback could be added.
    """

    __slots__ = ("_call", "_work")

    def __init__(self, work: Any, call: _Call) -> None:
        self._work = work
        self._call = call

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Waits for the collective, and records when it ended."""
        result = self._work.wait(*arguments, **options)
        if self._call.end is None:
            self._call.end = self._call.clock.mark()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _timed(work: Any, call: _Call) -> Any:
    """Makes ``work`` record the end of ``call``. Returns ``work`` or a wrapper of ``work``."""

    def ends(_: Any) -> None:
        # For GPU tensors, NCCL calls this function when the collective is queued. The current
        # stream then waits for the collective, so a mark on this stream is reached when the
        # collective ends.
        call.end = call.clock.mark()

    try:
        future = work.get_future()
    except RuntimeError:
        return _TimedWork(work, call)
    future.add_done_callback(ends)
    return work


def _is_async(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Returns whether a collective was started asynchronously, so that its caller waits later.

    ``arguments`` and ``options`` are the arguments of the call that started the collective.
    """
    settings = options.get("opts", arguments[-1] if arguments else None)
    return bool(getattr(settings, "asyncOp", True))


def model_parallel_groups(model_groups: ModelGroups | None = None) -> dict[str, Any]:
    """Returns this rank's process groups with more than one member, keyed by kind.

    Args:
        model_groups: Process groups of the model, or ``None`` to use the groups of
            ``parallel_state``.
    """
    groups = (model_groups or ModelGroups()).by_kind()
    return {
        kind: group
        for kind, group in groups.items()
        if isinstance(group, dist.ProcessGroup) and len(dist.get_process_group_ranks(group)) > 1
    }


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in ``values``, which may be nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _summary(group: _Group, iteration: int) -> GroupCollectives:
    """Returns the counts, total times and sizes of a group's collectives in step ``iteration``.

    The result also contains the start and end of up to :data:`MOST_KEPT` collectives.
    """
    operations = list(dict.fromkeys(call.operation for call in group.calls))
    counts = dict.fromkeys(operations, 0)
    totals_ns = dict.fromkeys(operations, 0)
    sizes = dict.fromkeys(operations, 0)
    times: dict[int, tuple[int, int]] = {}
    for number, call in enumerate(group.calls):
        counts[call.operation] += 1
        sizes[call.operation] += call.size_bytes
        if call.end is None:
            continue
        call.clock.wait(call.end)
        start_ns = call.clock.resolve_ns(call.start)
        end_ns = max(start_ns, call.clock.resolve_ns(call.end))
        totals_ns[call.operation] += end_ns - start_ns
        times[number] = start_ns, end_ns
    kept = _chosen(len(group.calls), iteration)
    return GroupCollectives(
        kind=group.kind,
        lowest_rank=group.ranks[0],
        size=len(group.ranks),
        operations=tuple(operations),
        totals=tuple((counts[name], totals_ns[name], sizes[name]) for name in operations),
        kept=tuple(
            (number, operations.index(group.calls[number].operation), *times[number])
            for number in sorted(kept)
            if number in times
        ),
    )


def _chosen(count: int, iteration: int) -> list[int]:
    """Returns the indices of the collectives of a step whose times are kept.

    Step ``iteration`` has ``count`` collectives. All ranks choose the same indices, because the
    choice depends only on the arguments.
    """

    def key(number: int) -> int:
        # Use odd constants, so that the top bits of the products depend on all bits of ``number``.
        mixed = number * 0x9E3779B97F4A7C15 + iteration * 0xD1B54A32D192ED03
        return (mixed & (1 << 64) - 1) >> 20

    return sorted(range(count), key=key)[:MOST_KEPT]
