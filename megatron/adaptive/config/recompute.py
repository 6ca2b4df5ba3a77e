"""Which activations are computed again in backward instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import assign, flag

__all__ = ["RecomputeConfig"]

_NO_EXPERTS = "it belongs to mixture-of-experts layers, which this trainer does not build"


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Recompute.

    ``recompute_granularity``, ``recompute_method`` and ``recompute_num_layers`` hold the outcome
    of the two shorthands once the object exists.
    """

    recompute_activations: bool = flag(
        "Shorthand for --recompute-granularity selective.", default=False
    )
    checkpoint_activations: bool = flag(
        "Old shorthand for --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1.",
        default=False,
    )
    recompute_granularity: str | None = flag(
        "Compute whole layers again, or only the modules of --recompute-modules.",
        default=None,
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        "With full: uniform keeps the input of every group of layers, block those of the first "
        "layers of each stage.",
        default=None,
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        "With full: layers of each group, or layers of each stage.",
        default=None,
        minimum=1,
        unit="LAYERS",
    )
    recompute_modules: tuple[str, ...] | None = flag(
        "With selective: modules computed again.",
        default=None,
        choices=("core_attn", "layernorm", "mlp"),
        refused_choices={
            "moe": _NO_EXPERTS,
            "moe_act": _NO_EXPERTS,
            "shared_experts": _NO_EXPERTS,
            "mla_up_proj": "it belongs to latent attention, which this trainer does not build",
        },
        derived="core_attn",
    )
    distribute_saved_activations: bool = flag(
        "With full: split kept inputs over tensor parallel ranks.", default=False
    )

    def __post_init__(self) -> None:
        if self.recompute_activations and self.recompute_granularity is None:
            assign(self, "recompute_granularity", "selective")
        if self.checkpoint_activations and self.recompute_granularity is None:
            assign(self, "recompute_granularity", "full")
            assign(self, "recompute_method", self.recompute_method or "uniform")
            assign(self, "recompute_num_layers", self.recompute_num_layers or 1)
