"""Defines the space of a search: options, objective, classes of stages, and plans found.

Stages of a class are alike whatever nodes of those types they get. A class whose GPUs are part of
one node comes in blocks: as many stages of the class in a row as the node holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.model import RECOMPUTE
from megatron.adaptive.planner.plan import Plan, Replica, StagePlace

__all__ = [
    "Best",
    "Collector",
    "Found",
    "Objective",
    "SearchOptions",
    "SearchResult",
    "StageClass",
    "place_on",
    "stage_classes",
]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Choices that are open to the search.

    Attributes:
        tp: tensor-parallel widths; empty for all that fit into a node. Likewise ``dp``, ``pp`` and
            ``micro_batch``.
        dp: numbers of replicas.
        pp: numbers of pipeline ranks.
        micro_batch: samples of a microbatch.
        recompute: of ``model.RECOMPUTE``.
        distributed_optimizer: which of off and on.
        overlap_reduce: whether the run overlaps the gradient reduction.
        sequence_parallel: whether the run uses it.
        partition: layers of each stage, embedding and head included, if they are given.
        schedules: ``1f1b``, and ``interleaved`` to try that as well.
        all_nodes: whether every node has to be used.
        unequal: whether stages may have different widths; the trainer runs those of width 1.
        top: how many plans to return.
        most_leaves: pipelines to time for one shape and set of nodes.
        most_levels: see ``shapes.make_dp_states``.
        most_interleaved: interleaved pipelines to try.
        most_cpu_s: CPU seconds after which what was not looked at only counts in the gap.
    """

    tp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    recompute: tuple[str, ...] = RECOMPUTE
    distributed_optimizer: tuple[bool, ...] = (False, True)
    overlap_reduce: bool = False
    sequence_parallel: bool = False
    partition: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("1f1b",)
    all_nodes: bool = False
    unequal: bool = False
    top: int = 1
    most_leaves: int = 3000
    most_levels: int = 20_000
    most_interleaved: int = 12
    most_cpu_s: float = 45.0


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Least time or least cost.

    Attributes:
        least: ``time`` for seconds per step, ``cost`` for the price of a step.
        most_seconds_per_step: slower plans do not count.
        most_price_per_hour: dearer nodes do not count.
        most_price_per_step: plans whose step costs more do not count; a budget for a run, divided
            by its steps.

    Raises:
        ConfigError: a limit is not above 0.
    """

    least: Literal["time", "cost"] = "time"
    most_seconds_per_step: float = math.inf
    most_price_per_hour: float = math.inf
    most_price_per_step: float = math.inf

    def __post_init__(self) -> None:
        if self.least not in ("time", "cost"):
            raise ConfigError(f"objective is {self.least!r}: choose time or cost")
        for name in ("most_seconds_per_step", "most_price_per_hour", "most_price_per_step"):
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise ConfigError(f"{name} is {value:g}: it must be above 0")

    def value(self, seconds: float, price_per_hour: float) -> float:
        """Returns what is minimised."""
        return seconds if self.least == "time" else seconds * price_per_hour / 3600

    def most_seconds(self, price_per_hour: float, worst_value: float) -> float:
        """Returns the seconds below which a plan keeps the limits and beats ``worst_value``."""
        if price_per_hour > self.most_price_per_hour:
            return 0.0
        # A limit may be met exactly.
        most = math.nextafter(self.most_seconds_per_step, math.inf)
        hourly = price_per_hour / 3600
        if hourly:
            most = min(most, math.nextafter(self.most_price_per_step / hourly, math.inf))
        if self.least == "time":
            return min(most, worst_value)
        return min(most, worst_value / hourly) if hourly else most


@dataclass(frozen=True, kw_only=True)
class Found:
    """One plan found.

    Attributes:
        plan: the plan.
        seconds: of a step, as ``predict`` has them.
        price_per_hour: of its nodes.
        value: what the objective minimises.
    """

    plan: Plan
    seconds: float
    price_per_hour: float
    value: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Attributes:
        found: the best plans, best first; empty where nothing fits.
        bound: no 1F1B plan of the search space has a value below it.
        whole: whether the search space had every mixture and order of nodes; where not, the bound
            holds only for those that it had.
        shapes: choices of widths, microbatch and so on that were looked at.
        timed: pipelines timed exactly.
        configurations: shapes, lengths of pipelines and sets of nodes for which a bound was made.
    """

    found: tuple[Found, ...]
    bound: float
    whole: bool
    shapes: int
    timed: int
    configurations: int

    @property
    def gap(self) -> float:
        """Share of its value by which the best might at most be improved."""
        if not self.found or self.found[0].value <= 0:
            return 0.0
        return max(0.0, 1 - self.bound / self.found[0].value)


