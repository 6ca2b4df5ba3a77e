"""Trains a multi-layer perceptron whose layers are divided among the processes.

torchrun --nproc-per-node 2 examples/cutpoint/mlp.py
"""

from __future__ import annotations

import torch
from common import Batch, parse, train

from megatron.adaptive import CutPoint


class Mlp(torch.nn.Module):
    """Multi-layer perceptron with a cut point after each hidden layer."""

    def __init__(self, width: int = 64, layers: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), CutPoint())
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the inputs ``x [n, width]`` with the classes ``label [n]``."""
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x), label)


def build() -> Mlp:
    """Returns the model. Its weights are the same on every process."""
    torch.manual_seed(1)
    return Mlp()


def make_batch(samples: int) -> Batch:
    """Returns a random batch of ``samples`` samples."""
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(samples, 64, generator=generator),
        "label": torch.randint(0, 10, (samples,), generator=generator),
    }


if __name__ == "__main__":
    train(parse(__doc__), build(), make_batch)
