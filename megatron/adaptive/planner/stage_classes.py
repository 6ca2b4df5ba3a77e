"""Classes of stages, and arrays of seconds and bytes of every class for every range of layers.

Stages of a class are alike whatever nodes of those types they get. A class whose GPUs are part of
one node comes in blocks: as many stages of the class in a row as the node holds.

One shape is one choice of widths, microbatch, recompute and optimizer; its arrays come from the
same functions as a prediction, so that both agree on every plan.

The states of the search's dynamic programming are every way in which the last stages of a pipeline
can stand on a cluster's nodes. A state is reached from the end of the pipeline. It knows the nodes
used, how many stages there are, the class of the foremost and how many more of the same class have
to come before another node may be opened. Orders of equal nodes that use the same nodes meet in one
state, so that there are few states where there are many orders.
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
    all_reduce_s,
    boundary_s,
    embedding_s,
    exposed_reduce_s,
    layer_table,
    link_of_types,
    link_within,
    range_largest,
    range_sums,
    reduction,
    stage_memory,
)
from megatron.adaptive.planner.plan import StagePlace, StageSettings, place_stage
from megatron.adaptive.planner.profile import PlanInputs

_FEW = 2000
_MOST_MIXED = 8


@dataclass(frozen=True)
class StageClass:
    """One class of stages.

    Attributes:
        nodes: how many nodes of each type a block takes, in the order of the cluster's types.
        tp: tensor-parallel width.
        dp: replicas; those that share a sequence count each.
        micro_batch: samples of a microbatch of each replica.
        block: stages of a block.
    """

    nodes: tuple[int, ...]
    tp: int
    dp: int
    micro_batch: int
    block: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Tensor-parallel width, replicas and samples of a microbatch."""
        return self.tp, self.dp, self.micro_batch


