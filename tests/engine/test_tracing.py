"""What the trainer tells the trace around the pipeline's actions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.recorder import Recorder

HEADER = TraceHeader(
    run="run-1",
    rank=0,
    world_size=1,
    pp_rank=0,
    num_ranks=1,
    num_chunks=1,
    num_microbatches=2,
    schedule="1f1b",
)


class Device(CpuClock):
    """A device whose work is done when it is said so."""

    def __init__(self) -> None:
        self.passed_ns = 0

    def is_passed(self, mark: int) -> bool:
        return mark <= self.passed_ns

    def wait(self, mark: int) -> None:
        self.passed_ns = max(self.passed_ns, mark)

    def catch_up(self) -> None:
        self.passed_ns = self.mark()


def kinds(run: RunTrace) -> dict[int, list[str]]:
    trace = run.ranks[0]
    return {i: [span.action for span in trace.spans(i)] for i in trace.iterations}


def test_spans_of_an_iteration_and_what_follows_it(tmp_path: Path) -> None:
    tracing = Tracing(Recorder(tmp_path, HEADER))
    double = tracing.around("reduce", lambda value: 2 * value)
    for iteration in (1, 2):
        tracing.begin_iteration(iteration, 2, is_traced=True)
        tracing.data_read(1, 10, 20)
        assert double(4) == 8
        with tracing.span("optimizer"):
            pass
        tracing.end_iteration()
        with tracing.host_span("evaluate"):
            tracing.data_read(0, 30, 40)  # not of this trace
    with tracing.host_span("checkpoint"):
        pass
    tracing.close()
    tracing.close()
    expected = ["data", "step", "reduce", "optimizer", "evaluate"]
    run = read_run(tmp_path)
    assert kinds(run) == {1: expected, 2: [*expected, "checkpoint"]}
    spans = {span.action: span for span in run.ranks[0].spans(2)}
    assert (spans["data"].microbatch, spans["data"].start_ns) == (1, 10)
    assert spans["step"].start_ns <= spans["reduce"].start_ns
    assert spans["optimizer"].end_ns <= spans["step"].end_ns + 10**9
    assert spans["evaluate"].end_ns <= spans["checkpoint"].start_ns


def test_what_the_device_has_not_passed_is_told_later_and_waits_for_nothing(tmp_path: Path) -> None:
    device = Device()
    tracing = Tracing(Recorder(tmp_path, HEADER), device)
    tracing.begin_iteration(1, 2, is_traced=True)
    with tracing.span("reduce"):
        pass
    device.catch_up()
    with tracing.span("optimizer"):
        pass
    tracing.end_iteration()
    tracing.begin_iteration(2, 2, is_traced=True)
    device.catch_up()
    with tracing.span("optimizer"):
        pass
    tracing.end_iteration()
    tracing.close()
    assert kinds(read_run(tmp_path)) == {
        1: ["step", "reduce", "optimizer"],
        2: ["step", "optimizer"],
    }


def test_untraced_iterations_leave_nothing(tmp_path: Path) -> None:
    tracing = Tracing(Recorder(tmp_path, HEADER))
    for iteration, traced in ((1, True), (2, False)):
        tracing.begin_iteration(iteration, 2, is_traced=traced)
        tracing.data_read(0, 1, 2)
        with tracing.span("optimizer"):
            pass
        tracing.end_iteration()
        with tracing.host_span("checkpoint"):
            pass
    tracing.close()
    assert kinds(read_run(tmp_path)) == {1: ["data", "step", "optimizer", "checkpoint"]}


def test_an_error_inside_leaves_the_span(tmp_path: Path) -> None:
    tracing = Tracing(Recorder(tmp_path, HEADER))
    tracing.begin_iteration(1, 2, is_traced=True)
    with pytest.raises(ValueError, match="mine"), tracing.span("optimizer"):
        raise ValueError("mine")
    with pytest.raises(ValueError, match="mine"), tracing.host_span("checkpoint"):
        raise ValueError("mine")
    tracing.end_iteration()
    tracing.close()
    assert kinds(read_run(tmp_path)) == {1: ["checkpoint", "step", "optimizer"]}
