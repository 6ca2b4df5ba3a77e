"""Number formats, optimizer, learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import assign, flag

__all__ = [
    "OptimizerConfig",
    "PrecisionConfig",
]

_NO_MUON = "it supports neither the distributed optimizer nor torch_dist checkpoints; use adam"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate.

    Steps of the learning rate are iterations with ``--train-iters`` and samples with
    ``--train-samples``; the flags of the other kind stay at their defaults.
    """

    optimizer: str = flag(
        "Optimizer.",
        default="adam",
        choices=("adam", "sgd"),
        refused_choices={"muon": _NO_MUON, "dist_muon": _NO_MUON},
    )
    lr: float = flag("Highest learning rate.", above=0)
    min_lr: float = flag("Lowest learning rate after the warm-up.", default=0.0, minimum=0)
    lr_decay_style: str = flag(
        "Curve of the decay.",
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        "Iterations until the lowest learning rate.",
        default=None,
        minimum=1,
        unit="ITERATIONS",
        derived="--train-iters",
    )
    lr_decay_samples: int | None = flag(
        "Samples until the lowest learning rate.",
        default=None,
        minimum=1,
        unit="SAMPLES",
        derived="--train-samples",
    )
    lr_wsd_decay_style: str = flag(
        "Curve of the last part of the WSD decay.",
        default="exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(
        "Length of the last part of the WSD decay.", default=None, minimum=1, unit="ITERATIONS"
    )
    lr_wsd_decay_samples: int | None = flag(
        "Length of the last part of the WSD decay.", default=None, minimum=1, unit="SAMPLES"
    )
    lr_warmup_fraction: float | None = flag(
        "Share of the decay's length that is warm-up.", default=None, minimum=0, below=1
    )
    lr_warmup_iters: int = flag(
        "Iterations of linear warm-up.", default=0, minimum=0, unit="ITERATIONS"
    )
    lr_warmup_samples: int = flag(
        "Samples of linear warm-up.", default=0, minimum=0, unit="SAMPLES"
    )
    lr_warmup_init: float = flag(
        "Learning rate at the start of the warm-up.", default=0.0, minimum=0
    )
    decoupled_lr: float | None = flag(
        "Highest learning rate of embedding and output layer.", default=None, above=0
    )
    decoupled_min_lr: float | None = flag(
        "Lowest learning rate of embedding and output layer.", default=None, minimum=0
    )
    override_opt_param_scheduler: bool = flag(
        "Prefer these flags to the learning rate schedule of a loaded checkpoint.",
        names=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
        default=False,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        "Prefer the learning rate schedule of a loaded checkpoint to these flags.",
        names=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        default=False,
    )
    weight_decay: float = flag("Weight decay.", default=0.01, minimum=0)
    start_weight_decay: float | None = flag(
        "First weight decay of a growing one.", default=None, minimum=0
    )
    end_weight_decay: float | None = flag(
        "Last weight decay of a growing one.", default=None, minimum=0
    )
    weight_decay_incr_style: str = flag(
        "How the weight decay grows.", default="constant", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(
        "Largest norm of the whole gradient; 0 does not clip.", default=1.0, minimum=0
    )
    adam_beta1: float = flag("Adam's first average.", default=0.9, minimum=0, below=1)
    adam_beta2: float = flag("Adam's second average.", default=0.999, minimum=0, below=1)
    adam_eps: float = flag("Number added to Adam's denominator.", default=1e-8, above=0)
    sgd_momentum: float = flag("Momentum of sgd.", default=0.9, minimum=0, below=1)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision."""

    fp16: bool = flag("Train in float16 with a loss scale.", default=False)
    bf16: bool = flag("Train in bfloat16.", default=False)
    loss_scale: float | None = flag(
        "Fixed loss scale for float16.", default=None, above=0, derived="chosen while training"
    )
    initial_loss_scale: float = flag(
        "First value of the changing loss scale.", default=float(2**32), above=0
    )
    min_loss_scale: float = flag("Smallest changing loss scale.", default=1.0, above=0)
    loss_scale_window: float = flag(
        "Steps without overflow after which the loss scale doubles.",
        default=1000.0,
        minimum=1,
        unit="STEPS",
    )
    hysteresis: int = flag("Overflows after which the loss scale is halved.", default=2, minimum=1)
    fp32_residual_connection: bool = flag("Keep residual connections in float32.", default=False)
    apply_query_key_layer_scaling: bool = flag(
        "Divide attention scores by the layer's number; turns on float32 softmax.", default=False
    )
    attention_softmax_in_fp32: bool = flag("Softmax of attention in float32.", default=False)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        "Sum and reduce gradients in float32; always on with --bf16 unless "
        "--grad-reduce-in-bf16 is given.",
        default=False,
    )
    grad_reduce_in_bf16: bool = flag("Reduce gradients in bfloat16.", default=False)
    fp16_lm_cross_entropy: bool = flag(
        "Compute the cross entropy in float16; needs --fp16.", default=False
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        "Go on when a loss or gradient is not a number; always so with a changing loss scale.",
        names=("--no-check-for-nan-in-loss-and-grad",),
        default=True,
    )

    def __post_init__(self) -> None:
        if self.apply_query_key_layer_scaling:
            assign(self, "attention_softmax_in_fp32", True)
        if self.bf16:
            assign(self, "accumulate_allreduce_grads_in_fp32", not self.grad_reduce_in_bf16)
        # Overflows are the signal that steers the changing scale, so they must not end the run.
        if self.fp16 and self.loss_scale is None:
            assign(self, "check_for_nan_in_loss_and_grad", False)

    @property
    def dtype_name(self) -> str:
        """Type of parameters and activations: ``float32``, ``float16`` or ``bfloat16``."""
        if self.fp16:
            return "float16"
        return "bfloat16" if self.bf16 else "float32"
