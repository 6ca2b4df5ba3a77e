"""Runs a user's script with a Pipeline. Each rank reports the samples and the loss of every step.

The arguments are the number of steps, the number of samples per step, a folder for results, and a
JSON object of options. The options ``folder``, ``save_interval`` and ``async_save`` configure the
training loop. ``state`` adds a learning rate scheduler, ``late`` makes the model sleep in each
block, and ``wrong`` selects an error that a job must reject. The remaining options are arguments of
the Pipeline.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron.adaptive import CutPoint, Pipeline

WIDTH = 8


class Late(torch.autograd.Function):
    """Sleeps in each pass. Node ``b`` sleeps longer while ``folder`` contains a file ``b``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, folder: str) -> torch.Tensor:
        ctx.folder = folder
        takes_s = 0.008  # This time is longer than the delays that other programs cause.
        if os.environ.get("MEGATRON_ADAPTIVE_NODE") == "b" and (Path(folder) / "b").exists():
            takes_s = 0.032
        time.sleep(takes_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        Late.forward(ctx, gradients[0], ctx.folder)
        return gradients[0], None


class Net(torch.nn.Module):
    def __init__(self, late_folder: str) -> None:
        super().__init__()
        # If this path is not empty, the model sleeps in each block. A file in the folder makes node
        # b slower.
        self.late_folder = late_folder
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.cuts = torch.nn.ModuleList(CutPoint() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.nn.functional.dropout(torch.tanh(block(x)) + x, 0.1, self.training)
            if self.late_folder:
                x = Late.apply(x, self.late_folder)
            if number < 5:
                x = self.cuts[number](x)
        return x.square().mean()


def batch_of(step: int, size: int) -> dict[str, torch.Tensor]:
    """Returns the ``size`` samples of ``step``. The first value of each sample identifies it."""
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step))
    x[:, 0] = (step * size + torch.arange(size)) / 1e3
    return {"x": x}


def main() -> None:
    total, size, reports, more = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    options: dict[str, Any] = json.loads(more)
    wrong, has_state = options.pop("wrong", ""), options.pop("state", False)
    names = ("folder", "save_interval", "async_save", "diagnose_interval")
    looping = {name: options.pop(name) for name in names if name in options}
    if wrong == "no pipeline":
        return
    torch.manual_seed(1)
    if wrong == "another model":
        options["memory_limit_bytes"] = 1e9 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    late = str(reports) if options.pop("late", False) else ""
    pipeline = Pipeline(Net(late), batch_of(0, size), **options)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    pipeline.set_optimizer(optimizer, clip_norm=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    if has_state:
        looping["state"] = {"scheduler": scheduler}
    job = json.loads(os.environ.get("MEGATRON_ADAPTIVE_JOB", '{"epoch": 0}'))
    rank = int(os.environ.get("RANK", "0"))
    if wrong == "no loop":
        pipeline.step(pipeline.share(batch_of(0, size)))
    with (reports / f"epoch-{job['epoch']}-{rank}.jsonl").open("a") as output:
        for step in pipeline.loop(total, **looping):
            batch = batch_of(step, size)
            part = pipeline.share(batch)
            loss, _ = pipeline.step(part)
            if has_state:
                scheduler.step()
            line = {
                "step": step,
                "loss": loss,
                "shape": [pipeline.pipeline_size, pipeline.replicas],
                "samples": [round(float(value) * 1e3) for value in part["x"][:, 0]],
            }
            output.write(json.dumps(line) + "\n")
            output.flush()
    (reports / f"after-{rank}").touch()
    pipeline.close()


if __name__ == "__main__":
    main()
