"""Length of the run, checkpoints, and what is reported."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag

__all__ = [
    "CheckpointConfig",
    "LoggingConfig",
    "RunConfig",
]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run."""

    train_iters: int | None = flag(
        "Iterations of the whole training; this or --train-samples.",
        default=None,
        minimum=1,
        unit="ITERATIONS",
    )
    train_samples: int | None = flag(
        "Samples of the whole training; this or --train-iters.",
        default=None,
        minimum=1,
        unit="SAMPLES",
    )
    eval_interval: int = flag(
        "Iterations between two validations.", default=1000, minimum=1, unit="ITERATIONS"
    )
    eval_iters: int = flag(
        "Batches of each validation and of the test; 0 for none.",
        default=100,
        minimum=0,
        unit="ITERATIONS",
    )
    skip_train: bool = flag("Only validate and test.", default=False)
    exit_interval: int | None = flag(
        "Save and end at the next iteration that this divides.",
        default=None,
        minimum=1,
        unit="ITERATIONS",
    )
    exit_duration_in_mins: int | None = flag(
        "Save and end after this time.", default=None, minimum=1, unit="MINUTES"
    )
    exit_signal_handler: bool = flag(
        "No effect: the run always saves and ends on SIGTERM.", default=False
    )
    seed: int = flag("Seed of all random numbers.", default=1234, minimum=1)
    manual_gc: bool = flag("Collect Python's garbage only when told to.", default=False)
    manual_gc_interval: int = flag(
        "Iterations between collections with --manual-gc; 0 for none.",
        default=0,
        minimum=0,
        unit="ITERATIONS",
    )
    manual_gc_eval: bool = flag(
        "No effect: with --manual-gc nothing is collected around validation.",
        names=("--no-manual-gc-eval",),
        default=True,
    )
    profile: bool = flag("Profile some iterations.", default=False)
    use_pytorch_profiler: bool = flag(
        "Profile with PyTorch's profiler into TensorBoard instead of marking the range for nsys.",
        default=False,
    )
    profile_step_start: int = flag(
        "First iteration that is profiled.", default=10, minimum=0, unit="ITERATION"
    )
    profile_step_end: int = flag(
        "Iteration at which profiling stops.", default=12, minimum=0, unit="ITERATION"
    )
    profile_ranks: tuple[int, ...] = flag(
        "Ranks that are profiled.", default=(0,), minimum=0, unit="RANK"
    )
    profile_execution: bool = flag(
        "Profile with PyTorch's profiler into TensorBoard.",
        default=False,
        takes_value=True,
        unit="True|False",
    )
    profile_name: str = flag(
        "Name of the profile of --profile-execution.", default="profile", unit="NAME"
    )


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
        """True if checkpoints are written while training goes on."""
        return self.async_save or self.save_local is not None


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = flag(
        "Iterations between two lines of the log.", default=100, minimum=1, unit="ITERATIONS"
    )
    log_throughput: bool = flag("Add throughput to the log.", default=False)
    log_params_norm: bool = flag("Add the norm of all parameters to the log.", default=False)
    log_num_zeros_in_grad: bool = flag(
        "Add the number of zeros in the gradient to the log.", default=False
    )
    timing_log_level: int = flag(
        "Detail of the timers: 0 iterations, 1 parts of an iteration, 2 parts of a microbatch.",
        default=0,
        choices=(0, 1, 2),
    )
    timing_log_option: str = flag(
        "Ranks whose timers are reported.", default="minmax", choices=("max", "minmax", "all")
    )
    barrier_with_L1_time: bool = flag(  # noqa: N815 - Megatron-LM's name
        "No barrier before timers of level 1.",
        names=("--no-barrier-with-level-1-timing",),
        default=True,
    )
    logging_level: int | None = flag(
        "Level of Python's logging, 10 being the most.", default=None, minimum=0
    )
    progress_dir: str | None = flag(
        "Folder for progress.jsonl, which says how far the run is.",
        default=None,
        unit="DIR",
        derived="--trace-dir",
    )
    tensorboard_dir: str | None = flag("Folder for TensorBoard.", default=None, unit="DIR")
    tensorboard_log_interval: int = flag(
        "Iterations between two points of TensorBoard's curves.",
        default=1,
        minimum=1,
        unit="ITERATIONS",
    )
    tensorboard_queue_size: int = flag(
        "Points that wait before TensorBoard writes them.", default=1000, minimum=1, unit="POINTS"
    )
    log_timers_to_tensorboard: bool = flag("Write timers to TensorBoard.", default=False)
    log_batch_size_to_tensorboard: bool = flag(
        "Write the batch size to TensorBoard.", default=False
    )
    log_learning_rate_to_tensorboard: bool = flag(
        "Keep the learning rate out of TensorBoard.",
        names=("--no-log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"),
        default=True,
    )
    log_loss_scale_to_tensorboard: bool = flag(
        "Keep the loss scale out of TensorBoard.",
        names=("--no-log-loss-scale-to-tensorboard",),
        default=True,
    )
    log_validation_ppl_to_tensorboard: bool = flag(
        "Write the perplexity of validation to TensorBoard.", default=False
    )
    log_memory_to_tensorboard: bool = flag("Write memory use to TensorBoard.", default=False)
    log_world_size_to_tensorboard: bool = flag(
        "Write the world size to TensorBoard.", default=False
    )
