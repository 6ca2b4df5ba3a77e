"""Describes models to the planner: kinds of layers, their order, and the sizes of transformers.

Owns the formulas; names of models and files are ``model_file``'s. Counts are of one sample and of
the whole layer, before tensor parallelism divides it.

Sources: Narayanan et al. 2021 (arXiv:2104.04473), appendix, for operations; Korthikanti et al. 2022
(arXiv:2205.05198), section 4, for activations, with grouped queries and gated feed-forward blocks
added and each element at its own size. Attention scores are counted whole unless the attention is
fused, which skips the masked half of a causal model, what lies outside of a window, and keeps one
number for each row of scores. Latent attention and layers that predict further tokens: DeepSeek-AI
2024 (arXiv:2412.19437), section 2.

Experts are counted with as many as a token goes to. Kinds of layers with experts are there once
for each number of ranks that experts can be spread over, as in ``experts/8``: that with the most to
do then has ``imbalance`` times the average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from megatron.adaptive.errors import ConfigError

ATTENTIONS = ("fused", "kernel", "unfused")
"""Ways of attention: Transformer Engine's and that of the trainer's own layers by torch's kernels,
neither of which keeps scores; with scores written out and kept."""
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
        trained: weights that are trained, over all; the bytes of the others' gradients are 0.
        fp8: whether layers multiply matrices in fp8, as with ``--fp8-format hybrid``.
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
        """Returns the mean sizes of frozen weights and, for each, a share of trained ones."""
        return replace(
            self,
            parameter_bytes=self.parameter_bytes * (1 + share),
            gradient_bytes=self.gradient_bytes * share,
            optimizer_bytes=self.optimizer_bytes * share,
            reduce_bytes=self.reduce_bytes * share,
            trained=share,
        )

    def with_fp8(self) -> Precision:
        """Returns the same with layers that multiply in fp8."""
        if self.name != "bf16":
            raise ConfigError(f"--fp8 with precision {self.name}: it goes with bf16; plan in that")
        return replace(self, fp8=True)

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
        expert_parameters: part of ``parameters`` that belongs to experts, which fewer replicas hold
            the more ranks they are spread over.
        context_bytes: keys and values that ranks which share a sequence send each other in a
            forward, divided by tensor parallelism; 0 where they cannot share it.
        routed_bytes: kept copies of tokens on their way to experts. Where these are spread over
            ranks, as many go there and back in a forward, and again in a backward.
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
    expert_parameters: float = 0.0
    context_bytes: float = 0.0
    routed_bytes: float = 0.0
    group: str = ""
    counted: bool = True

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
        return sharded / tp + self.replicated_activation_bytes / share + self.routed_bytes


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
        expert_ranks: numbers of ranks that its experts can be spread over, 1 included.
        sequence: tokens of a sample that ranks can divide; 1 where they cannot.
        has_own_kernels: whether attention without kept scores is computed by the trainer's own
            layers. These can split backwards. If ranks share a sequence, they gather its keys and
            values.
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
    expert_ranks: tuple[int, ...] = (1,)
    sequence: int = 1
    has_own_kernels: bool = False

    def __post_init__(self) -> None:
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

    @property
    def attention(self) -> str:
        """Returns how the model computes attention, one of ``ATTENTIONS``."""
        if self.has_own_kernels:
            return "kernel"
        return "unfused" if any(kind.attention_bytes for kind in self.kinds.values()) else "fused"

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(self.kinds[name].routed_bytes for name in set(self.layers))

    def divides_sequence(self, tp: int, context_ranks: int, sequence_parallel: bool) -> bool:
        """Returns whether its layers can be run with these ranks sharing each sequence."""
        kinds = [self.kinds[name] for name in set(self.layers)]
        if context_ranks > 1 and not all(k.context_bytes for k in kinds if k.attention_flops):
            return False
        unit = max(tp if sequence_parallel else 1, 1 if context_ranks == 1 else 2) * context_ranks
        if sequence_parallel and tp == 1:
            return False
        return self.sequence % unit == 0

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

    def stage_layers(self, counted: Sequence[int]) -> tuple[range, ...]:
        """Returns which layers each stage holds.

        Layers that ``--num-layers`` does not count go with the next one that it counts; those
        behind all others, such as the head, with the last stage, those before all with the first.

        Args:
            counted: layers of each stage, as ``--num-layers`` counts them.

        Raises:
            ConfigError: they are not as many as the model has.
        """
        if sum(counted) != self.num_counted:
            raise ConfigError(
                f"layers {'-'.join(map(str, counted))} are {sum(counted)}, model {self.name} has"
                f" {self.num_counted}: make them equal"
            )
        places = [i for i in range(self.num_layers) if self.layer(i).counted]
        # Each stage ends behind the last layer that it counts; without any it is empty, but for
        # the first, which has what comes before all of them.
        ends = [places[done - 1] + 1 if done else places[0] for done in accumulate(counted[:-1])]
        return tuple(map(range, (0, *ends), (*ends, self.num_layers)))

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


_MULTIPLY_ADD = 2
_FLOAT_BYTES = 4
_TOKEN_TYPES = 2


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
        own_attention: whether the trainer's own layers compute it, by torch's kernels.
        precision: bytes of numbers.
        arguments: Megatron arguments of the same model; may be empty.
        query_biases: queries, keys and values have biases though other layers have none.
        query_norms: queries and keys are normalized.
        latent_rank: width of what keys and values are made of, in latent attention; 0 for none.
        query_rank: width of what its queries are made of; 0 where they are made of the input.
        rotary_width: part of each of its heads that is rotated.
        value_width: of each of its heads' values.
        window: tokens that one attends to; 0 for all before it.
        window_layers: whether each layer has the window; empty for all.
        experts: of each layer that has them; 0 for none.
        expert_layers: whether each layer has them; empty for all.
        top_k: experts that a token goes to.
        expert_ffn: inner width of an expert.
        shared_ffn: inner width of the expert that all tokens go to.
        capacity: most tokens of an expert over the average; 0 for no limit.
        padded: experts compute as many as that whatever they get.
        imbalance: tokens of the rank with the most of them over the average, where experts are
            spread over ranks.
        predictions: layers that predict further tokens, on the last stage.
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
    own_attention: bool = False
    precision: Precision = field(default_factory=Precision)
    arguments: tuple[str, ...] = ()
    query_biases: bool = False
    query_norms: bool = False
    latent_rank: int = 0
    query_rank: int = 0
    rotary_width: int = 0
    value_width: int = 0
    window: int = 0
    window_layers: tuple[bool, ...] = ()
    experts: int = 0
    expert_layers: tuple[bool, ...] = ()
    top_k: int = 1
    expert_ffn: int = 1
    shared_ffn: int = 0
    capacity: float = 0.0
    padded: bool = False
    imbalance: float = 1.0
    predictions: int = 0

    def __post_init__(self) -> None:
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
    def outputs(self) -> int:
        """Width of what all heads of a token give."""
        return self.heads * (self.value_width or self.head_width)

    @property
    def keys_values(self) -> int:
        """Width of all keys and values of a token."""
        if self.latent_rank:
            return self.queries + self.outputs
        return 2 * self.query_groups * self.head_width

    @property
    def attention_weights(self) -> tuple[int, int]:
        """Weights of an attention's products that ranks divide, and that each holds."""
        if not self.latent_rank:
            return self.hidden * (self.queries + self.keys_values + self.outputs), 0
        unrotated = self.heads * (self.head_width - self.rotary_width)
        split = (self.query_rank or self.hidden) * self.queries + self.hidden * self.outputs
        split += self.latent_rank * (unrotated + self.outputs)
        down = self.query_rank + self.latent_rank + self.rotary_width
        return split, self.hidden * down

    def load(self, spread: int) -> float:
        """Returns the tokens of the busiest experts over the average, on so many ranks."""
        if self.padded:
            return self.capacity
        return min(self.imbalance if spread > 1 else 1.0, self.capacity or math.inf)


