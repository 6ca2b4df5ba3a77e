"""Defines the settings for run length, validation, checkpoints and logging."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import Count, Folder, Iterations, Natural, Samples, flag, switch


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run."""

    train_iters: Iterations | None = flag(
        "Total number of training iterations; either this or --train-samples is required."
    )
    train_samples: Samples | None = flag(
        "Total number of training samples; either this or --train-iters is required."
    )
    eval_interval: Iterations = flag("Number of iterations between two validations.", 1000)
    eval_iters: Natural = flag(
        "Number of batches in each validation and in the test; 0 to disable both.",
        100,
        unit="ITERATIONS",
    )
    skip_train: bool = switch("Skip training, and only validate and test.")
    sample_prompt: str | None = flag(
        "Prompt that the model continues after the run, with greedy decoding.", unit="TEXT"
    )
    sample_tokens: Count = flag("Number of tokens to generate after the prompt.", 32)
    exit_interval: Iterations | None = flag(
        "Save a checkpoint and stop at the next iteration that is a multiple of this number."
    )
    exit_duration_in_mins: Count | None = flag(
        "Save a checkpoint and stop after this time.", unit="MINUTES"
    )
    seed: Count = flag("Seed for all random numbers.", 1234)
    manual_gc: bool = switch(
        "Run Python's garbage collector only at the interval set with --manual-gc-interval."
    )
    manual_gc_interval: Natural = flag(
        "Number of iterations between collections; 0 to disable them.", 0, unit="ITERATIONS"
    )
    probe_interval: Natural = flag(
        "Number of iterations between two probes of ranks, links and groups, as in doctor "
        "--probe; a probe is skipped if it would take more than 1% of the time since the last "
        "probe; 0 to disable probes.",
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
        "Number of iterations between checkpoints; required with --save.",
        names=("--save-interval", "--persistent-save-interval"),
    )
    async_save: bool = switch(
        "Write checkpoints in the background, so that training waits only for a copy to host "
        "memory."
    )
    save_local: Folder | None = flag(
        "Folder on each node's local disk, where checkpoints are first written in the "
        "background before they are copied to --save."
    )
    keep_checkpoints: Count | None = flag(
        "Number of most recent complete checkpoints to keep.", unit="N", derived="all"
    )
    no_save_optim: bool = switch("Do not save the optimizer state in checkpoints.")
    no_save_rng: bool = switch("Do not save random number states in checkpoints.")
    load: Folder | None = flag("Folder with the checkpoint from which training resumes.")
    load_hf: Folder | None = flag(
        "Folder of a Hugging Face model: the run starts from its weights if --load has no "
        "checkpoint, and its config.json sets the model flags that are absent."
    )
    hf_family: str | None = flag(
        "Your own family of Hugging Face models, for a model_type that this package does not "
        "support; see docs/huggingface.md.",
        unit="PACKAGE.MODULE:CLASS",
    )
    ckpt_step: Natural | None = flag(
        "Iteration to load.", unit="ITERATION", derived="the latest complete checkpoint"
    )
    trust_checkpoint: bool = switch(
        "Also load checkpoints that contain pickles: those of Megatron-LM and of old versions of "
        "this trainer."
    )
    no_load_optim: bool = switch("Do not load the optimizer state.")
    no_load_rng: bool = switch("Do not load random number states.")
    finetune: bool = switch("Load only weights, and start at iteration 0 and the first sample.")
    exit_on_missing_checkpoint: bool = switch(
        "Exit with an error if the folder of --load has no checkpoint, instead of training from "
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
        "Do not distribute checkpoint writing over data-parallel ranks.",
        off="--no-ckpt-fully-parallel-save",
    )
    ckpt_fully_parallel_load: bool = switch(
        "Distribute checkpoint reading over data-parallel ranks."
    )

    @property
    def saves_behind(self) -> bool:
        """Whether checkpoints are written in the background while the training continues."""
        return self.async_save or self.save_local is not None


