"""Computes the parameters, FLOPs and memory of transformer layers from their sizes.

:func:`build_model` builds a GPT, BERT or T5 model from a :class:`TransformerShape`. The model may
have experts, attention windows, latent attention, and multi-token prediction layers.

Source: Narayanan et al. 2021 (arXiv:2104.04473), appendix, for FLOPs. Korthikanti et al. 2022
(arXiv:2205.05198), section 4, for activations. This module adds grouped queries and gated
feed-forward blocks, and counts each element with its actual size. DeepSeek-AI 2024
(arXiv:2412.19437), section 2, for latent attention and multi-token prediction.

Attention without a fused kernel computes and stores all scores. A fused kernel skips the scores
outside of a window, and the masked half of a causal model's scores. It stores only one number per
row of scores.

The FLOPs per token in a layer with experts are the FLOPs of the experts to which the token is
routed. If experts are distributed over ranks, the busiest rank has ``imbalance`` times the average
work. Therefore, layers with experts have a separate kind for each number of ranks. For example,
``experts/8`` is the kind for 8 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model_description import LayerKind, Model, Precision

_MULTIPLY_ADD = 2
_FLOAT_BYTES = 4
_TOKEN_TYPES = 2


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes and options of a transformer model.

    Attributes:
        name: Name of the model.
        family: Type of the model: ``gpt`` for a decoder, ``bert`` for an encoder, or ``t5`` for an
            encoder and a decoder.
        layers: Number of layers in the decoder of a ``gpt`` model, or in the encoder of a ``bert``
            or ``t5`` model.
        decoder_layers: Number of layers in T5's decoder.
        hidden: Hidden size, which is the number of elements per token between layers.
        heads: Number of attention heads.
        query_groups: Number of key and value heads. It equals ``heads`` if queries are not grouped.
        head_width: Number of elements in the queries, and in the keys, of a head.
        ffn: Inner width of the feed-forward block.
        sequence: Number of tokens per sample. For ``t5``, this is the number in the encoder.
        decoder_sequence: Number of tokens per sample in T5's decoder.
        positions: Number of rows in the table of learned positions, or 0 without such a table.
        vocabulary: Number of rows in the embedding, including Megatron's padding.
        gated: Whether the feed-forward block has a gate (SwiGLU).
        biases: Whether linear layers have biases.
        norm_biases: Whether normalizations have biases, like LayerNorm but unlike RMSNorm.
        tied: Whether embedding and head share their weights.
        dropout: Whether the model has dropout. Dropout masks are kept for the backward pass.
        fused_attention: Whether attention avoids storing scores, like FlashAttention.
        own_attention: Whether the trainer's own layers compute attention with torch's kernels
            instead of Transformer Engine.
        precision: Sizes in bytes of the numbers in a training run.
        arguments: Megatron's command-line arguments for the same model, or empty if unknown.
        query_biases: Whether queries, keys and values have biases even if other layers do not.
        query_norms: Whether queries and keys are normalized.
        latent_rank: Width of the latent vector of keys and values, or 0 without latent attention.
        query_rank: Width of the latent vector of queries, or 0 without such a vector.
        rotary_width: Number of elements of a head that have rotary positions in latent attention.
        value_width: Number of elements in the values of a head in latent attention.
        window: Number of tokens that a token attends to, or 0 for all previous tokens.
        window_layers: For each layer, whether it has the attention window. Empty if all layers have
            it.
        experts: Number of experts per layer, or 0 if the model has no experts.
        expert_layers: For each layer, whether it has experts. Empty if all layers have experts.
        top_k: Number of experts to which each token is routed.
        expert_ffn: Inner width of an expert.
        shared_ffn: Inner width of the shared expert, which processes all tokens.
        capacity: Maximum number of tokens per expert divided by the average number, or 0 for no
            limit.
        padded: Whether the input of each expert is padded to ``capacity``. If so, all experts have
            the same work.
        imbalance: Number of tokens on the rank with the busiest experts, divided by the average
            over all ranks.
        predictions: Number of multi-token prediction layers, which are on the last stage.
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
                f"model {self.name}: {self.heads} heads are not a multiple of {self.query_groups}"
                " query groups; every group must serve the same number of heads"
            )
        if self.family == "t5" and not (self.decoder_layers and self.decoder_sequence):
            raise ConfigError(
                f"model {self.name}: T5 also requires decoder_layers and decoder_sequence"
            )

    @property
    def queries(self) -> int:
        """Number of elements in the queries of a token, over all heads."""
        return self.heads * self.head_width

    @property
    def outputs(self) -> int:
        """Number of elements in the attention output of a token, over all heads."""
        return self.heads * (self.value_width or self.head_width)

    @property
    def keys_values(self) -> int:
        """Number of elements in the keys and values of a token, over all heads."""
        if self.latent_rank:
            return self.queries + self.outputs
        return 2 * self.query_groups * self.head_width

    @property
    def attention_weights(self) -> tuple[int, int]:
        """Number of attention weights that tensor parallelism divides, and that it replicates."""
        if not self.latent_rank:
            return self.hidden * (self.queries + self.keys_values + self.outputs), 0
        unrotated = self.heads * (self.head_width - self.rotary_width)
        split = (self.query_rank or self.hidden) * self.queries + self.hidden * self.outputs
        split += self.latent_rank * (unrotated + self.outputs)
        down = self.query_rank + self.latent_rank + self.rotary_width
        return split, self.hidden * down

    def load(self, spread: int) -> float:
        """Returns the work of the experts on the busiest rank, relative to the average rank.

        Args:
            spread: Number of ranks over which the experts are distributed.
        """
        if self.padded:
            return self.capacity
        return min(self.imbalance if spread > 1 else 1.0, self.capacity or math.inf)


def build_model(shape: TransformerShape) -> Model:
    """Builds a model from the sizes of the transformer ``shape``.

    The kinds of layers are called ``embedding``, ``transformer`` (``experts`` for layers with
    experts) and ``head``. For T5, they are called ``embedding``, ``encoder``,
    ``decoder_embedding``, ``decoder`` and ``head``. If only some layers have an attention window,
    the names of their kinds end with ``-window``.
    """
    windowed = shape.window_layers or (False,) * shape.layers
    with_experts = shape.expert_layers or (shape.experts > 0,) * shape.layers
    spreads = [n for n in range(1, shape.experts + 1) if shape.experts % n == 0] or [1]
    kinds: dict[str, LayerKind] = {}
    layers: list[str] = []
    if shape.family == "t5":
        tokens = shape.sequence + shape.decoder_sequence
        for kind, count in _t5_kinds(shape):
            kinds[kind.name] = kind
            layers += [kind.name] * count
    else:
        tokens = shape.sequence
        names = [
            ("experts" if has_experts else "transformer") + "-window" * has_window
            for has_experts, has_window in zip(with_experts, windowed, strict=True)
        ]
        layers = ["embedding", *names, "head"]
        kinds["embedding"] = _embedding(shape, "embedding", tokens)
        for spread in spreads:
            _add_kinds(kinds, shape, names, spread)
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
        # Tensor parallelism divides heads and feed-forward widths, so its size must be a divisor of
        # each of these numbers.
        max_tp=math.gcd(shape.heads, *widths),
        precision=shape.precision,
        arguments=shape.arguments,
        expert_ranks=tuple(spreads),
        sequence=1 if shape.family == "t5" else tokens,
        has_own_kernels=shape.fused_attention and shape.own_attention,
    )


def _t5_kinds(shape: TransformerShape) -> list[tuple[LayerKind, int]]:
    """Returns the kinds of layers of a T5 model in order, with the number of layers of each kind.

    The layers of the decoder also pass the output of the encoder to the next layer.
    """
    encoder_tokens, tokens = shape.sequence, shape.decoder_sequence
    decoder_embedding = _embedding(
        shape, "decoder_embedding", tokens, group="decoder", carried=encoder_tokens
    )
    decoder = _layer(shape, "decoder", tokens, causal=True, group="decoder", crossed=encoder_tokens)
    return [
        (_embedding(shape, "embedding", encoder_tokens, group="encoder"), 1),
        (_layer(shape, "encoder", encoder_tokens, causal=False, group="encoder"), shape.layers),
        (decoder_embedding, 1),
        (decoder, shape.decoder_layers),
        (_head(shape, tokens, group="decoder"), 1),
    ]


def _add_kinds(
    kinds: dict[str, LayerKind], shape: TransformerShape, names: Sequence[str], spread: int
) -> None:
    """Adds the layer kinds of a model whose experts are distributed over ``spread`` ranks.

    Args:
        kinds: Kinds of layers, keyed by name. New kinds are added to this dict.
        shape: Sizes of the model.
        names: For each layer, the name of its kind, without the number of ranks.
        spread: Number of ranks over which the experts are distributed. If it is 1, kinds without
            experts are also added.
    """
    tokens = shape.sequence
    causal = shape.family == "gpt"
    suffix = f"/{spread}" if spread > 1 else ""
    for name in dict.fromkeys(names):
        if spread == 1 or name.startswith("experts"):
            has_window = not any(shape.window_layers) or "-" in name
            kind_shape = shape if has_window else replace(shape, window=0)
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


def _embedding(
    shape: TransformerShape, name: str, tokens: int, *, group: str = "", carried: int = 0
) -> LayerKind:
    """Returns a layer kind for an embedding layer, with its costs.

    Args:
        shape: Sizes of the model.
        name: Name of the kind of layer.
        tokens: Number of tokens per sample.
        group: Group of the kind: ``encoder`` or ``decoder`` in a T5 model, otherwise empty.
        carried: Number of tokens of the encoder's output that the layer passes on with the
            embeddings.
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
        # Only the forward pass has an all-reduce, but ``tp_bytes`` counts for both directions, so
        # halve the size.
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
    """Returns a layer kind for a transformer layer, with its costs.

    Args:
        shape: Sizes of the model, with experts only if the layer has experts.
        name: Name of the kind of layer.
        tokens: Number of tokens per sample.
        causal: Whether tokens attend only to previous tokens.
        group: Group of the kind: ``encoder`` or ``decoder`` in a T5 model, otherwise empty.
        crossed: Number of tokens of the encoder's output to which cross-attention attends, or 0 if
            the layer has no cross-attention.
        spread: Number of ranks over which the layer's experts are distributed.
    """
    element = shape.precision.element_bytes
    mask = 1 if shape.dropout else 0
    hidden, queries, pairs = shape.hidden, shape.queries, shape.keys_values
    ffn = shape.shared_ffn if shape.experts else shape.ffn
    routed = shape.top_k * shape.load(spread) if shape.experts else 0.0
    gates = 3 if shape.gated else 2
    inner = ffn + routed * shape.expert_ffn
    scores = _all_scores(shape, tokens, crossed, causal=causal)
    # A layer consists of an attention block, a feed-forward block and possibly a cross-attention
    # block.
    blocks = 3 if crossed else 2
    width = tokens * hidden
    score_area = 0 if shape.fused_attention else shape.heads * tokens * (tokens + crossed)
    # The backward pass of dropout needs the mask, and the probabilities before and after dropout.
    attention_bytes = float(score_area * ((2 if mask else 1) * element + mask))
    # During the backward pass, the gradients of the scores before and after the softmax are in
    # memory. With 16-bit scores, the softmax kernel applies the causal mask. With 32-bit scores, a
    # separate mask requires a third copy of the scores.
    is_masked = causal and not shape.fused_attention and element > 2
    attention_work = tokens * (queries + pairs) + (3 if is_masked else 2) * score_area
    weights = _layer_weights(shape, crossed, spread)
    return LayerKind(
        name=name,
        parameters=weights.divided,
        replicated_parameters=weights.replicated,
        output_elements=(tokens + crossed) * hidden,
        forward_flops=_MULTIPLY_ADD * _products(shape, tokens, crossed, inner) + scores,
        attention_flops=scores,
        activation_bytes=_divided_bytes(shape, tokens, crossed, inner) + attention_bytes,
        replicated_activation_bytes=blocks * width * (2 * element + mask)
        + (tokens * tokens if is_masked else 0)
        + tokens * (shape.attention_weights[1] // hidden) * element,
        attention_bytes=attention_bytes,
        input_bytes=(tokens + crossed) * hidden * element,
        workspace_bytes=element * max(tokens * 2 * (gates - 1) * inner, attention_work),
        weight_bytes=tokens * (queries + shape.outputs + pairs + gates * inner) * element,
        tp_bytes=(blocks - 1 + routed + (ffn > 0)) * width * element,
        expert_parameters=weights.experts,
        context_bytes=tokens * pairs * element if _divides_tokens(shape, causal) else 0.0,
        keys_bytes=tokens * pairs * element if causal and not crossed else 0.0,
        is_local=bool(shape.window),
        routed_bytes=routed * width * element,
        group=group,
    )


def _products(shape: TransformerShape, tokens: int, crossed: int, inner: float) -> float:
    """Returns the number of multiply-adds in the linear parts of a layer, without attention scores.

    The arguments have the same meaning as in :func:`_divided_bytes`.
    """
    hidden, (attention, latent) = shape.hidden, shape.attention_weights
    gates = 3 if shape.gated else 2
    products = tokens * (attention + latent + shape.experts * hidden + gates * hidden * inner)
    if crossed:
        products += (2 * tokens * shape.queries + crossed * shape.keys_values) * hidden
    return products


def _divides_tokens(shape: TransformerShape, causal: bool) -> bool:
    """Returns whether ranks can share the sequences in a layer (context parallelism)."""
    is_engine = shape.fused_attention and not shape.own_attention
    # The trainer's own attention does not support windows if a rank holds only a part of a
    # sequence.
    return causal and not shape.experts and (not shape.window or is_engine)


class _LayerWeights(NamedTuple):
    """Numbers of parameters in a transformer layer.

    Attributes:
        divided: Number of parameters that tensor-parallel ranks divide among themselves.
        replicated: Number of parameters that every tensor-parallel rank holds.
        experts: Part of ``divided`` that belongs to experts.
    """

    divided: float
    replicated: float
    experts: float


def _layer_weights(shape: TransformerShape, crossed: int, spread: int) -> _LayerWeights:
    """Counts the parameters of a layer. Arguments have the same meaning as in :func:`_layer`."""
    hidden, queries, pairs = shape.hidden, shape.queries, shape.keys_values
    attention, latent = shape.attention_weights
    ffn = shape.shared_ffn if shape.experts else shape.ffn
    gates = 3 if shape.gated else 2
    norms = (3 if crossed else 2) * hidden * (2 if shape.norm_biases else 1)
    # Latent attention normalizes the latent vectors instead of queries and keys. Add the weights of
    # these normalizations below.
    norms += 2 * shape.head_width * shape.query_norms if not latent else 0
    norms += shape.query_rank + shape.latent_rank
    weights: float = attention + gates * hidden * ffn
    router = shape.experts * hidden
    expert = gates * hidden * shape.expert_ffn
    split_biases = queries + pairs + (gates - 1) * ffn
    if shape.biases:
        expert += (gates - 1) * shape.expert_ffn + hidden
    whole_biases = hidden if shape.experts else 2 * hidden
    if crossed:
        weights += hidden * (2 * queries + pairs)
        split_biases += queries + pairs
        whole_biases += hidden
    biases = split_biases if shape.biases else (queries + pairs) * shape.query_biases
    experts = shape.experts * expert / spread
    return _LayerWeights(
        divided=weights + biases + experts,
        replicated=norms + latent + router + (whole_biases if shape.biases else 0),
        experts=experts,
    )


def _divided_bytes(shape: TransformerShape, tokens: int, crossed: int, inner: float) -> float:
    """Returns the size in bytes of the activations that tensor parallelism divides.

    Attention scores are excluded.

    Args:
        shape: Sizes of the model.
        tokens: Number of tokens per sample.
        crossed: Number of tokens of the encoder's output to which cross-attention attends.
        inner: Inner width of the feed-forward block, plus the inner widths of the experts that
            process a token.
    """
    element = shape.precision.element_bytes
    pairs = shape.keys_values
    attentions = 2 if crossed else 1
    query_width = shape.queries + shape.outputs
    kept: float = attentions * tokens * query_width * element + tokens * pairs * element
    kept += crossed * pairs * element + (3 if shape.gated else 2) * tokens * inner * element
    if shape.fused_attention:
        # For the backward pass, the kernel keeps one number per row of scores: the logarithm of the
        # sum of their exponentials.
        kept += attentions * shape.heads * tokens * _FLOAT_BYTES
    return kept


def _predicting(shape: TransformerShape, head: LayerKind, layer: LayerKind, name: str) -> LayerKind:
    """Returns a layer kind for the head combined with all multi-token prediction layers.

    Each multi-token prediction layer takes the hidden state and the embedding of the next token,
    and computes separate logits. The last stage therefore needs a copy of the embedding.

    Args:
        shape: Sizes of the model.
        head: Costs of the head without multi-token prediction.
        layer: Costs of the transformer layer inside each multi-token prediction layer.
        name: Name of the combined kind.
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
        # The weight gradient of an output layer is deferred if the layer shares its weight with an
        # embedding on the same stage.
        output_flops=0.0 if shape.tied else total("output_flops", 1 + count),
        activation_bytes=total("activation_bytes", 1 + count),
        replicated_activation_bytes=kept[0] + count * kept[1],
        attention_bytes=total("attention_bytes"),
        workspace_bytes=max(head.workspace_bytes, layer.workspace_bytes),
        tp_bytes=total("tp_bytes", 1 + count),
        expert_parameters=total("expert_parameters"),
        routed_bytes=total("routed_bytes"),
    )


def _all_scores(shape: TransformerShape, tokens: int, crossed: int, *, causal: bool) -> float:
    """Returns the FLOPs for the scores in the self-attention and cross-attention of a layer."""
    scores = _scores(shape, tokens, tokens, causal=causal)
    if crossed:
        scores += _scores(shape, tokens, crossed, causal=False)
    return scores


def _scores(shape: TransformerShape, tokens: int, others: int, *, causal: bool) -> float:
    """Returns the FLOPs for multiplying queries with keys, and scores with values.

    Args:
        shape: Sizes of the model.
        tokens: Number of query tokens.
        others: Number of key tokens.
        causal: Whether tokens attend only to previous tokens.
    """
    whole = float(_MULTIPLY_ADD * tokens * others * (shape.queries + shape.outputs))
    if not (causal and shape.fused_attention):
        return whole
    # Each row has ``window`` scores, except the first rows, which have fewer.
    window_share = min(shape.window or others, others) / others
    return whole * window_share * (1 - window_share / 2)


def _head(shape: TransformerShape, tokens: int, *, group: str = "") -> LayerKind:
    """Returns a layer kind for the head, which computes final normalization, logits and loss."""
    element = shape.precision.element_bytes
    width, logits = tokens * shape.hidden, tokens * shape.vocabulary
    extra = shape.hidden * (shape.hidden + 3) if shape.family == "bert" else 0
    return LayerKind(
        name="head",
        parameters=shape.vocabulary * shape.hidden + (shape.vocabulary if extra else 0),
        replicated_parameters=shape.hidden * (2 if shape.norm_biases else 1) + extra,
        output_elements=float(tokens),
        forward_flops=_MULTIPLY_ADD * (tokens * extra + logits * shape.hidden),
        output_flops=float(_MULTIPLY_ADD * logits * shape.hidden),
        activation_bytes=logits * float(_FLOAT_BYTES),
        replicated_activation_bytes=2.0 * width * element,
        input_bytes=2.0 * width * element,
        workspace_bytes=logits * float(element + _FLOAT_BYTES),
        # Only the backward pass has an all-reduce, but ``tp_bytes`` counts for both directions, so
        # halve the size.
        tp_bytes=width * element / 2,
        group=group,
        counted=False,
    )
