"""What is reported, where and how often."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag

__all__ = ["LoggingConfig"]


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
        "Folder for progress.jsonl, which tells how far the run is.",
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
