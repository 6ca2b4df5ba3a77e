"""Which part of a forward a chunk's layers take."""

from __future__ import annotations

import time

import torch

from megatron.adaptive.accelerator import CpuClock
from megatron.adaptive.profiling.layer_share import LayerShare


class Waits(torch.nn.Module):
    """A model that does what is inside and then takes some time itself."""

    def __init__(self, seconds: float, inside: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.inside = inside

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given = given if self.inside is None else self.inside(given)
        time.sleep(self.seconds)
        return given


def test_the_share_is_that_of_the_block_in_its_model() -> None:
    block = Waits(0.02)
    model = Waits(0.001, block)
    measured = LayerShare({1: (model, block)}, CpuClock())
    assert measured.share(1) == 1.0
    for _ in range(3):
        model(torch.zeros(1))
    assert 0.5 < measured.share(1) < 1.0
    assert measured.share(0) == 1.0
    block.seconds, model.seconds = 0.0, 0.02
    measured.begin()
    for _ in range(3):
        model(torch.zeros(1))
    model.eval()
    model(torch.zeros(1))
    assert measured.share(1) < 0.5


def test_it_leaves_no_trace() -> None:
    block = Waits(0.0)
    model = Waits(0.0, block)
    measured = LayerShare({0: (model, block)}, CpuClock())
    measured.close()
    assert not model._forward_hooks
    assert not block._forward_pre_hooks
