"""What the examples share: their command line and the training loop."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron.adaptive import Pipeline
from megatron.adaptive.errors import AdaptiveError

Batch = dict[str, torch.Tensor]


def parse(description: str) -> argparse.Namespace:
    """Reads the command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of all replicas")
    parser.add_argument("--micro-batch-size", type=int, help="samples; the planner's best")
    parser.add_argument(
        "--pipeline-size", type=int, help="processes of a pipeline; all, or the planner's best"
    )
    parser.add_argument("--write-profile", metavar="FILE", help="what the planner stood on")
    parser.add_argument("--save", metavar="FOLDER", help="for a checkpoint at the end")
    parser.add_argument("--load", metavar="FOLDER", help="of checkpoints, to go on from")
    parser.add_argument("--schedule", default="adaptive", help="see docs/schedules.md")
    parser.add_argument("--chunks", type=int, help="stages of each process")
    parser.add_argument("--partition", help="segments of each stage, as 2-3-2; measured")
    parser.add_argument("--mixed-precision", choices=("bf16", "fp16"))
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--trace-dir", help="folder for traces")
    return parser.parse_args()


def train(
    given: argparse.Namespace,
    model: torch.nn.Module,
    make_batch: Callable[[int], Batch],
    **options: Any,
) -> list[float]:
    """Trains a model with cut points; returns the losses. Ends the program after an error.

    Args:
        given: the command line.
        model: the same on all processes.
        make_batch: gives a batch of that many samples.
        options: Further arguments of ``Pipeline``.
    """
    try:
        return _train(given, model, make_batch, **options)
    except AdaptiveError as error:
        print(f"rank {os.environ.get('RANK', 0)}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _train(
    given: argparse.Namespace,
    model: torch.nn.Module,
    make_batch: Callable[[int], Batch],
    **options: Any,
) -> list[float]:
    with Pipeline(
        model,
        make_batch(given.batch_size),
        micro_batch_size=given.micro_batch_size,
        pipeline_size=given.pipeline_size,
        schedule=given.schedule,
        chunks=given.chunks,
        partition=given.partition,
        mixed_precision=given.mixed_precision,
        trace_dir=given.trace_dir,
        **options,
    ) as pipeline:
        pipeline.set_optimizer(
            lambda parameters: torch.optim.AdamW(parameters, lr=given.lr), clip_norm=1.0
        )
        if given.load:
            pipeline.load(given.load)
        if torch.distributed.get_rank() == 0:
            if given.write_profile and pipeline.plan is not None:
                pipeline.plan.profile.write(given.write_profile)
            print(f"segments per stage: {'-'.join(map(str, pipeline.partition))}", flush=True)
        # One batch again and again, so that the loss falls; each replica takes its own samples.
        batch = pipeline.share(make_batch(given.batch_size))
        losses = []
        for _ in range(given.steps):
            loss, overflow = pipeline.step(batch)
            losses.append(loss)
            if torch.distributed.get_rank() == 0:
                said = ", overflow: skipped" if overflow else ""
                print(f"step {pipeline.steps}: loss {loss:.4f}{said}", flush=True)
        if given.save:
            pipeline.save(given.save)
        evaluated = pipeline.eval(batch)
        if torch.distributed.get_rank() == 0:
            print(f"evaluation: loss {evaluated:.4f}", flush=True)
    return losses