class Collector(Protocol):
    """Receiver of the plans of a search."""

    def value(self, seconds: float, price: float) -> float:
        """Returns the value by which goals are put in order."""

    def most_seconds(self, price: float) -> float:
        """Returns the seconds that a plan of that price per hour must stay below to matter."""

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Takes a plan; those with one key compete for one place."""


class Best:
    """The best plans so far, each shape and set of nodes once."""

    def __init__(self, top: int, objective: Objective) -> None:
        self.objective = objective
        self._top = top
        self._found: dict[Any, Found] = {}

    def value(self, seconds: float, price: float) -> float:
        """Returns what the objective minimises."""
        return self.objective.value(seconds, price)

    def worst_value(self) -> float:
        """Returns the value that a plan has to beat."""
        if len(self._found) < self._top:
            return math.inf
        return max(one.value for one in self._found.values())

    def most_seconds(self, price: float) -> float:
        """Returns the seconds that a plan of that price per hour must stay below to matter."""
        return self.objective.most_seconds(price, self.worst_value())

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        """Takes a plan; the worst goes where there are too many."""
        value = self.objective.value(seconds, price)
        old = self._found.get(key)
        if old is not None and old.value <= value:
            return
        self._found[key] = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        if len(self._found) > self._top:
            worst = max(self._found, key=lambda one: self._found[one].value)
            del self._found[worst]

    def sorted(self) -> list[Found]:
        """Returns the plans found, best first."""
        return sorted(self._found.values(), key=lambda one: one.value)


_MOST_MIXED = 8


@dataclass(frozen=True)
class StageClass:
    """One class of stages.

    Attributes:
        nodes: how many nodes of each type a block takes, in the order of the cluster's types.
        tp: tensor-parallel width.
        dp: replicas.
        micro_batch: samples of a microbatch of each replica.
        block: stages of a block.
    """

    nodes: tuple[int, ...]
    tp: int
    dp: int
    micro_batch: int
    block: int


def stage_classes(
    cluster: Cluster, *, tp: int, dp: int, micro_batch: int
) -> tuple[tuple[StageClass, ...], bool]:
    """Returns all classes of one width.

    Nodes are used whole: a stage takes an equal part of one node, or several nodes.

    Returns:
        The classes, and whether these are all: of very many mixtures only those of one or two types
        are kept.
    """
    counts = [group.count for group in cluster.groups]
    gpus = [group.type.gpus for group in cluster.groups]
    usable = [group.type.gpus % tp == 0 for group in cluster.groups]
    size = tp * dp
    found = []
    for index, each in enumerate(gpus):
        if usable[index] and each % size == 0:
            nodes = tuple(int(i == index) for i in range(len(gpus)))
            found.append(StageClass(nodes, tp, dp, micro_batch, each // size))
    limits = [count if fits else 0 for count, fits in zip(counts, usable, strict=True)]
    whole = True
    mixed: list[StageClass] = []
    for nodes in _mixtures(size, gpus, limits):
        if sum(nodes) < 2:
            continue
        if len(mixed) >= 4 * _MOST_MIXED:
            whole = False
            break
        mixed.append(StageClass(nodes, tp, dp, micro_batch, 1))
    if len(mixed) > _MOST_MIXED:
        whole = False
        mixed.sort(key=lambda one: sum(count > 0 for count in one.nodes))
        mixed = mixed[:_MOST_MIXED]
    return (*found, *mixed), whole


def _mixtures(size: int, gpus: Sequence[int], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields numbers of nodes of each type that have so many GPUs together, single types first."""
    if not gpus:
        if size == 0:
            yield ()
        return
    room = sum(limit * each for limit, each in zip(limits, gpus, strict=True))
    if room < size:
        return
    most = min(limits[0], size // gpus[0])
    for count in range(most, -1, -1):
        for rest in _mixtures(size - count * gpus[0], gpus[1:], limits[1:]):
            yield (count, *rest)


def place_on(
    cluster: Cluster, one: StageClass, nodes: Sequence[int], position: int = 0
) -> StagePlace:
    """Places a stage of a class on given nodes.

    Args:
        cluster: the nodes.
        one: the class.
        nodes: as many nodes of each type as the class takes, in the order of the ranks.
        position: which stage of the block.
    """
    slots = [(node, gpu) for node in nodes for gpu in range(cluster.nodes[node].gpus)]
    first = position * one.tp * one.dp
    replicas = tuple(
        Replica(node=slots[at][0], gpu=slots[at][1], tp=one.tp)
        for at in range(first, first + one.tp * one.dp, one.tp)
    )
    return StagePlace(replicas=replicas, micro_batch=one.micro_batch)
