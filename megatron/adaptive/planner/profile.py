"""Defines profiles, which contain the measured times of a model's layers.

A profile contains times for each GPU, tensor-parallel size and microbatch size. It interpolates
times between measured microbatch sizes, and estimates times that were not measured. Each time is
marked as measured or estimated. ``profile_file`` reads and writes profile files.
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
from megatron.adaptive.planner.documents import RunDocuments
from megatron.adaptive.planner.model_description import Model

Source = Literal["measured", "estimated"]

Key = tuple[str, str, int, int]
"""Key of a layer's times: kind of layer, GPU, tensor-parallel size, and samples per microbatch."""
_PARTS = ("forward_s", "backward_input_s", "backward_weight_s")


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Times that a layer takes for one microbatch on one tensor-parallel rank.

    Attributes:
        forward_s: Duration of the forward pass, in seconds.
        backward_input_s: Time for computing the input gradients in seconds, or the duration of the
            whole backward pass if ``backward_weight_s`` is 0.
        backward_weight_s: Time for computing the weight gradients, in seconds.
        tp_included: Whether the times include communication between tensor-parallel ranks.
        launch_s: Time in seconds during which the forward pass launches kernels. The backward pass
            spends the same time on launches. This time does not grow with the microbatch size. A
            rank can launch kernels while it waits for its input.
        kept_bytes: Measured size in bytes of the activations kept for the backward pass, or
            ``None`` if the size is computed from the model.
        source: Origin of the times: ``measured`` or ``estimated``.
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
        """Duration of the backward pass in seconds, including weight gradients."""
        return self.backward_input_s + self.backward_weight_s

    def slowed(self, factor: float) -> LayerTimes:
        """Returns a copy with all times multiplied by ``factor``."""
        if factor == 1.0:
            return self
        parts = (*_PARTS, "launch_s")
        return replace(self, **{name: getattr(self, name) * factor for name in parts})

    def scaled(self, factor: float) -> LayerTimes:
        """Returns a copy with all values except launch times multiplied by ``factor``."""
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
    """Measured times, and a function that estimates missing times.

    Attributes:
        layers: Times of layers, keyed by layer kind, GPU, tensor-parallel size and microbatch size.
        model: Name of the measured model, or empty if the profile applies to any model.
        links: Measured links between two nodes, keyed by the names of both node types. They take
            precedence over the links of the cluster.
        intra_links: Measured links within a node, keyed by node type. They take precedence over the
            links of the cluster.
        all_reduce: Measured all-reduces within a node, keyed by node type and number of ranks. Each
            of them is stored as a link, whose bandwidth is the tensor size in bytes divided by the
            duration of the all-reduce.
        optimizer_s_per_parameter: Duration of the optimizer step in seconds per updated parameter,
            keyed by GPU.
        launch_s: Additional time of each action outside of layers, in seconds, keyed by GPU.
        step_s: Additional time of each step outside of pipeline, reduction and optimizer, in
            seconds, keyed by GPU.
        action_sigma: Standard deviation of the logarithm of an action's duration.
        context_bytes: GPU memory in bytes that a process uses in addition to tensors, keyed by GPU.
            For GPUs that are not listed, the value in ``layer_costs.Runtime`` is used.
        allocator_share: Additional memory that the allocator holds, as a fraction of the memory for
            activations and workspace, keyed by GPU. It is only set for models in host memory.
        estimator: Function that estimates missing times from the kind of layer, the GPU, the number
            of tensor-parallel ranks and the microbatch size, or ``None`` if a missing time is an
            error.
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
        """Returns the measured, interpolated or estimated times of a layer.

        For a microbatch size that was not measured, times are linearly interpolated between the
        nearest measured sizes. Above the largest measured size, times are extrapolated from the two
        largest sizes. Below the smallest size, or if only one size was measured, all times except
        launch times are proportional to the size. If the number of ranks over which experts are
        distributed was not measured, the nearest measured number is used.

        Args:
            kind: Kind of the layer.
            gpu: Name of the GPU.
            tp: Number of tensor-parallel ranks.
            micro_batch: Number of samples per microbatch.
            load: FLOPs of the layer on the busiest rank, divided by the FLOPs of the measured kind
                of layer. The value is above 1 if the busiest rank has more expert work than
                average.

        Raises:
            ConfigError: The layer was not measured and cannot be estimated.
        """
        near = self._nearest(kind, gpu, tp)
        if near is not None:
            sizes = self._sizes[near, gpu, tp]
            # The keys contain microbatch sizes as int. A float with an equal value finds the same
            # entry, so no conversion is needed.
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
            f"profile: layer kind {kind!r} was not measured on {gpu} with tensor-parallel size "
            f"{tp}, only {measured_text or 'other kinds of layers were'}; measure it with the "
            '"profile" command, or exclude this GPU or tensor-parallel size'
        )

    def knows(self, kind: str, gpu: str, tp: int) -> bool:
        """Returns whether :meth:`times` has measured or estimated times for these arguments."""
        is_estimated = self.estimator is not None and known_gpu(gpu) is not None
        return is_estimated or self._nearest(kind, gpu, tp) is not None

    def _nearest(self, kind: str, gpu: str, tp: int) -> str | None:
        """Returns the most similar measured kind of layer, or ``None`` if no kind is similar.

        For layers with experts, the nearest measured number of ranks is used. For example,
        ``experts/8`` (experts on 8 ranks) replaces ``experts/16``.
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
        """Measured microbatch sizes in ascending order, keyed by layer kind, GPU and ``tp``."""
        sizes: dict[tuple[str, str, int], list[int]] = {}
        for kind, gpu, tp, micro_batch in self.layers:
            sizes.setdefault((kind, gpu, tp), []).append(micro_batch)
        return {key: tuple(sorted(values)) for key, values in sizes.items()}

    def _between(
        self, kind: str, gpu: str, tp: int, micro_batch: float, sizes: tuple[int, ...]
    ) -> LayerTimes:
        """Estimates the times for the size ``micro_batch`` from the nearest measured sizes."""
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
                # Bound the extrapolation: each additional sample takes between half and all of the
                # time per sample at the largest measured size.
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
    """Inputs of the planner: the model, the cluster, and the times of the layers.

    Attributes:
        model: Model to train.
        cluster: Nodes and links to plan for.
        profile: Times of the model's layers on the nodes.
        documents: Documents to train on if document lengths vary, or ``None`` if all samples have
            the model's sequence length.
    """

    model: Model
    cluster: Cluster
    profile: Profile
    documents: RunDocuments | None = None

    @cached_property
    def layer_tables(self) -> dict[Any, Any]:
        """Cache for the results of ``layer_costs.layer_table`` for these inputs."""
        return {}

    def step_tokens(self, samples: int) -> float:
        """Returns the mean number of tokens in a step with ``samples`` samples.

        Args:
            samples: Number of samples per step.
        """
        if self.documents is not None:
            return self.documents.mean_tokens
        return samples * self.model.tokens_per_sample

    def step_flops(self, samples: int) -> float:
        """Returns the mean number of FLOPs in all forward passes of a step.

        Args:
            samples: Number of samples per step.
        """
        kinds = [self.model.layer(i) for i in range(self.model.num_layers)]
        whole = sum(kind.forward_flops for kind in kinds)
        if self.documents is None:
            return whole * samples
        pairs = sum(kind.attention_flops for kind in kinds if not kind.is_local)
        length = self.model.sequence
        squares = self.documents.mean_squares / length**2
        return (whole - pairs) * self.documents.mean_tokens / length + pairs * squares

    def action_s(self, nodes: Iterable[NodeType]) -> float:
        """Returns an action's time outside of layers on the slowest of ``nodes``, in seconds."""
        each = self.profile.launch_s
        return max(each.get(node.gpu, 0.0) * node.slowness for node in nodes)

    def optimizer_s(self, nodes: Iterable[NodeType]) -> float:
        """Returns the optimizer's time in seconds per parameter on the slowest of ``nodes``.

        Unknown times count as 0.
        """
        each = self.profile.optimizer_s_per_parameter
        return max(each.get(node.gpu, 0.0) * node.slowness for node in nodes)
