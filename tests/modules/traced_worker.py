"""Runs one rank of a traced pipeline whose blocks sleep in proportion to their content.

Usage: ``traced_worker.py FOLDER PROGRAM``. Blocks sleep, because sleeping takes equally long on a
busy machine. The only program, ``moves``, moves segments while the job is traced.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import Pipeline

WIDTH = 8
BLOCKS = 6
SECONDS = [0.0]
"""Time in seconds that each pass of a block takes per element of the sequence."""
MOVES_S = 0.001


class Sleep(torch.autograd.Function):
    """Sleeps in both passes, in proportion to the length of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.length = x.shape[1]
        time.sleep(SECONDS[0] * ctx.length)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS[0] * ctx.length)
        return gradients[0]


class Block(torch.nn.Module):
    """Sleeps before it computes a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the layer."""
        return torch.tanh(self.layer(Sleep.apply(x)))


class Sleeper(torch.nn.Module):
    """Contains blocks of equal cost."""

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


def batch_of(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(1, length, WIDTH)} for length in lengths]


def moves(folder: Path) -> None:
    """Trains until segments have moved, then five more steps; writes the partition of each step."""
    torch.manual_seed(1)
    batch = batch_of([4] * 6)
    partitions = []
    with Pipeline(
        Sleeper(),
        batch,
        partition="2-5",
        schedule="1f1b",
        repartition="auto",
        repartition_interval=4,
        trace_dir=str(folder / "traces"),
        trace_detail="collectives",
    ) as pipeline:
        SECONDS[0] = MOVES_S
        pipeline.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        first = pipeline.partition
        left = 40
        for _ in pipeline.loop(left, diagnose_interval=4):
            partitions.append(pipeline.partition)
            pipeline.step(batch)
            left = 5 if pipeline.partition != partitions[-1] else left - 1
            pipeline.eval(batch[:1])
            if pipeline.partition != first and left == 0:
                break
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(partitions))


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs: dict[str, Callable[[Path], None]] = {"moves": moves}
    programs[sys.argv[2]](Path(sys.argv[1]))


if __name__ == "__main__":
    main()
