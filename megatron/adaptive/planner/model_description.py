"""Computes parameters, operations and bytes of every layer of a model.

A model is a list of layers, each of a kind. :func:`build_model` makes it from the sizes of a
transformer (:class:`TransformerShape`)::

    layers    embedding  transformer  transformer  ...  transformer  head
    kinds     3: embedding, transformer, head; each with its parameters, operations and bytes

All counts are those of one sample in one whole layer, before tensor parallelism divides it.
``model_file`` reads names of models and files.

Source: Narayanan et al. 2021 (arXiv:2104.04473), appendix, for operations; Korthikanti et al. 2022
(arXiv:2205.05198), section 4, for activations. Grouped queries and gated feed-forward blocks are
added, and each element is counted with its own size. DeepSeek-AI 2024 (arXiv:2412.19437), section
2, for latent attention and layers that predict further tokens.

Attention without a fused kernel computes and keeps all scores. A fused kernel skips the masked half
of a causal model and all scores outside of a window, and keeps one number for each row of scores.

Operations of experts are those of the experts that a token goes to. If experts are spread over
ranks, the busiest rank has ``imbalance`` times the average work. Therefore, layers with experts
have one kind for each number of ranks; ``experts/8`` is the kind for 8 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from megatron.adaptive.errors import ConfigError

ATTENTIONS = ("fused", "kernel", "unfused")
"""Ways to compute attention: ``fused`` by Transformer Engine and ``kernel`` by torch's kernels in
the trainer's layers keep no scores; ``unfused`` writes all scores into memory and keeps them."""
RECOMPUTE = ("none", "selective", "full")
"""Parts of a forward that the backward repeats: none, the attention core, or the whole layer."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Sizes of numbers in bytes.

    Attributes:
        name: Name of the precision, such as ``bf16``.
        element_bytes: Bytes of an element of an activation, in memory and in messages.
        parameter_bytes: Bytes of a weight that layers read.
        gradient_bytes: Bytes of the accumulated gradient of a weight.
        optimizer_bytes: Bytes of a weight's optimizer state and master copy, which the distributed
            optimizer divides.
        reduce_bytes: Bytes of a gradient in messages between data-parallel replicas.
        trained: Share of weights that are trained, above 0 and up to 1.
        fp8: Whether layers multiply matrices in fp8, as with ``--fp8-format hybrid``.
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
        """Returns mean sizes for frozen weights with adapters.

        Args:
            share: Number of trained weights in adapters for each frozen weight.
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
        """Returns the precision with matrix products in fp8.

        Raises:
            ConfigError: The precision is not bf16.
        """
        if self.name != "bf16":
            raise ConfigError(f"--fp8 with precision {self.name}: fp8 needs bf16: plan in bf16")
        return replace(self, fp8=True)

    @classmethod
    def named(cls, name: str) -> Precision:
        """Returns the sizes with which Megatron trains by Adam in a precision.

        Args:
            name: ``fp32``, ``fp16`` or ``bf16``.

        Raises:
            ConfigError: The name is another.
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
    """Costs of one kind of layer, for one sample (one sequence).

    Attributes:
        name: Name of the kind, such as ``transformer``, ``embedding`` or ``head``.
        parameters: Number of parameters that tensor parallelism divides.
        replicated_parameters: Number of parameters that every tensor-parallel rank has.
        output_elements: Number of elements that the next layer gets.
        forward_flops: Operations of a forward, before tensor parallelism divides them.
        attention_flops: Operations among them that selective recompute repeats.
        activation_bytes: Bytes kept for the backward that tensor parallelism divides.
        replicated_activation_bytes: Bytes kept for the backward on every tensor-parallel rank.
        attention_bytes: Part of ``activation_bytes`` that selective recompute does not keep.
        input_bytes: Bytes of the layer's input, which is all that full recompute keeps.
        workspace_bytes: Bytes in use only while the layer runs, which tensor parallelism divides.
        weight_bytes: Bytes of the inputs and output gradients of matrix products, which the weight
            gradients need, without those that tensor parallelism does not divide.
        tp_bytes: Bytes that tensor-parallel ranks all-reduce in a forward, and again in a backward.
        expert_parameters: Part of ``parameters`` that belongs to experts. The more ranks these are
            spread over, the fewer replicas have each of them.
        context_bytes: Bytes of keys and values that the ranks of a sequence send each other in a
            forward, divided by tensor parallelism; 0 if ranks cannot share a sequence.
        routed_bytes: Bytes of kept copies of tokens for experts. If experts are spread over ranks,
            as many bytes travel to them and back in a forward, and again in a backward.
        group: ``encoder`` or ``decoder`` if a stage must not have layers of both; otherwise empty.
        counted: Whether ``--num-layers`` and the partition of a plan file count the layer.
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
        """Returns the number of parameters on one of ``tp`` tensor-parallel ranks."""
        return self.parameters / tp + self.replicated_parameters

    def kept_bytes(
        self, tp: int, recompute: str = "none", *, sequence_parallel: bool = False
    ) -> float:
        """Returns the bytes of one sample that a rank keeps from forward to backward.

        Full recompute leaves out layers that are not counted, embedding and head.

        Args:
            tp: Number of tensor-parallel ranks.
            recompute: Kind of recompute, one of ``RECOMPUTE``.
            sequence_parallel: Whether tensor-parallel ranks divide all activations.
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
    """A model as a list of layers, with the costs of each kind.

    Attributes:
        name: Name, which also matches profiles to models.
        kinds: Every kind of layer by name.
        layers: Kind of each layer in pipeline order, embedding and head included.
        tokens_per_sample: Tokens of a sample, for figures in tokens per second.
        tied_parameters: Number of weights that embedding and head share; 0 if they share none. If
            the first and the last stage differ, both have a copy, and add their gradients. The
            head's kind counts them among its parameters.
        tied_layers: Indices of the layers with these weights.
        max_tp: Largest tensor-parallel width that the sizes of the model allow.
        precision: Bytes of numbers.
        arguments: Megatron arguments that describe the model, for plan files; may be empty.
        expert_ranks: Numbers of ranks that the experts can be spread over, with 1.
        sequence: Tokens of a sample that ranks can divide; 1 if they cannot.
        has_own_kernels: Whether the trainer's own layers compute attention without keeping scores.
            They can split backwards. If ranks share a sequence, they gather its keys and values.
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
        """Number of all layers, embedding and head included."""
        return len(self.layers)

    @property
    def num_counted(self) -> int:
        """Number of layers as ``--num-layers`` counts them."""
        return sum(self.kinds[name].counted for name in self.layers)

    @property
    def attention(self) -> str:
        """Way to compute attention, one of ``ATTENTIONS``."""
        if self.has_own_kernels:
            return "kernel"
        return "unfused" if any(kind.attention_bytes for kind in self.kinds.values()) else "fused"

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(self.kinds[name].routed_bytes for name in set(self.layers))

    def divides_sequence(self, tp: int, context_ranks: int, sequence_parallel: bool) -> bool:
        """Returns whether ranks can divide a sequence evenly, and all layers allow it.

        Args:
            tp: Number of tensor-parallel ranks.
            context_ranks: Number of ranks that share each sequence.
            sequence_parallel: Whether tensor-parallel ranks divide it further.
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
        """Number of parameters of the whole model, with tied ones counted once."""
        whole = sum(self.layer(i).held_parameters(1) for i in range(self.num_layers))
        return whole - self.tied_parameters * max(0, len(self.tied_layers) - 1)

    @cached_property
    def splits(self) -> frozenset[int]:
        """Indices of layers in front of which a stage has to end, because a new group begins."""
        groups = [self.kinds[name].group for name in self.layers]
        return frozenset(i for i in range(1, len(groups)) if groups[i] != groups[i - 1])

    def layer(self, index: int) -> LayerKind:
        """Returns the kind of a layer, by its index."""
        return self.kinds[self.layers[index]]

    def stage_layers(self, counted: Sequence[int]) -> tuple[range, ...]:
        """Returns the layers of each stage, embedding and head included.

        A layer that ``--num-layers`` does not count is on the stage of the next layer that it
        counts. The last layers, such as the head, are on the last stage.

        Args:
            counted: Number of layers of each stage, as ``--num-layers`` counts them.

        Raises:
            ConfigError: Their sum is not the number of layers of the model.
        """
        if sum(counted) != self.num_counted:
            raise ConfigError(
                f"layers {'-'.join(map(str, counted))} are {sum(counted)}, model {self.name} has"
                f" {self.num_counted}: make them equal"
            )
        positions = [i for i in range(self.num_layers) if self.layer(i).counted]
        # Each stage ends behind its last counted layer. A stage without any is empty, except for
        # the first stage, which still has the layers in front of all counted ones.
        ends = [
            positions[num_done - 1] + 1 if num_done else positions[0]
            for num_done in accumulate(counted[:-1])
        ]
        return tuple(map(range, (0, *ends), (*ends, self.num_layers)))

    def counted(self, partition: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the number of counted layers of each stage, as in a plan file.

        Args:
            partition: Number of layers of each stage, embedding and head included.
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
        name: Name of the model.
        family: ``gpt`` for a decoder, ``bert`` for an encoder, ``t5`` for both.
        layers: Number of layers of the decoder; for ``bert`` and ``t5``, of the encoder.
        decoder_layers: Number of layers of T5's decoder.
        hidden: Width of the hidden state between layers.
        heads: Number of attention heads.
        query_groups: Number of key and value heads; equal to ``heads`` without grouped queries.
        head_width: Width of a head's queries and keys.
        ffn: Inner width of the feed-forward block.
        sequence: Tokens of a sample; for ``t5``, those of the encoder.
        decoder_sequence: Tokens of a sample in T5's decoder.
        positions: Rows of the learned position table; 0 if there is none.
        vocabulary: Rows of the embedding, padded as in Megatron.
        gated: Whether the feed-forward block has a gate (SwiGLU).
        biases: Whether linear layers have biases.
        norm_biases: Whether normalizations have biases (LayerNorm has, RMSNorm has not).
        tied: Whether embedding and head share their weights.
        dropout: Whether there is dropout, whose masks are kept.
        fused_attention: Whether attention keeps no scores (FlashAttention and similar kernels).
        own_attention: Whether the trainer's own layers compute attention, by torch's kernels.
        precision: Bytes of numbers.
        arguments: Megatron arguments of the same model; may be empty.
        query_biases: Whether queries, keys and values have biases though other layers have none.
        query_norms: Whether queries and keys are normalized.
        latent_rank: Width of the latent vector of keys and values; 0 without latent attention.
        query_rank: Width of the latent vector of queries; 0 if they come from the hidden state.
        rotary_width: Width of the part of a head that has rotary positions, in latent attention.
        value_width: Width of a head's values, in latent attention.
        window: Number of tokens that a token attends to; 0 for all before it.
        window_layers: Whether each layer has the window; empty if all have it.
        experts: Number of experts of a layer; 0 without experts.
        expert_layers: Whether each layer has experts; empty if all have them.
        top_k: Number of experts that a token goes to.
        expert_ffn: Inner width of an expert.
        shared_ffn: Inner width of the expert that all tokens go to.
        capacity: Most tokens of an expert, divided by the average; 0 for no limit.
        padded: Whether experts always compute as many tokens as ``capacity`` allows.
        imbalance: Tokens of the busiest rank, divided by the average, if experts are spread over
            ranks.
        predictions: Number of layers that predict further tokens, on the last stage.
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
        """Width of the outputs of all heads of a token."""
        return self.heads * (self.value_width or self.head_width)

    @property
    def keys_values(self) -> int:
        """Width of all keys and values of a token."""
        if self.latent_rank:
            return self.queries + self.outputs
        return 2 * self.query_groups * self.head_width

    @property
    def attention_weights(self) -> tuple[int, int]:
        """Weights of the attention that ranks divide, and weights that each rank has whole."""
        if not self.latent_rank:
            return self.hidden * (self.queries + self.keys_values + self.outputs), 0
        unrotated = self.heads * (self.head_width - self.rotary_width)
        split = (self.query_rank or self.hidden) * self.queries + self.hidden * self.outputs
        split += self.latent_rank * (unrotated + self.outputs)
        down = self.query_rank + self.latent_rank + self.rotary_width
        return split, self.hidden * down

    def load(self, spread: int) -> float:
        """Returns the work of the rank with the busiest experts, divided by the average.

        Args:
            spread: Number of ranks that the experts are spread over.
        """
        if self.padded:
            return self.capacity
        return min(self.imbalance if spread > 1 else 1.0, self.capacity or math.inf)


def build_model(shape: TransformerShape) -> Model:
    """Makes a model from the sizes of a transformer.

    Its kinds are ``embedding``, ``transformer`` (``experts`` for layers with experts) and
    ``head``; those of T5 are ``embedding``, ``encoder``, ``decoder_embedding``, ``decoder`` and
    ``head``. If only some layers have a window, the names of their kinds end with ``-window``.
    """
    windowed = shape.window_layers or (False,) * shape.layers
    with_experts = shape.expert_layers or (shape.experts > 0,) * shape.layers
    spreads = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0] or [1]
    kinds: dict[str, LayerKind] = {}
    layers: list[str] = []
    if shape.family == "t5":
        # The decoder's stages also pass on the encoder's output.
        encoder_tokens, tokens = shape.sequence, shape.decoder_sequence
        for layer_kind, count in (
            (_embedding(shape, "embedding", encoder_tokens, group="encoder"), 1),
            (_layer(shape, "encoder", encoder_tokens, causal=False, group="encoder"), shape.layers),
            (
                _embedding(
                    shape, "decoder_embedding", tokens, group="decoder", carried=encoder_tokens
                ),
                1,
            ),
            (
                _layer(
                    shape, "decoder", tokens, causal=True, group="decoder", crossed=encoder_tokens
                ),
                shape.decoder_layers,
            ),
            (_head(shape, tokens, group="decoder"), 1),
        ):
            kinds[layer_kind.name] = layer_kind
            layers += [layer_kind.name] * count
        tokens += encoder_tokens
    else:
        tokens, causal = shape.sequence, shape.family == "gpt"
        names = [
            ("experts" if has_experts else "transformer") + "-window" * has_window
            for has_experts, has_window in zip(with_experts, windowed, strict=True)
        ]
        layers = ["embedding", *names, "head"]
        kinds["embedding"] = _embedding(shape, "embedding", tokens)
        for spread in spreads:
            suffix = f"/{spread}" if spread > 1 else ""
            for name in dict.fromkeys(names):
                if spread == 1 or name.startswith("experts"):
                    kind_shape = (
                        replace(shape, window=0) if any(windowed) and "-" not in name else shape
                    )
                    if name.startswith("transformer"):
                        kind_shape = replace(kind_shape, experts=0)
                    kinds[name + suffix] = _layer(
                        kind_shape, name + suffix, tokens, causal=causal, spread=spread
                    )
            head = _head(shape, tokens)
            if shape.predictions:
                last = kinds.get(names[-1] + suffix, kinds[names[-1]])
                kinds["head" + suffix] = _predicting(shape, head, last, "head" + suffix)
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
        # Tensor parallelism divides heads and feed-forward widths.
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
    """Returns an embedding.

    Args:
        shape: Sizes of the model.
        name: Name of the kind.
        tokens: Tokens of a sample.
        group: Group of the kind.
        carried: Tokens of the encoder's output, which are passed on with the embeddings.
    """
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
        # Only the forward has an all-reduce, and ``tp_bytes`` counts for both directions.
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
        shape: Sizes of the model, with experts only if the layer has them.
        name: Name of the kind.
        tokens: Tokens of a sample.
        causal: Whether tokens attend only to tokens before them.
        group: Group of the kind.
        crossed: Tokens of the encoder's output that a decoder layer also attends to; 0 for none.
        spread: Number of ranks that its experts are spread over.
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
    blocks = 3 if crossed else 2  # blocks that add to the residual: attentions and feed-forward
    attentions = blocks - 1
    width = tokens * hidden
    # Dropout keeps probabilities before and after it, and its mask.
    score_bytes = (2 if mask else 1) * element + mask
    attention_bytes = 0.0 if shape.fused_attention else float(score_area * score_bytes)
    query_width = queries + outputs
    kept: float = attentions * tokens * query_width * element + tokens * pairs * element
    kept += crossed * pairs * element + (gates if shape.gated else 2) * tokens * inner * element
    if shape.fused_attention:
        # The kernel keeps one number per row of scores: the logarithm of their sum.
        kept += attentions * shape.heads * tokens * _FLOAT_BYTES
    # The backward has the gradients of scores before and after a softmax in memory. The softmax
    # kernel with a causal mask is for 16 bits only; in 32 bits, masked scores are a third copy.
    masked = causal and not shape.fused_attention and element > 2
    attention_work = tokens * (queries + pairs)
    attention_work += 0 if shape.fused_attention else (3 if masked else 2) * score_area
    biases = split_biases if shape.biases else (queries + pairs) * shape.query_biases
    experts = shape.experts * expert / spread
    has_own = shape.own_attention or not shape.fused_attention
    # Latent attention normalizes the latent vectors instead of queries and keys.
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
        weight_bytes=tokens * (query_width + pairs + gates * inner) * element,
        tp_bytes=(attentions + routed + (ffn > 0)) * width * element,
        expert_parameters=experts,
        # The trainer's own attention does not support windows if ranks share a sequence.
        context_bytes=0.0
        if not causal or shape.experts or (shape.window and has_own)
        else tokens * pairs * element,
        routed_bytes=routed * width * element,
        group=group,
    )


def _predicting(shape: TransformerShape, head: LayerKind, layer: LayerKind, name: str) -> LayerKind:
    """Returns the head together with layers that predict further tokens.

    Each of these layers takes the hidden state and the next token's embedding, and computes logits
    of its own. The last stage therefore has a copy of the embedding.

    Args:
        shape: Sizes of the model.
        head: The head alone.
        layer: Kind of the layers.
        name: Name of the kind.
    """
    count, hidden, tokens = shape.predictions, shape.hidden, shape.sequence
    element = shape.precision.element_bytes

    def total(field: str, times: int = 1) -> float:
        return float(getattr(head, field) * times + getattr(layer, field) * count)

    copied = 0 if shape.tied else shape.vocabulary * hidden
    joined = 2 * hidden * hidden
    norms = 3 * hidden * (2 if shape.norm_biases else 1)
    kept = (total("replicated_activation_bytes", 1 + count), 5 * tokens * hidden * element)
    return replace(
        head,
        name=name,
        parameters=total("parameters") + count * joined + copied,
        replicated_parameters=total("replicated_parameters") + count * norms,
        forward_flops=total("forward_flops", 1 + count) + count * _MULTIPLY_ADD * tokens * joined,
        attention_flops=total("attention_flops"),
        activation_bytes=total("activation_bytes", 1 + count),
        replicated_activation_bytes=kept[0] + count * kept[1],
        attention_bytes=total("attention_bytes"),
        workspace_bytes=max(head.workspace_bytes, layer.workspace_bytes),
        tp_bytes=total("tp_bytes", 1 + count),
        expert_parameters=total("expert_parameters"),
        routed_bytes=total("routed_bytes"),
    )


def _scores(shape: TransformerShape, tokens: int, others: int, *, causal: bool) -> float:
    """Returns the operations of queries times keys, and of scores times values.

    Args:
        shape: Sizes of the model.
        tokens: Number of tokens that attend.
        others: Number of tokens that they attend to.
        causal: Whether tokens attend only to tokens before them.
    """
    whole = float(_MULTIPLY_ADD * tokens * others * (shape.queries + shape.outputs))
    if not (causal and shape.fused_attention):
        return whole
    # A row has as many scores as the window is wide; the first rows have fewer, by a triangle.
    window_share = min(shape.window or others, others) / others
    return whole * window_share * (1 - window_share / 2)


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
        # Only the backward has an all-reduce, and ``tp_bytes`` counts for both directions.
        tp_bytes=width * element / 2,
        group=group,
        counted=False,
    )
