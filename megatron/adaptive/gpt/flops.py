"""Floating-point operations that training a GPT takes, for throughput and utilization."""

from __future__ import annotations

from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.tokenizer import build_tokenizer

__all__ = ["flops_per_token", "stage_work"]

_MULTIPLY_ADD = 2  # operations of each element of a matrix product
_PASSES = 3  # forward, backward by inputs, backward by weights: each as much as the forward


def flops_per_token(cfg: TrainerConfig, *, padded_vocab_size: int | None = None) -> float:
    """Return the model FLOPs of one token's forward and backward through the whole model.

    With h hidden size, s sequence length, q = heads x head width, k = key-value heads x head
    width, f feed-forward width and V padded vocabulary, in multiply-adds of one forward::

        layer:   h(q + 2k)   queries, keys, values
               + 2qs/2       scores and weighted values; a causal token sees half the others
               + qh          output projection
               + 2hf         feed-forward, 3hf with --swiglu
        model:   layers x layer + hV

    times 2 for multiply and add, times 3 for forward, backward by inputs and by weights. Matrix
    products only; what is computed again for lack of memory is not counted, nor are the optimizer
    and the lookup of embeddings.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 5.1 and appendix; "model FLOPs" as
    in Korthikanti et al. 2022 (arXiv:2205.05198), section 6.3. Both count all of the attention
    scores; Megatron-LM's ``num_floating_point_operations`` counts the causal half, and so do we.

    Args:
        cfg: the run's settings.
        padded_vocab_size: rows of the embedding; by default the tokenizer is loaded to ask it.

    Raises:
        DataError: the tokenizer's files cannot be read.
    """
    model = cfg.model
    if padded_vocab_size is None:
        padded_vocab_size = _padded_vocab_size(cfg)
    layers = model.num_layers * _layer(cfg)
    logits = model.hidden_size * padded_vocab_size
    return float(_PASSES * _MULTIPLY_ADD * (layers + logits))


def stage_work(cfg: TrainerConfig, padded_vocab_size: int) -> tuple[float, ...]:
    """Return how much each stage should have to do, in layers.

    By multiply-adds alone: a stage's layers, and the logits on the last. What the embedding and
    the loss move through memory comes on top.

    Args:
        cfg: the run's settings.
        padded_vocab_size: rows of the embedding.
    """
    work = [float(layers) for layers in cfg.layers_per_stage]
    work[-1] += cfg.model.hidden_size * padded_vocab_size / _layer(cfg)
    return tuple(work)


def _layer(cfg: TrainerConfig) -> float:
    """Multiply-adds of one token's forward through a layer."""
    model = cfg.model
    query_width = model.num_attention_heads * model.kv_channels
    key_value_width = 2 * model.query_groups * model.kv_channels
    attention = (
        model.hidden_size * (query_width + key_value_width)
        + 2 * query_width * model.seq_length / 2
        + query_width * model.hidden_size
    )
    feed_forward = (3 if model.swiglu else 2) * model.hidden_size * model.ffn_hidden_size
    return attention + feed_forward


def _padded_vocab_size(cfg: TrainerConfig) -> int:
    tokenizer = build_tokenizer(
        cfg.data.tokenizer_type,
        cfg.data.vocab_file,
        cfg.data.merge_file,
        vocab_size=cfg.data.vocab_size,
        make_divisible_by=cfg.model.make_vocab_size_divisible_by,
        tensor_parallel_size=cfg.parallel.tensor_model_parallel_size,
    )
    return tokenizer.padded_vocab_size
