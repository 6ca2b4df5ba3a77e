"""Checks that random models with random cut points are trained with correct gradients."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from megatron.adaptive.modules import CutPoint

from .ranks import Case, assert_same

WIDTH = 4


class Tangle(nn.Module):
    """Model that applies random operations to earlier results.

    Some operations use shared or frozen parameters, or change a result in place.

    Args:
        seed: Seed of the random model.
        operations: Number of operations. On average, half of the operations are followed by a cut
            point.
    """

    def __init__(self, seed: int, operations: int = 14) -> None:
        super().__init__()
        torch.manual_seed(seed)
        choice = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].requires_grad_(False)
        self.register_buffer("table", torch.rand(WIDTH))
        self.cuts = nn.ModuleList()
        self.plan: list[tuple[str, int, int, int, int]] = []
        kinds = ("linear", "linear", "add", "gate", "mask", "detach", "in-place", "table", "dot")
        for number in range(operations):
            cut = -1
            if choice.random() < 0.5 or number in (3, 6, 9):
                cut = len(self.cuts)
                self.cuts.append(CutPoint())
            kind = "linear" if number == 0 else choice.choice(kinds)
            inputs = choice.randrange(number + 2), choice.randrange(number + 2)
            self.plan.append((kind, *inputs, choice.randrange(4) if number else 0, cut))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the inputs ``x`` and ``y``, each ``[n, 4]``."""
        made = [x, y]
        for kind, first, second, layer, cut in self.plan:
            made.append(self._run(kind, made[first], made[second], layer))
            if cut >= 0:
                made[-1] = self.cuts[cut](made[-1])
        return (made[-1] + 0.1 * sum(made[2:-1])).square().mean()

    def _run(self, kind: str, a: torch.Tensor, b: torch.Tensor, layer: int) -> torch.Tensor:
        if kind == "linear":
            return self.layers[layer](a).tanh()
        if kind == "add":
            return a + 0.5 * b
        if kind == "gate":
            return a * torch.sigmoid(b)
        if kind == "mask":
            return torch.where(b > 0, a, 0.1 * a)
        if kind == "detach":
            return a.detach() * b.mean(dim=0, keepdim=True)
        if kind == "in-place":
            return (a + 0).mul_(0.7).add_(b)
        if kind == "dot":
            left, right = a.chunk(2, dim=1)
            return torch.cat([right, left], dim=1) * (b * b).sum(dim=1, keepdim=True).sigmoid()
        return a * self.table + torch.arange(WIDTH) * 0.1


@pytest.mark.parametrize("seed", range(24))
def test_tangled_models(seed: int) -> None:
    model = Tangle(seed)
    generator = torch.Generator().manual_seed(seed)
    batch = {name: torch.randn(8, WIDTH, generator=generator) for name in ("x", "y")}
    case = Case(model, batch, 2)
    losses, gradients = case.expected()
    schedule, size = [("1f1b", 4), ("zb-v", 2), ("adaptive", 3), ("gpipe", 2)][seed % 4]
    staged_losses, staged = case.run(schedule, size)
    assert staged_losses == pytest.approx(losses, rel=1e-5)
    assert_same(staged, gradients)
