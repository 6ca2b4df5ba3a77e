"""Holds durations of layers by GPU, tensor parallelism and microbatch size, for the planner.

Every number carries its source, measured or estimated, so that a prediction can say on what it
stands. Reading and writing of profile files is not done here.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from megatron.adaptive.config.input_files import natural
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodeType, known_gpu
from megatron.adaptive.planner.model_description import Model

Source = Literal["measured", "estimated"]

Key = tuple[str, str, int, int]
"""Layer kind, GPU, tensor-parallel ranks, samples of a microbatch."""
_PARTS = ("forward_s", "backward_input_s", "backward_weight_s")


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Holds seconds of one layer for one microbatch on one tensor-parallel rank.

    Attributes:
        forward_s: its forward.
        backward_input_s: gradient by its inputs; of the whole backward where ``backward_weight_s``
            is 0.
        backward_weight_s: gradient by its weights.
        tp_included: whether forward and backward contain the communication between the
            tensor-parallel ranks.
        launch_s: part of the forward, and as much of the backward, that the CPU takes to launch the
            work; it does not grow with the microbatch and is hidden where a rank waits.
        kept_bytes: measured activations that stay from forward to backward; None where the model's
            count has to do.
        source: where the numbers come from.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float = 0.0
    tp_included: bool = False
    launch_s: float = 0.0
    kept_bytes: float | None = None
    source: Source = "measured"

    @property
    def backward_s(self) -> float:
        """Seconds of the whole backward."""
        return self.backward_input_s + self.backward_weight_s

    def slowed(self, factor: float) -> LayerTimes:
        """Returns the same where everything takes so many times as long."""
        if factor == 1.0:
            return self
        parts = (*_PARTS, "launch_s")
        return replace(self, **{name: getattr(self, name) * factor for name in parts})

    def scaled(self, factor: float) -> LayerTimes:
        """Returns the same for work so many times larger; launching it takes what it took."""
        fixed = min(self.launch_s, self.forward_s, self.backward_input_s)
        return replace(
            self,
            forward_s=fixed + (self.forward_s - fixed) * factor,
            backward_input_s=fixed + (self.backward_input_s - fixed) * factor,
            backward_weight_s=self.backward_weight_s * factor,
            kept_bytes=None if self.kept_bytes is None else self.kept_bytes * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Holds measured and estimated durations.

    Attributes:
        layers: durations by layer kind, GPU, tensor-parallel ranks and microbatch size.
        model: name of the model that it was measured with; empty for any.
        links: measured links between two nodes, by the names of both types; they stand in for
            those of the cluster.
        intra_links: measured links inside a node, by node type; likewise.
        all_reduce: measured all-reduces inside a node, by node type and number of ranks: bytes of
            the tensor over seconds of the whole operation.
        optimizer_s_per_parameter: seconds of the optimizer for each parameter that a rank updates,
            by GPU.
        launch_s: seconds that an action costs beyond the sum of its layers, by GPU.
        step_s: seconds of a step beside pipeline, reduction and optimizer, by GPU.
        action_sigma: spread of the logarithm of the durations of an action from one to the next.
        context_bytes: memory of a process before it holds tensors, by GPU; else the runtime's.
        allocator_share: what an allocator keeps beyond the tensors that it holds at a time, as a
            share of activations and workspace, by GPU; on the host's memory alone.
        estimator: makes durations that were not measured, of GPUs in the table, from kind, GPU,
            tensor-parallel ranks and microbatch size; None where missing ones are errors.
    """

    layers: Mapping[Key, LayerTimes] = field(default_factory=dict)
    model: str = ""
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)
    intra_links: Mapping[str, LinkSpeed] = field(default_factory=dict)
    all_reduce: Mapping[tuple[str, int], LinkSpeed] = field(default_factory=dict)
    optimizer_s_per_parameter: Mapping[str, float] = field(default_factory=dict)
    launch_s: Mapping[str, float] = field(default_factory=dict)
    step_s: Mapping[str, float] = field(default_factory=dict)
    action_sigma: float = 0.0
    context_bytes: Mapping[str, float] = field(default_factory=dict)
    allocator_share: Mapping[str, float] = field(default_factory=dict)
    estimator: Callable[[str, str, int, float], LayerTimes] | None = None

    def times(
        self, kind: str, gpu: str, tp: int, micro_batch: float, load: float = 1.0
    ) -> LayerTimes:
        """Returns durations of one layer.

        A microbatch size between two measured ones is interpolated, one above the largest lies on
        the line through the two largest, and one below the smallest shrinks in proportion; where
        one size was measured, all but the launching is in proportion. Experts spread over a number
        of ranks that was not measured take what the nearest does. The result is then estimated.

        Args:
            kind: of the layer.
            gpu: that it is on.
            tp: tensor-parallel ranks.
            micro_batch: samples.
            load: operations over those of what is measured, where one rank has more than others.

        Raises:
            ConfigError: neither measured nor to be estimated.
        """
        near = self._nearest(kind, gpu, tp)
        if near is not None:
            sizes = self._sizes[near, gpu, tp]
            # A whole number is found whatever its type.
            found = self.layers.get((near, gpu, tp, micro_batch))  # type: ignore[arg-type]
            found = found or self._between(near, gpu, tp, micro_batch, sizes)
            found = found if near == kind else replace(found, source="estimated")
            return found if load == 1 else found.scaled(load)
        if self.estimator is not None:
            return self.estimator(kind, gpu, tp, micro_batch)
        known = sorted((one, width) for name, one, width in self._sizes if name == kind)
        words = ", ".join(f"on {one} with {width}" for one, width in known)
        raise ConfigError(
            f"profile: layer kind {kind!r} on {gpu} with tensor parallelism {tp} was not measured,"
            f" only {words or 'other kinds'}: measure it with the profile command, or leave that"
            " GPU or width out"
        )

    def knows(self, kind: str, gpu: str, tp: int) -> bool:
        """Returns whether ``times`` has an answer."""
        is_estimated = self.estimator is not None and known_gpu(gpu) is not None
        return is_estimated or self._nearest(kind, gpu, tp) is not None

    def _nearest(self, kind: str, gpu: str, tp: int) -> str | None:
        """Returns a kind, or what was measured instead: its experts on other numbers of ranks."""
        if (kind, gpu, tp) in self._sizes:
            return kind
        name, _, ranks = kind.partition("/")
        alike = {
            int(one.partition("/")[2] or 1): one
            for one, *at in self._sizes
            if at == [gpu, tp] and re.fullmatch(rf"{re.escape(name)}(/\d+)?", one)
        }
        spread = natural(ranks) or 1
        nearest = min(alike, key=lambda one: max(one / spread, spread / one), default=1)
        return alike.get(nearest)

    @cached_property
    def _sizes(self) -> dict[tuple[str, str, int], tuple[int, ...]]:
        sizes: dict[tuple[str, str, int], list[int]] = {}
        for kind, gpu, tp, micro_batch in self.layers:
            sizes.setdefault((kind, gpu, tp), []).append(micro_batch)
        return {key: tuple(sorted(values)) for key, values in sizes.items()}

    def _between(
        self, kind: str, gpu: str, tp: int, micro_batch: float, sizes: tuple[int, ...]
    ) -> LayerTimes:
        if micro_batch < sizes[0] or len(sizes) == 1:
            found = self.layers[kind, gpu, tp, sizes[0]].scaled(micro_batch / sizes[0])
            return replace(found, source="estimated")
        at = min(bisect(sizes, micro_batch), len(sizes) - 1)
        small, large = sizes[at - 1], sizes[at]
        low, high = self.layers[kind, gpu, tp, small], self.layers[kind, gpu, tp, large]

        def line(name: str) -> float:
            one, other = getattr(low, name), getattr(high, name)
            rate = (other - one) / (large - small)
            if micro_batch > large:
                # At least at half the rate of the largest, at most at that.
                rate = min(max(rate, other / large / 2), other / large)
            return float(other + rate * (micro_batch - large))

        known = low.kept_bytes is not None and high.kept_bytes is not None
        return LayerTimes(
            **{name: line(name) for name in _PARTS},
            launch_s=high.launch_s if micro_batch > large else line("launch_s"),
            tp_included=high.tp_included,
            kept_bytes=line("kept_bytes") if known else None,
            source="estimated",
        )


@dataclass(frozen=True)
class PlanInputs:
    """Holds what a plan is made from: the model, the machines and the measured times.

    Attributes:
        model: its layers.
        cluster: the nodes and links.
        profile: durations.
    """

    model: Model
    cluster: Cluster
    profile: Profile

    @cached_property
    def layer_tables(self) -> dict[Any, Any]:
        """Keeps what ``layers.layer_table`` computed of these inputs."""
        return {}

    def action_s(self, nodes: Iterable[NodeType]) -> float:
        """Returns the seconds that an action costs beyond its layers, on the slowest of nodes."""
        each = self.profile.launch_s
        return max(each.get(node.gpu, 0.0) * node.slowness for node in nodes)

    def optimizer_s(self, nodes: Iterable[NodeType]) -> float:
        """Returns the optimizer's seconds for a parameter, 0 where the profile does not say."""
        each = self.profile.optimizer_s_per_parameter
        return max(each.get(node.gpu, 0.0) * node.slowness for node in nodes)
