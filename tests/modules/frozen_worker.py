"""Runs one of four ranks, which trains models with a frozen encoder under several schedules.

Usage: ``frozen_worker.py FOLDER``. Writes the actions of each training run to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import frozen_viewer, viewed
from worker import decaying, reference_of, require_same

from megatron.adaptive import CutPoint, Pipeline

TWO: dict[str, Any] = {"chunks": 2, "pipeline_size": 2}
RUNS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "least memory": {"activation_cap": 1.0, "partition": "2-1-2-3"},
    "traced": {"partition": "2-1-2-3", "trace_dir": "traces"},
    "two chunks": {"chunks": 2},
    "least memory, two chunks": {**TWO, "activation_cap": 1.0, "split_backward": False},
    "hinted": {**TWO, "schedule": "hinted"},
    "dfc": {**TWO, "schedule": "dfc"},
    "interleaved": {**TWO, "schedule": "interleaved"},
    "zb-v": {"schedule": "zb-v"},
    "1f1b": {"schedule": "1f1b", "partition": "2-1-2-3"},
}
IMAGES = ([3, 2, 8, 1, 2, 4, 1, 1], [1, 0, 5, 0, 1, 2, 0, 3])
"""Number of images in each microbatch, for each of two steps."""


class Skipping(nn.Module):
    """Model with layers for ``x [n, 16]``, and an encoder that runs only if ``seen`` is passed.

    ``seen`` has the shape ``[n, 16]``.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.encoder = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.encoder_cuts = nn.ModuleList(CutPoint() for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the loss of a batch with the entry ``x``, and optionally the entry ``seen``."""
        if seen is not None:
            for layer, cut in zip(self.encoder, self.encoder_cuts, strict=True):
                seen = cut(torch.tanh(layer(seen)))
        x = self.layers[0](x)
        x = x if seen is None else x + seen
        for layer, cut in zip(self.layers[1:], self.cuts, strict=True):
            x = layer(cut(torch.tanh(x)))
        return x.square().mean()


def train_without_images(folder: str) -> None:
    """Trains steps with and without images, and writes their trace to ``folder``."""
    part = {"x": torch.ones(2, 16)}
    with_image = {**part, "seen": torch.ones(2, 16)}
    with Pipeline(
        Skipping(), [with_image, part], partition="2-2-2-2", trace_dir=folder
    ) as pipeline:
        for parts in ([part, with_image], [part, part], [with_image, with_image]):
            pipeline.step(parts)


def resume(folder: str) -> None:
    """Checks that training continues with the same losses after a pipeline is saved and loaded.

    Three ranks of the pipeline have only frozen parameters. The checkpoint is saved to ``folder``.
    """
    options: dict[str, Any] = {"decisive_entries": ["sizes"], "partition": "1-1-1-5"}
    steps = [[viewed(2, 5, n), viewed(0, 4, n)] for n in range(3)]
    sample = [viewed(2, 5, 1), viewed(0, 4, 2)]
    with Pipeline(frozen_viewer(), sample, **options) as pipeline:
        pipeline.set_optimizer(decaying)
        pipeline.step(steps[0])
        pipeline.save(folder)
        losses = [pipeline.step(step)[0] for step in steps[1:]]
    with Pipeline(frozen_viewer(), sample, repartition="auto", **options) as pipeline:
        pipeline.set_optimizer(decaying)
        pipeline.load(folder)
        assert [pipeline.step(step)[0] for step in steps[1:]] == losses
        assert pipeline._repartitioner is not None
        refusal = pipeline._repartitioner._mover.move((1, 1, 2, 4))
        assert refusal is not None
        assert "rank 2: it would get the trained parameter words.weight" in refusal
        assert pipeline._repartitioner._mover.move((2, 1, 1, 4)) is not None


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Trains for two steps, and checks that losses and parameters equal those of the whole model.

    ``options`` are options of the pipeline.

    Returns:
        Dict with the partition, the stage of each chunk of this rank, and the chunks that ran
        backward passes.
    """
    steps = [[viewed(n, 3 + n, n) for n in counts] for counts in IMAGES]
    items = [[float(part["ids"].shape[1] - 1) for part in step] for step in steps]
    whole = frozen_viewer()
    losses = reference_of(whole, steps, items)
    with Pipeline(
        frozen_viewer(),
        [viewed(2, 5, 1), viewed(0, 4, 2)],
        shared_weights=[["words.weight", "head.weight"]],
        decisive_entries=["sizes"],
        **options,
    ) as pipeline:
        pipeline.set_optimizer(decaying)
        for step, numbers, loss in zip(steps, items, losses, strict=True):
            own_batch, own_items = pipeline.share(step), pipeline.share(numbers)
            trained, _ = pipeline.step(own_batch, num_items=own_items)
            assert trained == pytest.approx(loss, rel=1e-5)
        require_same(pipeline.named_parameters(), whole)
        whole.eval()
        with torch.no_grad():
            plain = sum(float(whole(**part)) for part in steps[0]) / len(steps[0])
        assert pipeline.eval(pipeline.share(steps[0])) == pytest.approx(plain, rel=1e-5)
        assert not pipeline._wiring.executor._inputs
        placement = pipeline._orders.placement
        rank = pipeline._mesh.pp_rank
        assert pipeline.times is not None
        return {
            "partition": pipeline.partition,
            "stages": [placement.stage_of(rank, n) for n in range(placement.num_chunks)],
            "backward": sorted(
                {action.chunk for action, _ in pipeline.times.actions if str(action.kind) != "F"}
            ),
        }


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.chdir(sys.argv[1])
    runs = {name: train(options) for name, options in RUNS.items()}
    train_without_images("skipping")
    resume("checkpoints")
    Path(f"{dist.get_rank()}.json").write_text(json.dumps(runs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
