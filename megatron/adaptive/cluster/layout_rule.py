"""Chooses the layout of a job for the processes that are there.

Without a profile: as many processes as the batch and the layers allow, and of those layouts the one
with the pipeline nearest to that of the command line, a deeper one first, for the model was meant
to fit into so many stages. The global batch stays. Nodes that are known to be slow get fewer
layers. With ``--plan-with`` the planner chooses, see ``planning``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from megatron.adaptive.cluster.job_state_file import MEASURES
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.command_parser import flags_in, last_value
from megatron.adaptive.config.input_files import natural
from megatron.adaptive.config.schedule import format_partition, nearly_even_split
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

_SIZES = "--stage-data-parallel-sizes"
WORTH_A_MORPH = 0.03
"""Least part of a step that a layout must save for the job to move into it."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Describes a node that a layout may use.

    Attributes:
        name: of the node.
        slots: processes that it may run.
        hosts: names of its machine.
        slowness: how many times as long as it should its work takes, as far as is known.
    """

    name: str
    slots: int
    hosts: tuple[str, ...] = ()
    slowness: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Describes how ranks share the model and the batch, and the flags that say so.

    Attributes:
        tensor: tensor-parallel width.
        pipeline: pipeline ranks.
        data: replicas; of the first stage where ``widths`` are given.
        partition: layers of each stage.
        micro_batch: samples of a microbatch.
        microbatches: of each replica in a step, of the first stage.
        flags: of the trainer, to be put after the user's own.
        places: processes on each node by name, at most, in the order of the ranks; empty for all
            nodes in their order.
        step_s: seconds of a step as the planner predicts them, ``None`` where the rule chose.
        pace: what a layer takes on each node by name, in any unit; empty where all are alike.
        widths: replicas of each stage where they differ; empty where all stages are alike.
        unit: what the partition counts.
    """

    tensor: int
    pipeline: int
    data: int
    partition: tuple[int, ...]
    micro_batch: int
    flags: tuple[str, ...]
    microbatches: int = 1
    places: tuple[tuple[str, int], ...] = ()
    step_s: float | None = None
    pace: Mapping[str, float] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    unit: str = "layers"

    @property
    def is_to_be_measured(self) -> bool:
        """Returns whether the model has to be measured first."""
        return not self.partition

    @property
    def identity(self) -> tuple[object, ...]:
        """Returns what two layouts differ in, however they were chosen."""
        nodes = [name for name, _ in self.places]
        degrees = self.tensor, self.pipeline, self.data, self.widths
        return *degrees, self.partition, self.micro_batch, nodes

    @property
    def world_size(self) -> int:
        """Processes that it takes."""
        if self.widths:
            return self.tensor * sum(self.widths)
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        if self.is_to_be_measured:
            return f"{self.world_size} {MEASURES}"
        replicas = "-".join(map(str, self.widths or (self.data,)))
        text = f"PP {self.pipeline} x DP {replicas}"
        if self.tensor > 1:
            text += f" x TP {self.tensor}"
        text = f"{text}, {self.unit} {format_partition(self.partition)}"
        return text if self.step_s is None else f"{text}, micro-batch {self.micro_batch}"


class Chooser:
    """Chooses the layout of a job, by the rule of this module; others choose by a planner.

    Attributes:
        why: why the last call found none, empty where nothing is to be said.
    """

    why = ""

    async def choose(
        self, arguments: Sequence[str], offers: Sequence[Offer]
    ) -> ParallelLayout | None:
        """Chooses the best layout.

        Args:
            arguments: of the trainer, as the user gave them.
            offers: the nodes, in the order of the ranks where the chooser has no other.

        Returns:
            The layout, ``None`` where none fits.
        """
        return choose_layout(arguments, offers)

    def is_better(self, layout: ParallelLayout, running: ParallelLayout) -> bool:
        """Returns whether a job should leave a layout for another one.

        Args:
            layout: the other one.
            running: the present one.
        """
        if layout.step_s is not None and running.step_s is not None:
            return layout.step_s < (1 - WORTH_A_MORPH) * running.step_s
        if layout.step_s is not None:  # the planner had no answer in time before
            return layout.identity != running.identity
        return layout.world_size > running.world_size