def _read_names(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of names."""
    return tuple(name.strip() for name in text.split(","))


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: Iterations = flag("Number of iterations between two lines of the log.", 100)
    log_throughput: bool = switch("Add throughput to the log.")
    log_params_norm: bool = switch("Add the norm of all parameters to the log.")
    log_num_zeros_in_grad: bool = switch(
        "Add the number of gradient elements that are zero to the log."
    )
    timing_log_level: int = flag(
        "Level of detail of timers: 0 for iterations, 1 for parts of an iteration, 2 for parts "
        "of a microbatch.",
        0,
        choices=(0, 1, 2),
    )
    timing_log_option: str = flag(
        "Times that are reported: the maximum over all ranks (max), minimum and maximum (minmax), "
        "or the time of every rank (all).",
        "minmax",
        choices=("max", "minmax", "all"),
    )
    barrier_with_L1_time: bool = switch(  # noqa: N815 - Megatron-LM's name
        "Do not wait for all ranks before each timer of level 1 starts.",
        off="--no-barrier-with-level-1-timing",
    )
    logging_level: Natural | None = flag("Level of Python's logging; 10 (debug) logs the most.")
    progress_dir: Folder | None = flag(
        "Folder for progress.jsonl, which records the progress of the run.", derived="--trace-dir"
    )
    logger: tuple[str, ...] | None = flag(
        "Additional loggers for curves: names of built-in loggers, or your own loggers as "
        "package.module:Class.",
        reader=_read_names,
        unit="NAME,NAME",
    )
    tensorboard_dir: Folder | None = flag("Folder for TensorBoard.")
    tensorboard_log_interval: Iterations = flag(
        "Number of iterations between two points of TensorBoard's curves.", 1
    )
    tensorboard_queue_size: Count = flag(
        "Maximum number of points that TensorBoard buffers before it writes them.",
        1000,
        unit="POINTS",
    )
    wandb_project: str | None = flag(
        "Project of Weights & Biases to which curves are sent; requires the package wandb.",
        unit="NAME",
    )
    wandb_entity: str | None = flag(
        "User or team that owns the project of --wandb-project.", unit="NAME"
    )
    wandb_exp_name: str | None = flag("Name of the run in Weights & Biases.", unit="NAME")
    wandb_save_dir: Folder | None = flag(
        "Folder for local files of Weights & Biases.", derived="folder wandb in --save"
    )
    mlflow_experiment: str | None = flag(
        "Experiment of MLflow to which curves are sent; requires the package mlflow.", unit="NAME"
    )
    mlflow_run_name: str | None = flag("Name of the run in MLflow.", unit="NAME")
    mlflow_tracking_uri: str | None = flag(
        "Tracking URI of MLflow, which points to a server or a file.",
        derived="the value of MLFLOW_TRACKING_URI",
        unit="URI",
    )
    prometheus_address: str | None = flag(
        "Address at which a Prometheus server reads the latest values; requires the package "
        "prometheus_client. Without HOST, only this machine can read them; otherwise, "
        "MEGATRON_ADAPTIVE_METRICS_TOKEN must contain a bearer token.",
        unit="[HOST:]PORT",
    )
    prometheus_file: str | None = flag(
        "File for the latest values, which Prometheus' node exporter reads (textfile "
        "collector); requires the package prometheus_client.",
        unit="FILE",
    )
    log_timers_to_tensorboard: bool = switch("Write timers to TensorBoard.")
    log_batch_size_to_tensorboard: bool = switch("Write the batch size to TensorBoard.")
    log_learning_rate_to_tensorboard: bool = switch(
        "Do not write the learning rate to TensorBoard.",
        off=("--no-log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"),
    )
    log_loss_scale_to_tensorboard: bool = switch(
        "Do not write the loss scale to TensorBoard.", off="--no-log-loss-scale-to-tensorboard"
    )
    log_validation_ppl_to_tensorboard: bool = switch(
        "Write the validation perplexity to TensorBoard."
    )
    log_memory_to_tensorboard: bool = switch("Write memory use to TensorBoard.")
    log_world_size_to_tensorboard: bool = switch("Write the world size to TensorBoard.")
