"""Optimizer, learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag

__all__ = ["OptimizerConfig"]

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
