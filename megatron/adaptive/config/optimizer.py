"""Defines the settings for data types, the optimizer, the learning rate and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.adaptive.config.flags import (
    Count,
    Folder,
    Iterations,
    Limits,
    Natural,
    NonNegative,
    Positive,
    Samples,
    Share,
    assign,
    flag,
    required,
    switch,
)

_OTHERS = ("dist_muon", "adaptive_muon", "soap", "lion")
_NOT_MOVED = "the trainer can save and move only the state of adam, sgd and muon; use one of these"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate.

    Lengths in the learning rate schedule are measured in iterations if ``--train-iters`` is set,
    and in samples if ``--train-samples`` is set. Flags with the other unit are rejected.
    """

    optimizer: str = flag(
        "Optimizer. With muon, word embeddings, the output layer, biases and norms use adam.",
        "adam",
        choices=("adam", "sgd", "muon"),
        refused_choices=dict.fromkeys(_OTHERS, _NOT_MOVED),
    )
    lr: Positive = required("Maximum learning rate.")
    min_lr: NonNegative = flag("Minimum learning rate after the warm-up.", 0.0)
    lr_decay_style: str = flag(
        "Shape of the learning rate decay.",
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: Iterations | None = flag(
        "Number of iterations until the learning rate reaches its minimum.", derived="--train-iters"
    )
    lr_decay_samples: Samples | None = flag(
        "Number of samples until the learning rate reaches its minimum.", derived="--train-samples"
    )
    lr_wsd_decay_style: str = flag(
        "Shape of the final part of the WSD decay.",
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: Iterations | None = flag(
        "Number of iterations in the final part of the WSD decay."
    )
    lr_wsd_decay_samples: Samples | None = flag(
        "Number of samples in the final part of the WSD decay."
    )
    lr_warmup_fraction: Share | None = flag(
        "Length of the warm-up as a fraction of the decay's length."
    )
    lr_warmup_iters: Natural = flag("Number of iterations of linear warm-up.", 0, unit="ITERATIONS")
    lr_warmup_samples: Natural = flag("Number of samples of linear warm-up.", 0, unit="SAMPLES")
    lr_warmup_init: NonNegative = flag("Learning rate at the start of the warm-up.", 0.0)
    decoupled_lr: Positive | None = flag(
        "Maximum learning rate of the embedding and the output layer, if it differs from --lr."
    )
    decoupled_min_lr: NonNegative | None = flag(
        "Minimum learning rate of the embedding and the output layer, with --decoupled-lr."
    )
    override_opt_param_scheduler: bool = switch(
        "Take the learning rate schedule from the flags, not from the loaded checkpoint.",
        names=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = switch(
        "Take the learning rate schedule from the loaded checkpoint, not from the flags.",
        names=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
    )
    weight_decay: NonNegative = flag("Weight decay.", 0.01)
    start_weight_decay: NonNegative | None = flag(
        "Weight decay at the start of training, if it increases; see --weight-decay-incr-style."
    )
    end_weight_decay: NonNegative | None = flag(
        "Weight decay at the end of training, if it increases; see --weight-decay-incr-style."
    )
    weight_decay_incr_style: str = flag(
        "Shape of the increase of the weight decay.",
        "constant",
        choices=("constant", "linear", "cosine"),
    )
    clip_grad: NonNegative = flag("Maximum norm of the whole gradient; 0 disables clipping.", 1.0)
    adam_beta1: Share = flag("Decay rate of Adam's average of gradients.", 0.9)
    adam_beta2: Share = flag("Decay rate of Adam's average of squared gradients.", 0.999)
    adam_eps: Positive = flag("Number added to Adam's denominator.", 1e-8)
    sgd_momentum: Share = flag("Momentum of sgd.", 0.9)
    muon_momentum: Share = flag("Momentum of muon.", 0.9)
    muon_nesterov: bool = switch(
        "Use Nesterov momentum in muon.", names=("--muon-nesterov", "--muon-use-nesterov")
    )
    muon_split_qkv: bool = switch(
        "In muon, orthogonalize the weights of queries, keys and values together instead of "
        "separately.",
        off=("--no-muon-split-qkv", "--muon-no-split-qkv"),
    )
    muon_scale_mode: str = flag(
        "Rule by which muon's updates are scaled, depending on the shape of the weight.",
        "spectral",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_fp32_matmul_prec: str = flag(
        "Precision of muon's matrix multiplications.", "medium", choices=("low", "medium", "high")
    )
    muon_coefficient_type: str = flag(
        "Coefficients of the Newton-Schulz iteration in muon.",
        "quintic",
        choices=("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"),
    )
    muon_num_ns_steps: Count = flag("Number of steps of the Newton-Schulz iteration in muon.", 5)
    muon_tp_mode: str = flag(
        "Method by which muon updates weights that are split over tensor-parallel ranks: each part "
        "separately (blockwise), or the whole weight.",
        "blockwise",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_extra_scale_factor: Positive = flag("Factor by which muon's updates are multiplied.", 1.0)
    muon_scalar_optimizer: str = flag(
        "Optimizer for the weights that muon does not train.",
        "adam",
        choices=("adam",),
        refused_choices={"lion": _NOT_MOVED},
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision."""

    fp16: bool = switch("Train in float16 with a loss scale.")
    bf16: bool = switch("Train in bfloat16.")
    loss_scale: Positive | None = flag(
        "Fixed loss scale for float16.", derived="adjusted during training"
    )
    initial_loss_scale: Positive = flag("Initial value of the dynamic loss scale.", float(2**32))
    min_loss_scale: Positive = flag("Minimum value of the dynamic loss scale.", 1.0)
    loss_scale_window: Annotated[float, Limits(minimum=1)] = flag(
        "Number of steps without overflow after which the loss scale doubles.", 1000.0, unit="STEPS"
    )
    hysteresis: Count = flag("Number of overflows after which the loss scale is halved.", 2)
    fp32_residual_connection: bool = switch("Keep residual connections in float32.")
    apply_query_key_layer_scaling: bool = switch(
        "Divide attention scores by the layer's number; enables float32 softmax."
    )
    attention_softmax_in_fp32: bool = switch("Compute the softmax of attention in float32.")
    accumulate_allreduce_grads_in_fp32: bool = switch(
        "Accumulate and reduce gradients in float32; always on with --bf16 unless "
        "--grad-reduce-in-bf16 is set."
    )
    grad_reduce_in_bf16: bool = switch("Reduce gradients in bfloat16.")
    fp16_lm_cross_entropy: bool = switch("Compute the cross entropy in float16; requires --fp16.")
    check_for_nan_in_loss_and_grad: bool = switch(
        "Continue if a loss or gradient is NaN or infinite; always on with a dynamic loss scale.",
        off="--no-check-for-nan-in-loss-and-grad",
    )

    def __post_init__(self) -> None:
        if self.apply_query_key_layer_scaling:
            assign(self, "attention_softmax_in_fp32", True)
        if self.bf16:
            assign(self, "accumulate_allreduce_grads_in_fp32", not self.grad_reduce_in_bf16)
        # A dynamic loss scale handles overflows, so an overflow must not end the run.
        if self.fp16 and self.loss_scale is None:
            assign(self, "check_for_nan_in_loss_and_grad", False)

    @property
    def dtype_name(self) -> str:
        """Data type of parameters and activations: ``float32``, ``float16`` or ``bfloat16``."""
        if self.fp16:
            return "float16"
        return "bfloat16" if self.bf16 else "float32"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters (LoRA)."""

    lora_rank: Count | None = flag(
        "Freeze the model and train low-rank adapters (LoRA) of this rank for its linear layers.",
        unit="RANK",
    )
    lora_alpha: Positive | None = flag(
        "Factor by which the adapters' output is multiplied before it is divided by --lora-rank.",
        derived="--lora-rank",
    )
    lora_dropout: Share = flag("Dropout rate of the adapters' input.", 0.0)
    lora_targets: str = flag(
        "Linear layers that get adapters, as comma-separated names that PEFT uses for this "
        "architecture, such as q_proj,v_proj; all-linear selects all linear layers of attention "
        "and of the feed-forward block.",
        "all-linear",
        unit="NAMES",
    )
    load_lora: Folder | None = flag(
        "Folder with adapters in PEFT's format, from which training starts; the folder's "
        "adapter_config.json sets the adapter flags that are absent."
    )

    @property
    def is_on(self) -> bool:
        """Whether low-rank adapters are trained, while the weights of the model are frozen."""
        return self.lora_rank is not None

    @property
    def scale(self) -> float:
        """Factor for each adapter's output: alpha / rank."""
        rank = self.lora_rank or 1
        return (self.lora_alpha or rank) / rank
