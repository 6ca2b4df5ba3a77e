"""Defines the settings for the pipeline schedule, the layers per stage, and traces."""

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
from megatron.adaptive.config.sequence_slices import (
    CHOSEN_SLICES,
    CHOSEN_TOKENS,
    LEAST_TOKENS,
    SLICE_CUTS,
)
from megatron.adaptive.errors import ConfigError

BALANCED = ("off", "lengths", "speed", "both")
"""Possible values of ``--balance-replicas``."""


def default_placement(schedule: str, num_chunks: int) -> PlacementKind:
    """Returns the default of ``--pipeline-placement``, which determines the rank of each stage.

    Args:
        schedule: Value of ``--pipeline-schedule``.
        num_chunks: Number of model chunks (virtual stages) per pipeline rank.
    """
    return schedule_spec(schedule).default_placement if num_chunks == 2 else "loop"


TRACE_DETAILS = ("actions", "layers", "collectives", "kernels")
"""Possible values of ``--trace-detail``. Each value includes all values before it."""

_PARTITION = re.compile(r"[0-9]+(-[0-9]+)*")


def parse_partition(text: str) -> tuple[int, ...]:
    """Parses a string such as ``0-11-8-8``, which contains the number of layers of each stage.

    Raises:
        ValueError: The text does not consist of non-negative integers joined by ``-``.
    """
    if _PARTITION.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is not a partition; use the number of layers of each stage as in 0-11-8-8"
        )
    return tuple(int(part) for part in text.split("-"))


_LAYOUT = re.compile(r"E?t*m*L?")
_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
_REPEAT = re.compile(r"([^()*])\*(\d{1,4})")
_MOST_LETTERS = 100_000


def parse_layout(text: str) -> tuple[str, ...]:
    """Parses a string such as ``Et|(tt|)*2mL``, which contains the layers of each stage.

    Stages are joined by ``|``. ``E`` is the embedding, ``t`` a transformer layer, ``m`` a layer for
    multi-token prediction, and ``L`` the loss.

    Source: The class ``PipelineParallelLayerLayout`` of megatron-core, which defines the notation.

    Raises:
        ValueError: The text does not match the notation, or layers are in the wrong order.
    """
    letters = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _REPEAT):
        matches = pattern.finditer(letters)
        if sum(len(match[1]) * int(match[2]) for match in matches) > _MOST_LETTERS:
            raise ValueError(f"{text!r} expands to more than {_MOST_LETTERS} layers")
        letters = pattern.sub(lambda match: match[1] * int(match[2]), letters)
    order = letters.replace("|", "")
    if _LAYOUT.fullmatch(order) is None or order[:1] != "E" or order[-1:] != "L":
        raise ValueError(
            f"{text!r} is not a layout; stages are joined by '|', E (embedding) comes first, then "
            "t (transformer layers), m (multi-token prediction), L (loss), as in Et|(tt|)*2mL"
        )
    stages = tuple(letters.split("|"))
    if stages[0][:1] != "E" or stages[-1][-1:] != "L":
        raise ValueError(f"{text!r} must have E on the first stage and L on the last")
    if sum("m" in stage for stage in stages) > 1:
        raise ValueError(f"{text!r} has m on several stages; put all m on one stage")
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
    """Returns the number of layers of each stage, given the number on the first or last rank.

    The result is the same as in Megatron-LM. Stages are assigned to ranks round-robin (in a loop).
    If the embedding or the loss counts as a layer, the stage that contains it gets one
    transformer layer fewer.

    Args:
        num_layers: Number of layers in the model.
        num_ranks: Number of pipeline ranks.
        num_chunks: Number of stages per rank.
        first: Number of layers on the first rank, or ``None`` for the same number as on other
            ranks.
        last: Number of layers on the last rank, or ``None`` for the same number as on other ranks.
        embedding: Whether the embedding counts as a layer of the first stage.
        loss: Whether the loss counts as a layer of the last stage.

    Raises:
        ValueError: The remaining layers cannot be divided evenly.
    """
    fixed = ((num_ranks - 1, last), (0, first))
    ends = {rank: layers for rank, layers in fixed if layers is not None}
    left = num_layers + bool(embedding) + bool(loss) - sum(ends.values())
    inner = (num_ranks - len(ends)) * num_chunks
    for layers, stages in ((left, inner), *((layers, num_chunks) for layers in ends.values())):
        if layers < 0 or (layers % stages if stages else layers):
            raise ValueError(f"{layers} layers do not divide evenly over {stages} stages")
    of_rank = [
        ends.get(rank, left) // (num_chunks if rank in ends else inner) for rank in range(num_ranks)
    ]
    of_stage = of_rank * num_chunks
    of_stage[0] -= bool(embedding)
    of_stage[-1] -= bool(loss)
    if min(of_stage) < 0:
        raise ValueError(
            "the embedding or the loss cannot count as a layer of a stage without layers"
        )
    return tuple(of_stage)


