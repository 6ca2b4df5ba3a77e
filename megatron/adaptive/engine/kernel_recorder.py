"""Records the operators and kernels of selected steps with torch.profiler.

On a CPU, the outermost operators are recorded; on a GPU, the kernels and copies. The times of some
marks are measured both by the profiler and with the trace's clock. The difference between the two
times of a mark is used to convert the profiler's times to the trace's clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from megatron.adaptive.trace.files import Outage
from megatron.adaptive.trace.kernels import KernelFile, TimedKernel, summed
from megatron.adaptive.trace.trace_format import KINDS, Span, SpanRow

_MARK = "megatron.adaptive: mark of a known time"
_NUM_MARKS = 3
_WRAPPER = re.compile(r"autograd::engine|.*Backward\d*$|megatron\.adaptive")
"""Pattern for the names of profiler ranges that contain operators but are not operators."""


class KernelRecorder:
    """Records the kernels of selected iterations with torch.profiler.

    All methods must be called from the same thread.

    Args:
        folder: Folder for the trace files.
        rank: Global rank of this process.
        iterations: Indices of the iterations to record.
        on_gpu: Whether the rank computes on a GPU.
        say: Function that prints a line of text.
        setting: Setting that turns the recorder on, spelled as users write it.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        iterations: range,
        *,
        on_gpu: bool,
        say: Callable[[str], None],
        setting: str = "--trace-detail kernels",
    ) -> None:
        self._file = KernelFile(Path(folder), rank)
        self._iterations = iterations
        self._on_gpu = on_gpu
        self._say = say
        self._setting = setting
        self._outage = Outage("kernels of the trace", "kernels")
        self._running: Any = None
        self._iteration = 0
        self._is_idle = True
        self._marks_ns: list[int] = []

    def begin(self, iteration: int, *, is_traced: bool) -> None:
        """Begins ``iteration``, and starts recording if this iteration is selected and traced."""
        self._stop()
        if iteration not in self._iterations:
            return
        if not is_traced:
            self._report_if_idle(iteration)
            return
        self._is_idle = False
        if torch.autograd._profiler_enabled():
            self._say(
                f"kernels of iteration {iteration} are not recorded, because another "
                f"torch.profiler is running in this process; stop it, or remove {self._setting}"
            )
            return
        activities = [profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(profiler.ProfilerActivity.CUDA)
        self._running = profiler.profile(activities=activities)
        self._running.start()
        self._iteration = iteration
        self._marks_ns = []
        for _ in range(_NUM_MARKS):
            self._marks_ns.append(time.monotonic_ns())
            with profiler.record_function(_MARK):
                pass

    def _report_if_idle(self, iteration: int) -> None:
        """Prints a message after the last selected iteration if none of them was traced."""
        if self._is_idle and iteration == self._iterations[-1]:
            self._say(
                f"no kernels are recorded, because iterations {self._iterations[0]} to {iteration} "
                "are not traced; change the tracing interval, or profile other iterations"
            )

    def end(self, rows: Callable[[], Iterable[SpanRow]]) -> None:
        """Ends an iteration. If the iteration was recorded, writes its kernels to the file.

        Args:
            rows: Function that returns the spans of the iteration. It is called after the device
                has finished the iteration.
        """
        running = self._stop()
        if running is None:
            return
        device = "cuda" if self._on_gpu else "cpu"
        iteration = self._iteration
        spans = (
            Span(KINDS[row.kind], row.chunk, row.microbatch, row.start_ns, row.end_ns, iteration)
            for row in rows()
        )
        step = summed(iteration, device, self._kernels(running.events()), spans)
        try:
            self._file.add(step)
        except OSError as error:
            self._outage.begins(error)

    def close(self) -> None:
        """Stops recording without writing the current iteration, and closes the file.

        Safe to call more than once.
        """
        self._stop()
        self._file.close()

    def _stop(self) -> Any:
        """Stops the profiler, if it is running, and waits for the device.

        Returns the profiler, or ``None`` if it was not running.
        """
        running, self._running = self._running, None
        if running is not None:
            running.stop()
        return running

    def _kernels(self, events: Any) -> Iterator[TimedKernel]:
        """Yields the kernels in ``events``, with their times converted to the monotonic clock."""
        marks = [event.time_range.start for event in events if event.name == _MARK]
        if len(marks) < len(self._marks_ns):
            return
        # The trace's clock is read shortly before the profiler records a mark. The mark with the
        # shortest delay after this reading gives the most accurate offset between the clocks.
        pairs = zip(self._marks_ns, sorted(marks), strict=False)
        shift_ns = max(time_ns - round(mark_us * 1e3) for time_ns, mark_us in pairs)
        for event in events:
            is_kernel = _is_of_gpu(event) if self._on_gpu else _is_outermost(event)
            if is_kernel:
                start_ns, end_ns = (
                    round(at_us * 1e3) + shift_ns
                    for at_us in (event.time_range.start, event.time_range.end)
                )
                yield TimedKernel(event.name, start_ns, end_ns)


def _is_of_gpu(event: Any) -> bool:
    """Returns whether the profiler's ``event`` is a kernel or a copy on a GPU."""
    is_range = getattr(event, "is_user_annotation", False)
    return bool(event.device_type != torch.autograd.DeviceType.CPU and not is_range)


def _is_outermost(event: Any) -> bool:
    """Returns whether ``event`` is a CPU operator that no other operator contains."""
    if event.device_type != torch.autograd.DeviceType.CPU or _WRAPPER.match(event.name):
        return False
    parent = event.cpu_parent
    while parent is not None:
        if not _WRAPPER.match(parent.name):
            return False
        parent = parent.cpu_parent
    return True