def choose_layout(arguments: Sequence[str], offers: Sequence[Offer]) -> ParallelLayout | None:
    """Chooses a layout by the rule above.

    Args:
        arguments: of the trainer, as the user gave them.
        offers: the nodes, in the order of the ranks.

    Returns:
        The layout, ``None`` where none fits.

    Raises:
        ConfigError: the arguments break a rule in every layout of any size; says the first.
    """
    asked = as_asked(arguments)
    tensor = asked.parallel.tensor_model_parallel_size
    by_rank = [one.slowness for one in offers for _ in range(one.slots // tensor * tensor)]
    usable = len(by_rank) // tensor
    for replicas, pipeline in _degrees(asked, usable):
        for chunks in dict.fromkeys((asked.parallel.num_chunks, 1)):
            stages = pipeline * chunks
            if stages > asked.model.num_layers:
                continue
            partition = nearly_even_split(asked.model.num_layers, stages)
            if chunks == 1 and len(set(by_rank)) > 1:
                weights = _by_stage(by_rank, pipeline, replicas * tensor)
                partition = _weighted_split(asked.model.num_layers, weights)
            layout = _layout(asked, arguments, pipeline, replicas, partition)
            if layout is not None:
                return layout
    return None


def relative_time(layout: ParallelLayout, slowness: Sequence[float]) -> float:
    """Estimates a step's time, in forwards and backwards of one layer and sample.

    Args:
        layout: the layout.
        slowness: of the node of each rank.
    """
    layers: Sequence[float] = layout.partition
    if layout.widths:
        ends = list(accumulate(layout.widths, initial=0))
        # Each replica has one of so many microbatches.
        paces = [
            count * max(slowness[begin:end]) / (end - begin)
            for count, (begin, end) in zip(layers, pairwise(ends), strict=True)
        ]
        microbatches = layout.microbatches * layout.widths[0]
        return (microbatches + layout.pipeline - 1) * layout.micro_batch * max(paces)
    weights = _by_stage(slowness, layout.pipeline, layout.world_size // layout.pipeline)
    if len(layers) != layout.pipeline:  # several chunks on a rank
        layers = [sum(layers) / layout.pipeline] * layout.pipeline
    pace = max(count * slow for count, slow in zip(layers, weights, strict=True))
    return (layout.microbatches + layout.pipeline - 1) * layout.micro_batch * pace


def _by_stage(by_rank: Sequence[float], pipeline: int, width: int) -> list[float]:
    """Returns the slowness of each pipeline rank: all of its processes wait for the slowest."""
    return [max(by_rank[at * width : (at + 1) * width]) for at in range(pipeline)]


def _weighted_split(num_layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Splits layers over stages, one at least, so that the slowest is as quick as it can be.

    Layer by layer to the stage that is done first with it, an inner one where that is open.
    """
    count = len(weights)
    given = [1] * count
    for _ in range(num_layers - count):
        best = min(
            range(count), key=lambda at: ((given[at] + 1) * weights[at], -min(at, count - 1 - at))
        )
        given[best] += 1
    return tuple(given)


def as_asked(arguments: Sequence[str]) -> TrainerConfig:
    """Reads the arguments for the smallest world in which they are sound.

    Its size does not matter here: degrees are taken apart from it.

    Raises:
        ConfigError: they break a rule in every world of up to 8 replicas; says the first.
    """
    words = list(arguments)
    if _SIZES in flags_in(words):
        raise ConfigError(
            f"{_SIZES}: a job that changes layout chooses the ranks of its stages; leave it out, or"
            " see --unequal"
        )
    first: ConfigError | None = None
    for replicas in (1, *range(2, 9)):
        try:
            unit = _unit(words)
            return parse(words, world_size=unit * replicas, last_wins=True)
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def _unit(words: Sequence[str]) -> int:
    """Counts the processes of one replica by the flags."""
    unit = 1
    for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        value = last_value(words, name) or "1"
        unit *= natural(value) or 1
    return unit


def _degrees(asked: TrainerConfig, usable: int) -> Iterator[tuple[int, int]]:
    """Lists replicas and pipeline ranks on so many groups of tensor-parallel ranks, best first."""
    per_replica = asked.batch.global_batch_size // asked.batch.micro_batch_size
    meant = asked.parallel.pipeline_model_parallel_size
    found = [
        (replicas, pipeline)
        for pipeline in range(1, min(usable, asked.model.num_layers) + 1)
        for replicas in range(1, usable // pipeline + 1)
        if per_replica % replicas == 0
    ]

    def rank(degrees: tuple[int, int]) -> tuple[int, bool, int]:
        replicas, pipeline = degrees
        return -replicas * pipeline, pipeline < meant, abs(pipeline - meant)

    return iter(sorted(found, key=rank))


def _layout(
    asked: TrainerConfig,
    arguments: Sequence[str],
    pipeline: int,
    replicas: int,
    partition: tuple[int, ...],
) -> ParallelLayout | None:
    """Makes a layout of degrees, ``None`` where the trainer would refuse its flags."""
    tensor = asked.parallel.tensor_model_parallel_size
    chunks = len(partition) // pipeline
    if pipeline == 1 and chunks > 1:
        return None
    flags = ["--pipeline-model-parallel-size", str(pipeline)]
    if asked.parallel.num_chunks > 1 or chunks > 1:
        flags += ["--model-chunks", str(chunks)]
    flags += ["--partition", format_partition(partition)]
    try:
        parse([*arguments, *flags], world_size=tensor * pipeline * replicas, last_wins=True)
    except ConfigError:
        return None
    return ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        data=replicas,
        partition=partition,
        micro_batch=asked.batch.micro_batch_size,
        microbatches=asked.batch.global_batch_size // (asked.batch.micro_batch_size * replicas),
        flags=tuple(flags),
    )
