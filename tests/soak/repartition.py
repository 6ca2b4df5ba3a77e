"""Measures how much time a job with a slow rank saves by moving layers, and how long moves take.

Four ranks train a GPT whose layers take a fixed time (``timed_layers.py``), 1.5 times as long on
one rank. ``--repartition auto`` chooses a partition. Then the same processes alternate between this
partition, equal stages, and the partition that is best in simulation, so that other programs slow
down all three equally. Finally, a small GPT at full speed moves single layers back and forth.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.processes import train
from harness.report import Result, Row
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.planner.choose_partition import Loads, simulated_step
from megatron.adaptive.schedule.catalog import make_candidate
from megatron.adaptive.schedule.stage_placement import Placement

WORKER = Path(__file__).parents[1] / "support" / "timed_layers.py"
GOAL_SHARE, GOAL_STEPS, GOAL_LOSS = 0.8, 2.0, 1e-5
LIMIT_S = 400.0
RANKS, LAYERS, MICROBATCHES, LAYER_MS, SLOW_RANK, FACTOR = 4, 24, 8, 8.0, 1, 1.5
COMMON = (
    "--micro-batch-size 1 --lr 1e-2 --lr-decay-style constant --eval-iters 0 --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 63 --mock-data --num-attention-heads 4 "
    f"--pipeline-model-parallel-size {RANKS} --distributed-timeout-minutes 2"
).split()
TIMED = (
    f"--num-layers {LAYERS} --hidden-size 32 --seq-length 16 --max-position-embeddings 16 "
    # Disable clipping, because a move of layers changes the order in which the norm is summed.
    f"--global-batch-size {MICROBATCHES} --pipeline-schedule 1f1b --clip-grad 0"
).split()
SMALL = (
    "--num-layers 8 --hidden-size 128 --seq-length 128 --max-position-embeddings 128 "
    "--global-batch-size 8"
).split()
TURN_STEPS, MOST_BEFORE = 4, 22
AUTO = ["--repartition", "auto", "--repartition-interval", "8"]


def repartition(folder: Path, *, quick: bool) -> Result:
    """Measures how much of a slow rank's delay is recovered, and how long a move of a layer takes.

    All files are written to ``folder``. If ``quick``, there are fewer repetitions.
    """
    figures = _regained(folder, rounds=3 if quick else 8) | _move(folder, moves=4 if quick else 12)
    loss = "repartition_loss_difference"
    rows = [
        Row(
            what="recovered share of the delay caused by a slow rank",
            value=figures["regained"],
            goal=GOAL_SHARE,
            least=True,
        ),
        Row(what="time to move a layer, in steps", value=figures["move_steps"], goal=GOAL_STEPS),
        Row(what="maximum difference of a loss", value=figures[loss], goal=GOAL_LOSS),
    ]
    return Result(rows=rows, facts=figures)


def _regained(folder: Path, *, rounds: int) -> dict[str, Any]:
    best, turns_file = _ideal(), folder / "turns.json"
    even = (LAYERS // RANKS,) * RANKS
    most = MOST_BEFORE + 3 * TURN_STEPS * rounds
    settings = {
        "others": [even, best],
        "steps": TURN_STEPS,
        "rounds": rounds,
        "moves_file": str(turns_file),
    }
    slow = {"LAYER_MS": str(LAYER_MS), "SLOW_RANKS": str(SLOW_RANK), "SLOW_FACTOR": str(FACTOR)}
    flags = [*TIMED, *AUTO]
    lines = _train(flags, folder / "turns", most, {**slow, "COMPARE": json.dumps(settings)})
    losses = {line["iteration"]: line["loss"] for line in lines if "loss" in line}
    still = _train([*TIMED], folder / "still", most, {})
    pairs = [(losses[line["iteration"]], line["loss"]) for line in still if "loss" in line]
    worst = max(abs(first / second - 1) for first, second in pairs)
    turns = json.loads(turns_file.read_text())
    chosen = tuple(turns["chosen"])
    took = _took(lines, turns)
    lost = took[even] - took[best]
    # Nothing was recovered if no layers were moved, or if other programs hid the slow rank's delay.
    regained = (took[even] - took[chosen]) / lost if chosen != even and lost > 0 else 0.0
    first = turns["turns"][0][0] - 1
    named = {"even": even, "ideal": best, "auto": chosen}
    print(
        f"a rank is {FACTOR:g} times slower; steps take {took[even]:.0f} ms with equal stages, "
        f"{took[best]:.0f} ms with the ideal partition {format_partition(best)} and "
        f"{took[chosen]:.0f} ms with {format_partition(chosen)}, which was chosen after step "
        f"{first}; {regained:.0%} regained; losses differ by at most {worst:.1e}"
    )
    return {
        "regained": regained,
        "repartition_chosen": list(chosen),
        "repartition_chosen_after": first,
        "repartition_step_ms": {name: took[partition] for name, partition in named.items()},
        "repartition_loss_difference": worst,
    }


def _took(lines: Sequence[dict[str, Any]], turns: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Returns the median step time in ms for each partition.

    Steps in which layers moved are not counted. ``lines`` are lines of the progress file. ``turns``
    contains the first step that was trained with each partition.
    """
    steps = {line["iteration"]: line["step_ms"] for line in lines if "iteration" in line}
    seconds: dict[tuple[int, ...], list[float]] = {}
    for first, partition in turns["turns"]:
        seconds.setdefault(tuple(partition), []).extend(
            steps[step] for step in range(first + 1, first + TURN_STEPS)
        )
    return {partition: statistics.median(values) for partition, values in seconds.items()}


