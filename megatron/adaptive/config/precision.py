"""Number formats and loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import assign, flag

__all__ = ["PrecisionConfig"]


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
