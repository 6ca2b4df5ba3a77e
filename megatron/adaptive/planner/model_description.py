"""Defines the planner's description of a model, which is a list of layers.

Each layer of a model has a kind, which determines its parameters, FLOPs and memory sizes::

    layers    embedding  transformer  transformer  ...  transformer  head
    kinds     embedding, transformer, head

All counts are for one sample in a whole layer, without tensor parallelism. ``transformer_layers``
computes the costs from the sizes of a transformer. ``model_file`` reads models by name and from
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from megatron.adaptive.config.sequence_slices import LEAST_TOKENS
from megatron.adaptive.errors import ConfigError

ATTENTIONS = ("fused", "kernel", "unfused")
"""Names of attention implementations. ``fused`` (Transformer Engine) and ``kernel`` (torch's
kernels in the trainer's own layers) do not store attention scores. ``unfused`` writes all scores to
memory and keeps them.
"""
RECOMPUTE = ("none", "selective", "full")
"""Parts of the forward pass that the backward pass recomputes: nothing, only attention, or whole
layers.
"""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Sizes in bytes of the numbers that a training run stores and sends.

    Attributes:
        name: Name of the data type, such as ``bf16``.
        element_bytes: Size in bytes of each element of an activation, in memory and in messages.
        parameter_bytes: Size in bytes of a weight in the copy that forward and backward passes use.
        gradient_bytes: Size in bytes of a weight's accumulated gradient.
        optimizer_bytes: Size in bytes of a weight's optimizer state and master copy. With a
            distributed optimizer, this memory is divided among the replicas.
        reduce_bytes: Size in bytes of a gradient when data-parallel replicas exchange it.
        trained: Fraction of the weights that are trained, greater than 0 and at most 1.
        fp8: Whether layers run matrix multiplications in fp8, as with ``--fp8-format hybrid``.
    """

    name: str = "bf16"
    element_bytes: int = 2
    parameter_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    reduce_bytes: float = 4
    trained: float = 1.0
    fp8: bool = False

    def beside_frozen(self, share: float) -> Precision:
        """Returns a copy with the sizes of one frozen weight plus ``share`` adapter weights.

        Args:
            share: Number of trained adapter weights per frozen weight.
        """
        return replace(
            self,
            parameter_bytes=self.parameter_bytes * (1 + share),
            gradient_bytes=self.gradient_bytes * share,
            optimizer_bytes=self.optimizer_bytes * share,
            reduce_bytes=self.reduce_bytes * share,
            trained=share,
        )

    def with_fp8(self) -> Precision:
        """Returns a copy that uses fp8 for matrix multiplications.

        Raises:
            ConfigError: The precision is not bf16.
        """
        if self.name != "bf16":
            raise ConfigError(f"--fp8 requires precision bf16, got {self.name}; plan in bf16")
        return replace(self, fp8=True)

    @classmethod
    def named(cls, name: str) -> Precision:
        """Returns the sizes that Megatron uses for training with Adam in the data type ``name``.

        Args:
            name: Name of the data type: ``fp32``, ``fp16`` or ``bf16``.

        Raises:
            ConfigError: The name is unknown.
        """
        if name == "fp32":
            return cls(name=name, element_bytes=4, parameter_bytes=4, optimizer_bytes=8)
        if name == "fp16":
            # Gradients are in fp16, unless --accumulate-allreduce-grads-in-fp32 is set.
            return cls(name=name, gradient_bytes=2, reduce_bytes=2)
        if name == "bf16":
            return cls(name=name)
        raise ConfigError(f"precision must be fp32, fp16 or bf16, got {name!r}")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Costs of one kind of layer per sample, where a sample is one sequence.

    Attributes:
        name: Name of the kind, such as ``transformer``, ``embedding`` or ``head``.
        parameters: Number of parameters that are divided among tensor-parallel ranks.
        replicated_parameters: Number of parameters that every tensor-parallel rank holds.
        output_elements: Number of elements that the layer passes to the next layer.
        forward_flops: FLOPs of a forward pass, without tensor parallelism.
        attention_flops: Part of ``forward_flops`` that selective recomputation repeats, which is
            the computation of attention.
        output_flops: Part of ``forward_flops`` that computes logits. The input gradient pass (B)
            also computes the weight gradients of this part, even if the backward pass is split.
        activation_bytes: Size in bytes of the activations that are kept for the backward pass and
            divided among tensor-parallel ranks.
        replicated_activation_bytes: Size in bytes of the activations that every tensor-parallel
            rank keeps for the backward pass.
        attention_bytes: Part of ``activation_bytes`` that selective recomputation does not keep.
        input_bytes: Size in bytes of the layer's input. Full recomputation keeps only this input.
        workspace_bytes: Size in bytes of the temporary memory that the layer uses while it runs,
            without tensor parallelism.
        weight_bytes: Size in bytes of the data needed to compute weight gradients. These are the
            inputs and output gradients of the matrix multiplications that tensor-parallel ranks
            divide.
        tp_bytes: Number of bytes that tensor-parallel ranks all-reduce in a forward pass, and again
            in a backward pass.
        expert_parameters: Part of ``parameters`` that belongs to experts. If experts are
            distributed over more ranks, fewer replicas hold each expert.
        frozen_parameters: Part of ``parameters`` that is not trained. These parameters have no
            gradients and no optimizer state.
        context_bytes: Size in bytes, without tensor parallelism, of the keys and values that ranks
            exchange in a forward pass if they share a sequence, or 0 if ranks cannot share a
            sequence.
        keys_bytes: Size in bytes, without tensor parallelism, of the keys and values that later
            slices of a sequence attend to, or 0 if sequences cannot be cut into slices.
        routed_bytes: Size in bytes of the token copies that are kept for experts. If experts are
            distributed over ranks, a forward pass sends this amount to the experts and back. A
            backward pass sends the same amount.
        group: ``encoder`` or ``decoder`` for models in which a stage must not contain layers of
            both groups, otherwise empty.
        is_local: Whether an attention window limits the number of tokens that a token attends to.
        counted: Whether the layer counts as a layer in ``--num-layers`` and in the partition of a
            plan file.
    """

    name: str
    parameters: float = 0.0
    replicated_parameters: float = 0.0
    output_elements: float = 0.0
    forward_flops: float = 0.0
    attention_flops: float = 0.0
    output_flops: float = 0.0
    activation_bytes: float = 0.0
    replicated_activation_bytes: float = 0.0
    attention_bytes: float = 0.0
    input_bytes: float = 0.0
    workspace_bytes: float = 0.0
    weight_bytes: float = 0.0
    tp_bytes: float = 0.0
    expert_parameters: float = 0.0
    frozen_parameters: float = 0.0
    context_bytes: float = 0.0
    keys_bytes: float = 0.0
    routed_bytes: float = 0.0
    group: str = ""
    is_local: bool = False
    counted: bool = True

    def held_parameters(self, tp: int) -> float:
        """Returns the number of parameters that each of ``tp`` tensor-parallel ranks holds."""
        return self.parameters / tp + self.replicated_parameters

    def kept_bytes(
        self, tp: int, recompute: str = "none", *, sequence_parallel: bool = False
    ) -> float:
        """Returns the number of bytes per sample that a rank keeps for the backward pass.

        Full recomputation does not apply to embedding and head.

        Args:
            tp: Number of tensor-parallel ranks.
            recompute: Kind of activation recomputation, one of ``RECOMPUTE``.
            sequence_parallel: Whether all activations are divided among tensor-parallel ranks.
        """
        share = tp if sequence_parallel else 1
        if recompute == "full" and self.counted:
            return self.input_bytes / share
        sharded = self.activation_bytes
        if recompute == "selective":
            sharded -= self.attention_bytes
        return sharded / tp + self.replicated_activation_bytes / share + self.routed_bytes


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as a list of layers, with the costs of each kind of layer.

    Attributes:
        name: Name by which profiles refer to the model.
        kinds: Every kind of layer, keyed by name.
        layers: Name of each layer's kind in pipeline order, including embedding and head.
        tokens_per_sample: Number of tokens per sample, used to compute the speed in tokens per
            second.
        tied_parameters: Number of weights that embedding and head share, or 0 if they share no
            weights. If embedding and head are on different stages, each stage has a copy of these
            weights, and the gradients are added up. The parameters of the head's kind include these
            weights.
        tied_layers: Indices of the layers that share the tied weights.
        frozen_layers: Number of leading layers through which no gradient flows. Stages that consist
            of such layers have no backward passes.
        max_tp: Maximum tensor-parallel size that divides the model's sizes evenly.
        precision: Sizes in bytes of the numbers in a training run.
        arguments: Megatron's command-line arguments for the model, which are written to plan files.
            The tuple is empty if they are unknown.
        expert_ranks: Possible numbers of ranks over which experts are distributed, including 1.
        sequence: Number of tokens per sample if ranks can divide a sample among themselves,
            otherwise 1.
        has_own_kernels: Whether the trainer's own layers compute attention without storing scores.
            These layers can compute weight gradients in a separate pass. If ranks share a sequence,
            each rank gathers the keys and values of the whole sequence.
    """

    name: str
    kinds: Mapping[str, LayerKind]
    layers: tuple[str, ...]
    tokens_per_sample: int = 1
    tied_parameters: float = 0.0
    tied_layers: tuple[int, ...] = ()
    frozen_layers: int = 0
    max_tp: int = 2**30
    precision: Precision = field(default_factory=Precision)
    arguments: tuple[str, ...] = ()
    expert_ranks: tuple[int, ...] = (1,)
    sequence: int = 1
    has_own_kernels: bool = False

    def __post_init__(self) -> None:
        for index in self.tied_layers:
            if not 0 <= index < len(self.layers):
                raise ConfigError(
                    f"model {self.name}: tied layer {index} is out of range; layers are 0 to "
                    f"{len(self.layers) - 1}"
                )

    @property
    def num_layers(self) -> int:
        """Total number of layers, including the embedding and the head."""
        return len(self.layers)

    @property
    def num_counted(self) -> int:
        """Number of layers that ``--num-layers`` counts, without the embedding and the head."""
        return sum(self.kinds[name].counted for name in self.layers)

    @property
    def attention(self) -> str:
        """Implementation of attention, one of ``ATTENTIONS``."""
        if self.has_own_kernels:
            return "kernel"
        return "unfused" if any(kind.attention_bytes for kind in self.kinds.values()) else "fused"

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(self.kinds[name].routed_bytes for name in set(self.layers))

    @cached_property
    def attention_share(self) -> float:
        """Fraction of the FLOPs of all transformer layers that is due to attention.

        Attention with a window is excluded, because its FLOPs do not grow with the square of the
        sequence length.
        """
        kinds = [self.kinds[name] for name in self.layers]
        whole = sum(kind.forward_flops for kind in kinds if kind.counted)
        grows = sum(kind.attention_flops for kind in kinds if kind.counted and not kind.is_local)
        return grows / whole if whole else 0.0

    def most_slices(self) -> int:
        """Returns the maximum number of slices per sequence, or 1 if sequences cannot be cut."""
        attending = [
            kind for kind in map(self.layer, range(self.num_layers)) if kind.attention_flops
        ]
        if self.attention == "fused" or not attending:
            return 1
        if not all(kind.keys_bytes for kind in attending):
            return 1
        return max(1, self.sequence // LEAST_TOKENS)

    def divides_sequence(self, tp: int, context_ranks: int, sequence_parallel: bool) -> bool:
        """Returns whether sequences can be divided evenly among ranks in all layers.

        Args:
            tp: Number of tensor-parallel ranks.
            context_ranks: Number of ranks that share each sequence (context parallelism).
            sequence_parallel: Whether each part of a sequence is divided further among
                tensor-parallel ranks.
        """
        kinds = [self.kinds[name] for name in set(self.layers)]
        attending = [kind for kind in kinds if kind.attention_flops]
        if context_ranks > 1 and not all(kind.context_bytes for kind in attending):
            return False
        unit = max(tp if sequence_parallel else 1, 1 if context_ranks == 1 else 2) * context_ranks
        if sequence_parallel and tp == 1:
            return False
        return self.sequence % unit == 0

    @cached_property
    def parameters(self) -> float:
        """Number of parameters of the whole model. Tied parameters are counted once."""
        whole = sum(self.layer(i).held_parameters(1) for i in range(self.num_layers))
        return whole - self.tied_parameters * max(0, len(self.tied_layers) - 1)

    @cached_property
    def splits(self) -> frozenset[int]:
        """Indices of layers that must start a new stage because they begin a new layer group."""
        groups = [self.kinds[name].group for name in self.layers]
        return frozenset(i for i in range(1, len(groups)) if groups[i] != groups[i - 1])

    def layer(self, index: int) -> LayerKind:
        """Returns the kind of the layer with index ``index``."""
        return self.kinds[self.layers[index]]

    def stage_layers(self, counted: Sequence[int]) -> tuple[range, ...]:
        """Returns the layers of each stage as a range of indices, including embedding and head.

        A layer that ``--num-layers`` does not count, such as the embedding, belongs to the same
        stage as the next counted layer. The last layers, such as the head, belong to the last
        stage.

        Args:
            counted: Number of layers in each stage, without embedding and head, as in
                ``--num-layers``.

        Raises:
            ConfigError: The numbers do not add up to the model's number of layers.
        """
        if sum(counted) != self.num_counted:
            raise ConfigError(
                f"layers {'-'.join(map(str, counted))} add up to {sum(counted)}, but model"
                f" {self.name} has {self.num_counted} layers; make them equal"
            )
        positions = [i for i in range(self.num_layers) if self.layer(i).counted]
        # A stage ends after its last counted layer. A stage without counted layers is empty, except
        # that the first stage always contains the layers before the first counted layer.
        ends = [
            positions[num_done - 1] + 1 if num_done else positions[0]
            for num_done in accumulate(counted[:-1])
        ]
        return tuple(map(range, (0, *ends), (*ends, self.num_layers)))

    def counted(self, partition: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the number of layers in each stage, without embedding and head.

        Plan files contain these numbers, which add up to ``--num-layers``.

        Args:
            partition: Number of layers in each stage, including embedding and head.
        """
        counts = []
        begin = 0
        for size in partition:
            counts.append(sum(self.layer(i).counted for i in range(begin, begin + size)))
            begin += size
        return tuple(counts)