def stage_classes(
    cluster: Cluster, *, tp: int, dp: int, micro_batch: int
) -> tuple[StageClass, ...]:
    """Returns the classes of one width; of very many mixtures those of few types.

    Nodes are used whole: a stage takes an equal part of one node, or several nodes.
    """
    counts = [group.count for group in cluster.groups]
    gpus = [group.type.gpus for group in cluster.groups]
    usable = [group.type.gpus % tp == 0 for group in cluster.groups]
    size = tp * dp
    limits = [count if fits else 0 for count, fits in zip(counts, usable, strict=True)]
    found, mixed = list[StageClass](), list[StageClass]()
    for index, each in enumerate(gpus):
        alone = tuple(max(size // each, 1) * (i == index) for i in range(len(gpus)))
        if usable[index] and each % size == 0:
            found.append(StageClass(alone, tp, dp, micro_batch, each // size))
        elif size % each == 0 and size // each <= limits[index]:
            mixed.append(StageClass(alone, tp, dp, micro_batch, 1))
    several = (nodes for nodes in _mixtures(size, gpus, limits) if sum(map(bool, nodes)) > 1)
    for nodes in itertools.islice(several, max(4 * _MOST_MIXED - len(mixed), 0)):
        mixed.append(StageClass(nodes, tp, dp, micro_batch, 1))
    if len(mixed) > _MOST_MIXED:
        mixed.sort(key=lambda one: sum(count > 0 for count in one.nodes))
        mixed = mixed[:_MOST_MIXED]
    return (*found, *mixed)


def take_nodes(free: list[int], first: int, count: int, kind: NodeType) -> list[int]:
    """Takes the first free nodes of a type, within an island where so many do not leave it."""
    found = free[:count]
    if island := kind.island(count * kind.gpus) if count else None:
        many = max(island[0] // kind.gpus, 1)
        for _, group in itertools.groupby(free, key=lambda node: (node - first) // many):
            if len(those := list(group)) >= count:
                found = those[:count]
                break
    free[:] = [node for node in free if node not in found]
    return found


def _mixtures(size: int, gpus: Sequence[int], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields numbers of nodes of each type that have so many GPUs together."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class DpStates:
    """The levels, each after those that it stands on.

    Attributes:
        arrays: those of ``kernel.ShapeArrays`` that say what levels and edges are, by name.
        used: per level, nodes of each type.
        complete: levels that leave no node half used.
        placements: orders of nodes among the complete ones.
        whole: whether every order is among them.
    """

    arrays: dict[str, Any]
    used: tuple[tuple[int, ...], ...]
    complete: tuple[int, ...]
    placements: int
    whole: bool


def make_dp_states(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    *,
    most_stages: int,
    most_levels: int = 20_000,
) -> DpStates:
    """Finds all levels, or those of whole runs of equal nodes where there are too many.

    Args:
        classes: of stages.
        counts: nodes of each type.
        most_stages: longest pipeline.
        most_levels: above it, only runs of equal nodes are kept, so long that there are few levels.
    """
    run, most = 1, most_levels
    while True:
        found = _found_states(classes, counts, most_stages, most, run)
        if found is not None:
            return found
        # Without a proof a finer choice is hardly worth its time.
        run, most = run * 2, min(most, _FEW)


_Key = tuple[int, tuple[int, ...], int, int, int]


def _found_states(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    most_stages: int,
    most_levels: int,
    run: int,
) -> DpStates | None:
    """Finds the states; ``run``: blocks of a class that come one after the other, as nodes last."""
    # Key: stages behind, nodes used, class, stages left of the block, further blocks of the run.
    edges: dict[_Key, list[tuple[_Key | None, int]]] = {}
    wave: dict[_Key, None] = {}
    nothing = (0,) * len(counts)
    for key in _opened(classes, counts, nothing, 0, run):
        edges.setdefault(key, []).append((None, 0))
        wave[key] = None
    for _ in range(most_stages - 1):
        ahead: dict[_Key, None] = {}
        for key in wave:
            j, used, c, left, more = key
            kind = 0
            if left:
                steps, kind = [(j + 1, used, c, left - 1, more)], 1
            elif more:
                nodes = tuple(a + b for a, b in zip(used, classes[c].nodes, strict=True))
                steps = [(j + 1, nodes, c, classes[c].block - 1, more - 1)]
            else:
                steps = list(_opened(classes, counts, used, j + 1, run))
            for step in steps:
                edges.setdefault(step, []).append((key, kind))
                ahead[step] = None
        if len(edges) > most_levels and run < max(counts):
            return None
        wave = ahead
    return _pack(edges, run == 1)


def _opened(
    classes: Sequence[StageClass],
    counts: Sequence[int],
    used: tuple[int, ...],
    follow: int,
    run: int,
) -> list[_Key]:
    keys = []
    for c, one in enumerate(classes):
        room = min((n - u) // a for n, u, a in zip(counts, used, one.nodes, strict=True) if a)
        if room > 0:
            nodes = tuple(a + b for a, b in zip(used, one.nodes, strict=True))
            keys.append((follow, nodes, c, one.block - 1, min(run, room) - 1))
    return keys


def _count_orders(used: tuple[int, ...]) -> int:
    """Returns the distinct orders of so many nodes of each type."""
    orders = math.factorial(sum(used))
    for count in used:
        orders //= math.factorial(count)
    return orders


def _pack(edges: dict[_Key, list[tuple[_Key | None, int]]], whole: bool) -> DpStates:
    numbers = {key: number for number, key in enumerate(edges)}
    first, sources, kinds = [0], [], []
    for key in edges:
        for source, kind in edges[key]:
            if source is not None:
                sources.append(numbers[source])
                kinds.append(kind)
        first.append(len(sources))
    rows = {
        "level_class": [key[2] for key in edges],
        "level_follow": [key[0] for key in edges],
        "level_edges": first,
        "edge_from": sources,
        "edge_kind": kinds,
    }
    return DpStates(
        arrays={name: np.array(row, dtype=np.int64) for name, row in rows.items()},
        used=tuple(key[1] for key in edges),
        complete=tuple(numbers[key] for key in edges if not key[3]),
        placements=sum(_count_orders(key[1]) for key in edges if not key[3]),
        whole=whole,
    )


@dataclass(frozen=True, kw_only=True)
class ShapeChoice(StageSettings):
    """The settings of stages, and the number of microbatches of a step."""

    microbatches: int

    @property
    def of_plan(self) -> dict[str, Any]:
        """Those that a plan has under the same names."""
        return {one.name: getattr(self, one.name) for one in fields(StageSettings)}


class Totals(NamedTuple):
    """Sums over all layers, as if one stage on one type of node held them.

    Attributes:
        work_s: seconds of a microbatch.
        least_s: those of the shortest forward between the first layer and the last.
        way_s: seconds from the start of a microbatch to the end of its backward, which needs no
            weight gradients if these are split.
        after_s: reduction and optimizer, at least.
        held_bytes: weights, gradients and optimizer state.
        kept_bytes: of a microbatch from forward to backward.
        stay: bytes times seconds that they are kept, at least.
    """

    work_s: float
    least_s: float
    way_s: float
    after_s: float
    held_bytes: float
    kept_bytes: float
    stay: float


class Tables:
    """Makes the arrays and keeps what several shapes have in common.

    Args:
        inputs: what is trained where, and how long it takes.
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
        for at in inputs.model.splits:
            crossing |= (cuts[:, None] < at) & (cuts[None, :] > at)
        self.crossing = crossing
        outputs = [inputs.model.layer(i).output_elements for i in range(n)]
        self._sizes = [0.0, *(size * inputs.model.precision.element_bytes for size in outputs)]

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Computes something the first time that it is asked for."""
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def place(self, one: StageClass, skip: tuple[int, ...] = ()) -> StagePlace | None:
        """Places a stage of a class on the first nodes after ``skip``; None if too few are left."""
        nodes: list[int] = []
        for index, count in enumerate(one.nodes):
            begin = self._first[index] + (skip[index] if skip else 0)
            if begin + count > self._first[index + 1]:
                return None
            nodes += range(begin, begin + count)
        key = ("place", one, skip)
        found: StagePlace = self._once(key, lambda: place_stage(self.cluster, nodes, *one.widths))
        return found

    def types(self, one: StageClass) -> list[NodeType]:
        """Returns the node types of a class."""
        return [
            group.type for group, count in zip(self.cluster.groups, one.nodes, strict=True) if count
        ]

    def layers(self, node: NodeType, one: StageClass, choice: ShapeChoice) -> LayerTable:
        """Returns the durations and bytes of every layer.

        Raises:
            ConfigError: the profile lacks a duration.
        """
        others = self.types(one) if one.nodes else ()
        return layer_table(
            self.inputs,
            node,
            tp=one.tp,
            micro_batch=one.micro_batch,
            settings=choice,
            others=others,
        )

    def totals(
        self, node: NodeType, one: StageClass, choice: ShapeChoice, whole: bool = True
    ) -> Totals:
        """Returns sums over all layers.

        Args:
            node: type of node that all of them are on.
            one: class of stages.
            choice: what its stages share.
            whole: whether backwards are not split.
        """
        table = self.layers(node, one, choice)
        key = (id(table), "totals", one, choice.distributed_optimizer, choice.overlap_reduce, whole)
        found: Totals = self._once(key, lambda: self._totals(table, node, one, choice, whole))
        return found

    def _totals(
        self, table: LayerTable, node: NodeType, one: StageClass, choice: ShapeChoice, whole: bool
    ) -> Totals:
        work = table.forward_s + table.backward_s + table.weight_s
        way = table.forward_s + table.backward_s + whole * table.weight_s - 2 * table.launch_s
        parameters = float(table.parameters.sum())
        experts = float(table.expert_parameters.sum())
        updated = choice.state_parameters(parameters, experts, one.dp)
        after = updated * self.inputs.optimizer_s([node])
        if not choice.overlap_reduce:
            alike = parameters - (experts if choice.expert_ranks > 1 else 0.0)
            after += self._least_reduce_s(one, alike * self.model.precision.reduce_bytes)
        held = stage_memory(
            self.model,
            parameters=parameters,
            expert_parameters=experts,
            dp=one.dp,
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
            # A layer's activations stay while later layers go forward and back.
            stay=float((table.kept_bytes * way[::-1].cumsum()[::-1]).sum()),
        )

    def _least_reduce_s(self, one: StageClass, size: float) -> float:
        """Returns seconds that no reduction of a stage of a class is faster than."""
        if one.block > 1 or sum(one.nodes) == 1:
            place = self.place(one)
            return 0.0 if place is None else reduction((place,), 0, self.inputs)(size)
        # A ring enters and leaves each of its nodes.
        types = self.types(one)
        if len(types) == 1:
            link = link_within(self.inputs, types[0], sum(one.nodes) * types[0].gpus)
            return all_reduce_s(link, size, one.dp, one.tp)
        ways = [link_of_types(self.inputs, a, b) for a, b in itertools.permutations(types, 2)]
        return min(all_reduce_s(way, size, one.dp, one.tp) for way in ways)

    def fits_split(self, classes: Sequence[StageClass], choice: ShapeChoice) -> bool:
        """Returns whether sequence parallelism, which is never slower, fits wherever this does."""
        other = replace(choice, sequence_parallel=True)
        for one in classes:
            for node in self.types(one):
                off, on = (self.layers(node, one, way) for way in (choice, other))
                saved = off.kept_bytes - on.kept_bytes
                more = on.workspace_bytes - off.workspace_bytes
                if (saved < 0).any() or (more > saved).any():
                    return False
        return True

    def pipeline_s(self, one: StageClass, choice: ShapeChoice) -> float:
        """Returns the seconds of all layers for one microbatch on the slowest node of a class."""
        return max(self.totals(node, one, choice).work_s for node in self.types(one))

    def arrays(self, classes: Sequence[StageClass], choice: ShapeChoice) -> dict[str, Any]:
        """Returns the arrays of ``kernel.ShapeArrays`` that belong to classes, by name."""
        rows = [self._class(one, choice) for one in classes]
        tables = max(len(row["base"]) for row in rows)
        for row in rows:
            for name in ("base", "kept"):
                # Rooms that a class does not need repeat its first.
                row[name] += row[name][:1] * (tables - len(row[name]))
        arrays = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        arrays["launch"] = arrays["launch"].swapaxes(0, 1)
        arrays["latency"], arrays["occupancy"], arrays["tied"] = self._between(classes, choice)
        # One layout, so that the kernel is compiled once.
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def _class(self, one: StageClass, choice: ShapeChoice) -> dict[str, Any]:
        """Returns the arrays of one class by name."""
        nodes = self.types(one)
        rows = [self.ranges(node, one, choice) for node in nodes]
        action = self.inputs.action_s(nodes)
        whole = [np.maximum.reduce([row[i] for row in rows]) for i in range(3)]
        # As in a prediction: the slowest with its launching, less the slowest without.
        work = [np.maximum.reduce([row[i] - row[3] for row in rows]) for i in range(2)]
        ranges = np.triu(np.ones_like(whole[0]), 1) * action
        forward, backward = whole[0] + ranges, whole[1] + whole[2] + ranges
        return {
            "forward": forward,
            "backward": backward,
            "weight": whole[2],
            "launch": np.array([forward - work[0], whole[1] + ranges - work[1]]),
            "after": self._after(one, choice, rows[0][4], rows[0][5], backward),
            "base": [row[6] for row in rows],
            "kept": [row[7] for row in rows],
        }

    def ranges(self, node: NodeType, one: StageClass, choice: ShapeChoice) -> list[Any]:
        """Computes sums over every range of layers on one type of node, ``[n + 1, n + 1]`` each.

        Returns:
            Seconds of forward, backward by inputs, by weights and of launching; parameters, and
            those of experts; bytes without microbatches less the limit, infinite where layers may
            not share a stage; bytes of one microbatch.
        """
        table = self.layers(node, one, choice)
        names = ("forward_s", "backward_s", "weight_s", "launch_s", "parameters")
        *sums, experts, kept = (
            self._once((id(table), name), partial(range_sums, getattr(table, name)))
            for name in (*names, "expert_parameters", "kept_bytes")
        )
        need = stage_memory(
            self.model,
            parameters=sums[-1],
            expert_parameters=experts,
            workspace_bytes=range_largest(table.workspace_bytes),
            dp=one.dp,
            settings=choice,
            limit_bytes=node.memory_bytes,
            context_bytes=self.profile.context_bytes.get(node.gpu),
        )
        base = np.where(self.crossing, np.inf, need.total_bytes - node.memory_bytes)
        return [*sums, experts, base, kept]

    def _after(
        self, one: StageClass, choice: ShapeChoice, parameters: Any, experts: Any, backward: Any
    ) -> Any:
        ranks = choice.expert_ranks

        def reduced() -> Any:
            place = self.place(one)
            assert place is not None
            alike = parameters - experts if ranks > 1 else parameters
            whole = np.zeros_like(parameters)
            for part, stride in ((alike, 1), (experts, ranks))[: 1 + (ranks > 1)]:
                # Sums of equal layers differ by rounding only.
                values, where = np.unique(np.round(part, 3), return_inverse=True)
                sizes = np.maximum(values, 0.0) * self.model.precision.reduce_bytes
                times = list(map(reduction((place,), 0, self.inputs, stride), sizes.tolist()))
                whole = whole + np.array(times)[where].reshape(parameters.shape)
            return whole

        whole = self._once(("reduce", one.nodes, one.tp, one.dp, ranks), reduced)
        if choice.overlap_reduce:
            count = parameters.shape[0]
            layers = np.arange(count)[None, :] - np.arange(count)[:, None]
            whole = exposed_reduce_s(whole, backward, np.maximum(layers, 1))
        updated = choice.state_parameters(parameters, experts, one.dp)
        return whole + np.maximum(updated, 0.0) * self.inputs.optimizer_s(self.types(one))

    def _between(self, classes: Sequence[StageClass], choice: ShapeChoice) -> tuple[Any, Any, Any]:
        """Returns latency, occupancy ``[2, 2, c, c, n + 1]`` and tied embeddings ``[2, c, c]``."""
        number, sliced = len(classes), choice.sequence_parallel
        latency, occupancy = np.zeros((2, 2, 2, number, number, len(self._sizes)))
        tied = np.zeros((2, number, number))
        sizes, where = np.unique(self._sizes, return_inverse=True)
        numbered = list(enumerate(classes))
        for (a, one), (b, other), kind in itertools.product(numbered, numbered, range(2)):
            first = self.place(one)
            second = first if kind else self.place(other, skip=one.nodes)
            if first is None or second is None or (kind and a != b):
                continue  # no two such stages are neighbours
            if not kind or one.block > 1:
                # Ranks that share a sequence send their part of it.
                parts = [float(size) / choice.context_ranks for size in sizes]
                rows = [
                    self._once(
                        ("message", one, other, kind, size, sliced),
                        partial(boundary_s, first, second, self.inputs, size, sliced=sliced),
                    )
                    for size in parts
                ]
                # A message back from ``a`` to ``b`` is as one onward between the same two.
                latency[:, kind, a, b], occupancy[:, kind, a, b] = np.array(rows)[where].T
            if self.model.tied_parameters:
                # It does not depend on microbatches.
                widths = (one.tp, one.dp, other.tp, other.dp)
                tied[kind, a, b] = self._once(
                    ("tied", one.nodes, other.nodes, widths, kind),
                    partial(embedding_s, (first, second), self.inputs, one.tp),
                )
        return latency, occupancy, tied


def only_partition(after: Any, partition: Sequence[int]) -> Any:
    """Forbids every range of layers that is not a stage of a given partition."""
    cuts = np.concatenate([[0], np.cumsum(partition)])
    allowed = np.zeros(after.shape[-2:], dtype=bool)
    allowed[cuts[:-1], cuts[1:]] = True
    return np.where(allowed, after, np.inf)


def most_rate(rates: Iterable[tuple[int, float, float]], most_stages: int) -> float:
    """Returns what the best stages have together, as if the work of one could be divided freely.

    Args:
        rates: type of node, microbatches per second or bytes of one stage, and how many stages the
            nodes of the type are enough for; several where widths differ.
        most_stages: of a pipeline.
    """
    by_type: dict[int, tuple[float, float]] = {}
    for index, rate, stages in rates:
        fastest, most = by_type.get(index, (0.0, 0.0))
        # The fastest stage and the most throughput may belong to different widths.
        fastest, most = max(fastest, rate), max(most, rate * stages)
        by_type[index] = (fastest, most)
    left, whole = float(most_stages), 0.0
    for fastest, most in sorted(by_type.values(), reverse=True):
        stages = min(most / fastest, left) if fastest else 0.0
        whole += fastest * stages
        left -= stages
    return max(whole, 1e-30)


def capacity_bound(
    tables: Tables, cluster: Cluster, classes: Sequence[StageClass], choice: ShapeChoice
) -> float:
    """Returns the seconds below which the stages of all nodes together cannot hold all layers.

    A stage holds at most so many layers as fit beside one microbatch, and as its GPUs get through,
    reduce and update in time. Of a type's stages, each waits for a layer more than the one before.
    A mixed stage is no better than one of its slowest type. Stages of several widths have no bound.

    Args:
        tables: for durations and bytes.
        cluster: the nodes.
        classes: of the shape.
        choice: what its stages share.

    Returns:
        Seconds; infinite if they do not fit at all.
    """
    n = tables.model.num_layers - 2  # without the ends, which may be next to nothing
    if n < 1 or len({one.widths for one in classes}) != 1:
        return 0.0
    types, waits = list[tuple[float, Any]](), math.inf
    one = replace(classes[0], nodes=(), block=1)
    for index, group in enumerate(cluster.groups):
        sums = [tables.totals(group.type, some, choice) for some in classes if some.nodes[index]]
        if sums:
            stages = group.count * group.type.gpus / (one.tp * one.dp)
            types.append((stages, _least_s(tables, group.type, one, choice, sums)))
            waits = min(waits, min(some.least_s for some in sums))
    waits = waits if math.isfinite(waits) else 0.0
    finite = [float(row[np.isfinite(row)].max(initial=0.0)) for _, row in types]
    low, high = 0.0, max(finite, default=0.0) + waits * n
    if not high or _held(high, types, waits) < n:
        return math.inf
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _held(middle, types, waits) >= n else (middle, high)
    return low


def _held(seconds: float, types: Sequence[tuple[float, Any]], waits: float) -> int:
    """Returns the layers that whole stages get through, a mixed one at its slowest type's pace.

    The nodes of the fastest types limit how many stages have none but these. Within such limits
    those that get through most are taken first: that is the most, for their sets are a matroid.
    """
    order = sorted(types, key=lambda one: float(one[1].min(initial=np.inf)))
    rooms = [int(each + 1e-9) for each in itertools.accumulate(stages for stages, _ in order)]
    gains = []
    for index, (_, row) in enumerate(order):
        # The first may hold no inner layer.
        left = seconds - waits * np.maximum(np.arange(min(rooms[index], len(row) + 2)) - 1, 0)
        gains += [(int(each), index) for each in np.searchsorted(row, left, side="right")]
    total = 0
    for each, index in sorted(gains, reverse=True):
        if min(rooms[index:]) > 0:
            total += each
            rooms[index:] = [room - 1 for room in rooms[index:]]
    return total


def _least_s(
    tables: Tables, node: NodeType, one: StageClass, choice: ShapeChoice, sums: Sequence[Totals]
) -> Any:
    """Returns ``[n - 2]``, ascending: least seconds for a stage of 1, 2, ... inner layers.

    ``sums``: of the classes with such nodes, for the seconds after the pipeline.
    """
    forward, backward, weight, _, parameters, _, base, kept = tables.ranges(node, one, choice)
    each = min(some.after_s for some in sums) / max(float(parameters[0, -1]), 1.0)
    whole = choice.microbatches * (forward + backward + weight) + each * parameters
    whole = np.where(base + kept <= 0, whole, np.inf)
    whole = whole[1:-1, 1:-1]
    least = np.array([np.diagonal(whole, size).min() for size in range(1, whole.shape[0])])
    return np.maximum.accumulate(least)
