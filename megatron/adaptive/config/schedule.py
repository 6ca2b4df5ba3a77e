"""The pipeline's order of work, its layers per stage and its traces: flags of this project."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.adaptive.config.flags import (
    Count,
    File,
    Folder,
    Iterations,
    Limits,
    Natural,
    Positive,
    flag,
)

PlacementKind = Literal["loop", "v"]

RULES = ("adaptive", "auto", "bfc", "dfc", "hinted")
"""Values of ``--pipeline-schedule`` that choose at run time; the others fix the order."""

V_ONLY = ("dualpipe-v", "v-half", "zb-v")
V_SCHEDULES = (*RULES, "file", "gpipe", *V_ONLY)
"""Values of ``--pipeline-schedule`` under ``--pipeline-placement v``."""

SPLIT_SCHEDULES = ("dualpipe-v", "interleaved-zb", "v-half", "zb-h1", "zb-v")
"""Fixed orders that compute weight gradients by themselves."""

KEEPING_ALL = ("breadth-first", "gpipe", "varuna")
"""Fixed orders that run the forwards of all microbatches before the first backward, or nearly."""

UNEQUAL_SCHEDULES = ("1f1b", "adaptive", "gpipe")
"""Values of ``--pipeline-schedule`` where stages have unequal numbers of ranks."""

ONE_CHUNK = ("1f1b", "varuna", "zb-h1")
TWO_CHUNKS = V_ONLY
SEVERAL_CHUNKS = ("breadth-first", "combined-1f1b", "interleaved", "interleaved-zb")
_FIXED = (*ONE_CHUNK, *TWO_CHUNKS, *SEVERAL_CHUNKS, "gpipe", "file")
_IN_A_V = ("adaptive", "auto", "hinted", *V_ONLY)


def default_placement(schedule: str, num_chunks: int) -> PlacementKind:
    """Returns the order of stages over ranks where ``--pipeline-placement`` does not say it.

    Args:
        schedule: the value of ``--pipeline-schedule``.
        num_chunks: model chunks of each pipeline rank.
    """
    return "v" if schedule in _IN_A_V and num_chunks == 2 else "loop"


_PARTITION = re.compile(r"[0-9]+(-[0-9]+)*")


def parse_partition(text: str) -> tuple[int, ...]:
    """Reads layers per stage from ``0-11-8-8``.

    Raises:
        ValueError: the text is not whole numbers joined by ``-``.
    """
    if _PARTITION.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is not a partition, write the layers of each stage as in 0-11-8-8"
        )
    return tuple(int(part) for part in text.split("-"))


def parse_widths(text: str) -> tuple[int, ...]:
    """Reads ranks per stage from ``2-1-1``.

    Raises:
        ValueError: the text is not whole numbers from 1 on joined by ``-``.
    """
    widths = tuple(map(int, text.split("-"))) if _PARTITION.fullmatch(text) else (0,)
    if min(widths) < 1:
        raise ValueError(f"{text!r} does not give the ranks of each stage, write it as in 2-1-1")
    return widths


def format_partition(layers_per_stage: Sequence[int]) -> str:
    """Writes layers per stage as ``0-11-8-8``; the inverse of :func:`parse_partition`."""
    return "-".join(str(layers) for layers in layers_per_stage)


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The same number of layers for each stage.

    Raises:
        ValueError: the layers do not divide evenly.
    """
    if num_stages < 1 or num_layers % num_stages != 0:
        raise ValueError(f"{num_layers} layers do not divide evenly into {num_stages} stages")
    return (num_layers // num_stages,) * num_stages


def nearly_even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage that differ by one at most, the inner stages taking the remainder.

    The outer stages also carry embedding and loss, so that a spare layer is best kept off them.
    """
    base, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest + 1) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(num_stages))


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Pipeline schedule and traces."""

    pipeline_schedule: str = flag(
        "Order of work: megatron-core's own code (megatron), a fixed order on our engine, or a "
        "choice made at run time from what has arrived (adaptive, hinted, dfc, bfc; auto takes "
        "the best after a few steps).",
        "adaptive",
        choices=("megatron", *sorted(_FIXED), *RULES),
    )
    schedule_file: File | None = flag(
        "The order of --pipeline-schedule file: JSON, or the CSV of torch.distributed.pipelining."
    )
    split_backward: bool | None = flag(
        "Compute weight gradients as work of their own (True), which fills waits, or within the "
        "backward (False).",
        takes_value=True,
        derived="True where the model's layers allow it and the schedule gains from it",
    )
    weight_pieces: Count = flag(
        "Parts into which a run-time choice may cut each weight gradient.", 4, unit="PIECES"
    )
    record_schedule: File | None = flag("Write the order of every training step to this file.")
    replay_schedule: File | None = flag("Follow the orders that --record-schedule wrote.")
    partition: tuple[int, ...] | None = flag(
        "Layers of each stage in pipeline order, joined by '-'; 0 is allowed.",
        convert=parse_partition,
        unit="0-11-8-8",
        derived="the same number for each stage",
    )
    pipeline_placement: str | None = flag(
        "How stages lie over the ranks when each holds several: every round from the first rank "
        "to the last, or there and back.",
        choices=("loop", "v"),
        derived="v for dualpipe-v, v-half, zb-v; with two chunks adaptive, auto, hinted; else loop",
    )
    repartition: str = flag(
        "Give layers of a slow rank to others between two steps, with their optimizer state, where "
        "measured times say that it pays.",
        "off",
        choices=("off", "auto"),
    )
    repartition_interval: Annotated[int, Limits(minimum=4)] = flag(
        "With --repartition auto: iterations between two looks, and so least between two moves.",
        50,
        unit="ITERATIONS",
    )
    repartition_gain: Annotated[float, Limits(above=0, below=1)] = flag(
        "With --repartition auto: least share of a step that a move must save.", 0.05, unit="SHARE"
    )
    activation_cap: Annotated[float, Limits(minimum=1)] | None = flag(
        "Most activations that a rank keeps, counted in microbatches over all its chunks; only "
        "where the order is chosen at run time.",
        unit="MICROBATCHES",
        derived="chosen from the pipeline's shape",
    )
    pipeline_timeout_s: Positive = flag(
        "Time limit of every wait for a message of the pipeline.",
        600.0,
        unit="SECONDS",
        derived="--distributed-timeout-minutes",
    )
    trace_dir: Folder | None = flag("Folder for traces; none are written without it.")
    trace_interval: Iterations = flag("Trace one iteration in this many.", 1)
    trace_iterations: Iterations | None = flag(
        "Stop after this many traced iterations.", derived="no limit"
    )
    diagnose_interval: Natural = flag(
        "With --trace-dir: look every so many iterations for what slows the run, and report it "
        "once; 0 for never.",
        100,
        unit="ITERATIONS",
    )

    @property
    def is_rule(self) -> bool:
        """True if the order is chosen at run time."""
        return self.pipeline_schedule in RULES

    def traces(self, iterations_done: int) -> bool:
        """Returns whether the next iteration is traced.

        Args:
            iterations_done: iterations that this process has finished, 0 at its first one, also
                after a checkpoint was loaded.
        """
        if self.trace_dir is None or iterations_done % self.trace_interval != 0:
            return False
        traced = iterations_done // self.trace_interval
        return self.trace_iterations is None or traced < self.trace_iterations
