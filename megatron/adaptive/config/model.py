"""Defines the settings for the GPT model and recomputation, and a table of known models."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from megatron.adaptive.config.flags import (
    Count,
    Layers,
    Limits,
    Positive,
    Share,
    Width,
    assign,
    flag,
    required,
    switch,
)
from megatron.adaptive.config.input_files import read_text
from megatron.adaptive.errors import ConfigError

_SWIGLU_MULTIPLE = 64


def _fusion(operations: str, off: str) -> Any:
    """Declares a flag that disables a fused kernel. Such kernels are enabled by default."""
    text = (
        f"Do not use a fused kernel for {operations}; without this flag, it is used if available."
    )
    return switch(text, off=off)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model.

    If ``ffn_hidden_size`` or ``kv_channels`` is not set, its value is computed from
    ``hidden_size``.
    """

    num_layers: Layers = required(
        "Number of transformer layers in the whole model.",
        names=("--num-layers", "--encoder-num-layers"),
    )
    hidden_size: Width = required("Width of the hidden state.")
    num_attention_heads: Width = required("Number of attention heads in each layer.")
    ffn_hidden_size: Width = flag(
        "Inner width of the feed-forward block.",
        derived="4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to a multiple "
        "of 64",
    )
    kv_channels: Width = flag(
        "Width of each attention head.", derived="hidden size / attention heads"
    )
    group_query_attention: bool = switch("Let several query heads share one key and value head.")
    num_query_groups: Width = flag(
        "Number of key and value heads, with --group-query-attention.", 1
    )
    seq_length: Count = required(
        "Number of tokens in each sample.",
        names=("--seq-length", "--encoder-seq-length"),
        unit="TOKENS",
    )
    max_position_embeddings: Count = required(
        "Maximum sequence length that the position embedding supports.", unit="TOKENS"
    )
    position_embedding_type: str = flag(
        "Encoding of positions.",
        "learned_absolute",
        choices=("learned_absolute", "rope", "none"),
        refused_choices={
            "mrope": "it belongs to multimodal models; use rope",
            "relative": "the GPT model of megatron-core has no relative bias; use rope",
            "yarn": "it belongs to latent attention; use rope",
        },
    )
    use_rotary_position_embeddings: bool = switch("Old spelling of --position-embedding-type rope.")
    mtp_num_layers: Layers | None = flag(
        "Number of layers for multi-token prediction; each layer predicts one token further ahead."
    )
    add_position_embedding: bool = switch(
        "Old flag for a model without learned positions; requires --position-embedding-type "
        "rope or none.",
        off="--no-position-embedding",
    )
    moe_router_group_best: Count | None = flag(
        "Number of highest-scoring experts of a group whose scores add up to the group's score.",
        derived="--moe-router-topk divided by --moe-router-group-topk",
    )
    rotary_base: Count = flag("Base of the rotary frequencies.", 10000)
    rotary_percent: Annotated[float, Limits(above=0, maximum=1)] = flag(
        "Fraction of each head's width that is rotated.", 1.0
    )
    rotary_interleaved: bool = switch("Rotate neighbouring channels in pairs.")
    rotary_seq_len_interpolation_factor: Count | None = flag(
        "Divide rotary positions by this factor."
    )
    use_rope_scaling: bool = switch("Scale rotary frequencies like Llama 3.")
    rope_scaling_factor: Positive = flag("Scaling factor for --use-rope-scaling.", 8.0)
    window_rotary_base: Count | None = flag(
        "Base of the rotary frequencies in layers with a window, if it differs from --rotary-base."
    )
    make_vocab_size_divisible_by: Count = flag(
        "Pad the vocabulary to a multiple of this number times the tensor parallel size.", 128
    )
    normalization: str = flag(
        "Kind of normalization.", "LayerNorm", choices=("LayerNorm", "RMSNorm")
    )
    norm_epsilon: Positive = flag("Number added to the variance in normalization.", 1e-5)
    apply_layernorm_1p: bool = switch("Store normalization weights around zero instead of one.")
    parallel_residual: bool = switch(
        "Run attention and the feed-forward block in parallel, so that both read the layer's input."
    )
    qk_layernorm: bool = switch("Normalize queries and keys.")
    norm_block_outputs: bool = switch(
        "Also normalize the outputs of attention and of the feed-forward block before they are "
        "added to the residual."
    )
    scale_embeddings: bool = switch("Multiply embeddings by the square root of the hidden size.")
    attention_softcap: Positive | None = flag(
        "Limit attention scores to this absolute value with a hyperbolic tangent (soft-capping)."
    )
    logit_softcap: Positive | None = flag(
        "Limit logits to this absolute value with a hyperbolic tangent (soft-capping)."
    )
    swiglu: bool = switch("Use a gated feed-forward block with SiLU instead of GELU.")
    squared_relu: bool = switch("Use the squared ReLU instead of GELU.")
    quick_geglu: bool = switch(
        "Use a gated feed-forward block with GELU, approximated by a sigmoid."
    )
    geglu: bool = switch(
        "Use a gated feed-forward block with GELU, approximated by a hyperbolic tangent."
    )
    openai_gelu: bool = switch("Approximate GELU by a hyperbolic tangent.")
    add_bias_linear: bool = switch(
        "Do not use a bias in linear layers.", off="--disable-bias-linear"
    )
    add_qkv_bias: bool = switch(
        "Use a bias for queries, keys and values even with --disable-bias-linear."
    )
    untie_embeddings_and_output_weights: bool = switch(
        "Do not share weights between the word embedding and the output layer."
    )
    init_method_std: Positive = flag("Standard deviation of the initial weights.", 0.02)
    attention_dropout: Share = flag("Dropout rate of attention probabilities.", 0.1)
    hidden_dropout: Share = flag("Dropout rate of the hidden state.", 0.1)
    use_cpu_initialization: bool = switch(
        "Draw initial weights on the CPU, so that they are the same in every parallel layout; on "
        "GPUs, they differ between layouts."
    )
    perform_initialization: bool = switch(
        "Do not draw initial weights, for runs that load a checkpoint.", off="--no-initialization"
    )
    transformer_impl: str = flag(
        "Layer implementation.",
        "local",
        choices=("local", "transformer_engine"),
        refused_choices={"inference_optimized": "it cannot train; use transformer_engine"},
        derived="transformer_engine if it is installed, otherwise local",
    )
    attention_backend: str = flag(
        "Attention kernel. Local layers use torch's fused kernels on GPUs (auto), on all devices "
        "(fused), or never (unfused, local); flash requires Transformer Engine.",
        "auto",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    use_flash_attn: bool = switch(
        "Use flash attention; requires Transformer Engine, which uses it automatically if possible."
    )
    bias_gelu_fusion: bool = _fusion("bias and GELU", "--no-bias-gelu-fusion")
    bias_swiglu_fusion: bool = _fusion("bias and SwiGLU", "--no-bias-swiglu-fusion")
    bias_dropout_fusion: bool = _fusion("bias, dropout and addition", "--no-bias-dropout-fusion")
    apply_rope_fusion: bool = _fusion("rotary embedding", "--no-rope-fusion")
    no_persist_layer_norm: bool = switch("Do not use a persistent kernel for LayerNorm.")
    gradient_accumulation_fusion: bool = switch(
        "Do not use a fused kernel to add weight gradients to the main gradient; without this "
        "flag, it is used if available.",
        off="--no-gradient-accumulation-fusion",
    )
    cross_entropy_loss_fusion: bool = switch("Use a fused kernel for the cross entropy.")
    cross_entropy_fusion_impl: str = flag(
        "Implementation of the fused cross entropy; te requires Transformer Engine.",
        "native",
        choices=("native", "te"),
    )

    def __post_init__(self) -> None:
        if self.use_rotary_position_embeddings:
            assign(self, "position_embedding_type", "rope")
        if self.ffn_hidden_size is None:
            # A gated block has three matrices instead of two. With two thirds of the usual width,
            # it has the same number of parameters. As in Megatron-LM, the width is rounded down to
            # a multiple of 64.
            gated = int((4 * self.hidden_size * 2 / 3) / _SWIGLU_MULTIPLE) * _SWIGLU_MULTIPLE
            assign(self, "ffn_hidden_size", gated if self.swiglu else 4 * self.hidden_size)
        if self.kv_channels is None:
            assign(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        if self.add_bias_linear:
            assign(self, "add_qkv_bias", True)
        else:
            assign(self, "bias_gelu_fusion", False)
        if self.position_embedding_type != "rope":
            assign(self, "apply_rope_fusion", False)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward block is gated, so that it has three matrices instead of two."""
        return self.swiglu or self.quick_geglu or self.geglu

    @property
    def local_attention(self) -> str:
        """Value of ``--attention-backend`` that applies to the trainer's own (local) layers."""
        return self.attention_backend

    @property
    def query_groups(self) -> int:
        """Number of key and value heads, or of query heads if queries are not grouped."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads


_NO_EXPERTS = "individual parts of expert layers cannot be recomputed; use full, or other modules"


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Recompute.

    The flags ``recompute_activations`` and ``checkpoint_activations`` are shorthands, which set the
    fields ``recompute_granularity``, ``recompute_method`` and ``recompute_num_layers``.
    """

    recompute_activations: bool = switch("Shorthand for --recompute-granularity selective.")
    checkpoint_activations: bool = switch(
        "Old shorthand for --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1."
    )
    recompute_granularity: str | None = flag(
        "Recompute whole layers (full), or only the modules of --recompute-modules (selective).",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        "With full: recompute groups of layers and keep the input of each group (uniform), or "
        "recompute only the first layers of each stage (block).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: Layers | None = flag(
        "With full: number of layers in each group (uniform) or in each stage (block)."
    )
    recompute_modules: tuple[str, ...] | None = flag(
        "With selective: modules to recompute.",
        choices=("core_attn", "layernorm", "mlp", "mla_up_proj"),
        refused_choices={"moe": _NO_EXPERTS, "moe_act": _NO_EXPERTS, "shared_experts": _NO_EXPERTS},
        derived="core_attn",
    )
    distribute_saved_activations: bool = switch(
        "With full: distribute the saved inputs over the tensor parallel ranks."
    )

    def __post_init__(self) -> None:
        if self.recompute_activations and self.recompute_granularity is None:
            assign(self, "recompute_granularity", "selective")
        if self.checkpoint_activations and self.recompute_granularity is None:
            assign(self, "recompute_granularity", "full")
            assign(self, "recompute_method", self.recompute_method or "uniform")
            assign(self, "recompute_num_layers", self.recompute_num_layers or 1)


def _shape(layers: int, hidden: int, heads: int, length: int, other_flags: str = "") -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {length} --max-position-embeddings {length} {other_flags}"
    )


_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --use-rotary-position-embeddings "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
_LLAMA_3 = f"{_LLAMA} --group-query-attention --num-query-groups 8 --rotary-base 500000"
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_GROUPS_8 = f"{_LLAMA} --group-query-attention --num-query-groups 8"

MODELS: Mapping[str, str] = {
    "tiny": _shape(4, 64, 4, 64, _NO_DROPOUT),
    "small": _shape(8, 128, 4, 128, _NO_DROPOUT),
    "gpt-125m": _shape(12, 768, 12, 1024),
    "gpt-345m": _shape(24, 1024, 16, 1024),
    "gpt-760m": _shape(24, 1536, 16, 1024),
    "gpt-1.3b": _shape(24, 2048, 32, 2048),
    "gpt-1.5b": _shape(48, 1600, 25, 1024),
    "gpt-2.7b": _shape(32, 2560, 32, 2048),
    "gpt-6.7b": _shape(32, 4096, 32, 2048),
    "gpt-13b": _shape(40, 5120, 40, 2048),
    "gpt2": _shape(12, 768, 12, 1024),
    "gpt2-medium": _shape(24, 1024, 16, 1024),
    "gpt2-345m": _shape(24, 1024, 16, 1024),
    "gpt2-large": _shape(36, 1280, 20, 1024),
    "gpt2-xl": _shape(48, 1600, 25, 1024),
    "gpt2-1.5b": _shape(48, 1600, 25, 1024),
    "gpt3-125m": _shape(12, 768, 12, 2048),
    "gpt3-350m": _shape(24, 1024, 16, 2048),
    "gpt3-760m": _shape(24, 1536, 16, 2048),
    "gpt3-1.3b": _shape(24, 2048, 16, 2048),
    "gpt3-2.7b": _shape(32, 2560, 32, 2048),
    "gpt3-6.7b": _shape(32, 4096, 32, 2048),
    "gpt3-13b": _shape(40, 5120, 40, 2048),
    "gpt3-175b": _shape(96, 12288, 96, 2048),
    "llama-7b": _shape(32, 4096, 32, 4096, f"{_LLAMA} --ffn-hidden-size 11008"),
    "llama-13b": _shape(40, 5120, 40, 4096, f"{_LLAMA} --ffn-hidden-size 13824"),
    "llama-30b": _shape(60, 6656, 52, 2048, f"{_LLAMA} --ffn-hidden-size 17920"),
    "llama-65b": _shape(80, 8192, 64, 2048, f"{_LLAMA} --ffn-hidden-size 22016"),
    "llama2-70b": _shape(
        80,
        8192,
        64,
        4096,
        f"{_LLAMA} --ffn-hidden-size 28672 --group-query-attention --num-query-groups 8",
    ),
    "llama3-8b": _shape(32, 4096, 32, 8192, f"{_LLAMA_3} --ffn-hidden-size 14336"),
    "llama3-70b": _shape(80, 8192, 64, 8192, f"{_LLAMA_3} --ffn-hidden-size 28672"),
    "llama3-405b": _shape(126, 16384, 128, 8192, f"{_LLAMA_3} --ffn-hidden-size 53248"),
    "mistral-7b": _shape(32, 4096, 32, 4096, f"{_GROUPS_8} --ffn-hidden-size 14336"),
    "mixtral-8x7b": _shape(
        32,
        4096,
        32,
        4096,
        f"{_GROUPS_8} --ffn-hidden-size 14336 --num-experts 8 --moe-router-topk 2",
    ),
    "qwen2.5-7b": _shape(
        28,
        3584,
        28,
        4096,
        f"{_LLAMA} --add-qkv-bias --ffn-hidden-size 18944 --group-query-attention"
        " --num-query-groups 4",
    ),
    "qwen2.5-72b": _shape(
        80, 8192, 64, 4096, f"{_GROUPS_8} --add-qkv-bias --ffn-hidden-size 29568"
    ),
    "qwen3-8b": _shape(36, 4096, 32, 4096, f"{_GROUPS_8} --qk-layernorm --ffn-hidden-size 12288"),
    "qwen3-30b-a3b": _shape(
        48,
        2048,
        32,
        4096,
        f"{_LLAMA} --qk-layernorm --kv-channels 128 --group-query-attention --num-query-groups 4"
        " --ffn-hidden-size 6144 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768",
    ),
    "deepseek-v3": _shape(
        61,
        7168,
        128,
        4096,
        f"{_LLAMA} --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512"
        " --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --ffn-hidden-size 18432"
        " --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048"
        " --moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*58"
        " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        " --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5"
        " --mtp-num-layers 1",
    ),
}


def model_flags(model: str, folder: Path) -> list[str]:
    """Returns the trainer's command-line flags for the model ``model``.

    Args:
        model: Name in :data:`MODELS`, or path of a text file with flags. In such a file, ``#``
            starts a comment.
        folder: Base folder of a relative path.

    Raises:
        ConfigError: ``model`` is neither a known name nor a readable file.
    """
    if model in MODELS:
        return MODELS[model].split()
    path = folder / model
    if path.is_file():
        try:
            return shlex.split(read_text(path, "pass a file of flags"), comments=True)
        except ValueError as error:
            raise ConfigError(f"MODEL={model}: {path}: {error}; close the quotes") from error
    nearest = difflib.get_close_matches(model.lower(), MODELS, n=1)
    hint = (
        f"the nearest name is {nearest[0]}" if nearest else f"known names are {', '.join(MODELS)}"
    )
    raise ConfigError(
        f"MODEL={model} is neither the name of a known model nor a file with flags; {hint}"
    )