def parse_widths(text: str) -> tuple[int, ...]:
    """Parses a string such as ``2-1-1``, which contains the number of ranks of each stage.

    Raises:
        ValueError: The text does not consist of positive integers joined by ``-``.
    """
    widths = tuple(map(int, text.split("-"))) if _PARTITION.fullmatch(text) else (0,)
    if min(widths) < 1:
        raise ValueError(
            f"{text!r} is not a list of ranks per stage; use positive integers, as in 2-1-1"
        )
    return widths


def format_partition(layers_per_stage: Sequence[int]) -> str:
    """Converts the number of layers of each stage to a string such as ``0-11-8-8``."""
    return "-".join(str(layers) for layers in layers_per_stage)


def nearly_even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Divides layers among stages so that the counts differ by at most one.

    If the layers cannot be divided evenly, inner stages get one layer more, because the first and
    the last stage also compute the embedding and the loss.
    """
    base, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest + 1) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(num_stages))


def _is_own_schedule(name: str) -> bool:
    """Returns whether ``name`` refers to a user's schedule, not to a schedule of this package.

    Raises:
        ValueError: The schedule does not exist or cannot be imported.
    """
    try:
        return schedule_spec(name).is_own
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _read_candidates(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of schedule names from which ``auto`` may choose.

    Raises:
        ValueError: A schedule does not exist, or is of a kind that ``auto`` does not support.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        try:
            spec = schedule_spec(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if spec.kind not in ("fixed", "rule"):
            raise ValueError(f"auto cannot try {name}; use a fixed order or a run-time rule")
    return names


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Pipeline schedule and traces.

    Attributes:
        chosen_slices: Number of slices that ``--sequence-slices auto`` has chosen, or ``None``
            before the choice. The field has no flag and is not saved in checkpoints.
        chosen_tokens: Number of tokens per slice that ``--slice-tokens auto`` has chosen, or
            ``None`` before the choice. The field has no flag and is not saved in checkpoints.
    """

    pipeline_schedule: str = flag(
        "Order of forward and backward passes: megatron-core's own pipeline code (megatron), a "
        "fixed order, or an order chosen at run time from the inputs that have arrived "
        "(adaptive, hinted, dfc, bfc; auto measures a few steps and then uses the best "
        "schedule and partition); or your own schedule as package.module:name.",
        "adaptive",
        choices=tuple(sorted(selectable_names())),
        also_takes=_is_own_schedule,
    )
    auto_candidates: tuple[str, ...] | None = flag(
        "Your own schedules that auto also considers, in the form package.module:name.",
        reader=_read_candidates,
        unit="NAME,NAME",
    )
    schedule_file: File | None = flag(
        "File with the order for --pipeline-schedule file: JSON, or the CSV of "
        "torch.distributed.pipelining."
    )
    split_backward: bool | None = flag(
        "Compute weight gradients as separate actions that fill waiting time (True), or within "
        "the backward pass (False).",
        takes_value=True,
        derived="True if the model's layers support it and the schedule benefits from it, except "
        "with full recomputation, or with --overlap-grad-reduce and several replicas",
    )
    overlap_moe_expert_parallel_comm: bool = switch(
        "Run a forward pass while the experts of a backward pass exchange tokens, and vice "
        "versa; for combined-1f1b, dualpipe-v and orders chosen at run time."
    )
    weight_pieces: Count = flag(
        "Maximum number of parts into which a weight gradient may be split by a schedule that "
        "chooses the order at run time.",
        4,
        unit="PIECES",
    )
    record_schedule: File | None = flag(
        "File to which the order of every training step is written."
    )
    replay_schedule: File | None = flag(
        "File written by --record-schedule, whose orders this run follows."
    )
    partition: tuple[int, ...] | None = flag(
        "Number of layers in each stage in pipeline order, joined by '-'; 0 is allowed.",
        reader=parse_partition,
        unit="0-11-8-8",
        derived="the same number for each stage; auto may change it",
    )
    pipeline_model_parallel_layout: str | None = flag(
        "Layers of each stage in Megatron-LM's notation: E embedding, t transformer layer, m "
        "multi-token prediction, L loss.",
        reader=_layout,
        unit="'Et|(tt|)*2mL'",
    )
    decoder_first_pipeline_num_layers: Layers | None = flag(
        "Number of layers on the first pipeline rank; the other ranks share the remaining layers."
    )
    decoder_last_pipeline_num_layers: Layers | None = flag(
        "Number of layers on the last pipeline rank; the other ranks share the remaining layers."
    )
    account_for_embedding_in_pipeline_split: bool = switch(
        "Assign one layer fewer to the first stage than to the others."
    )
    account_for_loss_in_pipeline_split: bool = switch(
        "Assign one layer fewer to the last stage than to the others."
    )
    pipeline_placement: str | None = flag(
        "Placement of stages on ranks if a rank has several stages: every round goes from the "
        "first rank to the last (loop), or every second round goes back from the last rank to the "
        "first (v).",
        choices=("loop", "v"),
        derived="v for dualpipe-v, v-half and zb-v, and for adaptive, auto and hinted with two "
        "chunks; otherwise loop",
    )
    repartition: str = flag(
        "Move layers, with their optimizer state, from slow ranks to other ranks between two "
        "steps if measured times predict a gain.",
        "off",
        choices=("off", "auto"),
    )
    repartition_interval: Annotated[int, Limits(minimum=4)] = flag(
        "Number of iterations between two checks for a better partition.", 50, unit="ITERATIONS"
    )
    repartition_gain: Annotated[float, Limits(above=0, below=1)] = flag(
        "Minimum gain for moving layers, as a fraction of the step time.", 0.05, unit="SHARE"
    )
    balance_replicas: str | None = flag(
        "Distribute the microbatches of each step over data-parallel replicas so that all replicas "
        "take the same time: by the lengths of documents, by the measured speed of the replicas, "
        "or by both; off gives every replica the same number of microbatches.",
        choices=BALANCED,
        derived="lengths with --variable-seq-lengths, both under train elastic, otherwise off; "
        "always off if the schedule or the layout does not support it",
    )
    activation_cap: Annotated[float, Limits(minimum=1)] | None = flag(
        "Maximum number of microbatches whose activations a rank holds, summed over its chunks; "
        "only for orders chosen at run time.",
        unit="MICROBATCHES",
        derived="chosen from the pipeline's shape",
    )
    sequence_slices: Count = flag(
        "Number of slices into which each sequence is cut. A stage processes one slice at a time, "
        "so a rank holds fewer activations, and waits less if there are few microbatches. With "
        "--pipeline-schedule auto, the number can be auto: the trainer measures steps with two "
        "different numbers of slices, and then chooses the number by simulation.",
        1,
        unit="SLICES",
        named_values={"auto": CHOSEN_SLICES},
    )
    chosen_slices: int | None = None
    slice_tokens: Annotated[int, Limits(minimum=LEAST_TOKENS)] | None = flag(
        "Number of tokens in each slice, as an alternative to --sequence-slices. With "
        "--variable-seq-lengths, documents are packed into rows, usually with as many slices as "
        "the longest document of the row needs. With --pipeline-schedule auto, the number can be "
        "auto: the trainer measures steps with two different numbers of tokens, and then chooses "
        "the number by simulation.",
        unit="TOKENS",
        named_values={"auto": CHOSEN_TOKENS},
    )
    chosen_tokens: int | None = None
    slice_cut: str = flag(
        "Method of cutting sequences: into slices of equal cost, where later slices are shorter "
        "because they attend to more tokens, or into slices of equal length.",
        SLICE_CUTS[0],
        choices=SLICE_CUTS,
    )
    pipeline_timeout_s: Positive = flag(
        "Timeout of each wait for a message of the pipeline.",
        600.0,
        unit="SECONDS",
        derived="--distributed-timeout-minutes",
    )
    hang_after_s: Annotated[float, Limits(minimum=0)] | None = flag(
        "Time without progress on any rank after which the run is considered to hang; the rank for "
        "which the others wait is then reported; 0 to disable this check.",
        unit="SECONDS",
        derived="10 times the median step, at least 30",
    )
    on_hang: str = flag(
        "Action if the run hangs: write a report and keep waiting (report), or also end the "
        "job (end).",
        "report",
        choices=("report", "end"),
    )
    trace_dir: Folder | None = flag("Folder for traces; without this flag, no traces are written.")
    trace_interval: Iterations = flag("Trace every n-th iteration.", 1)
    trace_iterations: Iterations | None = flag(
        "Stop tracing after this number of traced iterations.", derived="no limit"
    )
    trace_detail: str = flag(
        "Details that traced iterations record: only actions (actions); also the forward and "
        "backward pass of each transformer layer (layers); also the collectives of each process "
        "group of the model (collectives); and also operators and kernels, on --profile-ranks from "
        "--profile-step-start to --profile-step-end (kernels).",
        "actions",
        choices=TRACE_DETAILS,
    )
    trace_otlp: Annotated[str, Limits(unit="URL")] | None = flag(
        "Also send the spans of traced iterations to this collector while the job runs "
        "(OpenTelemetry, OTLP over HTTP); if the collector is down, spans are lost, but the "
        "job continues.",
        derived="none",
    )
    diagnose_interval: Natural = flag(
        "Number of iterations between two diagnoses of what slows the run; each finding is "
        "reported once; 0 to disable diagnoses.",
        100,
        unit="ITERATIONS",
    )

    @property
    def chooses_slices(self) -> bool:
        """Whether the trainer chooses the number of slices during the first steps."""
        return self.sequence_slices == CHOSEN_SLICES

    @property
    def chooses_tokens(self) -> bool:
        """Whether the trainer chooses the number of tokens per slice during the first steps."""
        return self.slice_tokens == CHOSEN_TOKENS

    @property
    def is_rule(self) -> bool:
        """Whether each rank chooses the order of its actions at run time."""
        return schedule_spec(self.pipeline_schedule).is_rule

    @property
    def trace_details(self) -> tuple[str, ...]:
        """Details that traced iterations record: ``--trace-detail`` and all values before it."""
        return trace_details(self.trace_detail)

    def traces(self, iterations_done: int) -> bool:
        """Returns whether the trace records the next training iteration.

        Args:
            iterations_done: Number of iterations that this process has completed since it started.
                Iterations from before the loaded checkpoint are not counted.
        """
        return self.trace_dir is not None and is_next_traced(
            iterations_done, self.trace_interval, self.trace_iterations
        )


def is_next_traced(iterations_done: int, interval: int, most: int | None) -> bool:
    """Returns whether a trace records the next iteration.

    Args:
        iterations_done: Number of iterations that this process has completed since it started.
        interval: Number of iterations from the start of one traced iteration to the start of the
            next.
        most: Maximum number of traced iterations, or ``None`` for no limit.
    """
    traced, rest = divmod(iterations_done, interval)
    return rest == 0 and (most is None or traced < most)


def trace_details(chosen: str) -> tuple[str, ...]:
    """Returns the value ``chosen`` of ``--trace-detail`` and all values that it includes."""
    return TRACE_DETAILS[: TRACE_DETAILS.index(chosen) + 1]
