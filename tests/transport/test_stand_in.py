"""Tests simulated channels, which deliver inputs in a given order and drop sent messages."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import TransportError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.interface import Arrival, Label
from megatron.adaptive.transport.kind import Payloads
from megatron.adaptive.transport.stand_in import ExpectedInput, StandIn

CPU = Accelerator(device=torch.device("cpu"), backend="gloo", name="CPU")
SHAPE = (3, 2, 5)


def stand_in() -> StandIn:
    payloads = Payloads(shape=SHAPE, dtype=torch.bfloat16, in_flight=2)
    return StandIn(CPU, payloads, [4], TransportConfig())


def test_inputs_come_in_the_order_of_need_and_then_no_more() -> None:
    transport = stand_in()
    actions = [Action(ActionKind.F, 0, 0), Action(ActionKind.B, 0, 0), Action(ActionKind.F, 0, 1)]
    transport.begin(7, [ExpectedInput(action, 4) for action in actions])
    assert transport.completions.poll() is None
    for action in actions:
        item = transport.completions.wait(time.monotonic())
        assert isinstance(item, Arrival)
        assert (item.label, item.peer) == (Label(7, action), 4)
        tensor = item.take()
        assert (tensor.shape, tensor.dtype) == (SHAPE, torch.bfloat16)
        assert tensor.requires_grad_().is_leaf
        assert float(tensor.detach().float().abs().max()) > 0
    assert transport.completions.wait(time.monotonic()) is None


def test_sent_tensors_leave_inputs_as_they_are() -> None:
    transport = stand_in()
    action = Action(ActionKind.F, 0, 0)
    transport.begin(0, [ExpectedInput(action, 4)])
    item = transport.completions.wait(time.monotonic())
    assert isinstance(item, Arrival)
    received = item.take()
    before = received.clone()
    for _ in range(100):
        transport.send(4, Label(0, action), torch.ones(SHAPE, dtype=torch.bfloat16))
    assert torch.equal(received, before)
    transport.close()


def test_an_error_that_was_put_is_raised_by_the_next_wait() -> None:
    transport = stand_in()
    transport.completions.put(TransportError("lost"))
    with pytest.raises(TransportError, match="lost"):
        transport.completions.wait(time.monotonic())
