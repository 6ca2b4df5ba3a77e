"""The pipeline's order of work, its layers per stage and its traces: flags of this project."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from megatron.adaptive.config.flags import (
    Count,
    File,
    Folder,
    Iterations,
    Layers,
    Limits,
    Natural,
    Positive,
    flag,
    switch,
)
from megatron.adaptive.config.schedule_specs import PlacementKind, schedule_spec, selectable_names
from megatron.adaptive.errors import ConfigError

BALANCED = ("off", "lengths", "speed", "both")
"""Values of ``--balance-replicas``."""


def default_placement(schedule: str, num_chunks: int) -> PlacementKind:
    """Returns the order of stages over ranks where ``--pipeline-placement`` does not say it.

    Args:
        schedule: the value of ``--pipeline-schedule``.
        num_chunks: model chunks of each pipeline rank.
    """
    return schedule_spec(schedule).default_placement if num_chunks == 2 else "loop"


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


_LAYOUT = re.compile(r"E?t*m*L?")
_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
_REPEAT = re.compile(r"([^()*])\*(\d{1,4})")
_MOST_WRITTEN = 100_000


def parse_layout(text: str) -> tuple[str, ...]:
    """Reads the layers of each stage from ``Et|(tt|)*2mL``: embedding, transformer, MTP, loss.

    Source: ``PipelineParallelLayerLayout`` of megatron-core, for the form.

    Raises:
        ValueError: it has another form, or layers in another order than a model's.
    """
    written = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _REPEAT):
        if sum(len(one[1]) * int(one[2]) for one in pattern.finditer(written)) > _MOST_WRITTEN:
            raise ValueError(f"{text!r} writes out to more than {_MOST_WRITTEN} layers")
        written = pattern.sub(lambda found: found[1] * int(found[2]), written)
    order = written.replace("|", "")
    if _LAYOUT.fullmatch(order) is None or order[:1] != "E" or order[-1:] != "L":
        raise ValueError(
            f"{text!r} is not a layout: stages are joined by '|', E (embedding) comes first, then "
            "t (transformer layers), m (multi-token prediction), L (loss), as in Et|(tt|)*2mL"
        )
    stages = tuple(written.split("|"))
    if stages[0][:1] != "E" or stages[-1][-1:] != "L":
        raise ValueError(f"{text!r} has E not on the first stage or L not on the last")
    if sum("m" in stage for stage in stages) > 1:
        raise ValueError(f"{text!r} has m on several stages; put all of them on one")
    return stages


def _layout(text: str) -> str:
    parse_layout(text)
    return text


def uneven_split(
    num_layers: int,
    num_ranks: int,
    num_chunks: int,
    first: int | None = None,
    last: int | None = None,
    embedding: bool | None = False,
    loss: bool | None = False,
) -> tuple[int, ...]:
    """Layers of each stage of a loop where the ends differ, as in Megatron-LM.

    Args:
        num_layers: of the model.
        num_ranks: pipeline ranks.
        num_chunks: stages of each.
        first: layers of the first rank.
        last: layers of the last rank.
        embedding: the embedding counts as a layer of the first stage.
        loss: the loss counts as one of the last stage.

    Raises:
        ValueError: they do not come out even.
    """
    given = ((num_ranks - 1, last), (0, first))
    ends = {rank: layers for rank, layers in given if layers is not None}
    left = num_layers + bool(embedding) + bool(loss) - sum(ends.values())
    inner = (num_ranks - len(ends)) * num_chunks
    for layers, stages in ((left, inner), *((layers, num_chunks) for layers in ends.values())):
        if layers < 0 or (layers % stages if stages else layers):
            raise ValueError(f"{layers} layers over {stages} stages do not come out even")
    of_rank = [
        ends.get(rank, left) // (num_chunks if rank in ends else inner) for rank in range(num_ranks)
    ]
    of_stage = of_rank * num_chunks
    of_stage[0] -= bool(embedding)
    of_stage[-1] -= bool(loss)
    if min(of_stage) < 0:
        raise ValueError("embedding and loss would be counted on stages without layers")
    return tuple(of_stage)


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


def nearly_even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage that differ by one at most, the inner stages taking the remainder.

    The outer stages also carry embedding and loss, so that a spare layer is best kept off them.
    """
    base, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest + 1) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(num_stages))


