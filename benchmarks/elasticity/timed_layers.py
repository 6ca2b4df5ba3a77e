"""Trains GPT as ``pretrain_gpt.py`` does, with layers that sleep for as long as they shall take.

Several ranks then share a processor and each still works at a speed of its own, as on devices.
What a layer computes, and so the losses, is as ever. The environment says:

``LAYER_MS``       milliseconds of each layer's forward, its backward takes twice as long; nothing
                   sleeps without it
``SLOW_RANKS``     global ranks, joined by commas, on which everything takes longer
``SLOW_FACTOR``    how many times longer
``MOVES``          ``6:3-1,9:2-2``: under ``--repartition auto``, the layers per stage from after
                   these iterations of this process on, whatever was measured
``COMPARE``        under ``--repartition auto``, the arguments of :func:`compare` in JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

import torch  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.config.schedule import parse_partition  # noqa: E402
from megatron.adaptive.engine.executor import RankTimes  # noqa: E402
from megatron.adaptive.rebalance.repartition import Move, Repartitioner  # noqa: E402

_PATIENCE = 20  # steps without a move, after which the partition at hand is the choice


class _Slot:
    """The time that one layer takes for one microbatch, whatever it computes meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start_s = 0.0

    def begin(self) -> None:
        """Work begins."""
        self._start_s = time.perf_counter()

    def end(self, times: int) -> None:
        """Wait until the work has taken its time, so many times over."""
        time.sleep(max(0.0, self._start_s + times * self._seconds - time.perf_counter()))


class _Before(torch.autograd.Function):
    """Stands before a layer, where forward begins and backward ends."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, slot: _Slot) -> torch.Tensor:  # type: ignore[override]
        ctx.slot = slot
        slot.begin()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.slot.end(2)
        return gradient, None


class _Behind(torch.autograd.Function):
    """Stands behind a layer, where forward ends and backward begins."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, slot: _Slot) -> torch.Tensor:  # type: ignore[override]
        ctx.slot = slot
        slot.end(1)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.slot.begin()
        return gradient, None


def time_layers(seconds: float) -> None:
    """Let every transformer layer of this process take so long."""
    forward = TransformerLayer.forward

    def timed(layer: Any, hidden_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        slot = _Slot(seconds)
        output, context = forward(layer, _Before.apply(hidden_states, slot), *given, **named)
        return _Behind.apply(output, slot), context

    TransformerLayer.forward = timed


def force_moves(moves: dict[int, tuple[int, ...]]) -> None:
    """Move layers after these iterations, and only then."""
    done = 0

    def after_step(_: Repartitioner, times: RankTimes, num_microbatches: int) -> Move | None:
        nonlocal done
        done += 1
        return _asked(moves[done], times) if done in moves else None

    Repartitioner.after_step = after_step  # type: ignore[method-assign]


def compare(others: list[tuple[int, ...]], steps: int, rounds: int, told: Path) -> None:
    """Let the first look decide, then train in turns under its partition and under others.

    Args:
        others: partitions to compare with.
        steps: of each turn.
        rounds: how often each has its turn.
        told: file for the first iteration of each turn and its partition, in JSON.
    """
    decide, done, turns = Repartitioner.after_step, 0, list[tuple[int, tuple[int, ...]]]()

    def after_step(own: Repartitioner, times: RankTimes, num_microbatches: int) -> Move | None:
        nonlocal done
        done += 1
        present = own._run.job.config.layers_per_stage
        if turns:
            wanted = dict(turns).get(done + 1, present)
            return None if wanted == present else _asked(wanted, times)
        move = decide(own, times, num_microbatches)
        if move is None and done < _PATIENCE:
            return None
        chosen = present if move is None else move.partition
        at = done + 1
        for number in range(rounds):
            each = [chosen, *others]
            for partition in each[number % len(each) :] + each[: number % len(each)]:
                turns.append((at, partition))
                at += steps
        if own._run.job.is_first:
            told.write_text(json.dumps({"chosen": chosen, "turns": turns, "end": at}))
        return move

    Repartitioner.after_step = after_step  # type: ignore[method-assign]


def _asked(partition: tuple[int, ...], times: RankTimes) -> Move:
    return Move(partition=partition, why="as asked", gain=0.0, before_s=times.span_s, layers=1)


if __name__ == "__main__":
    layer_s = float(os.environ.get("LAYER_MS", "0")) / 1e3
    if os.environ["RANK"] in os.environ.get("SLOW_RANKS", "").split(","):
        layer_s *= float(os.environ["SLOW_FACTOR"])
    if layer_s:
        time_layers(layer_s)
    if "MOVES" in os.environ:
        words = [move.split(":") for move in os.environ["MOVES"].split(",")]
        force_moves({int(step): parse_partition(layers) for step, layers in words})
    if "COMPARE" in os.environ:
        asked = json.loads(os.environ["COMPARE"])
        asked["others"] = [tuple(one) for one in asked["others"]]
        compare(**{**asked, "told": Path(asked["told"])})
    sys.exit(run())
