"""Small models with cut points, each with something that makes cutting hard."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from megatron.adaptive.modules import CutPoint

WIDTH, WORDS = 8, 16


class Knotty(nn.Module):
    """Two shared weights, tensors that skip stages, dropout, a running mean, unequal blocks.

    ``ids [n, s] int64``, ``mask [n, s] bool`` and ``label [n, s] int64`` make a loss.
    """

    def __init__(self, blocks: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.dropout = dropout

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        first = self.mixer(self.words(ids))
        weight = mask.float().unsqueeze(-1) / mask.sum(dim=1, keepdim=True).unsqueeze(-1)
        gate = torch.sigmoid(first.mean(dim=1, keepdim=True))
        x = first
        for number, (block, cut) in enumerate(zip(self.blocks, self.cuts, strict=True)):
            x = x + torch.tanh(block(F.dropout(x, self.dropout, self.training))) * weight
            if number == 1:
                x = self.norm(x.flatten(0, 1)).view_as(x)
            if number == 4:
                x = x + first
            x = cut(x)
        return F.cross_entropy(self.head(self.mixer(x) * gate).flatten(0, 1), label.flatten())


class Wide(nn.Module):
    """Six pieces of many parameters and few activations: ``x [n, 64]`` to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number < 5:
                x = self.cuts[number](x)
        return x.square().mean()


SHARED = [["words.weight", "head.weight"], ["mixer.weight"], ["mixer.bias"]]


def knotty(**options: float) -> Knotty:
    """Return the model, always the same."""
    torch.manual_seed(3)
    return Knotty(**options)  # type: ignore[arg-type]


def make_batch(samples: int, seed: int = 0, length: int = 5) -> dict[str, torch.Tensor]:
    """Return a batch for it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (samples, length), generator=generator)
    return {
        "ids": ids,
        "mask": torch.rand(samples, length, generator=generator) > 0.2,
        "label": ids.roll(-1, dims=1),
    }
