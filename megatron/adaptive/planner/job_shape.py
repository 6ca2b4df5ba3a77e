"""Chooses pipeline size, microbatch size and partition for a job with running processes.

Unlike ``search``, which chooses nodes and their order, this module uses every process in rank
order. Few combinations remain, so all of them are tried. The model is a list of pieces. A piece is
a part of the model between two possible stage boundaries (cut points)::

    for each pipeline size that divides the processes:
        for each microbatch size that divides a replica's samples:
            partition = the partition that fits into memory and whose slowest stage is fastest
            bound     = number of microbatches x the slowest rank's time per microbatch

    predict step times, lowest bound first, until no remaining bound is below the second-best
    predicted step time

:func:`least_largest` finds the best partition by dynamic programming.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.planner.choose_partition import charged_wholly, improved
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layer_costs import (
    Runtime,
    in_flight,
    layer_table,
    range_largest,
    range_sums,
    stage_memory,
)
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import PlanInputs, Profile
from megatron.adaptive.schedule import catalog
from megatron.adaptive.schedule.stage_placement import Placement

# The memory limit of a process is the free memory after its device context was created, so the
# context must not be counted again.
_RUNTIME = Runtime(context_bytes=0.0)
# Number of options whose partitions are improved by simulation if the model has frozen layers.
_REFINED = 2
# Approximate number of predictions needed to improve the partition of one option.
_SEARCHED = 50


@dataclass(frozen=True, kw_only=True)
class Running:
    """A running job, with its model and the measured times of the model.

    Attributes:
        model: Model as a list of pieces (parts between two cut points).
        cluster: Nodes of the job. The memory size of a GPU is the memory that a process may use.
        order: Indices of the nodes in rank order.
        batch: Number of samples per step over all replicas.
        schedule: Name of the pipeline schedule.
        chunks: Number of stages per process. This field is used only if the schedule leaves the
            choice to the user.
        whole: Times of the pieces if weight gradients are computed within the backward pass.
        split: Times of the pieces if a separate pass computes weight gradients, or ``None`` if the
            schedule has no such pass. These times are used for pipelines with several processes.
        cap: Maximum amount of activations that a process may hold under a run-time scheduling rule,
            or ``None`` for the rule's default. The unit is the size of one microbatch's activations
            in all stages of the process.
    """

    model: Model
    cluster: Cluster
    order: tuple[int, ...]
    batch: int
    schedule: str
    chunks: int
    whole: Profile
    split: Profile | None = None
    cap: float | None = None

    def placement(self, pipeline_size: int) -> Placement:
        """Returns the placement of stages on the ``pipeline_size`` processes of a pipeline."""
        return catalog.placement_for(self.schedule, pipeline_size, self.chunks)

    def inputs(self, pipeline_size: int) -> PlanInputs:
        """Returns model, cluster and layer times for pipelines of ``pipeline_size`` processes."""
        profile = self.whole if pipeline_size == 1 or self.split is None else self.split
        return PlanInputs(self.model, self.cluster, profile)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A choice of pipeline size, microbatch size and partition, with predicted time and memory.

    Attributes:
        pipeline_size: Number of processes per pipeline.
        replicas: Number of pipelines (data-parallel replicas).
        micro_batch_size: Number of samples per microbatch.
        partition: Number of pieces (parts between cut points) of each stage.
        seconds: Predicted step time in seconds. Before the prediction, a lower bound of the step
            time.
        needed_bytes: Memory in bytes that the process with the least free memory needs.
        limit_bytes: Memory in bytes that the process with the least free memory may use.
        fullest: Index, within its pipeline, of the process with the least free memory.
    """

    pipeline_size: int
    replicas: int
    micro_batch_size: int
    partition: tuple[int, ...]
    seconds: float
    needed_bytes: float
    limit_bytes: float
    fullest: int = 0

    @property
    def fits(self) -> bool:
        """Whether every process has enough memory."""
        return self.needed_bytes <= self.limit_bytes

    def __str__(self) -> str:
        return (
            f"{_counted(self.replicas, 'pipeline')} of "
            f"{_counted(self.pipeline_size, 'process', 'es')}, microbatches of "
            f"{_counted(self.micro_batch_size, 'sample')}, segments "
            f"{format_partition(self.partition)}"
        )


