"""Runs one rank of a traced pipeline whose blocks sleep in proportion to their content.

Usage: ``traced_worker.py FOLDER PROGRAM [ARGUMENT]``. Blocks sleep, because sleeping takes equally
long on a busy machine.

``moves``                moves segments while the job is traced
``observed URL``         records kernels, and sends spans to the collector at ``URL``
``predicted SCHEDULE``   asks what other settings would save, and trains with each of them
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import Pipeline
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.whatif.answers import what_if

WIDTH = 8
BLOCKS = 6
SECONDS = [0.0]
"""Time in seconds that a block with factor 1 sleeps per element of the sequence."""
MOVES_S = 0.001
MOVES_STEPS = 40
EQUAL = ((1.0, 1.0),) * BLOCKS

FROZEN_FIRST = ((3.0, 0.0),) * 2 + ((1.0, 2.0),) * 4
"""Factors of blocks like those of a frozen encoder and a trained language model.

Each pair contains the factors of the forward pass and of the backward pass.
"""
UNIT_S = 0.012
LENGTHS = [8, 1, 1, 2, 6, 1, 2, 1, 1, 5, 1, 3]
"""Length of each microbatch.

In round-robin order, the first replica would get 19 of 32 elements.
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"partition": "2-5"},
    "adaptive": {"partition": "1-1-4-1", "chunks": 2},
}
PREDICTED_STEPS = 3
MEASURED = range(2, PREDICTED_STEPS + 1)
"""Measured steps. Comparisons use the fastest of these steps.

The first step is excluded, because it includes the warm-up.
"""

OBSERVED_STEPS = 4
PROFILED = range(2, 4)
PROFILED_RANK = 1


class Sleep(torch.autograd.Function):
    """Sleeps in both passes, in proportion to the length of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_units = backward * x.shape[1]
        time.sleep(SECONDS[0] * forward * x.shape[1])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(SECONDS[0] * ctx.backward_units)
        return gradients[0], None, None


class Block(torch.nn.Module):
    """Block that sleeps before it computes a layer.

    Args:
        factors: Times of the forward pass and of the backward pass, in units of ``SECONDS``.
    """

    def __init__(self, factors: tuple[float, float]) -> None:
        super().__init__()
        self.factors = factors
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the layer."""
        return torch.tanh(self.layer(Sleep.apply(x, *self.factors)))


class Sleeper(torch.nn.Module):
    """Model whose blocks sleep.

    Args:
        factors: Times of the forward pass and the backward pass of each block, in units of
            ``SECONDS``.
    """

    def __init__(self, factors: Sequence[tuple[float, float]] = EQUAL) -> None:
        super().__init__()
        self.start = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(map(Block, factors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the batch ``x``."""
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


def batch_of(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(1, length, WIDTH)} for length in lengths]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def moves(folder: Path) -> None:
    """Trains until segments have moved, and then for five more steps.

    Writes the partition of each step to a file in ``folder``.
    """
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
        pipeline.set_optimizer(sgd)
        first = pipeline.partition
        left = MOVES_STEPS
        for _ in pipeline.loop(left, diagnose_interval=4):
            partitions.append(pipeline.partition)
            pipeline.step(batch)
            left = 5 if pipeline.partition != partitions[-1] else left - 1
            pipeline.eval(batch[:1])
            if pipeline.partition != first and left == 0:
                break
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(partitions))


def observed(folder: Path, url: str) -> None:
    """Trains without a trace, and then with recorded kernels and the collector at ``url``.

    Writes the losses of both runs to a file in ``folder``.
    """
    batch = batch_of([4] * 6)
    losses: list[list[float]] = []
    traced: dict[str, Any] = {
        "trace_dir": str(folder / "traces"),
        "trace_detail": "kernels",
        "profile_ranks": [PROFILED_RANK],
        "profile_step_start": PROFILED.start,
        "profile_step_end": PROFILED.stop,
        "trace_otlp": url,
    }
    for name, options in {"plain": {}, "traced": traced}.items():
        torch.manual_seed(1)
        losses.append([])
        with Pipeline(Sleeper(), batch, partition="3-4", schedule="1f1b", **options) as pipeline:
            pipeline.set_optimizer(sgd)
            for _ in pipeline.loop(OBSERVED_STEPS, folder=folder / f"saved-{name}"):
                losses[-1].append(pipeline.step(batch)[0])
            pipeline.eval(batch[:2])
            pipeline.save(folder / f"again-{name}")
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(losses))


def predicted(folder: Path, schedule: str) -> None:
    """Writes the measured and the predicted step time of each run.

    Rank 0 predicts the times from the trace of the first run. The other runs try the predicted
    settings: each single change, and all changes together.
    """
    layout = LAYOUTS[schedule]
    base_s = _step_s(folder / "base", schedule, layout)
    decided: list[Any] = [None]
    if dist.get_rank() == 0:
        decided = [_predictions(folder / "base")]
    dist.broadcast_object_list(decided)
    report = [{"settings": {}, "predicted_s": base_s, "real_s": base_s}]
    for number, (settings, predicted_s) in enumerate(decided[0]):
        real_s = _step_s(folder / f"run{number}", schedule, {**layout, **settings})
        report.append({"settings": settings, "predicted_s": predicted_s, "real_s": real_s})
    if dist.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(report))


def _least_disturbed(folder: Path) -> list[int]:
    """Returns the index of the fastest measured step in the trace in ``folder``, as a list.

    Other programs on a busy machine make steps longer, but never shorter.
    """
    answer = what_if(read_run(folder), MEASURED)
    return [int(answer.iterations[answer.recorded_s.argmin()])]


def _predictions(folder: Path) -> list[tuple[dict[str, str], float]]:
    """Returns settings that save time, each with the predicted step time in seconds.

    The prediction uses the trace in ``folder``.

    There is an element for each single change, and an element for all changes together.
    """
    answer = what_if(read_run(folder), _least_disturbed(folder))
    chosen = []
    for repair in answer.repairs:
        settings = dict(re.findall(r'\b(order|dealing|partition)="([\w-]+)"', repair.flag))
        if len(settings) in (1, 3):
            chosen.append((settings, repair.step_s))
    return chosen


def _step_s(folder: Path, schedule: str, settings: dict[str, Any]) -> float:
    """Trains two replicas with ``settings``, and returns the step time in seconds.

    The trace is written to ``folder``.
    """
    batch = batch_of(LENGTHS)
    SECONDS[0] = 0.0
    torch.manual_seed(1)
    with Pipeline(
        Sleeper(FROZEN_FIRST),
        batch,
        pipeline_size=2,
        schedule=schedule,
        trace_dir=str(folder),
        trace_detail="layers",
        **settings,
    ) as pipeline:
        SECONDS[0] = UNIT_S
        pipeline.set_optimizer(sgd)
        for _ in range(PREDICTED_STEPS):
            pipeline.step(pipeline.share(batch))
    dist.barrier()
    return float(what_if(read_run(folder), _least_disturbed(folder)).recorded_s.mean())


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs: dict[str, Callable[..., None]] = {
        "moves": moves,
        "observed": observed,
        "predicted": predicted,
    }
    programs[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])


if __name__ == "__main__":
    main()
