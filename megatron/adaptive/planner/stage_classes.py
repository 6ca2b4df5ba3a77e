"""Prepares the search: groups equivalent stages into classes, and computes the costs of stages.

A cluster has a huge number of possible plans, but most of them are equivalent, because nodes of the
same type are interchangeable. This module exploits this equivalence in two steps:

1. *Classes* (:func:`stage_classes`). A class describes how many nodes of each type a stage uses,
   and the stage's parallel sizes, but not which nodes are used. If a stage needs only a part of a
   node, the stages of a class form *blocks* that fill a node. For example, a node with 4 GPUs holds
   a block of 2 stages with 2 GPUs each.
2. *Arrays* (:class:`Tables`). A *shape* is a combination of parallel sizes, microbatch size,
   recomputation and optimizer. For each shape, arrays contain the time and memory of stages of
   every class with every range of layers. They are computed by the same functions as predictions,
   so search and prediction agree on every plan.

``search_levels`` enumerates the orders in which stages of these classes can follow each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.planner.cluster import Cluster, NodeType
from megatron.adaptive.planner.layer_costs import (
    LayerTable,
    layer_table,
    range_largest,
    range_sums,
    stage_memory,
)
from megatron.adaptive.planner.link_costs import (
    all_reduce_s,
    boundary_s,
    embedding_s,
    exposed_reduce_s,
    link_of_types,
    link_within,
    reduction,
)
from megatron.adaptive.planner.plan import StagePlace, StageSettings, place_stage
from megatron.adaptive.planner.profile import PlanInputs

_MOST_MIXED = 8
"""Maximum number of stage classes with several nodes per stage for each combination of parallel
sizes.
"""


@dataclass(frozen=True)
class StageClass:
    """A set of interchangeable stages with the same parallel sizes on nodes of the same types.

    Attributes:
        nodes: For each node type in the cluster, the number of nodes that a block of stages fills.
        tp: Tensor-parallel size, which is the number of GPUs per replica.
        dp: Number of replicas, where each rank that shares a sequence counts as a replica.
        micro_batch: Number of samples per microbatch on each replica.
        block: Number of stages in a block, which is a group of stages that together fill their
            nodes.
    """

    nodes: tuple[int, ...]
    tp: int
    dp: int
    micro_batch: int
    block: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Tensor-parallel size, number of replicas and samples per microbatch of a stage."""
        return self.tp, self.dp, self.micro_batch