def _is_own_schedule(name: str) -> bool:
    """Returns whether a name is that of a schedule outside this package.

    Raises:
        ValueError: It was meant to be one, and cannot be used.
    """
    try:
        return schedule_spec(name).is_own
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _read_candidates(text: str) -> tuple[str, ...]:
    """Reads names of schedules joined by commas.

    Raises:
        ValueError: There is no such schedule.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        try:
            spec = schedule_spec(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if spec.kind not in ("fixed", "rule"):
            raise ValueError(f"auto cannot try {name}: name a fixed order or a run-time rule")
    return names


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Pipeline schedule and traces."""

    pipeline_schedule: str = flag(
        "Order of work: megatron-core's own code (megatron), a fixed order on our engine, or a "
        "choice made at run time from what has arrived (adaptive, hinted, dfc, bfc; auto takes "
        "the best after a few steps, with the layers of each stage that suit it); or a schedule of "
        "yours as package.module:name.",
        "adaptive",
        choices=tuple(sorted(selectable_names())),
        also_takes=_is_own_schedule,
    )
    auto_candidates: tuple[str, ...] | None = flag(
        "Schedules of yours that auto tries beside its own, each as package.module:name.",
        reader=_read_candidates,
        unit="NAME,NAME",
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
    overlap_moe_expert_parallel_comm: bool = switch(
        "A forward computes while the experts of a backward exchange tokens, and the reverse; for "
        "an order chosen at run time, combined-1f1b or dualpipe-v."
    )
    weight_pieces: Count = flag(
        "Parts into which a run-time choice may cut each weight gradient.", 4, unit="PIECES"
    )
    record_schedule: File | None = flag("Write the order of every training step to this file.")
    replay_schedule: File | None = flag("Follow the orders that --record-schedule wrote.")
    partition: tuple[int, ...] | None = flag(
        "Layers of each stage in pipeline order, joined by '-'; 0 is allowed.",
        reader=parse_partition,
        unit="0-11-8-8",
        derived="the same number for each stage, until auto has chosen",
    )
    pipeline_model_parallel_layout: str | None = flag(
        "Layers of each stage in Megatron-LM's letters: E embedding, t transformer, m multi-token "
        "prediction, L loss.",
        reader=_layout,
        unit="'Et|(tt|)*2mL'",
    )
    decoder_first_pipeline_num_layers: Layers | None = flag(
        "Layers of the first pipeline rank; the others share the rest."
    )
    decoder_last_pipeline_num_layers: Layers | None = flag(
        "Layers of the last pipeline rank; the others share the rest."
    )
    account_for_embedding_in_pipeline_split: bool = switch(
        "Give the first stage one layer less than the others."
    )
    account_for_loss_in_pipeline_split: bool = switch(
        "Give the last stage one layer less than the others."
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
        "Least share of a step that a move of layers must save.", 0.05, unit="SHARE"
    )
    balance_replicas: str | None = flag(
        "Deal the microbatches of each step to data-parallel replicas so that all take as long: by "
        "the lengths of their documents, by the measured speed of the replicas, or by both; off "
        "deals them in turns.",
        choices=BALANCED,
        derived="lengths with --variable-seq-lengths, both under run, else off; off where the "
        "schedule or the shape does without it",
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
    hang_after_s: Annotated[float, Limits(minimum=0)] | None = flag(
        "Name the rank that others wait for when nothing has moved on any rank for this long; 0 "
        "for never.",
        unit="SECONDS",
        derived="10 times the median step, at least 30",
    )
    on_hang: str = flag(
        "When nothing moves: write a page and a line and go on, or end the job besides.",
        "report",
        choices=("report", "end"),
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
        return schedule_spec(self.pipeline_schedule).is_rule

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
