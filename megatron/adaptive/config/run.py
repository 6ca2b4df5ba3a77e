"""Length of the run, checkpoints, and what is reported."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import Count, Folder, Iterations, Natural, Samples, flag, switch


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run."""

    train_iters: Iterations | None = flag(
        "Iterations of the whole training; this or --train-samples."
    )
    train_samples: Samples | None = flag("Samples of the whole training; this or --train-iters.")
    eval_interval: Iterations = flag("Iterations between two validations.", 1000)
    eval_iters: Natural = flag(
        "Batches of each validation and of the test; 0 for none.", 100, unit="ITERATIONS"
    )
    skip_train: bool = switch("Only validate and test.")
    sample_prompt: str | None = flag(
        "Text that the model continues after the run, with the likeliest token each time.",
        unit="TEXT",
    )
    sample_tokens: Count = flag("Tokens of that continuation.", 32)
    exit_interval: Iterations | None = flag("Save and end at the next iteration that this divides.")
    exit_duration_in_mins: Count | None = flag("Save and end after this time.", unit="MINUTES")
    seed: Count = flag("Seed of all random numbers.", 1234)
    manual_gc: bool = switch("Collect Python's garbage only as --manual-gc-interval says.")
    manual_gc_interval: Natural = flag(
        "Iterations between collections with --manual-gc; 0 for none.", 0, unit="ITERATIONS"
    )
    profile: bool = switch("Profile some iterations.")
    use_pytorch_profiler: bool = switch(
        "Profile with PyTorch's profiler into TensorBoard instead of marking the range for nsys."
    )
    profile_step_start: Natural = flag("First iteration that is profiled.", 10, unit="ITERATION")
    profile_step_end: Natural = flag("Iteration at which profiling stops.", 12, unit="ITERATION")
    profile_ranks: tuple[Natural, ...] = flag("Ranks that are profiled.", (0,), unit="RANK")
    profile_execution: bool = flag(
        "Profile with PyTorch's profiler into TensorBoard.",
        False,
        takes_value=True,
        unit="True|False",
    )
    profile_name: str = flag("Name of the profile of --profile-execution.", "profile", unit="NAME")


