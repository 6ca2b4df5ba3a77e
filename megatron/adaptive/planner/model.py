"""Describes models to the planner: kinds of layers, their order, and the sizes of transformers.

Owns the formulas; names of models and files are ``model_file``'s. Counts are of one sample and of
the whole layer, before tensor parallelism divides it.

Sources: Narayanan et al. 2021 (arXiv:2104.04473), appendix, for operations; Korthikanti et al. 2022
(arXiv:2205.05198), section 4, for activations, with grouped queries and gated feed-forward blocks
added and each element at its own size. Attention scores are counted whole unless the attention is
fused, which skips the masked half of a causal model and keeps no scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megatron.adaptive.errors import ConfigError

RECOMPUTE = ("none", "selective", "full")
"""The parts that a backward repeats: nothing, the attention core, or the whole layer."""


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
        _check("precision", self)

    @classmethod
    def named(cls, name: str) -> Precision:
        """Returns the sizes with which Megatron trains in fp32, fp16 or bf16 with Adam.

        Raises:
            ConfigError: another name.
        """
        if name == "fp32":
            return cls(name=name, element_bytes=4, parameter_bytes=4, optimizer_bytes=8)
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
        weight_bytes: inputs and gradients of its products, which weight gradients need, as far as
            tensor parallelism divides them.
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
    weight_bytes: float = 0.0
    tp_bytes: float = 0.0
    group: str = ""
    counted: bool = True

    def __post_init__(self) -> None:
        _check("layer kind", self)

    def held_parameters(self, tp: int) -> float:
        """Returns the number of parameters that one of ``tp`` ranks holds."""
        return self.parameters / tp + self.replicated_parameters

    def kept_bytes(
        self, tp: int, recompute: str = "none", *, sequence_parallel: bool = False
    ) -> float:
        """Returns the bytes of one sample that a rank keeps from forward to backward.

        Layers that are not counted, embedding and head, are never computed again.

        Args:
            tp: tensor-parallel ranks.
            recompute: one of ``RECOMPUTE``.
            sequence_parallel: whether they divide all activations.
        """
        share = tp if sequence_parallel else 1
        if recompute == "full" and self.counted:
            return self.input_bytes / share
        sharded = self.activation_bytes
        if recompute == "selective":
            sharded -= self.attention_bytes
        return sharded / tp + self.replicated_activation_bytes / share


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
        """Returns the kind of the layer at that place."""
        return self.kinds[self.layers[index]]

    def counted(self, partition: tuple[int, ...]) -> tuple[int, ...]:
        """Counts a partition of all layers as a plan file and ``--num-layers`` do.

        Args:
            partition: layers of each stage, embedding and head included.
        """
        counts, begin = [], 0
        for size in partition:
            counts.append(sum(self.layer(i).counted for i in range(begin, begin + size)))
            begin += size
        return tuple(counts)


def _check(what: str, one: Precision | LayerKind) -> None:
    for name, value in vars(one).items():
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"{what} {one.name}: {name} is {value}: it must be finite and not negative"
            )


_MULTIPLY_ADD = 2
_FLOAT_BYTES = 4
_TOKEN_TYPES = 2
_OPTIONAL = ("decoder_layers", "decoder_sequence", "positions")


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer.

    Attributes:
        name: of the model.
        family: decoder only, encoder only, or both.
        layers: of the decoder, or of the encoder for ``bert`` and ``t5``.
        decoder_layers: of T5's decoder.
        hidden: width between layers.
        heads: attention heads.
        query_groups: key and value heads; equal to ``heads`` without grouped queries.
        head_width: of each head.
        ffn: inner width of the feed-forward block.
        sequence: tokens of a sample; those of the encoder for ``t5``.
        decoder_sequence: tokens of a sample in T5's decoder.
        positions: rows of the learned position table, 0 where none is learned.
        vocabulary: rows of the embedding, padded as Megatron pads it.
        gated: the feed-forward block has a gate (SwiGLU).
        biases: linear layers have biases.
        norm_biases: normalizations have biases (LayerNorm; RMSNorm has none).
        tied: embedding and head share their weights.
        dropout: dropout keeps its masks.
        fused_attention: attention keeps no scores (FlashAttention and the like).
        precision: bytes of numbers.
        arguments: Megatron arguments of the same model; may be empty.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    head_width: int
    query_groups: int
    ffn: int
    sequence: int
    vocabulary: int
    family: str = "gpt"
    decoder_layers: int = 0
    decoder_sequence: int = 0
    positions: int = 0
    gated: bool = False
    biases: bool = True
    norm_biases: bool = True
    tied: bool = True
    dropout: bool = True
    fused_attention: bool = False
    precision: Precision = field(default_factory=Precision)
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in _OPTIONAL else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ConfigError(
                    f"model {self.name}: {name} is {value}: it must be at least {least}"
                )
        if self.heads % self.query_groups:
            raise ConfigError(
                f"model {self.name}: {self.heads} heads are no multiple of {self.query_groups}"
                " query groups: every group serves the same number of heads"
            )
        if self.family == "t5" and not (self.decoder_layers and self.decoder_sequence):
            raise ConfigError(
                f"model {self.name}: T5 needs the decoder's layers and sequence length too"
            )

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_width

    @property
    def keys_values(self) -> int:
        """Width of all keys and values of a token."""
        return 2 * self.query_groups * self.head_width


def build_model(shape: TransformerShape) -> Model:
    """Makes the planner's model of a shape.

    The kinds are ``embedding``, ``transformer`` and ``head``; those of T5 ``embedding``,
    ``encoder``, ``decoder_embedding``, ``decoder`` and ``head``.
    """
    if shape.family == "t5":
        # The encoder's output goes along with the decoder's.
        memory, tokens = shape.sequence, shape.decoder_sequence
        kinds = {
            _embedding(shape, "embedding", memory, group="encoder"): 1,
            _layer(shape, "encoder", memory, causal=False, group="encoder"): shape.layers,
            _embedding(shape, "decoder_embedding", tokens, group="decoder", carried=memory): 1,
            _layer(shape, "decoder", tokens, causal=True, group="decoder", crossed=memory): (
                shape.decoder_layers
            ),
            _head(shape, tokens, group="decoder"): 1,
        }
        tokens += memory
    else:
        tokens, causal = shape.sequence, shape.family == "gpt"
        kinds = {
            _embedding(shape, "embedding", tokens): 1,
            _layer(shape, "transformer", tokens, causal=causal): shape.layers,
            _head(shape, tokens): 1,
        }
    layers = tuple(kind.name for kind, count in kinds.items() for _ in range(count))
    tied = [i for i, name in enumerate(layers) if name.endswith(("embedding", "head"))]
    return Model(
        name=shape.name,
        kinds={kind.name: kind for kind in kinds},
        layers=layers,
        tokens_per_sample=tokens,
        tied_parameters=float(shape.vocabulary * shape.hidden) if shape.tied else 0.0,
        tied_layers=tuple(tied) if shape.tied else (),
        # What divides heads and feed-forward width.
        max_tp=math.gcd(shape.heads, shape.ffn),
        precision=shape.precision,
        arguments=shape.arguments,
    )


def _embedding(
    shape: TransformerShape, name: str, tokens: int, *, group: str = "", carried: int = 0
) -> LayerKind:
    element = shape.precision.element_bytes
    width = tokens * shape.hidden
    types = _TOKEN_TYPES * shape.hidden if shape.family == "bert" else 0
    return LayerKind(
        name=name,
        parameters=shape.vocabulary * shape.hidden,
        replicated_parameters=shape.positions * shape.hidden + types,
        output_elements=width + carried * shape.hidden,
        replicated_activation_bytes=tokens * 8.0 + (width if shape.dropout else 0),
        input_bytes=tokens * 8.0,
        workspace_bytes=0.0,
        # Its one all-reduce is the forward's; the backward has none.
        tp_bytes=width * element / 2,
        group=group,
        counted=False,
    )


def _layer(
    shape: TransformerShape,
    name: str,
    tokens: int,
    *,
    causal: bool,
    group: str = "",
    crossed: int = 0,
) -> LayerKind:
    """Returns a transformer layer; ``crossed``: length of the sequence it attends to besides."""
    element, mask = shape.precision.element_bytes, 1 if shape.dropout else 0
    hidden, ffn, queries, pairs = shape.hidden, shape.ffn, shape.queries, shape.keys_values
    gates = 3 if shape.gated else 2
    norms = (3 if crossed else 2) * hidden * (2 if shape.norm_biases else 1)
    weights = hidden * (2 * queries + pairs) + gates * hidden * ffn
    split_biases = queries + pairs + (gates - 1) * ffn
    whole_biases = 2 * hidden
    linear = tokens * weights
    scores = _scores(shape, tokens, tokens, causal=causal)
    score_area = shape.heads * tokens * tokens
    if crossed:
        weights += hidden * (2 * queries + pairs)
        linear += 2 * tokens * hidden * queries + crossed * hidden * pairs
        scores += _scores(shape, tokens, crossed, causal=False)
        score_area += shape.heads * tokens * crossed
        split_biases += queries + pairs
        whole_biases += hidden
    blocks = 3 if crossed else 2  # of the residual stream: attention (twice) and feed-forward
    attentions = blocks - 1
    width = tokens * hidden
    # Probabilities before and after dropout, and its mask; without dropout the two are one.
    each = (2 if mask else 1) * element + mask
    attention_bytes = 0.0 if shape.fused_attention else float(score_area * each)
    kept = attentions * tokens * 2 * queries * element + tokens * pairs * element
    kept += crossed * pairs * element + (gates if shape.gated else 2) * tokens * ffn * element
    # A backward holds the gradients of what it goes through: of scores before and after a softmax,
    # whose kernel has masks within it for 16 bits alone.
    masked = causal and not shape.fused_attention and element > 2
    attention_work = tokens * (queries + pairs)
    attention_work += 0 if shape.fused_attention else (3 if masked else 2) * score_area
    return LayerKind(
        name=name,
        parameters=weights + (split_biases if shape.biases else 0),
        replicated_parameters=norms + (whole_biases if shape.biases else 0),
        output_elements=(tokens + crossed) * hidden,
        forward_flops=_MULTIPLY_ADD * linear + scores,
        attention_flops=scores,
        activation_bytes=kept + attention_bytes,
        replicated_activation_bytes=blocks * width * (2 * element + mask)
        + (tokens * tokens if masked else 0),
        attention_bytes=attention_bytes,
        input_bytes=(tokens + crossed) * hidden * element,
        workspace_bytes=element * max(tokens * 2 * (gates - 1) * ffn, attention_work),
        weight_bytes=tokens * (2 * queries + pairs + gates * ffn) * element,
        tp_bytes=blocks * width * element,
        group=group,
    )


def _scores(shape: TransformerShape, tokens: int, others: int, *, causal: bool) -> float:
    """Returns the operations of queries times keys and of scores times values."""
    whole = 2 * _MULTIPLY_ADD * tokens * others * shape.queries
    return whole / 2 if causal and shape.fused_attention else float(whole)


def _head(shape: TransformerShape, tokens: int, *, group: str = "") -> LayerKind:
    """Returns the last normalization, logits and loss."""
    element = shape.precision.element_bytes
    width, logits = tokens * shape.hidden, tokens * shape.vocabulary
    extra = shape.hidden * (shape.hidden + 3) if shape.family == "bert" else 0
    return LayerKind(
        name="head",
        parameters=shape.vocabulary * shape.hidden + (shape.vocabulary if extra else 0),
        replicated_parameters=shape.hidden * (2 if shape.norm_biases else 1) + extra,
        output_elements=float(tokens),
        forward_flops=_MULTIPLY_ADD * (tokens * extra + logits * shape.hidden),
        activation_bytes=logits * float(_FLOAT_BYTES),
        replicated_activation_bytes=2.0 * width * element,
        input_bytes=2.0 * width * element,
        workspace_bytes=logits * float(element + _FLOAT_BYTES),
        # Its one all-reduce is the backward's.
        tp_bytes=width * element / 2,
        group=group,
        counted=False,
    )
