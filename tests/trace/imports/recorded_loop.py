"""Runs a simple data-parallel loop over gloo, and writes its traces to the folder ``argv[1]``."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from megatron.adaptive import record_trace

STEPS, SLOW_S = 6, 0.02


class Net(torch.nn.Module):
    """Model with two layers, whose forward pass takes longer on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(SLOW_S * (1 + dist.get_rank()))
        return {"loss": self.layers(x).square().mean()}


def main() -> None:
    """Trains for a few steps, and records three of these steps."""
    dist.init_process_group("gloo")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record_trace(sys.argv[1], model, skip=1, steps=3) as step:
        for _ in range(STEPS):
            for _ in range(2):
                model(torch.randn(4, 16))["loss"].backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            step()
    assert not model._forward_hooks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
