"""Shape and kernels of the GPT model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import assign, flag

__all__ = ["ModelConfig"]

_SWIGLU_MULTIPLE = 64
_FUSION_NOTE = "; it is only ever used where the machine supports it"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model.

    ``ffn_hidden_size`` and ``kv_channels`` always hold a number once the object exists.
    """

    num_layers: int = flag("Transformer layers in the whole model.", minimum=1, unit="LAYERS")
    hidden_size: int = flag("Width of the hidden state.", minimum=1)
    num_attention_heads: int = flag("Attention heads of each layer.", minimum=1)
    ffn_hidden_size: int = flag(
        "Inner width of the feed-forward block.",
        default=None,
        minimum=1,
        derived="4 x hidden size; with --swiglu 8/3 x hidden size, a multiple of 64",
    )
    kv_channels: int = flag(
        "Width of each attention head.",
        default=None,
        minimum=1,
        derived="hidden size / attention heads",
    )
    group_query_attention: bool = flag(
        "Let several query heads share one key and value head.", default=False
    )
    num_query_groups: int = flag(
        "Key and value heads, used with --group-query-attention.", default=1, minimum=1
    )
    seq_length: int = flag("Tokens of each sample.", minimum=1, unit="TOKENS")
    max_position_embeddings: int = flag(
        "Longest sequence that the position embedding covers.", minimum=1, unit="TOKENS"
    )
    position_embedding_type: str = flag(
        "How positions enter the model.",
        default="learned_absolute",
        choices=("learned_absolute", "rope", "none"),
        refused_choices={
            "mrope": "it belongs to multimodal models; use rope",
            "relative": "the GPT model of megatron-core has no relative bias; use rope",
            "yarn": "it belongs to latent attention; use rope",
        },
    )
    use_rotary_position_embeddings: bool = flag(
        "Old spelling of --position-embedding-type rope.", default=False
    )
    add_position_embedding: bool = flag(
        "Old way to say that no position table is learned; needs a position embedding type "
        "that learns none.",
        names=("--no-position-embedding",),
        default=True,
    )
    rotary_base: int = flag("Base of the rotary frequencies.", default=10000, minimum=1)
    rotary_percent: float = flag(
        "Share of each head's width that is rotated.", default=1.0, above=0, maximum=1
    )
    rotary_interleaved: bool = flag("Rotate neighbouring channels in pairs.", default=False)
    rotary_seq_len_interpolation_factor: int | None = flag(
        "Squeeze rotary positions by this factor.", default=None, minimum=1
    )
    use_rope_scaling: bool = flag("Scale rotary frequencies as Llama 3 does.", default=False)
    rope_scaling_factor: float = flag("Factor of --use-rope-scaling.", default=8.0, above=0)
    make_vocab_size_divisible_by: int = flag(
        "Pad the vocabulary to a multiple of this times the tensor parallel size.",
        default=128,
        minimum=1,
    )
    normalization: str = flag(
        "Kind of normalization.", default="LayerNorm", choices=("LayerNorm", "RMSNorm")
    )
    norm_epsilon: float = flag(
        "Number added to the variance when normalizing.", default=1e-5, above=0
    )
    apply_layernorm_1p: bool = flag(
        "Store normalization weights around zero instead of one.", default=False
    )
    apply_residual_connection_post_layernorm: bool = flag(
        "Take the residual after the normalization.", default=False
    )
    qk_layernorm: bool = flag("Normalize queries and keys.", default=False)
    swiglu: bool = flag("Gated feed-forward block with SiLU in place of GELU.", default=False)
    squared_relu: bool = flag("Squared ReLU in place of GELU.", default=False)
    add_bias_linear: bool = flag(
        "Leave the bias out of linear layers.", names=("--disable-bias-linear",), default=True
    )
    add_qkv_bias: bool = flag(
        "Bias in the query, key and value projection even without other biases.", default=False
    )
    untie_embeddings_and_output_weights: bool = flag(
        "Give the output layer weights of its own.", default=False
    )
    init_method_std: float = flag(
        "Standard deviation of the initial weights.", default=0.02, above=0
    )
    attention_dropout: float = flag(
        "Dropout of attention probabilities.", default=0.1, minimum=0, below=1
    )
    hidden_dropout: float = flag("Dropout of the hidden state.", default=0.1, minimum=0, below=1)
    use_cpu_initialization: bool = flag(
        "Draw the initial weights on the CPU, equal for every tensor parallel size.", default=False
    )
    perform_initialization: bool = flag(
        "Skip drawing initial weights, for runs that load a checkpoint.",
        names=("--no-initialization",),
        default=True,
    )
    transformer_impl: str = flag(
        "Layer implementation.",
        default="local",
        choices=("local", "transformer_engine"),
        refused_choices={"inference_optimized": "it cannot train; use transformer_engine"},
        derived="transformer_engine where it is installed, else local",
    )
    attention_backend: str = flag(
        "Attention kernel; flash and fused need Transformer Engine.",
        default="auto",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    use_flash_attn: bool = flag(
        "Needs Transformer Engine, which picks flash attention by itself where it can.",
        default=False,
    )
    deprecated_use_mcore_models: bool = flag(
        "No effect: the model always is megatron-core's.",
        names=("--use-mcore-models",),
        default=False,
    )
    masked_softmax_fusion: bool = flag(
        "No fused scale, mask and softmax" + _FUSION_NOTE + ".",
        names=("--no-masked-softmax-fusion",),
        default=True,
    )
    bias_gelu_fusion: bool = flag(
        "No fused bias and GELU" + _FUSION_NOTE + ".",
        names=("--no-bias-gelu-fusion",),
        default=True,
    )
    bias_swiglu_fusion: bool = flag(
        "No fused bias and SwiGLU" + _FUSION_NOTE + ".",
        names=("--no-bias-swiglu-fusion",),
        default=True,
    )
    bias_dropout_fusion: bool = flag(
        "No fused bias, dropout and addition" + _FUSION_NOTE + ".",
        names=("--no-bias-dropout-fusion",),
        default=True,
    )
    apply_rope_fusion: bool = flag(
        "No fused rotary embedding" + _FUSION_NOTE + ".",
        names=("--no-rope-fusion",),
        default=True,
    )
    no_persist_layer_norm: bool = flag("No persistent kernel for LayerNorm.", default=False)
    gradient_accumulation_fusion: bool = flag(
        "No weight gradient that adds straight into the main gradient" + _FUSION_NOTE + ".",
        names=("--no-gradient-accumulation-fusion",),
        default=True,
    )
    cross_entropy_loss_fusion: bool = flag("Fused cross entropy.", default=False)
    cross_entropy_fusion_impl: str = flag(
        "Implementation of the fused cross entropy; te needs Transformer Engine.",
        default="native",
        choices=("native", "te"),
    )

    def __post_init__(self) -> None:
        if self.use_rotary_position_embeddings:
            assign(self, "position_embedding_type", "rope")
        if self.ffn_hidden_size is None:
            assign(self, "ffn_hidden_size", self._default_ffn_hidden_size())
        if self.kv_channels is None:
            assign(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        if self.add_bias_linear:
            assign(self, "add_qkv_bias", True)
        else:
            assign(self, "bias_gelu_fusion", False)
        if self.position_embedding_type != "rope":
            assign(self, "apply_rope_fusion", False)

    def _default_ffn_hidden_size(self) -> int:
        # A gated block has three matrices instead of two: two thirds of the width keep the number
        # of parameters; Megatron-LM rounds down to a multiple of 64.
        if not self.swiglu:
            return 4 * self.hidden_size
        return int((4 * self.hidden_size * 2 / 3) / _SWIGLU_MULTIPLE) * _SWIGLU_MULTIPLE

    @property
    def query_groups(self) -> int:
        """Key and value heads of each layer, equal to the heads without grouped queries."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads
