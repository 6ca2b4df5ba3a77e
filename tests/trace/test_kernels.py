"""Files of kernels: bounded, on the run's clock, joined to actions; damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.kernels import (
    MOST_KEPT,
    MOST_NAMES,
    OTHERS,
    TimedKernel,
    actions_of,
    add_step,
    kernels_path,
    read_steps,
    summed,
)
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.trace_format import Span
from tests.support.synthetic_trace import SyntheticRun, write_synthetic


def test_a_step_of_many_kernels_is_bounded(tmp_path: Path) -> None:
    many = [
        TimedKernel(f"k{number % 1500:04d}", number, 2 * number + 1) for number in range(30_000)
    ]
    step = summed(4, "cuda", many)
    assert len(step.kept) <= MOST_KEPT
    assert len(step.totals) == MOST_NAMES + 1
    assert step.totals[OTHERS][0] == 500 * 20
    assert sum(count for count, _ in step.totals.values()) == len(many)
    add_step(tmp_path, 0, step)
    assert kernels_path(tmp_path, 0).stat().st_size < 1 << 20


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SyntheticRun(iterations=3))
    run = read_run(tmp_path)
    assert read_steps(run, 0) == []
    steps = [
        summed(number, "cpu", [TimedKernel("a", 5, 9), TimedKernel("b", 6, 7)]) for number in (1, 2)
    ]
    for step in steps:
        add_step(tmp_path, 0, step)
    path = kernels_path(tmp_path, 0)
    path.write_text(path.read_text() + '{"iteration": 3, "na')  # the program was killed
    assert [step.totals for step in read_steps(run, 0)] == [step.totals for step in steps]
    first, second = read_steps(run, 0)[0].kept
    assert (first.name, first.end_ns - first.start_ns) == ("a", 4)
    assert second.start_ns - first.start_ns == 1
    path.write_text('{"iteration": 3, "names": ["a"], "totals": [[1, 2]], "kept": [[7, 0, 1]]}\n')
    with pytest.raises(TraceError, match="line 1, has no kernels of a step"):
        read_steps(run, 0)


def test_a_kernel_belongs_to_the_action_in_which_it_begins() -> None:
    spans = [
        Span("F", 0, 1, 10, 20, 1),
        Span("wait", -1, -1, 20, 40, 1),
        Span("B", 0, 1, 40, 60, 1),
    ]
    kernels = [TimedKernel("k", start, start + 15) for start in (5, 10, 19, 20, 59, 60)]
    begun_in = [None if span is None else span.action for span in actions_of(spans, kernels)]
    assert begun_in == [None, "F", "F", None, "B", None]