def choose_option(
    running: Running,
    *,
    pipeline_sizes: Sequence[int] = (),
    micro_batches: Sequence[int] = (),
    partition: Callable[[int], tuple[int, ...] | None] = lambda num_stages: None,
    least: int = 1,
    most: int = 0,
) -> list[Option]:
    """Finds the fastest combinations of pipeline size, microbatch size and partition for a job.

    Args:
        running: Running job, with its model and nodes.
        pipeline_sizes: Pipeline sizes to choose from, or empty for all possible sizes.
        micro_batches: Microbatch sizes in samples to choose from, or empty for all sizes from
            ``least`` to ``most``.
        partition: Function that takes a number of stages and returns the user's partition, or
            ``None`` if the user did not set a partition.
        least: Minimum number of samples per microbatch.
        most: Maximum number of samples per microbatch.

    Returns:
        Options whose step times were predicted, starting with the fastest.

    Raises:
        ConfigError: No pipeline size divides the processes and samples, or no option fits into
            memory.
    """
    untimed = []
    sizes = range(least, most + 1)
    for size, micro_batch in _shapes(running, pipeline_sizes, micro_batches, sizes):
        try:
            shape = _Shape(running, size, micro_batch)
            untimed.append((shape, shape.best(partition(shape.placement.num_stages))))
        except ScheduleError:
            continue  # Skip sizes with fewer microbatches per step than the schedule needs.
    if not untimed:
        raise ConfigError(_nothing_divides(running, pipeline_sizes, micro_batches))
    fitting = [(shape, option) for shape, option in untimed if option.fits]
    if not fitting:
        raise ConfigError(_nothing_fits([option for _, option in untimed]))
    # If the model has frozen layers, some partitions are improved by simulation, which needs
    # additional predictions.
    count = len(fitting) + (_REFINED * _SEARCHED if running.model.frozen_layers else 0)
    timed: list[tuple[_Shape, Option]] = []
    for shape, option in sorted(fitting, key=lambda pair: pair[1].seconds):
        # Options are sorted by ``option.seconds``, which is still a lower bound here, so no later
        # option can be among the two fastest.
        if len(timed) > 1 and option.seconds >= sorted(other.seconds for _, other in timed)[1]:
            break
        try:
            timed.append((shape, replace(option, seconds=shape.seconds(option.partition, count))))
        except ScheduleError:
            continue
    if not timed:
        raise ConfigError(_nothing_divides(running, pipeline_sizes, micro_batches))
    timed.sort(key=lambda pair: pair[1].seconds)
    options = [option for _, option in timed]
    for index, (shape, option) in enumerate(timed[:_REFINED]):
        if running.model.frozen_layers and partition(shape.placement.num_stages) is None:
            options[index] = shape.refined(option, count)
    return sorted(options, key=lambda option: option.seconds)


