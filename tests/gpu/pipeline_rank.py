"""Runs one rank that trains a model with ``Pipeline`` in mixed precision.

Usage: ``pipeline_rank.py RESULT``. Rank 0 writes a JSON object with the lists ``losses`` and
``expected`` to the file ``RESULT``. The expected losses are those of a loop that trains the whole
model with autocast on the same device.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron.adaptive import Pipeline
from megatron.adaptive.accelerator import current_device
from megatron.adaptive.modules import CutPoint

WIDTH, LAYERS, STEPS = 32, 4, 4
SAMPLES, MICROBATCH = 8, 2


class Model(nn.Module):
    """Model whose segments end with operations that autocast runs in float32 on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
            for _ in range(LAYERS)
        )
        self.cuts = nn.ModuleList(CutPoint() for _ in range(LAYERS - 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch: the squared distance of the outputs from ``y``."""
        for number, layer in enumerate(self.layers):
            # The model creates a tensor on the device on which it runs.
            x = layer(x) + torch.linspace(0, 1, WIDTH, device=x.device)
            if number < len(self.cuts):
                x = self.cuts[number](x)
        return (x.float() - y).square().mean()


def plain_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Trains the whole ``model`` on ``batch`` several times, and returns the losses."""
    device = current_device()
    model = model.to(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    (result,) = sys.argv[1:]
    torch.manual_seed(1)
    model = Model()
    whole = copy.deepcopy(model)
    batch = {name: torch.randn(SAMPLES, WIDTH) for name in ("x", "y")}
    with Pipeline(
        model,
        batch,
        mixed_precision="bf16",
        micro_batch_size=MICROBATCH,
        schedule="adaptive",
        split_backward=True,
    ) as pipeline:
        pipeline.set_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        losses = [pipeline.step(batch)[0] for _ in range(STEPS)]
        if dist.get_rank() == 0:
            content = {"losses": losses, "expected": plain_losses(whole, batch)}
            Path(result).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
