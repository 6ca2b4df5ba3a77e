"""Chooses the layout of a job for the available nodes.

Without ``--plan-with``, a simple rule chooses a layout with as many processes as the batch size and
the number of layers allow. Among these layouts, the rule prefers the smallest pipeline size that is
at least the size on the command line. If there is none, it prefers the largest pipeline size. Sizes
below the one on the command line are avoided, because the model may not fit in memory with fewer
stages. The global batch size never changes. Nodes known to be slow get fewer layers. With
``--plan-with``, the planner chooses the layout (see ``layout_planner``).
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
"""Minimum predicted saving that makes a job change its layout, as a fraction of the step time."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Node that a layout may use, with its capacity and speed.

    Attributes:
        name: Name of the node.
        slots: Number of processes that the node may run.
        hosts: Host names of the node's machine. The last entry is the name that the machine itself
            reports.
        slowness: Ratio of the node's computing time to the expected time; 1 if unknown.
    """

    name: str
    slots: int
    hosts: tuple[str, ...] = ()
    slowness: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Describes how ranks share the model and the batch, and contains the matching trainer flags.

    Attributes:
        tensor: Tensor-parallel size.
        pipeline: Pipeline-parallel size.
        data: Number of replicas (data-parallel size). If ``widths`` is not empty, it is the number
            of replicas of the first stage.
        partition: Number of layers of each stage; empty if the model must be measured first.
        micro_batch: Number of samples per microbatch.
        microbatches: Number of microbatches per step for each replica of the first stage.
        flags: Trainer flags, which are appended to the user's own flags.
        places: Pairs of a node's name and the maximum number of processes on this node, ordered by
            rank. If it is empty, all nodes are used in the manager's order.
        step_s: Step time that the planner predicts, in seconds, or ``None`` without the planner.
        pace: Computing time per layer on each node, keyed by node name, in an arbitrary unit; empty
            without the planner.
        widths: Number of replicas of each stage; empty if all stages have the same number.
        unit: Name of the model parts that ``partition`` counts, such as ``layers`` or ``segments``.
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
        """Returns whether this layout's ranks only measure the model, before any training."""
        return not self.partition

    @property
    def identity(self) -> tuple[object, ...]:
        """Returns a key that is the same for equal layouts, even if different rules chose them."""
        nodes = [name for name, _ in self.places]
        degrees = self.tensor, self.pipeline, self.data, self.widths
        return *degrees, self.partition, self.micro_batch, nodes

    @property
    def world_size(self) -> int:
        """Returns the number of processes in the layout."""
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
    """Chooses the layout of a job by a simple rule. Subclasses may use a planner instead.

    Attributes:
        why: Reason why the last call of :meth:`choose` returned no layout; may be empty.
    """

    why = ""

    async def choose(
        self, arguments: Sequence[str], offers: Sequence[Offer]
    ) -> ParallelLayout | None:
        """Chooses the best layout for the nodes in ``offers`` and returns it.

        Args:
            arguments: The user's arguments for the trainer.
            offers: Available nodes. They get ranks in this order. A subclass may order the
                nodes differently.

        Returns:
            The layout, or ``None`` if no layout fits the nodes.
        """
        return choose_layout(arguments, offers)

    def is_better(self, layout: ParallelLayout, running: ParallelLayout) -> bool:
        """Returns whether a job with the layout ``running`` should switch to ``layout``.

        Args:
            layout: Layout that the job could change to.
            running: Current layout of the job.
        """
        if layout.step_s is not None and running.step_s is not None:
            return layout.step_s < (1 - WORTH_A_MORPH) * running.step_s
        if layout.step_s is not None:  # The running layout was chosen without the planner.
            return layout.identity != running.identity
        return layout.world_size > running.world_size