_ONLY_DIST = "checkpoints are written and read in torch_dist, which loads into any shape"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: Folder | None = flag("Folder for checkpoints.")
    save_interval: Iterations | None = flag(
        "Iterations between checkpoints; needed with --save.",
        names=("--save-interval", "--persistent-save-interval"),
    )
    async_save: bool = switch(
        "Write checkpoints while training goes on, which waits only for a copy in host memory."
    )
    save_local: Folder | None = flag(
        "Folder on each node's own disk: checkpoints are written there while training goes on, and "
        "copied to --save behind it."
    )
    keep_checkpoints: Count | None = flag(
        "Complete checkpoints to keep, the last ones; all by default.", unit="N"
    )
    no_save_optim: bool = switch("Leave the optimizer out of checkpoints.")
    no_save_rng: bool = switch("Leave random states out of checkpoints.")
    load: Folder | None = flag("Folder of checkpoints to go on from.")
    load_hf: Folder | None = flag(
        "Folder of a Hugging Face model whose weights the run starts from where --load has no "
        "checkpoint; flags of the model that are not given are those of its config.json."
    )
    ckpt_step: Natural | None = flag(
        "Iteration to load.", unit="ITERATION", derived="the latest one that is whole"
    )
    trust_checkpoint: bool = switch(
        "Load also checkpoints of Megatron-LM and of former versions, which hold pickles."
    )
    no_load_optim: bool = switch("Do not load the optimizer.")
    no_load_rng: bool = switch("Do not load random states.")
    finetune: bool = switch("Load weights only and start from iteration 0 with fresh data.")
    exit_on_missing_checkpoint: bool = switch(
        "End the run if --load names a folder without checkpoint, instead of starting anew."
    )
    ckpt_format: str = flag(
        "Format of checkpoints.",
        "torch_dist",
        choices=("torch_dist",),
        refused_choices={
            "torch": _ONLY_DIST,
            "zarr": _ONLY_DIST,
            "torch_dcp": _ONLY_DIST,
            "fsdp_dtensor": _ONLY_DIST,
        },
    )
    ckpt_fully_parallel_save: bool = switch(
        "Do not share the writing among data parallel ranks.", off="--no-ckpt-fully-parallel-save"
    )
    ckpt_fully_parallel_load: bool = switch("Share the reading among data parallel ranks.")

    @property
    def saves_behind(self) -> bool:
        """True if checkpoints are written while training goes on."""
        return self.async_save or self.save_local is not None


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: Iterations = flag("Iterations between two lines of the log.", 100)
    log_throughput: bool = switch("Add throughput to the log.")
    log_params_norm: bool = switch("Add the norm of all parameters to the log.")
    log_num_zeros_in_grad: bool = switch("Add the number of zeros in the gradient to the log.")
    timing_log_level: int = flag(
        "Detail of the timers: 0 iterations, 1 parts of an iteration, 2 parts of a microbatch.",
        0,
        choices=(0, 1, 2),
    )
    timing_log_option: str = flag(
        "Ranks whose timers are reported.", "minmax", choices=("max", "minmax", "all")
    )
    barrier_with_L1_time: bool = switch(  # noqa: N815 - Megatron-LM's name
        "No barrier before timers of level 1.", off="--no-barrier-with-level-1-timing"
    )
    logging_level: Natural | None = flag("Level of Python's logging, 10 being the most.")
    progress_dir: Folder | None = flag(
        "Folder for progress.jsonl, which says how far the run is.", derived="--trace-dir"
    )
    tensorboard_dir: Folder | None = flag("Folder for TensorBoard.")
    tensorboard_log_interval: Iterations = flag(
        "Iterations between two points of TensorBoard's curves.", 1
    )
    tensorboard_queue_size: Count = flag(
        "Points that wait before TensorBoard writes them.", 1000, unit="POINTS"
    )
    wandb_project: str | None = flag(
        "Project of Weights & Biases that gets the curves too; needs the package wandb.",
        unit="NAME",
    )
    wandb_entity: str | None = flag("User or team of --wandb-project.", unit="NAME")
    wandb_exp_name: str | None = flag("Name of the run there.", unit="NAME")
    wandb_save_dir: Folder | None = flag(
        "Folder for what Weights & Biases keeps here.", derived="wandb in --save"
    )
    mlflow_experiment: str | None = flag(
        "Experiment of MLflow that gets the curves too; needs the package mlflow.", unit="NAME"
    )
    mlflow_run_name: str | None = flag("Name of the run there.", unit="NAME")
    mlflow_tracking_uri: str | None = flag(
        "Server or file: address of MLflow.", derived="that of MLFLOW_TRACKING_URI", unit="URI"
    )
    log_timers_to_tensorboard: bool = switch("Write timers to TensorBoard.")
    log_batch_size_to_tensorboard: bool = switch("Write the batch size to TensorBoard.")
    log_learning_rate_to_tensorboard: bool = switch(
        "Keep the learning rate out of TensorBoard.",
        off=("--no-log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"),
    )
    log_loss_scale_to_tensorboard: bool = switch(
        "Keep the loss scale out of TensorBoard.", off="--no-log-loss-scale-to-tensorboard"
    )
    log_validation_ppl_to_tensorboard: bool = switch(
        "Write the perplexity of validation to TensorBoard."
    )
    log_memory_to_tensorboard: bool = switch("Write memory use to TensorBoard.")
    log_world_size_to_tensorboard: bool = switch("Write the world size to TensorBoard.")

    @property
    def draws_curves(self) -> bool:
        """True if TensorBoard or another logger takes curves."""
        return any((self.tensorboard_dir, self.wandb_project, self.mlflow_experiment))
