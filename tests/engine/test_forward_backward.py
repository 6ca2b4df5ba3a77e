"""Tests that the replacement of megatron-core's function rejects unsupported arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining  # noqa: E402

from megatron.adaptive.engine.executor import Executor  # noqa: E402
from megatron.adaptive.engine.policy_factory import Orders  # noqa: E402
from megatron.adaptive.engine.stages import ForwardBackward  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402


def never(*_: Any) -> Any:
    raise AssertionError("nothing may run when the arguments are rejected")


def forward_backward(num_chunks: int) -> ForwardBackward:
    placement = Placement(num_ranks=1, num_chunks=num_chunks)
    executor = Executor(
        placement=placement, pp_rank=0, transport=None, clock=accelerator.CpuClock(), timeout_s=1.0
    )
    orders = Orders(schedule="adaptive", placement=placement, pp_rank=0)
    return ForwardBackward(executor=executor, orders=orders)


def call(num_chunks: int, **arguments: Any) -> None:
    defaults = {
        "forward_step_func": never,
        "data_iterator": iter(()),
        "model": torch.nn.Linear(1, 1),
        "num_microbatches": 2,
        "seq_length": 4,
        "micro_batch_size": 1,
        **arguments,
    }
    forward_backward(num_chunks)(**defaults)


def test_signature_is_that_of_megatron_core() -> None:
    parameters = inspect.signature(ForwardBackward.__call__).parameters
    expected = inspect.signature(forward_backward_no_pipelining).parameters
    assert list(parameters)[1:] == [
        *expected,
        "loss_parts",
        "sizes",
    ]  # The last two parameters are those that this project adds.
    assert parameters["loss_parts"].default is parameters["sizes"].default is None
    for name, parameter in expected.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        assert parameters[name].default == parameter.default, name


def test_shapes_are_not_adjusted() -> None:
    with pytest.raises(ConfigError, match="adjust_tensor_shapes_fn is not supported"):
        call(1, adjust_tensor_shapes_fn=never)


@pytest.mark.parametrize(
    ("models", "iterators", "chunks"), [(1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 2, 1)]
)
def test_chunks_models_and_iterators_must_match(models: int, iterators: int, chunks: int) -> None:
    text = f"{chunks} chunks per rank .* got {models} model chunks and {iterators} data iterators"
    with pytest.raises(ConfigError, match=text):
        call(chunks, model=[torch.nn.Linear(1, 1)] * models, data_iterator=[iter(())] * iterators)
