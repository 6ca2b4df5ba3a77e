"""Trains a small vision transformer.

The mean over the patches is computed in the first stage and used in the last stage. Tensors that
skip stages need no extra code.

torchrun --nproc-per-node 4 examples/cutpoint/vit.py --schedule 1f1b
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from common import Batch, parse, train
from torch import nn

from megatron.adaptive import CutPoint


class Block(nn.Module):
    """Transformer block with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output ``[n, patches, width]`` for an input ``x`` of the same shape."""
        n, patches, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, patches, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, patches, width)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        hidden = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class Vit(nn.Module):
    """Vision transformer that classifies images of 16 x 16 pixels with 3 colors."""

    def __init__(
        self, width: int = 32, depth: int = 8, classes: int = 10, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(depth))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[n, classes]`` for images ``[n, 3, 16, 16]``."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        mean = x.mean(dim=1)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(block(x))
        return self.head(torch.cat([self.norm(x)[:, 0], mean], dim=1))


def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the loss of the microbatch ``batch``, for which the model has computed ``logits``."""
    return F.cross_entropy(logits, batch["label"])


def build(dropout: float = 0.1) -> nn.Module:
    """Returns the model. Its weights are the same on every process."""
    torch.manual_seed(1)
    return Vit(dropout=dropout)


def make_batch(samples: int) -> Batch:
    """Returns a batch of ``samples`` random images."""
    generator = torch.Generator().manual_seed(2)
    return {
        "image": torch.randn(samples, 3, 16, 16, generator=generator),
        "label": torch.randint(0, 10, (samples,), generator=generator),
    }


if __name__ == "__main__":
    train(parse(__doc__), build(), make_batch, loss=loss)
