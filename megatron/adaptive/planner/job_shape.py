"""Chooses the shape of a job whose processes are there already.

Other than ``search``, which picks nodes and their order, this takes every process, in the order of
their ranks. What is left is small, and is looked at whole:

::

    pipeline sizes      x   microbatches            partition              time
    that divide the         that divide a           exact: the least       ``cost.predict``, best
    processes               replica's samples       largest stage that     bound first
                                                    fits into memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import ConfigError, ScheduleError
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

_RUNTIME = Runtime(context_bytes=0.0)  # limits of memory are of what is free


@dataclass(frozen=True, kw_only=True)
class Running:
    """A job and what it trains.

    Attributes:
        model: its pieces.
        cluster: its nodes; their memory is what a process may use.
        order: numbers of the nodes in the order of the ranks.
        batch: samples of a step over all replicas.
        schedule: order of work.
        chunks: stages of each process, where the schedule leaves the choice.
        whole: durations with whole backwards.
        split: those with split ones, where several ranks split them.
        cap: most activations that a process keeps under a rule, in microbatches; the rule's own
            where ``None``.
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
        """Returns the placement of the stages."""
        return catalog.placement_for(self.schedule, pipeline_size, self.chunks)

    def inputs(self, pipeline_size: int) -> PlanInputs:
        """Returns model, cluster and the durations of a pipeline of that size."""
        profile = self.whole if pipeline_size == 1 or self.split is None else self.split
        return PlanInputs(self.model, self.cluster, profile)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One shape of the job.

    Attributes:
        pipeline_size: processes of a pipeline.
        replicas: pipelines.
        micro_batch_size: samples of a microbatch.
        partition: pieces of each stage.
        seconds: predicted for a step.
        needed_bytes: of the process whose memory is fullest.
        limit_bytes: what that one may use.
        fullest: its position in the pipeline.
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
        """Whether memory suffices."""
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
    most: int = 0,
) -> list[Option]:
    """Returns the best shape and the next best ones, as far as their steps were timed.

    Args:
        running: the job.
        pipeline_sizes: to choose from; empty for all.
        micro_batches: likewise.
        partition: returns that of so many stages where it is given, ``None`` where not.
        most: samples of the largest microbatch, where none is given.

    Raises:
        ConfigError: no shape divides processes and samples, or none fits into memory.
    """
    untimed = []
    for size, micro_batch in _shapes(running, pipeline_sizes, micro_batches, most):
        try:
            made = _Shape(running, size, micro_batch)
            untimed.append((made, made.best(partition(made.placement.num_stages))))
        except ScheduleError:
            continue  # not with so few microbatches
    if not untimed:
        raise ConfigError(_nothing_divides(running, pipeline_sizes, micro_batches))
    fitting = [(shape, one) for shape, one in untimed if one.fits]
    if not fitting:
        raise ConfigError(_nothing_fits([one for _, one in untimed]))
    found: list[Option] = []
    for shape, one in sorted(fitting, key=lambda pair: pair[1].seconds):
        # What is there of seconds is a bound yet.
        if len(found) > 1 and one.seconds >= sorted(f.seconds for f in found)[1]:
            break
        try:
            found.append(replace(one, seconds=shape.seconds(one.partition)))
        except ScheduleError:
            continue
    if not found:
        raise ConfigError(_nothing_divides(running, pipeline_sizes, micro_batches))
    return sorted(found, key=lambda one: one.seconds)


