"""Arrays for the search: what every class of stages takes for every range of layers.

One shape is one choice of widths, microbatch, recompute and optimizer; its arrays come from the
same functions as a prediction, so that both agree on every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.adaptive.planner import memory
from megatron.adaptive.planner.classes import StageClass, place_on
from megatron.adaptive.planner.cluster import Cluster, NodeType
from megatron.adaptive.planner.communication import (
    all_reduce_s,
    boundary_s,
    embedding_s,
    exposed_reduce_s,
    measured_all_reduce,
    ring_segments,
)
from megatron.adaptive.planner.layers import LayerTable, layer_table, optimizer_s
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.plan import StagePlace
from megatron.adaptive.planner.profile import Profile

__all__ = ["Choice", "Tables"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What all stages of a plan share.

    Attributes:
        microbatches: of a step.
        recompute: one of ``model.RECOMPUTE``.
        distributed_optimizer: whether replicas divide the optimizer state.
        overlap_reduce: whether the reduction runs along with backwards.
        sequence_parallel: whether tensor parallelism divides all activations.
    """

    microbatches: int
    recompute: str = "none"
    distributed_optimizer: bool = False
    overlap_reduce: bool = False
    sequence_parallel: bool = False


class Tables:
    """Makes the arrays and keeps what several shapes have in common.

    Args:
        model: what is trained.
        cluster: on which nodes.
        profile: how long it takes.
    """

    def __init__(self, model: Model, cluster: Cluster, profile: Profile) -> None:
        self.model, self.cluster, self.profile = model, cluster, profile
        self._first = np.concatenate(
            [[0], np.cumsum([group.count for group in cluster.groups])]
        ).tolist()
        self._layers: dict[Any, LayerTable] = {}
        self._reduce: dict[Any, Any] = {}
        self._messages: dict[Any, tuple[float, float]] = {}
        self._ranges: dict[Any, Any] = {}
        self._places: dict[Any, StagePlace | None] = {}
        n = model.num_layers
        cuts = np.arange(n + 1)
        crossing = np.zeros((n + 1, n + 1), dtype=bool)
        for at in model.splits:
            crossing |= (cuts[:, None] < at) & (cuts[None, :] > at)
        self.crossing = crossing
        outputs = [model.layer(i).output_elements for i in range(n)]
        self._sizes = [0.0, *(size * model.precision.element_bytes for size in outputs)]

    def place(self, one: StageClass, skip: tuple[int, ...] = ()) -> StagePlace | None:
        """A stage of a class on the first nodes, or on those after ``skip``; None if too few."""
        if (one, skip) in self._places:
            return self._places[one, skip]
        nodes: list[int] = []
        place = None
        for index, count in enumerate(one.nodes):
            begin = self._first[index] + (skip[index] if skip else 0)
            if begin + count > self._first[index + 1]:
                break
            nodes += range(begin, begin + count)
        else:
            place = place_on(self.cluster, one, nodes)
        self._places[one, skip] = place
        return place

    def types(self, one: StageClass) -> list[NodeType]:
        """The node types of a class."""
        return [
            group.type for group, count in zip(self.cluster.groups, one.nodes, strict=True) if count
        ]

    def layers(self, node: NodeType, one: StageClass, choice: Choice) -> LayerTable:
        """Durations and bytes of every layer.

        Raises:
            ConfigError: the profile lacks a duration.
        """
        key = (node.name, one.tp, one.micro_batch, choice.recompute, choice.sequence_parallel)
        if key not in self._layers:
            self._layers[key] = layer_table(
                self.model,
                self.profile,
                node,
                tp=one.tp,
                micro_batch=one.micro_batch,
                recompute=choice.recompute,
                sequence_parallel=choice.sequence_parallel,
            )
        return self._layers[key]

    def arrays(self, classes: Sequence[StageClass], choice: Choice) -> dict[str, Any]:
        """The arrays of ``kernel.Shape`` that belong to classes, by name."""
        rows = [self._class(one, choice) for one in classes]
        tables = max(len(row[3]) for row in rows)
        for row in rows:
            # Rooms that a class does not need repeat its first.
            row[3].extend([row[3][0]] * (tables - len(row[3])))
            row[4].extend([row[4][0]] * (tables - len(row[4])))
        latency, occupancy = self._messages_of(classes, choice)
        arrays = {
            "forward": np.array([row[0] for row in rows]),
            "backward": np.array([row[1] for row in rows]),
            "launch": np.array([row[5] for row in rows]).swapaxes(0, 1),
            "after": np.array([row[2] for row in rows]),
            "base": np.array([row[3] for row in rows]),
            "kept": np.array([row[4] for row in rows]),
            "latency": latency,
            "occupancy": occupancy,
            "tied": self._tied(classes),
        }
        # One layout, so that the kernel is compiled once.
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def _sums(self, key: Any, values: Any) -> Any:
        """``[n + 1, n + 1]`` sums over every range of layers."""
        if key not in self._ranges:
            total = np.concatenate([[0.0], np.cumsum(values)])
            self._ranges[key] = total[None, :] - total[:, None]
        return self._ranges[key]

    def _class(self, one: StageClass, choice: Choice) -> tuple[Any, ...]:
        """Forward, backward, what follows, bytes without and per microbatch, launching."""
        nodes = self.types(one)
        rows = [self.ranges(node, one, choice) for node in nodes]
        action = max(self.profile.launch_s.get(node.gpu, 0.0) for node in nodes)
        whole = [np.maximum.reduce([row[i] for row in rows]) for i in range(3)]
        # As in a prediction: the slowest with its launching, less the slowest without.
        work = [np.maximum.reduce([row[i] - row[3] for row in rows]) for i in range(2)]
        ranges = np.triu(np.ones_like(whole[0]), 1) * action
        forward, backward = whole[0] + ranges, whole[1] + whole[2] + ranges
        launch = np.array([forward - work[0], whole[1] + ranges - work[1]])
        after = self._after(one, choice, rows[0][4], backward)
        return forward, backward, after, [row[5] for row in rows], [row[6] for row in rows], launch

    def ranges(self, node: NodeType, one: StageClass, choice: Choice) -> list[Any]:
        """Sums over every range of layers on one type of node, ``[n + 1, n + 1]`` each.

        Returns:
            Seconds of forward, backward by inputs, by weights and of launching; parameters; bytes
            without microbatches less the limit, infinite where layers may not share a stage; bytes
            of one microbatch.
        """
        table = self.layers(node, one, choice)
        key = id(table)
        values = (table.forward_s, table.backward_s, table.weight_s, table.launch_s)
        sums = [self._sums((key, index), value) for index, value in enumerate(values)]
        parameters = self._sums((key, "parameters"), table.parameters)
        need = memory.stage_memory(
            self.model,
            parameters=parameters,
            kept_bytes=0.0,
            held=0.0,
            workspace_bytes=_largest(table.workspace_bytes),
            dp=one.dp,
            distributed_optimizer=choice.distributed_optimizer,
            limit_bytes=node.memory_bytes,
        )
        base = np.where(self.crossing, np.inf, need.total_bytes - node.memory_bytes)
        return [*sums, parameters, base, self._sums((key, "kept"), table.kept_bytes)]

    def _after(self, one: StageClass, choice: Choice, parameters: Any, backward: Any) -> Any:
        key = (one.nodes, one.tp, one.dp)
        if key not in self._reduce:
            place = self.place(one)
            assert place is not None
            # Sums of equal layers differ by rounding only.
            values, where = np.unique(np.round(parameters, 3), return_inverse=True)
            segments = ring_segments((place,), 0, self.cluster, self.profile)
            sizes = np.maximum(values, 0.0) * self.model.precision.reduce_bytes
            measured = measured_all_reduce(place, self.cluster, self.profile)
            if measured is None:
                times = [
                    max(
                        (all_reduce_s(link, size, one.dp, pairs) for link, pairs in segments),
                        default=0.0,
                    )
                    for size in sizes.tolist()
                ]
            else:
                times = [measured[0].seconds(size, measured[1]) for size in sizes.tolist()]
            self._reduce[key] = np.array(times)[where].reshape(parameters.shape)
        whole = self._reduce[key]
        if choice.overlap_reduce:
            count = parameters.shape[0]
            layers = np.arange(count)[None, :] - np.arange(count)[:, None]
            whole = exposed_reduce_s(whole, backward, np.maximum(layers, 1))
        updates = [
            optimizer_s(
                self.profile,
                node.gpu,
                1.0,
                dp=one.dp,
                distributed_optimizer=choice.distributed_optimizer,
            )
            for node in self.types(one)
        ]
        return whole + np.maximum(parameters, 0.0) * max(updates)

    def _messages_of(self, classes: Sequence[StageClass], choice: Choice) -> tuple[Any, Any]:
        """Latency and occupancy ``[2, 2, c, c, n + 1]``."""
        number, cuts = len(classes), len(self._sizes)
        latency = np.zeros((2, 2, number, number, cuts))
        occupancy = np.zeros((2, 2, number, number, cuts))
        sizes, where = np.unique(self._sizes, return_inverse=True)
        for a, one in enumerate(classes):
            for b, other in enumerate(classes):
                for kind in range(2):
                    if kind and (a != b or one.block == 1):
                        continue
                    rows = [self._message(one, other, kind, float(size), choice) for size in sizes]
                    both = np.array(rows)[where]
                    # A message back from ``a`` to ``b`` is as one onward between the same two.
                    for way in range(2):
                        latency[way, kind, a, b] = both[:, 0]
                        occupancy[way, kind, a, b] = both[:, 1]
        return latency, occupancy

    def _message(
        self, one: StageClass, other: StageClass, kind: int, size: float, choice: Choice
    ) -> tuple[float, float]:
        key = (one, other, kind, size, choice.sequence_parallel)
        if key not in self._messages:
            pair = self._pair(one, other, kind)
            if pair is None:
                return 0.0, 0.0
            self._messages[key] = boundary_s(
                *pair,
                self.cluster,
                self.profile,
                size,
                sliced=choice.sequence_parallel,
            )
        return self._messages[key]

    def _pair(
        self, one: StageClass, other: StageClass, kind: int
    ) -> tuple[StagePlace, StagePlace] | None:
        """Two neighbours of these classes; None where the cluster has no nodes for both."""
        first = self.place(one)
        second = first if kind else self.place(other, skip=one.nodes)
        return None if first is None or second is None else (first, second)

    def _tied(self, classes: Sequence[StageClass]) -> Any:
        number = len(classes)
        tied = np.zeros((2, number, number))
        if not self.model.tied_parameters:
            return tied
        for a, one in enumerate(classes):
            for b, other in enumerate(classes):
                for kind in range(2):
                    pair = None if kind and a != b else self._pair(one, other, kind)
                    if pair is None:
                        continue
                    # It does not depend on microbatches.
                    key = ("tied", one.nodes, other.nodes, one.tp, one.dp, other.tp, other.dp, kind)
                    if key not in self._reduce:
                        self._reduce[key] = embedding_s(pair, self.model, self.cluster, one.tp)
                    tied[kind, a, b] = self._reduce[key]
        return tied


def _largest(values: Any) -> Any:
    """``[n + 1, n + 1]`` largest of every range; 0 for none."""
    n = len(values)
    if not np.any(values):
        return np.zeros((n + 1, n + 1))
    found = np.zeros((n + 1, n + 1))
    for low in range(n):
        found[low, low + 1 :] = np.maximum.accumulate(values[low:])
    return found
