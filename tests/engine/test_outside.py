"""Work that another loop orders is timed from outside, without a change of its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.engine.tracing import OutsideTrace, Tracing
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.recorder import Recorder

HEADER = TraceHeader(
    run="run-1",
    rank=0,
    world_size=1,
    pp_rank=0,
    num_ranks=1,
    num_chunks=2,
    num_microbatches=3,
    schedule="megatron",
)
Chunks = list[torch.nn.Module]


def forward_step(data_iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    """As a user writes it."""
    return model(next(data_iterator)), partial(torch.sum)


def loop(
    *, forward_step_func: Any, data_iterator: Any, model: Chunks, forward_only: bool = False
) -> list[Any]:
    """A loop of another hand: all forwards of a chunk, their backwards the other way round."""
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
    """A step from the same state each time; returns its losses and gradients."""
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
    with Recorder(tmp_path, HEADER) as recorder:
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


def test_others_see_what_it_does(tmp_path: Path, chunks: Chunks) -> None:
    seen = []
    with Recorder(tmp_path, HEADER) as recorder:
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
