"""Defines profiles: measured durations of layers by GPU, tensor-parallel width and microbatch.

A profile also answers for microbatch sizes between those measured, and estimates what was not
measured. Each duration says whether it was measured or estimated. ``profile_file`` reads and writes
profile files.
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
"""Kind of layer, GPU, number of tensor-parallel ranks, samples of a microbatch."""
_PARTS = ("forward_s", "backward_input_s", "backward_weight_s")


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Durations of one layer for one microbatch on one tensor-parallel rank.

    Attributes:
        forward_s: Seconds of the forward.
        backward_input_s: Seconds of the gradients by inputs, or of the whole backward if
            ``backward_weight_s`` is 0.
        backward_weight_s: Seconds of the gradients by weights.
        tp_included: Whether forward and backward contain the communication between
            tensor-parallel ranks.
        launch_s: Seconds of the forward, and as many of the backward, in which the CPU launches the
            work. They do not grow with the microbatch, and pass while a rank waits for its input.
        kept_bytes: Measured bytes of activations from forward to backward; ``None`` to use the
            count of the model.
        source: Source of the numbers, ``measured`` or ``estimated``.
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
        """Returns the durations with all seconds multiplied by a factor."""
        if factor == 1.0:
            return self
        parts = (*_PARTS, "launch_s")
        return replace(self, **{name: getattr(self, name) * factor for name in parts})

    def scaled(self, factor: float) -> LayerTimes:
        """Returns the durations with the work multiplied by a factor; launch times stay."""
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
    """Measured durations, and a function that estimates further ones.

    Attributes:
        layers: Durations by layer kind, GPU, tensor-parallel ranks and microbatch size.
        model: Name of the measured model; empty if the profile fits any.
        links: Measured links between two nodes, by the names of both types. They override those of
            the cluster.
        intra_links: Measured links inside a node, by node type. They override those of the cluster.
        all_reduce: Measured all-reduces inside a node, by node type and number of ranks, as a link
            whose bandwidth is bytes of the tensor divided by seconds of the whole operation.
        optimizer_s_per_parameter: Seconds of the optimizer per parameter that a rank updates, by
            GPU.
        launch_s: Seconds of an action in addition to those of its layers, by GPU.
        step_s: Seconds of a step besides pipeline, reduction and optimizer, by GPU.
        action_sigma: Standard deviation of the logarithm of an action's duration.
        context_bytes: Memory of a process before it has tensors, by GPU. For other GPUs, the
            runtime's value counts.
        allocator_share: Memory that the allocator keeps in addition to tensors, as a share of
            activations and workspace, by GPU. Only for models in the host's memory.
        estimator: Function that estimates durations from kind, GPU, tensor-parallel ranks and
            microbatch size; ``None`` if a missing duration is an error.
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
        """Returns the durations of one layer, as measured, interpolated or estimated.

        The time of a microbatch size that was not measured lies on a line through its measured
        neighbours, or through the two largest sizes if it is above them. Below the smallest size,
        and if there is only one, durations without launch times are in proportion to the size. If
        experts are spread over a number of ranks that was not measured, the nearest number counts.

        Args:
            kind: Kind of the layer.
            gpu: Name of the GPU.
            tp: Number of tensor-parallel ranks.
            micro_batch: Samples of a microbatch.
            load: Operations of the rank, divided by those of the measured kind, above 1 if the
                busiest rank has more experts' work than the mean.

        Raises:
            ConfigError: The layer was not measured, and cannot be estimated.
        """
        near = self._nearest(kind, gpu, tp)
        if near is not None:
            sizes = self._sizes[near, gpu, tp]
            # The key has an int, but an equal float finds it too.
            times = self.layers.get((near, gpu, tp, micro_batch))  # type: ignore[arg-type]
            times = times or self._between(near, gpu, tp, micro_batch, sizes)
            times = times if near == kind else replace(times, source="estimated")
            return times if load == 1 else times.scaled(load)
        if self.estimator is not None:
            return self.estimator(kind, gpu, tp, micro_batch)
        measured = sorted(
            (measured_gpu, width) for name, measured_gpu, width in self._sizes if name == kind
        )
        measured_text = ", ".join(
            f"on {measured_gpu} with {width}" for measured_gpu, width in measured
        )
        raise ConfigError(
            f"profile: layer kind {kind!r} on {gpu} with tensor parallelism {tp} was not measured,"
            f" only {measured_text or 'other kinds'}: measure it with the profile command, or leave"
            " that GPU or width out"
        )

    def knows(self, kind: str, gpu: str, tp: int) -> bool:
        """Returns whether :meth:`times` has durations of a kind, measured or estimated."""
        is_estimated = self.estimator is not None and known_gpu(gpu) is not None
        return is_estimated or self._nearest(kind, gpu, tp) is not None

    def _nearest(self, kind: str, gpu: str, tp: int) -> str | None:
        """Returns the measured kind that is nearest to a kind, or ``None``.

        For layers with experts, the nearest number of ranks counts: ``experts/8`` stands in for
        ``experts/16``.
        """
        if (kind, gpu, tp) in self._sizes:
            return kind
        name, _, ranks = kind.partition("/")
        by_ranks = {
            int(measured_kind.partition("/")[2] or 1): measured_kind
            for measured_kind, *rest in self._sizes
            if rest == [gpu, tp] and re.fullmatch(rf"{re.escape(name)}(/\d+)?", measured_kind)
        }
        spread = natural(ranks) or 1
        nearest = min(by_ranks, key=lambda count: max(count / spread, spread / count), default=1)
        return by_ranks.get(nearest)

    @cached_property
    def _sizes(self) -> dict[tuple[str, str, int], tuple[int, ...]]:
        """Measured microbatch sizes by kind, GPU and tensor-parallel ranks, ascending."""
        sizes: dict[tuple[str, str, int], list[int]] = {}
        for kind, gpu, tp, micro_batch in self.layers:
            sizes.setdefault((kind, gpu, tp), []).append(micro_batch)
        return {key: tuple(sorted(values)) for key, values in sizes.items()}

    def _between(
        self, kind: str, gpu: str, tp: int, micro_batch: float, sizes: tuple[int, ...]
    ) -> LayerTimes:
        """Estimates durations of a microbatch size from the measured sizes around it."""
        if micro_batch < sizes[0] or len(sizes) == 1:
            scaled = self.layers[kind, gpu, tp, sizes[0]].scaled(micro_batch / sizes[0])
            return replace(scaled, source="estimated")
        index = min(bisect(sizes, micro_batch), len(sizes) - 1)
        small, large = sizes[index - 1], sizes[index]
        low, high = self.layers[kind, gpu, tp, small], self.layers[kind, gpu, tp, large]

        def line(name: str) -> float:
            low_value, high_value = getattr(low, name), getattr(high, name)
            rate = (high_value - low_value) / (large - small)
            if micro_batch > large:
                # A further sample takes between half and all of the largest size's mean seconds.
                rate = min(max(rate, high_value / large / 2), high_value / large)
            return float(high_value + rate * (micro_batch - large))

        has_bytes = low.kept_bytes is not None and high.kept_bytes is not None
        return LayerTimes(
            **{name: line(name) for name in _PARTS},
            launch_s=high.launch_s if micro_batch > large else line("launch_s"),
            tp_included=high.tp_included,
            kept_bytes=line("kept_bytes") if has_bytes else None,
            source="estimated",
        )


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of the planner.

    Attributes:
        model: Model to train.
        cluster: Nodes and links to plan for.
        profile: Durations of the model's layers on the nodes.
    """

    model: Model
    cluster: Cluster
    profile: Profile

    @cached_property
    def layer_tables(self) -> dict[Any, Any]:
        """Cache of ``layer_costs.layer_table`` for these inputs."""
        return {}

    def action_s(self, nodes: Iterable[NodeType]) -> float:
        """Returns the seconds of an action in addition to its layers, on the slowest of nodes."""
        each = self.profile.launch_s
        return max(each.get(node.gpu, 0.0) * node.slowness for node in nodes)

    def optimizer_s(self, nodes: Iterable[NodeType]) -> float:
        """Returns the optimizer's seconds per parameter on the slowest of nodes, 0 if unknown."""
        each = self.profile.optimizer_s_per_parameter
        return max(each.get(node.gpu, 0.0) * node.slowness for node in nodes)
