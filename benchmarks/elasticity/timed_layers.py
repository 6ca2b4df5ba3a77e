"""Trains GPT as ``pretrain_gpt.py`` does, with layers that sleep for as long as they shall take.

Several ranks then share a processor and each still works at a speed of its own, as on devices.
What a layer computes, and so the losses, is as ever. The environment says:

``LAYER_MS``       milliseconds of each layer's forward, its backward takes twice as long; nothing
                   sleeps without it
``SLOW_RANKS``     global ranks, joined by commas, on which everything takes longer
``SLOW_FACTOR``    how many times longer
``MOVES``          ``6:3-1,9:2-2``: under ``--repartition auto``, the layers per stage from after
                   these iterations of this process on, whatever was measured
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.config.partition import parse_partition  # noqa: E402
from megatron.adaptive.pipeline.executor import StepTimes  # noqa: E402
from megatron.adaptive.training.repartition import Move, Repartitioner  # noqa: E402


class _Takes(torch.autograd.Function):
    """Hands a tensor on after some seconds, and its gradient after twice as many."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        time.sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


def time_layers(seconds: float) -> None:
    """Let every transformer layer of this process take so long."""
    forward = TransformerLayer.forward

    def timed(layer: Any, hidden_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        return forward(layer, _Takes.apply(hidden_states, seconds), *given, **named)

    TransformerLayer.forward = timed


def force_moves(moves: dict[int, tuple[int, ...]]) -> None:
    """Move layers after these iterations, and only then."""
    done = 0

    def after_step(_: Repartitioner, times: StepTimes, num_microbatches: int) -> Move | None:
        nonlocal done
        done += 1
        if done not in moves:
            return None
        return Move(
            partition=moves[done], why="as asked", gain=0.0, before_s=times.span_s, layers=1
        )

    Repartitioner.after_step = after_step  # type: ignore[method-assign]


if __name__ == "__main__":
    layer_s = float(os.environ.get("LAYER_MS", "0")) / 1e3
    if os.environ["RANK"] in os.environ.get("SLOW_RANKS", "").split(","):
        layer_s *= float(os.environ["SLOW_FACTOR"])
    if layer_s:
        time_layers(layer_s)
    if "MOVES" in os.environ:
        words = [move.split(":") for move in os.environ["MOVES"].split(",")]
        force_moves({int(step): parse_partition(layers) for step, layers in words})
    sys.exit(run())
