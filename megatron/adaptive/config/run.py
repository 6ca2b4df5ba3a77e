"""Defines the settings of the length of a run, of validation, checkpoints and logging."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import Count, Folder, Iterations, Natural, Samples, flag, switch


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run."""

    train_iters: Iterations | None = flag(
        "Number of iterations of the whole training; this or --train-samples is needed."
    )
    train_samples: Samples | None = flag(
        "Number of samples of the whole training; this or --train-iters is needed."
    )
    eval_interval: Iterations = flag("Iterations between two validations.", 1000)
    eval_iters: Natural = flag(
        "Number of batches of each validation and of the test; 0 for none.", 100, unit="ITERATIONS"
    )
    skip_train: bool = switch("Only validate and test.")
    sample_prompt: str | None = flag(
        "Text that the model continues after the run, always with the likeliest token.", unit="TEXT"
    )
    sample_tokens: Count = flag("Number of tokens of that continuation.", 32)
    exit_interval: Iterations | None = flag(
        "Save a checkpoint and stop at the next iteration that is a multiple of this number."
    )
    exit_duration_in_mins: Count | None = flag(
        "Save a checkpoint and stop after this time.", unit="MINUTES"
    )
    seed: Count = flag("Seed of all random numbers.", 1234)
    manual_gc: bool = switch(
        "Run Python's garbage collector only at the interval of --manual-gc-interval."
    )
    manual_gc_interval: Natural = flag(
        "Iterations between collections with --manual-gc; 0 for none.", 0, unit="ITERATIONS"
    )
    probe_interval: Natural = flag(
        "Iterations between two probes of ranks, links and groups, as by doctor --probe; a probe "
        "is skipped if it would take more than 1% of the time since the last probe; 0 for none.",
        0,
        unit="ITERATIONS",
    )
    profile: bool = switch(
        "Profile the iterations from --profile-step-start to --profile-step-end."
    )
    use_pytorch_profiler: bool = switch(
        "Profile with PyTorch's profiler and write to TensorBoard, instead of marking the range "
        "for nsys."
    )
    profile_step_start: Natural = flag("First iteration to profile.", 10, unit="ITERATION")
    profile_step_end: Natural = flag("Iteration at which profiling stops.", 12, unit="ITERATION")
    profile_ranks: tuple[Natural, ...] = flag("Ranks to profile.", (0,), unit="RANK")
    profile_execution: bool = flag(
        "Profile with PyTorch's profiler and write to TensorBoard.",
        False,
        takes_value=True,
        unit="True|False",
    )
    profile_name: str = flag("Name of the profile of --profile-execution.", "profile", unit="NAME")


_ONLY_DIST = "checkpoints have the format torch_dist, which loads into any parallel layout"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: Folder | None = flag("Folder for checkpoints.")
    save_interval: Iterations | None = flag(
        "Iterations between checkpoints; needed with --save.",
        names=("--save-interval", "--persistent-save-interval"),
    )
    async_save: bool = switch(
        "Write checkpoints in the background; training waits only for a copy to host memory."
    )
    save_local: Folder | None = flag(
        "Folder on each node's local disk: checkpoints are first written there in the background, "
        "and then copied to --save."
    )
    keep_checkpoints: Count | None = flag(
        "Number of complete checkpoints to keep, the latest ones.", unit="N", derived="all"
    )
    no_save_optim: bool = switch("Leave the optimizer state out of checkpoints.")
    no_save_rng: bool = switch("Leave random number states out of checkpoints.")
    load: Folder | None = flag("Folder of checkpoints to resume from.")
    load_hf: Folder | None = flag(
        "Folder of a Hugging Face model: the run starts from its weights if --load has no "
        "checkpoint, and its config.json sets model flags that are absent."
    )
    hf_family: str | None = flag(
        "Your own family of Hugging Face models, for a model_type that this package lacks; see "
        "docs/huggingface.md.",
        unit="PACKAGE.MODULE:CLASS",
    )
    ckpt_step: Natural | None = flag(
        "Iteration to load.", unit="ITERATION", derived="the latest complete checkpoint"
    )
    trust_checkpoint: bool = switch(
        "Also load checkpoints of Megatron-LM and of old versions, which contain pickles."
    )
    no_load_optim: bool = switch("Do not load the optimizer state.")
    no_load_rng: bool = switch("Do not load random number states.")
    finetune: bool = switch("Load only weights, and start at iteration 0 and the first sample.")
    exit_on_missing_checkpoint: bool = switch(
        "Stop with an error if the folder of --load has no checkpoint, instead of training from "
        "scratch."
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
        "Do not divide the writing among data parallel ranks.", off="--no-ckpt-fully-parallel-save"
    )
    ckpt_fully_parallel_load: bool = switch("Divide the reading among data parallel ranks.")

    @property
    def saves_behind(self) -> bool:
        """Whether checkpoints are written in the background while training continues."""
        return self.async_save or self.save_local is not None


def _read_names(text: str) -> tuple[str, ...]:
    """Parses a list of names separated by commas."""
    return tuple(name.strip() for name in text.split(","))


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
        "Do not wait for all ranks before timers of level 1.",
        off="--no-barrier-with-level-1-timing",
    )
    logging_level: Natural | None = flag("Level of Python's logging; 10 (debug) logs the most.")
    progress_dir: Folder | None = flag(
        "Folder for progress.jsonl, which records the progress of the run.", derived="--trace-dir"
    )
    logger: tuple[str, ...] | None = flag(
        "Further loggers that receive curves, each a name or your own logger as "
        "package.module:Class.",
        reader=_read_names,
        unit="NAME,NAME",
    )
    tensorboard_dir: Folder | None = flag("Folder for TensorBoard.")
    tensorboard_log_interval: Iterations = flag(
        "Iterations between two points of TensorBoard's curves.", 1
    )
    tensorboard_queue_size: Count = flag(
        "Number of points that TensorBoard buffers before it writes them.", 1000, unit="POINTS"
    )
    wandb_project: str | None = flag(
        "Project of Weights & Biases to which curves are sent; needs the package wandb.",
        unit="NAME",
    )
    wandb_entity: str | None = flag("User or team of --wandb-project.", unit="NAME")
    wandb_exp_name: str | None = flag("Name of the run in Weights & Biases.", unit="NAME")
    wandb_save_dir: Folder | None = flag(
        "Folder for local files of Weights & Biases.", derived="wandb in --save"
    )
    mlflow_experiment: str | None = flag(
        "Experiment of MLflow to which curves are sent; needs the package mlflow.", unit="NAME"
    )
    mlflow_run_name: str | None = flag("Name of the run in MLflow.", unit="NAME")
    mlflow_tracking_uri: str | None = flag(
        "Address of MLflow, a server or a file.",
        derived="the value of MLFLOW_TRACKING_URI",
        unit="URI",
    )
    prometheus_address: str | None = flag(
        "Address at which a Prometheus server reads the last values; needs the package "
        "prometheus_client. Without HOST, only this machine may read them; otherwise "
        "MEGATRON_ADAPTIVE_METRICS_TOKEN must hold a bearer token.",
        unit="[HOST:]PORT",
    )
    prometheus_file: str | None = flag(
        "File for the last values, which Prometheus' node exporter reads (textfile collector); "
        "needs the package prometheus_client.",
        unit="FILE",
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