def _ideal() -> tuple[int, ...]:
    """Returns the partition with the shortest simulated step for the known speeds of the ranks."""
    each = [LAYER_MS / 1e3 * (FACTOR if rank == SLOW_RANK else 1) for rank in range(RANKS)]
    even = (LAYERS // RANKS,) * RANKS
    loads = Loads(
        placement=Placement(num_ranks=RANKS, num_chunks=1),
        partition=even,
        layer_s=tuple(((layer_s, 2 * layer_s, 0.0),) for layer_s in each),
        beside_s=((0.0, 0.0, 0.0),) * RANKS,
        most_layers=(math.inf,) * RANKS,
    )
    step_s = simulated_step(loads, make_candidate("1f1b", RANKS, 1, MICROBATCHES), MICROBATCHES)
    near = range(even[0] - 3, even[0] + 4)
    every = [(*first, LAYERS - sum(first)) for first in itertools.product(near, repeat=RANKS - 1)]
    return min((partition for partition in every if partition[-1] >= 0), key=step_s)


def _move(folder: Path, *, moves: int) -> dict[str, Any]:
    """Moves a layer to the next rank and back repeatedly, and returns the measured times.

    ``moves`` is the total number of moves. The files are in ``folder``.
    """
    partitions = itertools.cycle(("3-1-2-2", "2-2-2-2"))
    moved = [6 + 4 * number for number in range(moves)]
    text = ",".join(f"{step}:{next(partitions)}" for step in moved)
    lines = _train([*SMALL, *AUTO], folder / "moves", moved[-1] + 4, {"MOVES": text})
    steps = {line["iteration"]: line["step_ms"] for line in lines if "iteration" in line}
    took_ms = [line["seconds"] * 1e3 for line in lines if "repartitioned" in line]
    assert len(took_ms) == moves
    step_ms = statistics.median(steps[step] for number in moved for step in (number - 1, number))
    after_ms = statistics.median(steps[step + 1] for step in moved)
    move_ms = statistics.median(took_ms)
    whole = (move_ms + max(0.0, after_ms - step_ms)) / step_ms
    print(
        f"a move takes {move_ms:.0f} ms, a usual step {step_ms:.0f} ms and the first step after a "
        f"move {after_ms:.0f} ms, so a move costs as much time as {whole:.2f} steps"
    )
    return {"move_ms": move_ms, "move_step_ms": step_ms, "move_steps": whole}


def _train(
    flags: Sequence[str], folder: Path, steps: int, settings: dict[str, str]
) -> list[dict[str, Any]]:
    """Trains a model for ``steps`` steps on four ranks with the flags ``flags``.

    Returns the lines of the progress file in ``folder`` as dicts. ``settings`` contains additional
    environment variables.
    """
    flags = [str(WORKER), *COMMON, *flags, "--train-iters", str(steps)]
    return train(flags, folder, RANKS, LIMIT_S, settings)
