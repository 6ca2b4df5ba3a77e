"""Trains GPT like ``pretrain_gpt.py``, but layers sleep until they have taken a chosen time.

Ranks that share a processor can therefore have different speeds, as if they had separate devices.
The layers compute the same values as without sleeping. The program reads these environment
variables:

``LAYER_MS``       milliseconds of each layer's forward pass; the backward pass takes twice as long.
                   The value is a number, or a JSON object with a number for each node name.
                   Without this variable nothing sleeps.
``EACH_LAYER``     if set, each layer sleeps in its own forward pass, and the time of embedding and
                   loss is added. Otherwise, passes sleep at their end, so measurements of layers
                   within a pass count only the real work.
``EXPERT_FACTOR``  factor of the time of layers with experts; 1 by default
``LAYER_PAIRS``    ``0.5/128``: half of the time is proportional to the number of token pairs in a
                   document, half to the number of tokens, relative to a document of 128 tokens; by
                   default the length has no effect
``EXACT_TIMES``    if set, ``auto`` gets the chosen times instead of the measured times, which are
                   longer on a busy machine
``SLOW_RANKS``     global ranks, separated by commas, on which everything takes longer
``SLOW_FACTOR``    factor of the time on these ranks
``SLOW_STEPS``     ``7-16``: these ranks are slow only from the 7th to the 15th step of this process
``MOVES``          ``6:3-1,9:2-2``: under ``--repartition auto``, the layers per stage after these
                   iterations of this process, regardless of measurements
``COMPARE``        under ``--repartition auto``, the arguments of :func:`compare` in JSON
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()
accelerator.quiet_libraries()

from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron.adaptive.cli.pretrain_gpt import run  # noqa: E402
from megatron.adaptive.config.schedule import parse_partition  # noqa: E402
from megatron.adaptive.engine.executor import RankTimes  # noqa: E402
from megatron.adaptive.engine.stages import MegatronStages  # noqa: E402
from megatron.adaptive.gpt import train_step  # noqa: E402
from megatron.adaptive.gpt.forward import feed  # noqa: E402
from megatron.adaptive.rebalance.auto_schedule import Tuner  # noqa: E402
from megatron.adaptive.rebalance.judgement import Move  # noqa: E402
from megatron.adaptive.rebalance.repartition import Repartitioner  # noqa: E402
from megatron.adaptive.schedule.action import Action, ActionKind  # noqa: E402

_STEPS = itertools.count(1)
_of_step: list[Any] = []
_ADDED = "backward" if "EACH_LAYER" in os.environ else ""
"""Name of the pass that sleeps for the full time of its layers after it has computed, or ``""``."""
_PATIENCE = 20  # The job keeps the current partition after this number of steps without a move.


def time_layers(seconds: float, slow: float) -> None:
    """Makes a layer's forward pass take ``seconds``, and its backward pass take twice as long.

    Args:
        seconds: Time of a layer's forward pass, in seconds.
        slow: Factor by which the time is multiplied during ``SLOW_STEPS``.
    """
    for name, times in (("forward", 1), ("backward", 2)):
        timed = _timed(getattr(MegatronStages, name), times * seconds, slow, adds=name == _ADDED)
        setattr(MegatronStages, name, timed)


def is_slow(stages: Any) -> bool:
    """Returns whether the current step of ``stages`` is in the range ``SLOW_STEPS``."""
    if not hasattr(stages, "number_of_step"):
        stages.number_of_step = next(_STEPS)
    first, end = map(int, os.environ.get("SLOW_STEPS", "0-1000000").split("-"))
    return first <= stages.number_of_step < end


def time_each_layer(seconds: float) -> None:
    """Makes each layer's forward pass take ``seconds``, multiplied by the layer's factor.

    The factor is the result of :func:`factor_of`.
    """
    work = TransformerLayer.forward

    @functools.wraps(work)
    def timed(layer: Any, *arguments: Any, **options: Any) -> Any:
        end_s = time.perf_counter() + seconds * factor_of(layer)
        result = work(layer, *arguments, **options)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result

    TransformerLayer.forward = timed


def report_exact_times(layer_s: float) -> None:
    """Makes ``--pipeline-schedule auto`` use the times that the test has set for actions.

    Measured times are not used, because some actions take many times longer on a busy machine. The
    job fails if a measured time is shorter than the set time.

    Args:
        layer_s: Time of a layer's forward pass, in seconds.
    """
    decide = Tuner.after_step

    def after_step(tuner: Tuner, times: RankTimes, num_microbatches: int) -> Any:
        layers = [sum(map(factor_of, chunk.modules())) for chunk in tuner.chunks]
        exact: list[tuple[Action, int]] = []
        for action, measured_ns in times.actions:
            share = {ActionKind.F: 1.0, ActionKind.B: 2.0}.get(action.kind, 0.0)
            least_ns = int(share * layer_s * layers[action.chunk] * 1e9)
            assert measured_ns >= 0.9 * least_ns, f"{action} took only {measured_ns} ns"
            exact.append((action, max(least_ns, 1000)))
        return decide(tuner, dataclasses.replace(times, actions=tuple(exact)), num_microbatches)

    Tuner.after_step = after_step  # type: ignore[method-assign]


def factor_of(module: Any) -> float:
    """Returns the time of a layer relative to a layer without experts, or 0 for other modules."""
    if not isinstance(module, TransformerLayer):
        return 0.0
    return float(os.environ.get("EXPERT_FACTOR", 1)) if isinstance(module.mlp, MoELayer) else 1.0


def keep_microbatches() -> None:
    """Makes the trainer store the microbatches of each step, which :func:`share_of` reads."""

    def keep(microbatches: Any, count: int) -> Any:
        _of_step[:] = [microbatches]
        return feed(microbatches, count)

    train_step.feed = keep


def share_of(microbatch: int) -> float:
    """Returns the time of ``microbatch`` relative to a document of maximum length."""
    (batch,) = _of_step or [None]
    if batch is None or "lengths" not in batch[microbatch]:
        return 1.0
    of_pairs, longest = map(float, os.environ["LAYER_PAIRS"].split("/"))
    parts = batch[microbatch]["lengths"] / longest
    return float(((1 - of_pairs) * parts + of_pairs * parts**2).sum())


def _timed(
    work: Callable[..., Any], layer_s: float, slow: float, *, adds: bool
) -> Callable[..., Any]:
    """Returns a function that runs ``work``, and sleeps until its layers' time has passed.

    Args:
        work: Method of :class:`MegatronStages`.
        layer_s: Time of a layer in seconds.
        slow: Factor of the time during ``SLOW_STEPS``.
        adds: Whether the time of the layers starts when ``work`` has ended. Otherwise, it starts
            together with ``work``.
    """

    @functools.wraps(work)
    def timed(stages: Any, chunk: int, microbatch: int, *others: Any) -> Any:
        end_s = time.perf_counter()
        share = share_of(microbatch) * (slow if is_slow(stages) else 1.0)
        for module in stages.chunks[chunk].modules():
            end_s += share * layer_s * factor_of(module)
        begin_s = time.perf_counter()
        result = work(stages, chunk, microbatch, *others)
        if adds:
            end_s += time.perf_counter() - begin_s
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result

    return timed


def force_moves(moves: dict[int, tuple[int, ...]]) -> None:
    """Makes the job move layers after the iterations in ``moves`` only.

    ``moves`` maps iterations to partitions.
    """
    done = 0

    def after_step(
        repartitioner: Repartitioner, times: RankTimes, num_microbatches: int, **_: Any
    ) -> Move | None:
        nonlocal done
        done += 1
        return _asked(repartitioner, moves[done], times) if done in moves else None

    Repartitioner.after_step = after_step  # type: ignore[method-assign]


def compare(others: list[tuple[int, ...]], steps: int, rounds: int, moves_file: Path) -> None:
    """Makes the job alternate between the partition that it chooses first and those in ``others``.

    Args:
        others: Partitions to compare with the chosen partition.
        steps: Number of steps of each timed run.
        rounds: Number of runs with each partition.
        moves_file: Path of a JSON file to which the first iteration and the partition of each run
            are written.
    """
    decide, done, turns = Repartitioner.after_step, 0, list[tuple[int, tuple[int, ...]]]()

    def after_step(
        repartitioner: Repartitioner, times: RankTimes, num_microbatches: int, **options: Any
    ) -> Move | None:
        nonlocal done
        done += 1
        present = repartitioner._run.job.config.layers_per_stage
        if turns:
            next_partition = dict(turns).get(done + 1, present)
            return (
                None if next_partition == present else _asked(repartitioner, next_partition, times)
            )
        move = decide(repartitioner, times, num_microbatches, **options)
        if move is None and done < _PATIENCE:
            return None
        chosen = present if move is None else move.partition
        iteration = done + 1
        for number in range(rounds):
            each = [chosen, *others]
            for partition in each[number % len(each) :] + each[: number % len(each)]:
                turns.append((iteration, partition))
                iteration += steps
        if repartitioner._run.job.is_first:
            moves_file.write_text(json.dumps({"chosen": chosen, "turns": turns, "end": iteration}))
        return move

    Repartitioner.after_step = after_step  # type: ignore[method-assign]


def _asked(repartitioner: Repartitioner, partition: tuple[int, ...], times: RankTimes) -> Move:
    return Move(
        partition=partition,
        why="as asked",
        present_s=1.0,
        step_s=1.0,
        before_s=times.span_s,
        former=repartitioner._run.job.config.layers_per_stage,
    )


if __name__ == "__main__":
    settings = json.loads(os.environ.get("LAYER_MS", "0"))
    layer_ms = (
        settings[os.environ["MEGATRON_ADAPTIVE_NODE"]] if isinstance(settings, dict) else settings
    )
    layer_s = layer_ms / 1e3
    is_here = os.environ["RANK"] in os.environ.get("SLOW_RANKS", "").split(",")
    slow = float(os.environ["SLOW_FACTOR"]) if is_here else 1.0
    if layer_s:
        time_layers(layer_s, slow)
        if "LAYER_PAIRS" in os.environ:
            keep_microbatches()
        if "EXACT_TIMES" in os.environ:
            report_exact_times(layer_s)
        if {"EACH_LAYER", "EXPERT_FACTOR"} & set(os.environ):
            time_each_layer(layer_s * slow)
    if "MOVES" in os.environ:
        pairs = [move.split(":") for move in os.environ["MOVES"].split(",")]
        force_moves({int(step): parse_partition(layers) for step, layers in pairs})
    if "COMPARE" in os.environ:
        asked = json.loads(os.environ["COMPARE"])
        asked["others"] = [tuple(layers) for layers in asked["others"]]
        compare(**{**asked, "moves_file": Path(asked["moves_file"])})
    sys.exit(run())
