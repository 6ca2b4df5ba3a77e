"""Length of the run, evaluation, profile and seed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag

__all__ = ["RunConfig"]


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
