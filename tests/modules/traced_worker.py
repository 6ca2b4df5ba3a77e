"""One of the ranks of a traced pipeline, whose blocks sleep in proportion to their content.

Usage: ``traced_worker.py FOLDER PROGRAM``. Sleeping blocks take the same time on a busy machine.
Programs: ``moves`` moves segments while the job is traced; ``settings`` trains with the settings
that the analysis of a first trace names, and compares the times of steps.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import Pipeline
from megatron.adaptive.config.schedule import parse_partition
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.whatif.answers import what_if

WIDTH = 8
BLOCKS = 6
SECONDS = [0.0]
"""Time of a block's forward per element of the sequence; its backward takes as long."""
MOVES_S, SETTINGS_S = 0.001, 0.0006


class Sleep(torch.autograd.Function):
    """Takes a while in both directions, longer for longer sequences."""

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
    """A layer that takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product."""
        return torch.tanh(self.layer(Sleep.apply(x)))


class Sleeper(torch.nn.Module):
    """A tower of equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


def batch_of(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(1, length, WIDTH)} for length in lengths]


def make(lengths: list[int], seconds: float, **settings: Any) -> Pipeline:
    """Returns a pipeline whose blocks sleep only in steps."""
    torch.manual_seed(1)
    SECONDS[0] = 0.0
    batch = batch_of(lengths)
    pipeline = Pipeline(Sleeper(), batch, pipeline_size=2, seed=1, **settings)
    pipeline.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    pipeline.step(pipeline.share(batch))
    SECONDS[0] = seconds
    return pipeline


def moves(folder: Path) -> None:
    """Trains until segments have moved, and five steps more; writes the partitions of the steps."""
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


def settings(folder: Path) -> None:
    """Writes the times that the analysis of a trace predicts, and those of real runs."""
    lengths = [3, 18, 4, 12, 2, 9, 5, 16, 3, 14, 4, 8]

    def step_s(**options: Any) -> float:
        """Returns the median time of a step in seconds, on the slowest rank."""
        spans_s = []
        with make(lengths, SETTINGS_S, schedule="1f1b", **options) as pipeline:
            for step in range(10):
                pipeline.step(pipeline.share(batch_of(lengths)))
                if step >= 4:
                    spans_s.append(pipeline.times.span_s)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, spans_s)
        return statistics.median(map(max, zip(*gathered, strict=True)))

    traces = folder / "traces"
    pairs = {"": step_s(partition="2-5", trace_dir=str(traces))}
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        answer = what_if(read_run(traces))
        box[0] = {
            repair.flag: repair.step_s
            for repair in answer.repairs
            if re.search(r"(order|dealing|partition)=", repair.flag)
        } | {"": float(answer.recorded_s.mean())}
    dist.broadcast_object_list(box)
    for flag in box[0]:
        options = dict(re.findall(r'\b(order|dealing|partition)="([\w-]+)"', flag))
        cut = options.setdefault("partition", "2-5")
        assert sum(parse_partition(cut)) == BLOCKS + 1
        pairs[flag] = step_s(**options)
    report = {flag: [predicted_s, pairs[flag]] for flag, predicted_s in box[0].items()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(report))


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs: dict[str, Callable[[Path], None]] = {"moves": moves, "settings": settings}
    programs[sys.argv[2]](Path(sys.argv[1]))


if __name__ == "__main__":
    main()
