"""What the planner knows of a model: its layers in pipeline order, each of some kind.

Owns sizes only. How long a layer takes is the profile's to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from megatron.adaptive.errors import ConfigError

__all__ = ["RECOMPUTE", "LayerKind", "Model", "Precision"]

RECOMPUTE = ("none", "selective", "full")
"""What a backward repeats: nothing, the attention core, or the whole layer."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes that numbers take.

    Attributes:
        name: for people, such as ``bf16``.
        element_bytes: one element of an activation, as kept and as sent between stages.
        parameter_bytes: one weight as the layers read it.
        gradient_bytes: its gradient, as accumulated.
        optimizer_bytes: its optimizer state and master copy; what the distributed optimizer splits.
        reduce_bytes: its gradient on the wire between data-parallel replicas.
    """

    name: str = "bf16"
    element_bytes: int = 2
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    reduce_bytes: int = 4

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "name":
                _check(f"precision {self.name}: {one.name}", getattr(self, one.name))

    @classmethod
    def named(cls, name: str) -> Precision:
        """The sizes with which Megatron trains in fp32, fp16 or bf16 with Adam.

        Raises:
            ConfigError: another name.
        """
        if name == "fp32":
            return cls(
                name=name,
                element_bytes=4,
                parameter_bytes=4,
                gradient_bytes=4,
                optimizer_bytes=8,
                reduce_bytes=4,
            )
        if name == "fp16":
            # Gradients are fp16, unless --accumulate-allreduce-grads-in-fp32.
            return cls(name=name, gradient_bytes=2, reduce_bytes=2)
        if name == "bf16":
            return cls(name=name)
        raise ConfigError(f"precision is {name!r}: choose one of fp32, fp16, bf16")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One kind of layer; sizes are of one sample (one sequence) unless they say otherwise.

    Attributes:
        name: such as ``transformer``, ``embedding``, ``head``.
        parameters: numbers that tensor parallelism divides.
        replicated_parameters: numbers that every tensor-parallel rank holds whole.
        output_elements: elements handed to the next layer.
        forward_flops: operations of a forward, before tensor parallelism divides them.
        attention_flops: those of them that selective recompute repeats.
        activation_bytes: kept for the backward, divided by tensor parallelism.
        replicated_activation_bytes: kept for the backward on every tensor-parallel rank.
        attention_bytes: part of ``activation_bytes`` that selective recompute does not keep.
        input_bytes: all that full recompute keeps.
        workspace_bytes: held only while the layer runs, divided by tensor parallelism.
        tp_bytes: all-reduced over the tensor-parallel ranks in a forward; a backward has as many.
        group: ``encoder`` or ``decoder`` where no stage may hold layers of both; else empty.
        counted: whether ``--num-layers`` and the partition of a plan file count it.
    """

    name: str
    parameters: float = 0.0
    replicated_parameters: float = 0.0
    output_elements: float = 0.0
    forward_flops: float = 0.0
    attention_flops: float = 0.0
    activation_bytes: float = 0.0
    replicated_activation_bytes: float = 0.0
    attention_bytes: float = 0.0
    input_bytes: float = 0.0
    workspace_bytes: float = 0.0
    tp_bytes: float = 0.0
    group: str = ""
    counted: bool = True

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                _check(f"layer kind {self.name}: {one.name}", value)

    def held_parameters(self, tp: int) -> float:
        """Numbers that one of ``tp`` ranks holds."""
        return self.parameters / tp + self.replicated_parameters

    def kept_bytes(self, tp: int, recompute: str = "none") -> float:
        """Bytes of one sample that a rank keeps from forward to backward.

        Args:
            tp: tensor-parallel ranks.
            recompute: one of ``RECOMPUTE``.
        """
        if recompute == "full":
            return self.input_bytes
        sharded = self.activation_bytes
        if recompute == "selective":
            sharded -= self.attention_bytes
        return sharded / tp + self.replicated_activation_bytes


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as the planner sees it.

    Attributes:
        name: for people and for matching profiles.
        kinds: every kind of layer by name.
        layers: the kind of each layer in pipeline order, embedding and head included.
        tokens_per_sample: for tokens per second.
        tied_parameters: weights that the first and the last stage both hold when they differ, and
            whose gradients they add up; 0 where embedding and head are not tied. The head's kind
            counts them as its own parameters.
        tied_layers: indices of the layers that hold them.
        max_tp: the widest tensor parallelism that the shapes allow (attention groups).
        vocabulary: tokens, for people.
        precision: bytes of numbers.
        arguments: the Megatron arguments that it was made of, for plan files; may be empty.
    """

    name: str
    kinds: Mapping[str, LayerKind]
    layers: tuple[str, ...]
    tokens_per_sample: int = 1
    tied_parameters: float = 0.0
    tied_layers: tuple[int, ...] = ()
    max_tp: int = 2**30
    precision: Precision = field(default_factory=Precision)
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"model {self.name}: it has no layers: list their kinds in order")
        for index, name in enumerate(self.layers):
            if name not in self.kinds:
                raise ConfigError(
                    f"model {self.name}: layer {index} is of kind {name!r}, which is not described:"
                    f" kinds are {', '.join(self.kinds)}"
                )
        for index in self.tied_layers:
            if not 0 <= index < len(self.layers):
                raise ConfigError(
                    f"model {self.name}: tied layer {index}: layers are 0 to {len(self.layers) - 1}"
                )

    @property
    def num_layers(self) -> int:
        """All layers, embedding and head included."""
        return len(self.layers)

    @property
    def num_counted(self) -> int:
        """Layers as ``--num-layers`` counts them."""
        return sum(self.kinds[name].counted for name in self.layers)

    @cached_property
    def parameters(self) -> float:
        """Weights of the whole model; tied ones once."""
        whole = sum(self.layer(i).held_parameters(1) for i in range(self.num_layers))
        return whole - self.tied_parameters * max(0, len(self.tied_layers) - 1)

    @cached_property
    def splits(self) -> frozenset[int]:
        """Positions at which a stage has to end: where one group of layers ends."""
        groups = [self.kinds[name].group for name in self.layers]
        return frozenset(i for i in range(1, len(groups)) if groups[i] != groups[i - 1])

    def layer(self, index: int) -> LayerKind:
        """The kind of the layer at that place."""
        return self.kinds[self.layers[index]]

    def counted(self, partition: tuple[int, ...]) -> tuple[int, ...]:
        """A partition of all layers as a plan file and ``--num-layers`` count it.

        Args:
            partition: layers of each stage, embedding and head included.
        """
        counts, begin = [], 0
        for size in partition:
            counts.append(sum(self.layer(i).counted for i in range(begin, begin + size)))
            begin += size
        return tuple(counts)


def _check(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{what} is {value}: it must be finite and not negative")