def build_model(shape: TransformerShape) -> Model:
    """Makes the planner's model of a shape.

    The kinds are ``embedding``, ``transformer`` and ``head``; those of T5 ``embedding``,
    ``encoder``, ``decoder_embedding``, ``decoder`` and ``head``. Layers with experts are
    ``experts``; of layers with and without a window, those with one have ``-window`` behind.
    """
    windowed = shape.window_layers or (False,) * shape.layers
    with_experts = shape.expert_layers or (shape.experts > 0,) * shape.layers
    spreads = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0] or [1]
    kinds: dict[str, LayerKind] = {}
    layers: list[str] = []
    if shape.family == "t5":
        # The encoder's output goes along with the decoder's.
        memory, tokens = shape.sequence, shape.decoder_sequence
        for kind, count in (
            (_embedding(shape, "embedding", memory, group="encoder"), 1),
            (_layer(shape, "encoder", memory, causal=False, group="encoder"), shape.layers),
            (_embedding(shape, "decoder_embedding", tokens, group="decoder", carried=memory), 1),
            (
                _layer(shape, "decoder", tokens, causal=True, group="decoder", crossed=memory),
                shape.decoder_layers,
            ),
            (_head(shape, tokens, group="decoder"), 1),
        ):
            kinds[kind.name] = kind
            layers += [kind.name] * count
        tokens += memory
    else:
        tokens, causal = shape.sequence, shape.family == "gpt"
        names = [
            ("experts" if some else "transformer") + "-window" * near
            for some, near in zip(with_experts, windowed, strict=True)
        ]
        layers = ["embedding", *names, "head"]
        kinds["embedding"] = _embedding(shape, "embedding", tokens)
        for spread in spreads:
            behind = f"/{spread}" if spread > 1 else ""
            for name in dict.fromkeys(names):
                if spread == 1 or name.startswith("experts"):
                    one = replace(shape, window=0) if any(windowed) and "-" not in name else shape
                    if name.startswith("transformer"):
                        one = replace(one, experts=0)
                    kinds[name + behind] = _layer(
                        one, name + behind, tokens, causal=causal, spread=spread
                    )
            head = _head(shape, tokens)
            if shape.predictions:
                last = kinds.get(names[-1] + behind, kinds[names[-1]])
                kinds["head" + behind] = _predicting(shape, head, last, "head" + behind)
            elif spread == 1:
                kinds["head"] = head
    shared = [i for i, name in enumerate(layers) if name.endswith(("embedding", "head"))]
    tied = shape.tied or shape.predictions > 0
    widths = [shape.ffn] if not all(with_experts) else []
    widths += [shape.expert_ffn, shape.shared_ffn] if shape.experts else []
    return Model(
        name=shape.name,
        kinds=kinds,
        layers=tuple(layers),
        tokens_per_sample=tokens,
        tied_parameters=float(shape.vocabulary * shape.hidden) if tied else 0.0,
        tied_layers=tuple(shared) if tied else (),
        # What divides heads and feed-forward width.
        max_tp=math.gcd(shape.heads, *widths),
        precision=shape.precision,
        arguments=shape.arguments,
        expert_ranks=tuple(spreads),
        sequence=1 if shape.family == "t5" else tokens,
        has_own_kernels=shape.fused_attention and shape.own_attention,
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
    spread: int = 1,
) -> LayerKind:
    """Returns a transformer layer.

    Args:
        shape: whose experts the layer has.
        name: of the kind.
        tokens: of a sample.
        causal: whether tokens attend to those before them alone.
        group: of the kind.
        crossed: length of the sequence it attends to besides.
        spread: ranks that its experts are spread over.
    """
    element, mask = shape.precision.element_bytes, 1 if shape.dropout else 0
    hidden, ffn, queries, pairs = shape.hidden, shape.ffn, shape.queries, shape.keys_values
    outputs, (attention, latent) = shape.outputs, shape.attention_weights
    routed = shape.top_k * shape.load(spread) if shape.experts else 0.0
    if shape.experts:
        ffn = shape.shared_ffn
    gates = 3 if shape.gated else 2
    norms = (3 if crossed else 2) * hidden * (2 if shape.norm_biases else 1)
    weights: float = attention + gates * hidden * ffn
    router = shape.experts * hidden
    inner = ffn + routed * shape.expert_ffn
    linear = tokens * (attention + latent + router + gates * hidden * inner)
    expert = gates * hidden * shape.expert_ffn
    split_biases = queries + pairs + (gates - 1) * ffn
    if shape.biases:
        expert += (gates - 1) * shape.expert_ffn + hidden
    whole_biases = hidden if shape.experts else 2 * hidden
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
    both = queries + outputs
    kept: float = attentions * tokens * both * element + tokens * pairs * element
    kept += crossed * pairs * element + (gates if shape.gated else 2) * tokens * inner * element
    if shape.fused_attention:  # one number per row of scores: the logarithm of its sum
        kept += attentions * shape.heads * tokens * _FLOAT_BYTES
    # A backward holds the gradients of what it goes through: of scores before and after a softmax,
    # whose kernel has masks within it for 16 bits alone.
    masked = causal and not shape.fused_attention and element > 2
    attention_work = tokens * (queries + pairs)
    attention_work += 0 if shape.fused_attention else (3 if masked else 2) * score_area
    biases = split_biases if shape.biases else (queries + pairs) * shape.query_biases
    experts = shape.experts * expert / spread
    has_own = shape.own_attention or not shape.fused_attention
    # Of latent attention, what queries, keys and values are made of is normalized.
    norms += 2 * shape.head_width * shape.query_norms if not latent else 0
    norms += shape.query_rank + shape.latent_rank
    return LayerKind(
        name=name,
        parameters=weights + biases + experts,
        replicated_parameters=norms + latent + router + (whole_biases if shape.biases else 0),
        output_elements=(tokens + crossed) * hidden,
        forward_flops=_MULTIPLY_ADD * linear + scores,
        attention_flops=scores,
        activation_bytes=kept + attention_bytes,
        replicated_activation_bytes=blocks * width * (2 * element + mask)
        + (tokens * tokens if masked else 0)
        + tokens * (latent // hidden) * element,
        attention_bytes=attention_bytes,
        input_bytes=(tokens + crossed) * hidden * element,
        workspace_bytes=element * max(tokens * 2 * (gates - 1) * inner, attention_work),
        weight_bytes=tokens * (both + pairs + gates * inner) * element,
        tp_bytes=(attentions + routed + (ffn > 0)) * width * element,
        expert_parameters=experts,
        # The trainer's own attention knows no windows in parts of a sequence.
        context_bytes=0.0
        if not causal or shape.experts or (shape.window and has_own)
        else tokens * pairs * element,
        routed_bytes=routed * width * element,
        group=group,
    )


def _predicting(shape: TransformerShape, head: LayerKind, layer: LayerKind, name: str) -> LayerKind:
    """Returns the head with layers before it that predict further tokens.

    Each takes the hidden state and the next token's embedding; logits are made once more. The
    stage has a copy of the embedding.
    """
    count, hidden, tokens = shape.predictions, shape.hidden, shape.sequence
    element = shape.precision.element_bytes

    def both(field: str, times: int = 1) -> float:
        return float(getattr(head, field) * times + getattr(layer, field) * count)

    copied = 0 if shape.tied else shape.vocabulary * hidden
    joined = 2 * hidden * hidden
    norms = 3 * hidden * (2 if shape.norm_biases else 1)
    kept = (both("replicated_activation_bytes", 1 + count), 5 * tokens * hidden * element)
    return replace(
        head,
        name=name,
        parameters=both("parameters") + count * joined + copied,
        replicated_parameters=both("replicated_parameters") + count * norms,
        forward_flops=both("forward_flops", 1 + count) + count * _MULTIPLY_ADD * tokens * joined,
        attention_flops=both("attention_flops"),
        activation_bytes=both("activation_bytes", 1 + count),
        replicated_activation_bytes=kept[0] + count * kept[1],
        attention_bytes=both("attention_bytes"),
        workspace_bytes=max(head.workspace_bytes, layer.workspace_bytes),
        tp_bytes=both("tp_bytes", 1 + count),
        expert_parameters=both("expert_parameters"),
        routed_bytes=both("routed_bytes"),
    )


def _scores(shape: TransformerShape, tokens: int, others: int, *, causal: bool) -> float:
    """Returns the operations of queries times keys and of scores times values."""
    whole = float(_MULTIPLY_ADD * tokens * others * (shape.queries + shape.outputs))
    if not (causal and shape.fused_attention):
        return whole
    # The masked half of a square as wide as the window, or as all.
    near = min(shape.window or others, others) / others
    return whole * near * (1 - near / 2)


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