def _shapes(
    running: Running, pipeline_sizes: Sequence[int], micro_batches: Sequence[int], sizes: range
) -> Iterator[tuple[int, int]]:
    """Yields the pairs of pipeline size and microbatch size that divide processes and samples.

    ``sizes`` contains the microbatch sizes to try if ``micro_batches`` is empty.
    """
    world = running.cluster.num_gpus
    for size in pipeline_sizes or range(1, world + 1):
        if world % size or running.batch % (world // size):
            continue
        if running.placement(size).num_stages > running.model.num_layers:
            continue
        share = running.batch // (world // size)
        for micro_batch in micro_batches or sizes:
            if share % micro_batch == 0:
                yield size, micro_batch


class _Shape:
    """A pipeline size and a microbatch size, with the costs of all possible stages.

    Args:
        running: Running job, with its model and nodes.
        size: Number of processes per pipeline.
        micro_batch: Number of samples per microbatch.
    """

    def __init__(self, running: Running, size: int, micro_batch: int) -> None:
        self._running = running
        self.placement = running.placement(size)
        self._size, self._micro_batch = size, micro_batch
        self._replicas = running.cluster.num_gpus // size
        self._count = running.batch // (self._replicas * micro_batch)
        self._places = place_ranks(
            running.cluster,
            running.order,
            tp=1,
            dp=self._replicas,
            pp=size,
            micro_batch=micro_batch,
        )
        self._held = in_flight(running.schedule, size, self.placement.num_chunks, self._count)
        if running.cap is not None and catalog.is_rule(running.schedule):
            self._held = (min(running.cap, float(self._count)),) * size
        self._ranks = [self._rank(rank) for rank in range(size)]

    def _rank(self, rank: int) -> tuple[Any, Any, float]:
        """Returns time and memory of every range of pieces on a rank, and the rank's memory limit.

        The arrays of times in seconds and memory in bytes have shape ``[pieces + 1, pieces + 1]``.
        They are indexed by the first piece and the end of the range.
        """
        running = self._running
        count = running.model.num_layers
        seconds, needed = np.zeros((2, count + 1, count + 1))
        nodes = [running.cluster.nodes[replica.node] for replica in self._places[rank].replicas]
        for node in {node.name: node for node in nodes}.values():
            inputs = running.inputs(self._size)
            table = layer_table(inputs, node, tp=1, micro_batch=self._micro_batch)
            seconds = np.maximum(
                seconds, range_sums(table.forward_s + table.backward_s + table.weight_s)
            )
            memory = stage_memory(
                running.model,
                parameters=range_sums(table.parameters),
                frozen_parameters=range_sums(table.frozen_parameters),
                kept_bytes=range_sums(table.kept_bytes),
                held=self._held[rank],
                workspace_bytes=range_largest(table.workspace_bytes),
                limit_bytes=node.memory_bytes,
                runtime=_RUNTIME,
            )
            needed = np.maximum(needed, memory.total_bytes)
        return seconds, needed, min(node.memory_bytes for node in nodes)

    def best(self, fixed: tuple[int, ...] | None) -> Option:
        """Returns the option with the best partition for this pipeline size and microbatch size.

        The option's ``seconds`` is a lower bound of the step time, not a prediction.

        If no partition fits into memory, the partition that would be best without a memory limit is
        returned.

        Args:
            fixed: User's partition, or ``None`` to choose a partition.
        """
        partition = fixed
        if partition is None:
            partition = self._divide(bounded=True) or self._divide(bounded=False)
        assert partition is not None, "there are as many pieces as stages"
        needed = [0.0] * self._size
        busy = [0.0] * self._size
        begin = 0
        for stage, pieces in enumerate(partition):
            rank = self.placement.locate(stage)[0]
            end = begin + pieces
            needed[rank] += float(self._ranks[rank][1][begin, end])
            busy[rank] += float(self._ranks[rank][0][begin, end])
            begin = end
        limits = [limit for _, _, limit in self._ranks]
        fullest = max(range(self._size), key=lambda rank: needed[rank] - limits[rank])
        return Option(
            pipeline_size=self._size,
            replicas=self._replicas,
            micro_batch_size=self._micro_batch,
            partition=partition,
            seconds=max(busy) * self._count,
            needed_bytes=needed[fullest],
            limit_bytes=limits[fullest],
            fullest=fullest,
        )

    def _divide(self, *, bounded: bool) -> tuple[int, ...] | None:
        """Returns the partition whose slowest stage is fastest, or ``None`` if no partition fits.

        Args:
            bounded: Whether the partition must fit into memory. If a rank has several stages, each
                of them may use an equal part of the rank's memory.
        """
        costs = []
        for stage in range(self.placement.num_stages):
            seconds, needed, limit = self._ranks[self.placement.locate(stage)[0]]
            share = limit / self.placement.num_chunks
            costs.append(np.where(needed <= share, seconds, np.inf) if bounded else seconds)
        return least_largest(costs)

    def refined(self, option: Option, predictions: int) -> Option:
        """Improves the partition of ``option`` by simulating similar partitions.

        If layers are frozen, a partition whose slowest stage is as fast as possible may not be the
        fastest, because forward passes of frozen layers can run while a process would otherwise
        wait.

        Args:
            option: Option whose partition is improved.
            predictions: Number of predictions that will be made for this job.
        """

        def step_s(partition: tuple[int, ...]) -> float:
            if min(partition) < 1 or not self.best(partition).fits:
                return math.inf
            return self.seconds(partition, predictions)

        each_s = np.diagonal(self._ranks[0][0], 1).tolist()
        costs = charged_wholly(each_s, self._running.model.frozen_layers)
        wholly = least_largest_of(costs, self.placement.num_stages)
        assert wholly is not None, "there are as many pieces as stages"
        partition, seconds = improved((option.partition, wholly), step_s)
        return replace(self.best(partition), seconds=seconds)

    def seconds(self, partition: tuple[int, ...], predictions: int) -> float:
        """Returns the predicted step time with the given ``partition``, in seconds.

        Args:
            partition: Number of pieces in each stage.
            predictions: Number of predictions that will be made for this job.
        """
        running = self._running
        chunks = self.placement.num_chunks
        plan = Plan(
            tp=1,
            dp=self._replicas,
            pp=self._size,
            micro_batch=self._micro_batch,
            global_batch=running.batch,
            partition=partition,
            places=self._places,
            chunks=chunks,
            schedule=running.schedule,
        )
        inputs = running.inputs(self._size)
        return predict(plan, inputs, _RUNTIME, predictions=predictions).seconds


def least_largest(costs: Sequence[Any]) -> tuple[int, ...] | None:
    """Divides pieces among stages so that the most expensive stage costs as little as possible.

    Among equally good divisions, the one with the smallest sum of squared costs is chosen. For
    example, pieces with costs 3 1 1 4 are divided into 3 1 | 1 4 on two stages, with stage costs 4
    and 5.

    Dynamic programming proceeds stage by stage. The best division of the first pieces among k
    stages extends the best division of fewer pieces among k - 1 stages.

    Args:
        costs: For each stage, the cost of every range of pieces, ``[pieces + 1, pieces + 1]``,
            indexed by the first piece and the end of the range. The cost is infinite if the range
            does not fit on the stage.

    Returns:
        Number of pieces of each stage (at least 1), or ``None`` if no division is possible.
    """
    size = costs[0].shape[0]
    is_range = np.triu(np.ones((size, size), dtype=bool), 1)
    costs = [np.where(is_range, stage_costs, np.inf) for stage_costs in costs]
    largest = np.full(size, np.inf)
    largest[0] = 0.0
    for stage_costs in costs:
        largest = np.maximum(largest[:, None], stage_costs).min(axis=0)
    if not np.isfinite(largest[-1]):
        return None
    squares = np.full(size, np.inf)
    squares[0] = 0.0
    origins = []
    for stage_costs in costs:
        kept = np.where(stage_costs <= largest[-1], stage_costs, np.inf)
        total = squares[:, None] + kept * kept
        origins.append(total.argmin(axis=0))
        squares = total.min(axis=0)
    end = size - 1
    parts = []
    for origin in reversed(origins):
        begin = int(origin[end])
        parts.append(end - begin)
        end = begin
    return tuple(reversed(parts))


def least_largest_of(weights: Sequence[float], num_stages: int) -> tuple[int, ...] | None:
    """Divides pieces among stages so that the largest total weight of a stage is minimal.

    Args:
        weights: Weight of each piece, for example its duration.
        num_stages: Number of stages, each with at least one piece.

    Returns:
        Number of pieces in each stage, or ``None`` if there are fewer pieces than stages.
    """
    return least_largest([range_sums(weights)] * num_stages)


def _nothing_divides(
    running: Running, pipeline_sizes: Sequence[int], micro_batches: Sequence[int]
) -> str:
    """Returns the error message for the case that no sizes divide processes and samples evenly."""
    world = running.cluster.num_gpus
    sizes = ", ".join(map(str, pipeline_sizes)) or "any"
    samples = ", ".join(map(str, micro_batches)) or "any"
    return (
        f"no pipeline size divides {_counted(world, 'process', 'es')} evenly and gives each "
        f"replica whole microbatches and each stage a segment (batch_size {running.batch}, "
        f"pipeline_size {sizes}, micro_batch_size {samples}, schedule {running.schedule}, "
        f"{running.model.num_layers} segments between cut points); use a batch_size that is "
        f"a multiple of {world}, or mark more cut points"
    )


def _nothing_fits(options: Sequence[Option]) -> str:
    """Returns the error message for the case that none of ``options`` fits into memory."""
    best = min(options, key=lambda option: option.needed_bytes - option.limit_bytes)
    return (
        f"no pipeline and microbatch size fit into memory: the closest is {best}, where process "
        f"{best.fullest} of a pipeline needs {best.needed_bytes / 1e9:.3g} GB but has "
        f"only {best.limit_bytes / 1e9:.3g} GB; start more processes, mark more cut points, or use "
        "a smaller batch_size"
    )


def _counted(count: int, name: str, plural: str = "s") -> str:
    """Returns ``count`` followed by ``name``, in the plural unless ``count`` is 1."""
    return f"{count} {name}{'' if count == 1 else plural}"
