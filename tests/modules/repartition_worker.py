"""Runs one of the ranks of a pipeline whose segments move, and compares it with the whole model.

Usage: ``repartition_worker.py FOLDER SCHEDULE PARTITION``. Each block sleeps, so the first
partition is slow. After each move blocks sleep longer, so the move does not pay off, and one move
is undone. Writes the pipeline's partitions to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import SHARED, WIDTH, Knotty, make_batch

from megatron.adaptive import Pipeline

MOST_STEPS = 40
MICROBATCH = 2
SLEEP_S = [0.002]


class Sleep(torch.autograd.Function):
    """Sleeps in the forward pass and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_S[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_S[0])
        return gradients[0]


class SlowLinear(torch.nn.Linear):
    """Linear layer that sleeps before it computes its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the linear layer."""
        return super().forward(Sleep.apply(x))


def sleeping_model() -> torch.nn.Module:
    """Returns a model with slow layers, shared weights, a running mean and a frozen layer."""
    torch.manual_seed(3)
    model = Knotty()
    model.blocks = torch.nn.ModuleList(SlowLinear(WIDTH, WIDTH) for _ in model.blocks)
    model.blocks[2].requires_grad_(False)
    return marked(model)


def marked(model: torch.nn.Module) -> torch.nn.Module:
    """Gives each parameter the attribute ``shrink`` for the optimizer, and returns ``model``."""
    for number, parameter in enumerate(model.parameters()):
        vars(parameter)["shrink"] = 1 - 0.001 * number
    return model


class Shrinking(torch.optim.AdamW):
    """Optimizer like AdamW that also scales each parameter by its attribute ``shrink``."""

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters, and scales them down."""
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(getattr(parameter, "shrink", 1.0))


def adam(named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Returns an optimizer for the trained parameters in ``named``, in two groups.

    One group contains all matrices, and the other contains all other parameters. The optimizer also
    stores the names of the parameters.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    groups = [
        [(name, parameter) for name, parameter in trained if (parameter.dim() > 1) is is_matrix]
        for is_matrix in (True, False)
    ]
    return Shrinking(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0, "lr": 0.01}], lr=0.02
    )


def require_names(pipeline: Pipeline) -> None:
    """Checks that the optimizer of ``pipeline`` has exactly the trained parameters of this rank.

    The optimizer must also have the right name for each parameter.
    """
    pairs = [
        pair
        for group in pipeline._update.optimizer.param_groups
        for pair in zip(group["param_names"], group["params"], strict=True)
    ]
    parameters = {name: p for name, p in pipeline.named_parameters() if p.requires_grad}
    assert len(pairs) == len(parameters)
    assert all(parameter is parameters[name] for name, parameter in pairs)
    assert all(vars(parameter)["later"] == name for name, parameter in pairs)


class Reference:
    """Trains the whole model in this process, for comparison with the pipeline."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = adam(model.named_parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)

    def loss_of(self, batch: dict[str, torch.Tensor], *, trains: bool) -> float:
        """Returns the mean loss of ``batch``. If ``trains``, also trains one step on ``batch``."""
        total = 0.0
        self.optimizer.zero_grad()
        self.model.train(trains)
        count = len(batch["ids"]) // MICROBATCH
        seconds, SLEEP_S[0] = SLEEP_S[0], 0.0
        with torch.set_grad_enabled(trains):
            for number in range(count):
                part = slice(number * MICROBATCH, (number + 1) * MICROBATCH)
                loss = self.model(**{name: entry[part] for name, entry in batch.items()}) / count
                if trains:
                    loss.backward()
                total += float(loss.detach())
        SLEEP_S[0] = seconds
        if trains:
            self.optimizer.step()
            self.schedule.step()
        return total


def require_same(pipeline: Pipeline, whole: torch.nn.Module) -> None:
    parameters = dict(whole.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=1e-5, atol=1e-6)


def train(folder: Path, schedule: str, partition: str) -> list[tuple[int, ...]]:
    """Trains until segments have moved and moved back, and returns all partitions in order.

    The pipeline uses ``schedule``, and starts with ``partition``. Checkpoints are in ``folder``.
    """
    model = sleeping_model()
    # deepcopy() does not copy added attributes of parameters, so add the attributes to the copy.
    reference = Reference(marked(copy.deepcopy(model)))
    batches = [make_batch(8, seed) for seed in range(3)]
    seconds = SLEEP_S[0]
    SLEEP_S[0] = 0.0
    with Pipeline(
        model,
        batches[0],
        micro_batch_size=MICROBATCH,
        pipeline_size=2,
        schedule=schedule,
        partition=partition,
        shared_weights=SHARED,
        repartition="auto",
        repartition_interval=4,
    ) as pipeline:
        SLEEP_S[0] = seconds
        pipeline.set_optimizer(adam(pipeline.named_parameters()))
        for name, parameter in pipeline.named_parameters():
            vars(parameter)["later"] = name
        optimizer = pipeline._update.optimizer
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        partitions = [pipeline.partition]
        saved: dict[str, torch.Tensor] = {}
        for step in range(MOST_STEPS):
            batch = batches[step % len(batches)]
            loss, _ = pipeline.step(pipeline.share(batch))
            plan.step()
            assert loss == pytest.approx(reference.loss_of(batch, trains=True), rel=1e-6)
            if pipeline.partition != partitions[-1]:
                partitions.append(pipeline.partition)
                require_same(pipeline, reference.model)
                require_names(pipeline)
                SLEEP_S[0] *= 3
                if len(partitions) == 2:
                    pipeline.save(folder / "checkpoints")
                    saved = copy.deepcopy(reference.model.state_dict())
            if len(partitions) > 2 and partitions[-1] == partitions[-3]:
                break
        if pipeline.replicas == 1:
            # Each replica has a different running mean, so evaluate only with a single replica.
            expected = reference.loss_of(batches[0], trains=False)
            assert pipeline.eval(batches[0]) == pytest.approx(expected, rel=1e-6)
        pipeline.load(folder / "checkpoints")
        reference.model.load_state_dict(saved)
        require_same(pipeline, reference.model)
        assert pipeline._update.optimizer is optimizer
    return partitions


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, schedule, partition = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    partitions = train(folder, schedule, partition)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(partitions))


if __name__ == "__main__":
    main()
