"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag

__all__ = ["CheckpointConfig"]

_ONLY_DIST = "checkpoints are written and read in torch_dist, which loads into any shape"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = flag("Folder for checkpoints.", default=None, unit="DIR")
    save_interval: int | None = flag(
        "Iterations between checkpoints; needed with --save.",
        names=("--save-interval", "--persistent-save-interval"),
        default=None,
        minimum=1,
        unit="ITERATIONS",
    )
    async_save: bool = flag(
        "Write checkpoints while training goes on, which waits only for a copy in host memory.",
        default=False,
    )
    save_local: str | None = flag(
        "Folder on each node's own disk: checkpoints are written there while training goes on, and "
        "copied to --save behind it.",
        default=None,
        unit="DIR",
    )
    keep_checkpoints: int | None = flag(
        "Complete checkpoints to keep, the last ones; all by default.",
        default=None,
        minimum=1,
        unit="N",
    )
    no_save_optim: bool = flag("Leave the optimizer out of checkpoints.", default=False)
    no_save_rng: bool = flag("Leave random states out of checkpoints.", default=False)
    load: str | None = flag("Folder of checkpoints to go on from.", default=None, unit="DIR")
    ckpt_step: int | None = flag(
        "Iteration to load.",
        default=None,
        minimum=0,
        unit="ITERATION",
        derived="the latest complete one",
    )
    no_load_optim: bool = flag("Do not load the optimizer.", default=False)
    no_load_rng: bool = flag("Do not load random states.", default=False)
    finetune: bool = flag(
        "Load weights only and start from iteration 0 with fresh data.", default=False
    )
    exit_on_missing_checkpoint: bool = flag(
        "End the run if --load names a folder without checkpoint, instead of starting anew.",
        default=False,
    )
    ckpt_format: str = flag(
        "Format of checkpoints.",
        default="torch_dist",
        choices=("torch_dist",),
        refused_choices={
            "torch": _ONLY_DIST,
            "zarr": _ONLY_DIST,
            "torch_dcp": _ONLY_DIST,
            "fsdp_dtensor": _ONLY_DIST,
        },
    )
    ckpt_fully_parallel_save: bool = flag(
        "Do not share the writing among data parallel ranks.",
        names=("--no-ckpt-fully-parallel-save",),
        default=True,
    )
    ckpt_fully_parallel_load: bool = flag(
        "Share the reading among data parallel ranks.", default=False
    )
    ckpt_fully_parallel_save_deprecated: bool = flag(
        "No effect: it is the default.", names=("--ckpt-fully-parallel-save",), default=False
    )
    use_dist_ckpt_deprecated: bool = flag(
        "No effect: it is the default.", names=("--use-dist-ckpt",), default=False
    )

    @property
    def saves_behind(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.async_save or self.save_local is not None
