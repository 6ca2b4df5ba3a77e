"""Tests that kernels of selected iterations are recorded, unless another profiler is running."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import torch
from torch import profiler

from megatron.adaptive.engine.kernel_recorder import KernelRecorder
from megatron.adaptive.engine.tracing import CpuClock, Tracing
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.kernels import kernel_figures, kernels_path
from megatron.adaptive.trace.read import read_run

from .loopback import recorder_of


def recorded(folder: Path, said: list[str]) -> int:
    """Runs three iterations, and records the second. Returns the number of lines in the file.

    The file is in ``folder``. Messages of the recorder are added to ``said``.
    """
    recorder = KernelRecorder(str(folder), 3, range(2, 3), on_gpu=False, say=said.append)
    for iteration in (1, 2, 3):
        recorder.begin(iteration, is_traced=True)
        torch.ones(8, 8, requires_grad=True).mm(torch.ones(8, 8)).sum().backward()
        recorder.end(tuple)
    recorder.close()
    path = kernels_path(folder, 3)
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_the_chosen_iteration_is_recorded_on_the_clock_of_the_trace(tmp_path: Path) -> None:
    said: list[str] = []
    begin_ns = time.monotonic_ns()
    assert recorded(tmp_path, said) == 1
    end_ns = time.monotonic_ns()
    assert said == []
    text = kernels_path(tmp_path, 3).read_text()
    record = json.loads(text)
    assert "aten::mm" in record["names"]
    assert not any("Backward" in name or "mark" in name for name in record["names"])
    for _, start_ns, length_ns in record["kept"]:
        assert begin_ns <= start_ns <= start_ns + length_ns <= end_ns


class LateDevice(CpuClock):
    """Simulates a device that finishes its work only after the profiler has stopped."""

    def is_passed(self, mark: int) -> bool:
        return not torch.autograd._profiler_enabled()


def multiply(count: int) -> None:
    """Multiplies ``count`` pairs of matrices.

    Sleeps before and after, because the clocks of the profiler and the trace differ slightly.
    """
    time.sleep(0.005)
    for _ in range(count):
        torch.ones(8, 8).mm(torch.ones(8, 8))
    time.sleep(0.005)


def test_totals_are_those_of_the_actions_that_ran_the_kernels(tmp_path: Path) -> None:
    tracing = Tracing(
        recorder_of(tmp_path, 0, Placement(num_ranks=1, num_chunks=1), 1), LateDevice()
    )
    tracing.kernels = KernelRecorder(str(tmp_path), 0, range(1, 2), on_gpu=False, say=print)
    tracing.begin_iteration(1, 1, is_traced=True)
    for kind, count in (("reduce", 1), ("optimizer", 2), ("", 1)):
        with tracing.span(kind) if kind else contextlib.nullcontext():
            multiply(count)
    tracing.end_iteration()
    tracing.close()
    figures = kernel_figures(read_run(tmp_path), 1)
    products = {figure.action: figure.count for figure in figures if figure.name == "aten::mm"}
    assert products == {"reduce": 1, "optimizer": 2, "outside": 1}


def test_beside_another_profiler_a_line_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as other:
        assert recorded(tmp_path, said) == 0
    (line,) = said
    assert "another torch.profiler is running in this process" in line
    assert any(event.name == "aten::mm" for event in other.events())


def test_a_line_says_that_no_selected_iteration_is_traced(tmp_path: Path) -> None:
    said: list[str] = []
    recorder = KernelRecorder(str(tmp_path), 0, range(2, 4), on_gpu=False, say=said.append)
    for iteration in range(1, 6):
        recorder.begin(iteration, is_traced=iteration % 4 == 1)
        recorder.end(tuple)
    recorder.close()
    (line,) = said
    assert "iterations 2 to 3 are not traced" in line
