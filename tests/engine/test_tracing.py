"""Tests spans of pipeline actions, and spans in the training loops of other programs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.engine.tracing import OutsideTrace, Tracing
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.read import RunTrace, read_run

from .loopback import recorder_of

ONE = Placement(num_ranks=1, num_chunks=2)
Chunks = list[torch.nn.Module]


class Device(CpuClock):
    """Simulates a device that finishes its work only when the test calls :meth:`catch_up`."""

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
    tracing = Tracing(recorder_of(tmp_path, 0, ONE, 2))
    double = tracing.around("reduce", lambda value: 2 * value)
    for iteration in (1, 2):
        tracing.begin_iteration(iteration, 2, is_traced=True)
        tracing.data_read(1, 10, 20)
        assert double(4) == 8
        with tracing.span("optimizer"):
            pass
        tracing.end_iteration()
        with tracing.host_span("evaluate"):
            # The trace contains only reads of training data, so it must omit this read.
            tracing.data_read(0, 30, 40)
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
    tracing = Tracing(recorder_of(tmp_path, 0, ONE, 2), device)
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


def test_an_error_inside_leaves_the_span(tmp_path: Path) -> None:
    tracing = Tracing(recorder_of(tmp_path, 0, ONE, 2))
    tracing.begin_iteration(1, 2, is_traced=True)
    with pytest.raises(ValueError, match="mine"), tracing.span("optimizer"):
        raise ValueError("mine")
    with pytest.raises(ValueError, match="mine"), tracing.host_span("checkpoint"):
        raise ValueError("mine")
    tracing.end_iteration()
    tracing.close()
    assert kinds(read_run(tmp_path)) == {1: ["checkpoint", "step", "optimizer"]}


# The following tests trace the loop of another program, which determines the order of actions.


def forward_step(data_iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    """Runs ``model`` on the next batch, like a user's forward step function for megatron-core."""
    return model(next(data_iterator)), partial(torch.sum)


def loop(
    *, forward_step_func: Any, data_iterator: Any, model: Chunks, forward_only: bool = False
) -> list[Any]:
    """Imitates another program's loop. Runs the passes of each chunk in ``model``.

    The backward passes of a chunk run after all of its forward passes, in reverse order. With
    ``forward_only``, there are no backward passes. Returns the losses.
    """
    losses = []
    for chunk in model:
        outputs = []
        for _ in range(3):
            output, loss_func = forward_step_func(data_iterator, chunk)
            outputs.append(output)
            losses.append(loss_func(output))
        if not forward_only:
            for output in reversed(outputs):
                torch.autograd.backward(output, torch.ones_like(output))
    return losses


def step(function: Any, chunks: Chunks, **more: Any) -> list[float]:
    """Runs ``function`` with the same data in each call. Returns losses and sums of gradients."""
    data = iter(torch.arange(24.0).reshape(6, 1, 4))
    for chunk in chunks:
        chunk.zero_grad()
    losses = function(forward_step_func=forward_step, data_iterator=data, model=chunks, **more)
    gradients = [p.grad.sum() for c in chunks for p in c.parameters() if p.grad is not None]
    return [float(value.detach()) for value in (*losses, *gradients)]


@pytest.fixture
def chunks() -> Chunks:
    torch.manual_seed(3)
    return [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)]


def test_each_action_is_there_and_numbers_are_the_same(tmp_path: Path, chunks: Chunks) -> None:
    plain = step(loop, chunks)
    with recorder_of(tmp_path, 0, ONE, 3) as recorder:
        tracing = Tracing(recorder)
        outside = OutsideTrace(loop, tracing)
        tracing.begin_iteration(1, 3, is_traced=True)
        assert step(outside, chunks) == plain
        tracing.end_iteration()
        tracing.begin_iteration(2, 3, is_traced=False)
        assert step(outside, chunks) == plain
        tracing.end_iteration()
        tracing.begin_iteration(3, 3, is_traced=True)
        assert step(outside, chunks, forward_only=True) == plain[:6]
        tracing.end_iteration()
    run = read_run(tmp_path)
    table = run.ranks[0].table()
    spans = [
        (span.action, span.chunk, span.microbatch)
        for span in sorted(table.of_kind("F", "B").spans(), key=lambda span: span.start_ns)
    ]
    assert spans == [
        (kind, chunk, microbatch)
        for chunk in range(2)
        for kind, order in (("F", (0, 1, 2)), ("B", (2, 1, 0)))
        for microbatch in order
    ]
    actions = table.of_kind("F", "B")
    assert set(actions.iteration.tolist()) == {1}
    assert (actions.end_ns[:-1] <= actions.start_ns[1:]).all()
    assert (actions.end_ns > actions.start_ns).all()
    assert run.complete_iterations() == (1,)


def test_others_see_what_another_loop_does(tmp_path: Path, chunks: Chunks) -> None:
    seen = []
    with recorder_of(tmp_path, 0, ONE, 3) as recorder:
        tracing = Tracing(recorder)
        outside = OutsideTrace(loop, tracing)
        for chunk in chunks:
            chunk.register_forward_hook(lambda *_: seen.append(outside.snapshot()))
        tracing.begin_iteration(1, 3, is_traced=True)
        assert outside.snapshot() == {}
        step(outside, chunks)
        assert outside.snapshot() == {}
    assert [(s["doing"], s["chunk"], s["microbatch"], s["done"]) for s in seen] == [
        ("F", chunk, microbatch, [3 * chunk + microbatch, 3 * chunk, 0])
        for chunk in range(2)
        for microbatch in range(3)
    ]