def _shapes(
    running: Running, pipeline_sizes: Sequence[int], micro_batches: Sequence[int], most: int
) -> Iterator[tuple[int, int]]:
    """Returns the pipeline sizes and microbatches that divide what there is."""
    world = running.cluster.num_gpus
    for size in pipeline_sizes or range(1, world + 1):
        if world % size or running.batch % (world // size):
            continue
        if running.placement(size).num_stages > running.model.num_layers:
            continue
        share = running.batch // (world // size)
        for micro_batch in micro_batches or range(1, min(share, most) + 1):
            if share % micro_batch == 0:
                yield size, micro_batch


class _Shape:
    """A pipeline size and a microbatch on the job's processes."""

    def __init__(self, running: Running, size: int, micro_batch: int) -> None:
        self._running = running
        self.placement = running.placement(size)
        self._size, self._micro_batch = size, micro_batch
        self._replicas = running.cluster.num_gpus // size
        self._count = running.batch // (self._replicas * micro_batch)
        self._places = place_ranks(
            running.cluster, running.order, tp=1, dp=self._replicas, pp=size,
            micro_batch=micro_batch,
        )  # fmt: skip
        self._held = in_flight(running.schedule, size, self.placement.num_chunks, self._count)
        if running.cap is not None and catalog.is_rule(running.schedule):
            self._held = (min(running.cap, float(self._count)),) * size
        self._ranks = [self._rank(rank) for rank in range(size)]

    def _rank(self, rank: int) -> tuple[Any, Any, float]:
        """Returns seconds and bytes, ``[pieces + 1, pieces + 1]``, of runs of pieces; the limit."""
        running = self._running
        count = running.model.num_layers
        seconds, needed = np.zeros((2, count + 1, count + 1))
        nodes = [running.cluster.nodes[one.node] for one in self._places[rank].replicas]
        for node in {one.name: one for one in nodes}.values():
            inputs = running.inputs(self._size)
            table = layer_table(inputs, node, tp=1, micro_batch=self._micro_batch)
            seconds = np.maximum(
                seconds, range_sums(table.forward_s + table.backward_s + table.weight_s)
            )
            memory = stage_memory(
                running.model,
                parameters=range_sums(table.parameters),
                kept_bytes=range_sums(table.kept_bytes),
                held=self._held[rank],
                workspace_bytes=range_largest(table.workspace_bytes),
                limit_bytes=node.memory_bytes,
                runtime=_RUNTIME,
            )
            needed = np.maximum(needed, memory.total_bytes)
        return seconds, needed, min(one.memory_bytes for one in nodes)

    def best(self, given: tuple[int, ...] | None) -> Option:
        """Returns the best partition, or the given one, with a bound of its seconds.

        Where none fits into memory, the one that is best without regard to it.
        """
        partition = given
        if partition is None:
            partition = self._divide(bounded=True) or self._divide(bounded=False)
        assert partition is not None, "there are as many pieces as stages"
        needed, busy, begin = [0.0] * self._size, [0.0] * self._size, 0
        for stage, pieces in enumerate(partition):
            rank, end = self.placement.locate(stage)[0], begin + pieces
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
        """Divides the pieces; with several chunks on a rank, each gets its part of the memory."""
        costs = []
        for stage in range(self.placement.num_stages):
            seconds, needed, limit = self._ranks[self.placement.locate(stage)[0]]
            share = limit / self.placement.num_chunks
            costs.append(np.where(needed <= share, seconds, np.inf) if bounded else seconds)
        return least_largest(costs)

    def seconds(self, partition: tuple[int, ...]) -> float:
        """Predicts a step."""
        running, chunks = self._running, self.placement.num_chunks
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
        return predict(plan, running.inputs(self._size), _RUNTIME).seconds


def least_largest(costs: Sequence[Any]) -> tuple[int, ...] | None:
    """Divides pieces so that the largest stage is as small as possible; ``None`` if none can be.

    Exact. Of several such divisions the one with the least sum of squares.

    Args:
        costs: of each stage ``[pieces + 1, pieces + 1]``: what it costs from one piece up to
            before another; infinite where it may not have them.
    """
    size = costs[0].shape[0]
    some = np.triu(np.ones((size, size), dtype=bool), 1)
    costs = [np.where(some, one, np.inf) for one in costs]
    largest = np.full(size, np.inf)
    largest[0] = 0.0
    for one in costs:
        largest = np.maximum(largest[:, None], one).min(axis=0)
    if not np.isfinite(largest[-1]):
        return None
    squares = np.full(size, np.inf)
    squares[0] = 0.0
    origins = []
    for one in costs:
        kept = np.where(one <= largest[-1], one, np.inf)
        total = squares[:, None] + kept * kept
        origins.append(total.argmin(axis=0))
        squares = total.min(axis=0)
    end, parts = size - 1, []
    for origin in reversed(origins):
        begin = int(origin[end])
        parts.append(end - begin)
        end = begin
    return tuple(reversed(parts))


def least_largest_of(weights: Sequence[float], num_stages: int) -> tuple[int, ...] | None:
    """Divides pieces of known weight likewise; ``None`` if there are too few.

    Args:
        weights: of each piece.
        num_stages: each of one piece at least.
    """
    return least_largest([range_sums(weights)] * num_stages)


def _nothing_divides(
    running: Running, pipeline_sizes: Sequence[int], micro_batches: Sequence[int]
) -> str:
    world = running.cluster.num_gpus
    sizes, samples = (", ".join(map(str, one)) or "any" for one in (pipeline_sizes, micro_batches))
    return (
        f"a batch of {running.batch} samples on {_counted(world, 'process', 'es')}, pipeline_size "
        f"{sizes}, micro_batch_size {samples}, schedule {running.schedule} and "
        f"{running.model.num_layers} segments: no pipeline size divides the processes, leaves each "
        "replica whole microbatches and each stage a segment; give a batch_size that is a multiple "
        f"of {world}, or mark more cut points"
    )


def _nothing_fits(options: Sequence[Option]) -> str:
    best = min(options, key=lambda one: one.needed_bytes - one.limit_bytes)
    return (
        f"no pipeline size and microbatch fits into memory: nearest is {best}, where process "
        f"{best.fullest} of a pipeline needs {best.needed_bytes / 1e9:.3g} GB of "
        f"{best.limit_bytes / 1e9:.3g} GB; start more processes, mark more cut points, or give a "
        "smaller batch_size"
    )


def _counted(count: int, name: str, plural: str = "s") -> str:
    return f"{count} {name}{'' if count == 1 else plural}"
