"""Provides the command line and the training loop of all examples in this folder."""

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
    """Parses the command line of an example, and returns the options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="samples per step, over all replicas"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        help="samples per microbatch (default: chosen by the planner)",
    )
    parser.add_argument(
        "--pipeline-size",
        type=int,
        help="processes per pipeline (default: all, or chosen by the planner)",
    )
    parser.add_argument(
        "--write-profile",
        metavar="FILE",
        help="file for the measurements on which the plan is based",
    )
    parser.add_argument("--save", metavar="FOLDER", help="folder for a checkpoint at the end")
    parser.add_argument(
        "--load",
        metavar="FOLDER",
        help="folder of checkpoints; training continues from the newest checkpoint",
    )
    parser.add_argument(
        "--schedule", default="adaptive", help="name of the schedule, see docs/schedules.md"
    )
    parser.add_argument("--chunks", type=int, help="stages per process")
    parser.add_argument("--partition", help="segments per stage, such as 2-3-2 (default: balanced)")
    parser.add_argument("--mixed-precision", choices=("bf16", "fp16"))
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--trace-dir", help="folder for traces")
    return parser.parse_args()


def train(
    options: argparse.Namespace,
    model: torch.nn.Module,
    make_batch: Callable[[int], Batch],
    **more: Any,
) -> list[float]:
    """Trains a model with cut points, and returns the loss of each step. Errors end the program.

    Args:
        options: Options of the command line, from :func:`parse`.
        model: Model whose weights are the same on all processes.
        make_batch: Function that returns a batch with the given number of samples.
        more: Additional arguments of ``Pipeline``.
    """
    try:
        return _train(options, model, make_batch, **more)
    except AdaptiveError as error:
        print(f"rank {os.environ.get('RANK', 0)}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _train(
    options: argparse.Namespace,
    model: torch.nn.Module,
    make_batch: Callable[[int], Batch],
    **more: Any,
) -> list[float]:
    with Pipeline(
        model,
        make_batch(options.batch_size),
        micro_batch_size=options.micro_batch_size,
        pipeline_size=options.pipeline_size,
        schedule=options.schedule,
        chunks=options.chunks,
        partition=options.partition,
        mixed_precision=options.mixed_precision,
        trace_dir=options.trace_dir,
        **more,
    ) as pipeline:
        pipeline.set_optimizer(
            lambda parameters: torch.optim.AdamW(parameters, lr=options.lr), clip_norm=1.0
        )
        if options.load:
            pipeline.load(options.load)
        if torch.distributed.get_rank() == 0:
            if options.write_profile and pipeline.plan is not None:
                pipeline.plan.profile.write(options.write_profile)
            elif options.write_profile:
                print("no profile is written, because no layout was chosen by measurements")
            print(f"segments per stage: {'-'.join(map(str, pipeline.partition))}", flush=True)
        # Train on the same batch in every step, so that the loss decreases. Each replica gets its
        # part of the batch.
        batch = pipeline.share(make_batch(options.batch_size))
        losses = []
        for _ in range(options.steps):
            loss, overflow = pipeline.step(batch)
            losses.append(loss)
            if torch.distributed.get_rank() == 0:
                note = ", overflow: no update" if overflow else ""
                print(f"step {pipeline.steps}: loss {loss:.4f}{note}", flush=True)
        if options.save:
            pipeline.save(options.save)
        evaluated = pipeline.eval(batch)
        if torch.distributed.get_rank() == 0:
            print(f"evaluation: loss {evaluated:.4f}", flush=True)
    return losses
