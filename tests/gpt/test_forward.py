"""Tests how the loss of a microbatch is computed."""

from __future__ import annotations

import pytest
import torch

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.gpt.forward import LOSS_NAME, masked_loss  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")


def test_loss_is_the_mean_of_what_the_mask_leaves() -> None:
    losses = torch.tensor([[1.0, 2.0], [3.0, 100.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    loss, reported = masked_loss(mask, losses)
    assert float(loss) == 2.0
    assert float(reported[LOSS_NAME]) == 2.0
    assert not reported[LOSS_NAME].requires_grad
    loss.backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


def test_loss_of_nothing_is_zero() -> None:
    loss, _ = masked_loss(torch.zeros(2, 2), torch.ones(2, 2))
    assert float(loss) == 0.0