def stage_classes(
    cluster: Cluster, *, tp: int, dp: int, micro_batch: int
) -> tuple[StageClass, ...]:
    """Returns the classes of the stages with tensor-parallel size ``tp`` and ``dp`` replicas.

    A stage uses an equal part of a node, or several whole nodes, which may have different types. If
    node types can be mixed in many ways, only mixtures of few types are returned.
    """
    counts = [group.count for group in cluster.groups]
    gpus = [group.type.gpus for group in cluster.groups]
    usable = [group.type.gpus % tp == 0 for group in cluster.groups]
    size = tp * dp
    limits = [count if fits else 0 for count, fits in zip(counts, usable, strict=True)]
    within, several = list[StageClass](), list[StageClass]()
    for index, each in enumerate(gpus):
        nodes = tuple(max(size // each, 1) * (i == index) for i in range(len(gpus)))
        if usable[index] and each % size == 0:
            within.append(StageClass(nodes, tp, dp, micro_batch, each // size))
        elif size % each == 0 and size // each <= limits[index]:
            several.append(StageClass(nodes, tp, dp, micro_batch, 1))
    mixtures = (nodes for nodes in _mixtures(size, gpus, limits) if sum(map(bool, nodes)) > 1)
    for nodes in itertools.islice(mixtures, max(4 * _MOST_MIXED - len(several), 0)):
        several.append(StageClass(nodes, tp, dp, micro_batch, 1))
    if len(several) > _MOST_MIXED:
        several.sort(key=lambda stage_class: sum(count > 0 for count in stage_class.nodes))
        several = several[:_MOST_MIXED]
    return (*within, *several)


def take_nodes(free: list[int], first: int, count: int, kind: NodeType) -> list[int]:
    """Takes ``count`` nodes of one type from ``free``, from a single island if possible.

    An island is a group of GPUs with fast links between them.

    Args:
        free: Indices of the free nodes of the type, in ascending order. Indices of taken nodes are
            removed.
        first: Index of the first node of this type in the cluster.
        count: Number of nodes to take.
        kind: Type of the nodes.

    Returns:
        Indices of the taken nodes, in ascending order.
    """
    taken = free[:count]
    if island := kind.island(count * kind.gpus) if count else None:
        nodes_per_island = max(island[0] // kind.gpus, 1)
        by_island = itertools.groupby(free, key=lambda node: (node - first) // nodes_per_island)
        for _, group in by_island:
            if len(nodes := list(group)) >= count:
                taken = nodes[:count]
                break
    free[:] = [node for node in free if node not in taken]
    return taken


def _mixtures(size: int, gpus: Sequence[int], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields all combinations of nodes with exactly ``size`` GPUs, as numbers of nodes per type."""
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


@dataclass(frozen=True, kw_only=True)
class ShapeChoice(StageSettings):
    """Settings that all stages of a plan share, and the number of microbatches per step.

    Attributes:
        microbatches: Number of microbatches per step. If sequences are cut into slices, this is the
            total number of slices.
    """

    microbatches: int

    @property
    def of_plan(self) -> dict[str, Any]:
        """Settings that all stages share, as keyword arguments for ``Plan``."""
        return {item.name: getattr(self, item.name) for item in fields(StageSettings)}


class Totals(NamedTuple):
    """Total times and sizes of all layers, as if a single stage on one node type held them all.

    Attributes:
        work_s: Duration of a microbatch's forward and backward pass, in seconds.
        least_s: Shortest forward pass of any layer except the first and the last, in seconds.
        way_s: Time in seconds from the start of a microbatch to the end of its backward pass.
            Weight gradients that are computed in a separate pass are excluded.
        after_s: Lower bound of the time for gradient reduction and optimizer, in seconds.
        held_bytes: Size in bytes of weights, gradients and optimizer state.
        kept_bytes: Size in bytes of the activations that a microbatch keeps for its backward pass.
        stay: Lower bound of the size of a microbatch's activations, multiplied by the time that
            they stay in memory, in byte-seconds.
    """

    work_s: float
    least_s: float
    way_s: float
    after_s: float
    held_bytes: float
    kept_bytes: float
    stay: float


class LayerRanges(NamedTuple):
    """Times and sizes of a stage on one node type, for all ranges of layers.

    Each array has shape ``[n + 1, n + 1]``, indexed by the first layer of a range and the layer
    after its last layer.

    Attributes:
        forward: Duration of a forward pass in seconds.
        backward: Duration of a backward pass in seconds, excluding weight gradients.
        weight: Time for computing the weight gradients, in seconds.
        launch: Part of ``forward`` that is spent launching kernels, in seconds. ``backward``
            contains the same launch time.
        trained: Number of trained parameters per GPU, including experts.
        experts: Number of parameters per GPU that belong to experts.
        base: Memory in bytes that does not depend on microbatches, minus the memory limit. The
            value is infinite if the layers of the range must not be on the same stage.
        kept: Size in bytes of the activations that a microbatch keeps.
    """

    forward: Any
    backward: Any
    weight: Any
    launch: Any
    trained: Any
    experts: Any
    base: Any
    kept: Any


class Tables:
    """Computes arrays with the costs of all possible stages, and caches intermediate results.

    Args:
        inputs: Model, cluster and profile of layer times.
    """

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs = inputs
        self.model, self.cluster, self.profile = inputs.model, inputs.cluster, inputs.profile
        self._first = np.concatenate(
            [[0], np.cumsum([group.count for group in inputs.cluster.groups])]
        ).tolist()
        self._kept: dict[Any, Any] = {}
        n = inputs.model.num_layers
        cuts = np.arange(n + 1)
        crossing = np.zeros((n + 1, n + 1), dtype=bool)
        for split in inputs.model.splits:
            crossing |= (cuts[:, None] < split) & (cuts[None, :] > split)
        self.crossing = crossing
        outputs = [inputs.model.layer(i).output_elements for i in range(n)]
        self._sizes = [0.0, *(size * inputs.model.precision.element_bytes for size in outputs)]

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Returns the cached result for ``key``, or calls ``compute`` and caches its result."""
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def place(self, stage_class: StageClass, skip: tuple[int, ...] = ()) -> StagePlace | None:
        """Assigns GPUs to a stage of a class, on the first nodes of each type that the class uses.

        Args:
            stage_class: Class of the stage.
            skip: For each node type, the number of nodes to skip at the beginning. If empty, no
                nodes are skipped.

        Returns:
            GPUs of the stage, or ``None`` if the cluster has too few nodes.
        """
        nodes: list[int] = []
        for index, count in enumerate(stage_class.nodes):
            begin = self._first[index] + (skip[index] if skip else 0)
            if begin + count > self._first[index + 1]:
                return None
            nodes += range(begin, begin + count)
        key = ("place", stage_class, skip)
        widths = stage_class.widths
        stage_place: StagePlace = self._once(key, lambda: place_stage(self.cluster, nodes, *widths))
        return stage_place

    def types(self, stage_class: StageClass) -> list[NodeType]:
        """Returns the node types that stages of the class ``stage_class`` use."""
        return [
            group.type
            for group, count in zip(self.cluster.groups, stage_class.nodes, strict=True)
            if count
        ]

    def layers(self, node: NodeType, stage_class: StageClass, choice: ShapeChoice) -> LayerTable:
        """Returns the times and memory sizes of all layers on the node type ``node``.

        Raises:
            ConfigError: The profile does not contain the time of a layer.
        """
        others = self.types(stage_class) if stage_class.nodes else ()
        return layer_table(
            self.inputs,
            node,
            tp=stage_class.tp,
            micro_batch=stage_class.micro_batch,
            settings=choice,
            others=others,
        )

    def totals(
        self, node: NodeType, stage_class: StageClass, choice: ShapeChoice, whole: bool = True
    ) -> Totals:
        """Returns total times and memory sizes of all layers, as if a single stage held them all.

        Args:
            node: Type of the stage's nodes.
            stage_class: Class of the stage.
            choice: Settings of the stage.
            whole: Whether the backward pass also computes weight gradients. If false, a separate
                pass computes them.
        """
        table = self.layers(node, stage_class, choice)
        key = (
            id(table),
            "totals",
            stage_class,
            choice.distributed_optimizer,
            choice.overlap_reduce,
            whole,
        )
        totals: Totals = self._once(
            key, lambda: self._totals(table, node, stage_class, choice, whole)
        )
        return totals

    def _totals(
        self,
        table: LayerTable,
        node: NodeType,
        stage_class: StageClass,
        choice: ShapeChoice,
        whole: bool,
    ) -> Totals:
        work = table.forward_s + table.backward_s + table.weight_s
        way = table.forward_s + table.backward_s + whole * table.weight_s - 2 * table.launch_s
        parameters = float(table.parameters.sum())
        frozen = float(table.frozen_parameters.sum())
        trained = parameters - frozen
        experts = float(table.expert_parameters.sum())
        updated = choice.state_parameters(trained, experts, stage_class.dp)
        after = updated * self.inputs.optimizer_s([node])
        if not choice.overlap_reduce:
            alike = trained - (experts if choice.expert_ranks > 1 else 0.0)
            after += self._least_reduce_s(stage_class, alike * self.model.precision.reduce_bytes)
        held = stage_memory(
            self.model,
            parameters=parameters,
            expert_parameters=experts,
            frozen_parameters=frozen,
            dp=stage_class.dp,
            settings=choice,
            context_bytes=0.0,
        )
        least = (table.forward_s - table.launch_s)[1:-1].min(initial=np.inf)
        return Totals(
            work_s=float(work.sum()),
            least_s=float(least) if math.isfinite(least) else 0.0,
            way_s=float(way.sum()),
            after_s=after,
            held_bytes=float(held.total_bytes),
            kept_bytes=float(table.kept_bytes.sum()),
            # The activations of a layer stay in memory while all later layers run their forward and
            # backward passes.
            stay=float((table.kept_bytes * way[::-1].cumsum()[::-1]).sum()),
        )

    def _least_reduce_s(self, stage_class: StageClass, size: float) -> float:
        """Returns a lower bound, in seconds, of the time to reduce gradients of ``size`` bytes."""
        if stage_class.block > 1 or sum(stage_class.nodes) == 1:
            stage_place = self.place(stage_class)
            if stage_place is None:
                return 0.0
            return reduction((stage_place,), 0, self.inputs)(size)
        # A ring over several nodes uses links between nodes to enter and to leave each node. The
        # slowest of these links limits the ring.
        types = self.types(stage_class)
        if len(types) == 1:
            link = link_within(self.inputs, types[0], sum(stage_class.nodes) * types[0].gpus)
            return all_reduce_s(link, size, stage_class.dp, stage_class.tp)
        ways = [link_of_types(self.inputs, a, b) for a, b in itertools.permutations(types, 2)]
        return min(all_reduce_s(way, size, stage_class.dp, stage_class.tp) for way in ways)

    def fits_split(self, classes: Sequence[StageClass], choice: ShapeChoice) -> bool:
        """Returns whether sequence parallelism never increases the memory that ``choice`` needs.

        In this case, the search skips ``choice`` and tries only its variant with sequence
        parallelism, which is always at least as fast.
        """
        parallel = replace(choice, sequence_parallel=True)
        for stage_class in classes:
            for node in self.types(stage_class):
                off, on = (self.layers(node, stage_class, way) for way in (choice, parallel))
                saved = off.kept_bytes - on.kept_bytes
                more = on.workspace_bytes - off.workspace_bytes
                if (saved < 0).any() or (more > saved).any():
                    return False
        return True

    def pipeline_s(self, stage_class: StageClass, choice: ShapeChoice) -> float:
        """Returns the time in seconds of a microbatch in all layers, on the slowest node type."""
        return max(
            self.totals(node, stage_class, choice).work_s for node in self.types(stage_class)
        )

    def arrays(self, classes: Sequence[StageClass], choice: ShapeChoice) -> dict[str, Any]:
        """Returns the costs of all stages, keyed by field name of ``search_kernel.ShapeArrays``."""
        rows = [self._class(stage_class, choice) for stage_class in classes]
        tables = max(len(row["base"]) for row in rows)
        for row in rows:
            for name in ("base", "kept"):
                # All classes need the same number of tables in the array. If a class has fewer
                # tables, its first table is repeated, which does not change the result.
                row[name] += row[name][:1] * (tables - len(row[name]))
        arrays = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        arrays["launch"] = arrays["launch"].swapaxes(0, 1)
        arrays["latency"], arrays["occupancy"], arrays["tied"] = self._between(classes, choice)
        # Numba compiles the kernel again for every memory layout, so all arrays are made
        # contiguous.
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def _class(self, stage_class: StageClass, choice: ShapeChoice) -> dict[str, Any]:
        """Returns the costs of the stages of one class, keyed by field name of ``ShapeArrays``."""
        nodes = self.types(stage_class)
        rows = [self.ranges(node, stage_class, choice) for node in nodes]
        action = self.inputs.action_s(nodes)
        forward = np.maximum.reduce([row.forward for row in rows])
        inputs = np.maximum.reduce([row.backward for row in rows])
        weight = np.maximum.reduce([row.weight for row in rows])
        # The launch time is computed as in predictions, so that search and predictions agree. It is
        # the maximum over node types of the time with kernel launches, minus the maximum of the
        # time without kernel launches.
        forward_work = np.maximum.reduce([row.forward - row.launch for row in rows])
        inputs_work = np.maximum.reduce([row.backward - row.launch for row in rows])
        action_s = np.triu(np.ones_like(forward), 1) * action
        forward = forward + action_s
        backward = inputs + weight + action_s
        first = rows[0]
        return {
            "forward": forward,
            "backward": backward,
            "weight": weight,
            "launch": np.array([forward - forward_work, inputs + action_s - inputs_work]),
            "after": self._after(stage_class, choice, first.trained, first.experts, backward),
            "base": [row.base for row in rows],
            "kept": [row.kept for row in rows],
        }

    def ranges(self, node: NodeType, stage_class: StageClass, choice: ShapeChoice) -> LayerRanges:
        """Returns the times and sizes of all ranges of layers on the node type ``node``."""
        table = self.layers(node, stage_class, choice)
        names = (
            "forward_s",
            "backward_s",
            "weight_s",
            "launch_s",
            "parameters",
            "expert_parameters",
            "frozen_parameters",
            "kept_bytes",
        )
        forward, backward, weight, launch, parameters, experts, frozen, kept = (
            self._once((id(table), name), partial(range_sums, getattr(table, name)))
            for name in names
        )
        need = stage_memory(
            self.model,
            parameters=parameters,
            expert_parameters=experts,
            frozen_parameters=frozen,
            workspace_bytes=range_largest(table.workspace_bytes),
            dp=stage_class.dp,
            settings=choice,
            limit_bytes=node.memory_bytes,
            context_bytes=self.profile.context_bytes.get(node.gpu),
        )
        base = np.where(self.crossing, np.inf, need.total_bytes - node.memory_bytes)
        trained = parameters - frozen
        return LayerRanges(forward, backward, weight, launch, trained, experts, base, kept)

    def _after(
        self,
        stage_class: StageClass,
        choice: ShapeChoice,
        parameters: Any,
        experts: Any,
        backward: Any,
    ) -> Any:
        """Returns the time for gradient reduction and optimizer step for each range of layers.

        The array has shape ``[n + 1, n + 1]`` and contains times in seconds.
        """
        ranks = choice.expert_ranks

        def reduced() -> Any:
            stage_place = self.place(stage_class)
            assert stage_place is not None
            shared = parameters - experts if ranks > 1 else parameters
            whole = np.zeros_like(parameters)
            for part, stride in ((shared, 1), (experts, ranks))[: 1 + (ranks > 1)]:
                # Many ranges of layers have the same sum, up to rounding, so compute the time for
                # each distinct sum only once.
                values, where = np.unique(np.round(part, 3), return_inverse=True)
                sizes = np.maximum(values, 0.0) * self.model.precision.reduce_bytes
                times = list(map(reduction((stage_place,), 0, self.inputs, stride), sizes.tolist()))
                whole = whole + np.array(times)[where].reshape(parameters.shape)
            return whole

        whole = self._once(
            ("reduce", stage_class.nodes, stage_class.tp, stage_class.dp, ranks), reduced
        )
        if choice.overlap_reduce:
            count = parameters.shape[0]
            layers = np.arange(count)[None, :] - np.arange(count)[:, None]
            whole = exposed_reduce_s(whole, backward, np.maximum(layers, 1))
        updated = choice.state_parameters(parameters, experts, stage_class.dp)
        return whole + np.maximum(updated, 0.0) * self.inputs.optimizer_s(self.types(stage_class))

    def _between(self, classes: Sequence[StageClass], choice: ShapeChoice) -> tuple[Any, Any, Any]:
        """Returns latency, occupancy and tied-embedding time for each pair of stage classes."""
        number = len(classes)
        sliced = choice.sequence_parallel
        latency, occupancy = np.zeros((2, 2, 2, number, number, len(self._sizes)))
        tied = np.zeros((2, number, number))
        sizes, where = np.unique(self._sizes, return_inverse=True)
        numbered = list(enumerate(classes))
        for (a, sender), (b, receiver), kind in itertools.product(numbered, numbered, range(2)):
            first = self.place(sender)
            second = first if kind else self.place(receiver, skip=sender.nodes)
            if first is None or second is None or (kind and a != b):
                # Skip this combination of classes and kind of boundary, because no pipeline
                # contains it.
                continue
            if not kind or sender.block > 1:
                # Each rank that shares a sequence sends only its part of the sequence. If sequences
                # are cut into slices, a message contains one slice.
                share = choice.share_of(self.model.sequence) / choice.context_ranks
                parts = [float(size) * share for size in sizes]
                rows = [
                    self._once(
                        ("message", sender, receiver, kind, size, sliced),
                        partial(boundary_s, first, second, self.inputs, size, sliced=sliced),
                    )
                    for size in parts
                ]
                # A message takes the same time in both directions, so store the same values for
                # both.
                latency[:, kind, a, b], occupancy[:, kind, a, b] = np.array(rows)[where].T
            if self.model.tied_parameters:
                # The cache key omits the microbatch size, because the embedding's size does not
                # depend on it.
                widths = (sender.tp, sender.dp, receiver.tp, receiver.dp)
                tied[kind, a, b] = self._once(
                    ("tied", sender.nodes, receiver.nodes, widths, kind),
                    partial(embedding_s, (first, second), self.inputs, sender.tp),
                )
        return latency, occupancy, tied


def only_partition(after: Any, partition: Sequence[int]) -> Any:
    """Returns ``after`` with infinity for each layer range that is not a stage of ``partition``.

    Args:
        after: Time for gradient reduction and optimizer in seconds, for each range of layers,
            ``[..., n + 1, n + 1]``.
        partition: Number of layers of each stage.
    """
    cuts = np.concatenate([[0], np.cumsum(partition)])
    allowed = np.zeros(after.shape[-2:], dtype=bool)
    allowed[cuts[:-1], cuts[1:]] = True
    return np.where(allowed, after, np.inf)


def most_rate(rates: Iterable[tuple[int, float, float]], most_stages: int) -> float:
    """Returns an upper bound for the sum of all stages' rates in a pipeline.

    The bound assumes that the fastest node types are used first, and that a stage could be divided
    freely among nodes of its type. Instead of rates, the values may be any additive quantity, such
    as memory in bytes.

    Args:
        rates: Tuples of three values: the index of a node type, the rate of one stage, and the
            number of stages that fit on all nodes of the type. A rate is in microbatches per
            second, or in bytes. A type may have several entries with different parallel sizes.
        most_stages: Maximum number of stages of a pipeline.
    """
    by_type: dict[int, tuple[float, float]] = {}
    for index, rate, stages in rates:
        fastest, most = by_type.get(index, (0.0, 0.0))
        # Take both maxima separately, because a node type may reach them with different parallel
        # sizes.
        fastest, most = max(fastest, rate), max(most, rate * stages)
        by_type[index] = (fastest, most)
    left = float(most_stages)
    whole = 0.0
    for fastest, most in sorted(by_type.values(), reverse=True):
        stages = min(most / fastest, left) if fastest else 0.0
        whole += fastest * stages
        left -= stages
    return max(whole, 1e-30)


def capacity_bound(
    tables: Tables, cluster: Cluster, classes: Sequence[StageClass], choice: ShapeChoice
) -> float:
    """Returns a lower bound, in seconds, for the step time of every plan on a cluster.

    For a time T in seconds, the function computes how many layers all stages together can process
    within T. If this number is less than the model's number of layers, no plan takes T or less.
    Bisection finds the largest such T. In this example, 10 layers run on two stages of type a,
    which need 1 s per layer for the whole step, and on one stage of type b, which needs 2 s per
    layer::

        T = 3 s    3 + 3 + 1 =  7 layers   too few
        T = 4 s    4 + 4 + 2 = 10 layers   enough, so the bound is 4 s

    A stage holds at most as many layers as fit into memory with one microbatch. Its time includes
    gradient reduction and optimizer. Each additional stage of a node type has to wait for the
    forward pass of one layer, so its available time is shorter by the duration of this pass. A
    stage on several node types counts as a stage of its slowest type. If stages have different
    parallel sizes, no bound is computed.

    Args:
        tables: Times and memory sizes of the layers.
        cluster: Cluster with its node types and numbers of nodes.
        classes: Stage classes that a pipeline may use.
        choice: Settings that all stages share.

    Returns:
        Lower bound in seconds, 0 if no bound was computed, or infinity if the layers do not fit
        into memory.
    """
    # Ignore the first and the last layer, because they may take almost no time.
    n = tables.model.num_layers - 2
    if n < 1 or len({stage_class.widths for stage_class in classes}) != 1:
        return 0.0
    types = list[tuple[float, Any]]()
    waits = math.inf
    any_node = replace(classes[0], nodes=(), block=1)
    for index, group in enumerate(cluster.groups):
        sums = [
            tables.totals(group.type, stage_class, choice)
            for stage_class in classes
            if stage_class.nodes[index]
        ]
        if sums:
            stages = group.count * group.type.gpus / (any_node.tp * any_node.dp)
            types.append((stages, _least_s(tables, group.type, any_node, choice, sums)))
            waits = min(waits, min(totals.least_s for totals in sums))
    waits = waits if math.isfinite(waits) else 0.0
    finite = [float(row[np.isfinite(row)].max(initial=0.0)) for _, row in types]
    low = 0.0
    high = max(finite, default=0.0) + waits * n
    if not high or _most_layers(high, types, waits) < n:
        return math.inf
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        is_enough = _most_layers(middle, types, waits) >= n
        low, high = (low, middle) if is_enough else (middle, high)
    return low


def _most_layers(seconds: float, types: Sequence[tuple[float, Any]], waits: float) -> int:
    """Returns the maximum number of layers that all stages together process in ``seconds``.

    A stage counts as a stage of its slowest node type. Stages of a slow type may therefore also use
    nodes of faster types, but not the reverse. The k fastest types together have at most as many
    stages as fit on their nodes. With such nested limits, the sets of stages form a matroid, so a
    greedy choice is optimal: the stages that process the most layers are taken first.

    Args:
        seconds: Time limit per step, in seconds.
        types: For each node type, the number of stages and the result of ``_least_s``.
        waits: Delay in seconds between the starts of successive stages of a node type.
    """
    order = sorted(types, key=lambda entry: float(entry[1].min(initial=np.inf)))
    rooms = [int(each + 1e-9) for each in itertools.accumulate(stages for stages, _ in order)]
    gains = []
    for index, (_, row) in enumerate(order):
        # The second stage may not have to wait, like the first stage, because the first stage may
        # hold only the model's first layer, which is ignored here.
        left = seconds - waits * np.maximum(np.arange(min(rooms[index], len(row) + 2)) - 1, 0)
        gains += [(int(each), index) for each in np.searchsorted(row, left, side="right")]
    total = 0
    for each, index in sorted(gains, reverse=True):
        if min(rooms[index:]) > 0:
            total += each
            rooms[index:] = [room - 1 for room in rooms[index:]]
    return total


def _least_s(
    tables: Tables,
    node: NodeType,
    stage_class: StageClass,
    choice: ShapeChoice,
    sums: Sequence[Totals],
) -> Any:
    """Returns the minimum step time of a stage in seconds for each number of layers.

    The first and the last layer of the model are ignored.

    Args:
        tables: Times and memory sizes of the layers.
        node: Type of the stage's nodes.
        stage_class: Parallel sizes of the stage.
        choice: Settings of the stage.
        sums: Totals of the stage classes that use this node type. They include the time for
            gradient reduction and the optimizer step.

    Returns:
        Array ``[n - 2]``, where n is the number of layers of the model. Its entries are the times
        in seconds of stages with 1, 2, ... layers. An entry is infinite if no stage with this
        number of layers fits into memory.
    """
    ranges = tables.ranges(node, stage_class, choice)
    after_s = min(totals.after_s for totals in sums)
    each = after_s / max(float(ranges.trained[0, -1]), 1.0)
    whole = choice.microbatches * (ranges.forward + ranges.backward + ranges.weight)
    whole = whole + each * ranges.trained
    whole = np.where(ranges.base + ranges.kept <= 0, whole, np.inf)
    whole = whole[1:-1, 1:-1]
    least = np.array([np.diagonal(whole, size).min() for size in range(1, whole.shape[0])])
    return np.maximum.accumulate(least)
