"""Tests the operation counts of recorded calls, which are computed from tensor shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.modules import CutPoint  # noqa: E402
from megatron.adaptive.modules.recording import Forward, Forwards  # noqa: E402
from megatron.adaptive.modules.recordings import segment_work  # noqa: E402


class Mixed(nn.Module):
    """Model with a convolution, an attention layer and a linear layer in separate segments."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.see = nn.Conv1d(4, 32, 3, padding=1)
        self.mix = nn.Linear(32, 96, bias=False)
        self.say = nn.Linear(32, 8, bias=False)
        self.see.requires_grad_(not frozen)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``, which has the shape ``[n, 4, s]``."""
        x = self.cuts[0](self.see(x).transpose(1, 2))
        q, k, v = self.mix(x).unsqueeze(1).chunk(3, dim=-1)
        x = self.cuts[1](F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return self.say(x).square().mean()


def work_of(model: nn.Module, length: int, slicing: str) -> list[float]:
    """Returns the operation count of each segment of ``model`` for one sequence of ``length``.

    ``slicing`` is the method of recording the model.
    """
    forward = Forward(model=model, loss=None, arguments=None, decisive_entries=())
    forwards = Forwards.of(forward, {"x": torch.randn(1, 4, length)}, slicing)
    return list(segment_work(forwards.training))


@pytest.mark.parametrize("slicing", ["record", "export"])
def test_products_convolutions_and_attention_count_their_multiplications(slicing: str) -> None:
    length = 512
    see, mix, say = work_of(Mixed(), length, slicing)
    # The counts include the forward pass and the gradients of operands. The batch needs no
    # gradient.
    assert see == pytest.approx(2 * length * 32 * 12, rel=0.3)
    assert mix == pytest.approx(3 * length * 32 * 96 + 3 * 2 * length * length * 32, rel=0.1)
    assert say == pytest.approx(3 * length * 32 * 8, rel=0.3)
    half = work_of(Mixed(), length // 2, slicing)
    assert see / half[0] == pytest.approx(2, rel=0.01)
    assert mix / half[1] > 3


def test_frozen_layers_have_a_forward_only() -> None:
    trained, frozen = (work_of(Mixed(frozen=each), 64, "record") for each in (False, True))
    assert frozen[0] < 0.6 * trained[0]
    assert frozen[1] < trained[1]
    assert frozen[2] == trained[2]
