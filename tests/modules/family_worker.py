"""Runs one of two ranks, which trains ``transformers`` models as pipelines and as whole models.

Usage: ``family_worker.py FOLDER FAMILY ...``. Writes the names of the families whose results agree
to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from families import FAMILIES, Batch, Family

from megatron.adaptive import Pipeline


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def train_whole(model: torch.nn.Module, family: Family, batch: Batch, steps: int) -> list[float]:
    """Trains the whole model on microbatches of two samples, and returns the loss of each step.

    Each step uses the same ``batch``, and the additional arguments of ``family``.
    """
    optimizer = sgd(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for start in (0, 2):
            part = {name: entry[start : start + 2] for name, entry in batch.items()}
            loss = model(**part, **family.arguments).loss / 2
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def check(family: Family) -> None:
    """Checks that a pipeline and the whole model of ``family`` have equal losses and parameters."""
    batch = family.make_batch()
    model = family.build(4)
    whole = copy.deepcopy(model)
    expected = train_whole(whole, family, batch, 2)
    with Pipeline(
        model,
        batch,
        micro_batch_size=2,
        schedule="zb-v",
        slicing=family.slicing,  # type: ignore[arg-type]
        decisive_entries=family.decisive_entries,
        arguments=dict(family.arguments),
    ) as pipeline:
        pipeline.set_optimizer(sgd)
        losses = [pipeline.step(batch)[0] for _ in range(2)]
        assert losses == pytest.approx(expected, rel=1e-5), family.name
        parameters = dict(whole.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-4, atol=1e-6)


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done = []
    chosen = {family.name: family for family in FAMILIES}
    for name in sys.argv[2:]:
        check(chosen[name])
        done.append(name)
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