def choose_layout(arguments: Sequence[str], offers: Sequence[Offer]) -> ParallelLayout | None:
    """Chooses a layout by a simple rule, without a planner, and returns it.

    The rule prefers the layout with the most processes. Among layouts with the same number of
    processes, it prefers the smallest pipeline size that is at least the requested size, and then
    the largest one below the requested size.

    Args:
        arguments: The user's arguments for the trainer.
        offers: Available nodes. They get ranks in this order.

    Returns:
        The layout, or ``None`` if no layout fits the nodes.

    Raises:
        ConfigError: The arguments are invalid for every layout. The message contains the first
            reason.
    """
    config = parse_requested(arguments)
    tensor = config.parallel.tensor_model_parallel_size
    by_rank = [offer.slowness for offer in offers for _ in range(offer.slots // tensor * tensor)]
    usable = len(by_rank) // tensor
    for replicas, pipeline in _degrees(config, usable):
        for chunks in dict.fromkeys((config.parallel.num_chunks, 1)):
            stages = pipeline * chunks
            if stages > config.model.num_layers:
                continue
            partition = nearly_even_split(config.model.num_layers, stages)
            if chunks == 1 and len(set(by_rank)) > 1:
                weights = _by_stage(by_rank, pipeline, replicas * tensor)
                partition = _weighted_split(config.model.num_layers, weights)
            layout = _layout(config, arguments, pipeline, replicas, partition)
            if layout is not None:
                return layout
    return None


def relative_time(layout: ParallelLayout, slowness: Sequence[float]) -> float:
    """Estimates the step time of ``layout``, as a multiple of the time per layer and sample.

    The time per layer and sample is the duration of the forward and backward pass of one sample
    through one layer.

    Args:
        layout: Layout whose step time is estimated.
        slowness: Ratio of the computing time of each rank's node to the expected time, indexed by
            rank.
    """
    layers: Sequence[float] = layout.partition
    if layout.widths:
        ends = list(accumulate(layout.widths, initial=0))
        # A stage's replicas share the microbatches, so more replicas make the stage faster.
        paces = [
            count * max(slowness[first_rank:end_rank]) / (end_rank - first_rank)
            for count, (first_rank, end_rank) in zip(layers, pairwise(ends), strict=True)
        ]
        microbatches = layout.microbatches * layout.widths[0]
        return (microbatches + layout.pipeline - 1) * layout.micro_batch * max(paces)
    weights = _by_stage(slowness, layout.pipeline, layout.world_size // layout.pipeline)
    if len(layers) != layout.pipeline:  # Each rank runs several model chunks.
        layers = [sum(layers) / layout.pipeline] * layout.pipeline
    pace = max(count * slow for count, slow in zip(layers, weights, strict=True))
    return (layout.microbatches + layout.pipeline - 1) * layout.micro_batch * pace


def _by_stage(by_rank: Sequence[float], pipeline: int, width: int) -> list[float]:
    """Returns the slowness of each stage: that of its slowest rank."""
    return [max(by_rank[stage * width : (stage + 1) * width]) for stage in range(pipeline)]


def _weighted_split(num_layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Splits ``num_layers`` layers into stages so that the slowest stage is as fast as possible.

    ``weights`` contains the time per layer of each stage. Each stage gets at least one layer. Each
    further layer is assigned to the stage that would take the shortest time with this layer. In
    case of a tie, the stage closest to the middle of the pipeline gets the layer.
    """
    count = len(weights)
    layers = [1] * count
    for _ in range(num_layers - count):
        best = min(
            range(count),
            key=lambda stage: (
                (layers[stage] + 1) * weights[stage],
                -min(stage, count - 1 - stage),
            ),
        )
        layers[best] += 1
    return tuple(layers)


def parse_requested(arguments: Sequence[str]) -> TrainerConfig:
    """Parses the trainer's arguments with the smallest world size for which they are valid.

    This world size is not used later, because the layout sets the world size and the parallel
    sizes.

    Raises:
        ConfigError: The arguments are invalid for every number of replicas from 1 to 8. The message
            contains the first reason.
    """
    flags = list(arguments)
    if _SIZES in flags_in(flags):
        raise ConfigError(
            f"{_SIZES} cannot be used in a job that changes its layout, because the job chooses "
            "the ranks of its stages; remove it, or use --unequal instead"
        )
    first: ConfigError | None = None
    for replicas in (1, *range(2, 9)):
        try:
            unit = _unit(flags)
            return parse(flags, world_size=unit * replicas, last_wins=True)
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise first


def _unit(flags: Sequence[str]) -> int:
    """Returns the number of processes per replica: the tensor size times the pipeline size."""
    unit = 1
    for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        value = last_value(flags, name) or "1"
        unit *= natural(value) or 1
    return unit


def _degrees(config: TrainerConfig, usable: int) -> Iterator[tuple[int, int]]:
    """Yields the possible pairs ``(number of replicas, pipeline size)``, sorted by preference.

    ``usable`` is the number of tensor-parallel groups that the available processes can form.
    """
    per_replica = config.batch.global_batch_size // config.batch.micro_batch_size
    meant = config.parallel.pipeline_model_parallel_size
    degree_pairs = [
        (replicas, pipeline)
        for pipeline in range(1, min(usable, config.model.num_layers) + 1)
        for replicas in range(1, usable // pipeline + 1)
        if per_replica % replicas == 0
    ]

    def rank(degrees: tuple[int, int]) -> tuple[int, bool, int]:
        replicas, pipeline = degrees
        return -replicas * pipeline, pipeline < meant, abs(pipeline - meant)

    return iter(sorted(degree_pairs, key=rank))


def _layout(
    config: TrainerConfig,
    arguments: Sequence[str],
    pipeline: int,
    replicas: int,
    partition: tuple[int, ...],
) -> ParallelLayout | None:
    """Creates a layout with the given sizes, or returns ``None`` if the trainer rejects it."""
    tensor = config.parallel.tensor_model_parallel_size
    chunks = len(partition) // pipeline
    if pipeline == 1 and chunks > 1:
        return None
    flags = ["--pipeline-model-parallel-size", str(pipeline)]
    if config.parallel.num_chunks > 1 or chunks > 1:
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
        micro_batch=config.batch.micro_batch_size,
        microbatches=config.batch.global_batch_size // (config.batch.micro_batch_size * replicas),
        flags=tuple(flags),
    )
