"""Tests that kernel files are small, use the clock of the trace, and may have damaged lines."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from megatron.adaptive.cli import trace
from megatron.adaptive.trace.kernels import (
    MOST_KEPT,
    MOST_NAMES,
    OTHERS,
    OUTSIDE,
    KernelFile,
    KernelTotal,
    StepKernels,
    TimedKernel,
    actions_of,
    kernel_figures,
    kernel_notes,
    kernels_path,
    read_steps,
    summed,
)
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.trace_format import Span
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

LATE_NS = 9 * 10**15
"""Monotonic clock reading of a machine that has been running for 104 days, in nanoseconds."""


@pytest.fixture
def run(tmp_path: Path) -> RunTrace:
    """Returns the trace of a run with three iterations."""
    write_synthetic(tmp_path, SyntheticRun(iterations=3))
    return read_run(tmp_path)


def small_step(iteration: int) -> StepKernels:
    """Returns the kernels of step ``iteration``, in which only two kernels run."""
    return summed(iteration, "cpu", [TimedKernel("a", 5, 9), TimedKernel("b", 6, 7)], ())


def test_a_step_of_many_kernels_is_bounded(tmp_path: Path) -> None:
    many = [
        TimedKernel(
            f"k{number % 1500:04d}" + "x" * 300, LATE_NS + number, LATE_NS + 1001 * number + 1
        )
        for number in range(30_000)
    ]
    spans = [Span("F", 0, 0, LATE_NS, LATE_NS + 15_000, 4)]
    step = summed(4, "cuda", many, spans)
    assert len(step.kept) <= MOST_KEPT
    assert len(step.totals) == MOST_NAMES + 2
    assert sum(total.number for total in step.totals) == len(many)
    others = [total for total in step.totals if total.name == OTHERS]
    assert {total.action for total in others} == {"F", OUTSIDE}
    assert sum(total.number for total in others) == 2000 * 10
    file = KernelFile(tmp_path, 0)
    file.add(step)
    file.close()
    assert kernels_path(tmp_path, 0).stat().st_size < 10**6


def test_short_kernels_that_are_frequent_count_in_full(tmp_path: Path, run: RunTrace) -> None:
    spans = run.ranks[0].spans(2)
    first = next(span for span in spans if span.action == "F")
    start_ns = first.start_ns
    number_of_short = 5 * MOST_KEPT
    many = [TimedKernel("long", start_ns, start_ns + 50)] * MOST_KEPT
    many += [TimedKernel("short", start_ns + 1, start_ns + 11)] * number_of_short
    file = KernelFile(tmp_path, 0)
    file.add(summed(2, "cuda", many, spans))
    file.close()
    long, short = sorted(kernel_figures(run, 2), key=lambda figure: figure.name)
    assert (long.action, long.count, long.total_ms) == ("F", MOST_KEPT, 1.0)
    assert (short.action, short.count, short.total_ms) == ("F", number_of_short, 1.0)


def test_steps_are_read_as_they_were_written(tmp_path: Path, run: RunTrace) -> None:
    assert read_steps(run, 0) == []
    file = KernelFile(tmp_path, 0)
    for number in (1, 2):
        file.add(small_step(number))
    file.close()
    path = kernels_path(tmp_path, 0)
    # Add an incomplete line, as if the program had been killed while it wrote.
    path.write_text(path.read_text() + '{"iteration": 3, "na')
    assert [step.iteration for step in read_steps(run, 0)] == [1, 2]
    assert kernel_notes(run) == []
    step = read_steps(run, 0)[0]
    assert step.totals == (KernelTotal(OUTSIDE, "a", 1, 4), KernelTotal(OUTSIDE, "b", 1, 1))
    first, second = step.kept
    assert (first.name, first.end_ns - first.start_ns) == ("a", 4)
    assert second.start_ns - first.start_ns == 1


def test_a_torn_line_costs_only_its_own_step(tmp_path: Path, run: RunTrace) -> None:
    path = kernels_path(tmp_path, 0)
    # This incomplete line was left by an earlier process that was killed while it wrote.
    path.write_text('{"iteration": 1, "na')
    file = KernelFile(tmp_path, 0)
    file.add(small_step(2))
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        # The file size limit makes this write fail after 10 bytes, as on a full disk.
        file.add(small_step(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    file.add(small_step(3))
    file.close()
    assert [step.iteration for step in read_steps(run, 0)] == [2, 3]
    assert kernel_notes(run)[0].startswith(f"{path}: line 1 is damaged")


def damaged(**fields: object) -> str:
    """Returns a line of a kernel file with valid values, except for the given ``fields``."""
    step = {"iteration": 1, "device": "cpu", "names": ["a"], "totals": [], "kept": []}
    return json.dumps(step | fields)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "[" * 100_000,
        damaged(kept=[[7, 0, 1]]),
        damaged(kept=[[-1, 0, 1]]),
        damaged(kept=[[0, 5, -1]]),
        damaged(kept=[[0, 10**40, 1]]),
        damaged(kept=[[0, 1 << 61, 1 << 61]]),
        damaged(kept=[[0, float("inf"), 1]]),
        damaged(totals=[["F", 0, -1, 1]]),
        damaged(totals=[["F", 0, 1, float("inf")]]),
        damaged(iteration=float("inf")),
        damaged(names=[None]),
    ],
    ids=lambda line: line[:90].replace(" ", "") or "empty",
)
def test_a_damaged_line_is_left_out_and_named(
    tmp_path: Path, run: RunTrace, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    file = KernelFile(tmp_path, 0)
    file.add(small_step(2))
    path = kernels_path(tmp_path, 0)
    with path.open("a") as text:
        text.write(line + "\n\n")
    file.add(small_step(3))
    file.close()
    assert [step.iteration for step in read_steps(run, 0)] == [2, 3]
    (note,) = kernel_notes(run)
    assert f"{path}: lines 2-3 are damaged" in note
    pages = ["--format", "perfetto", "--output-dir", str(tmp_path / "views")]
    assert trace.main([str(tmp_path), "--iteration", "2", *pages]) == 0
    assert capsys.readouterr().err.count(f"warning: {path}: lines 2-3") == 1


def test_a_kernel_belongs_to_the_action_in_which_it_begins() -> None:
    spans = [
        Span("F", 0, 1, 10, 20, 1),
        Span("wait", -1, -1, 20, 40, 1),
        Span("B", 0, 1, 40, 60, 1),
    ]
    kernels = [TimedKernel("k", start, start + 15) for start in (5, 10, 19, 20, 59, 60)]
    begun_in = [None if span is None else span.action for span in actions_of(spans, kernels)]
    assert begun_in == [None, "F", "F", None, "B", None]
