"""The pipeline's order of work, its layers per stage and its traces: flags of this project."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import flag
from megatron.adaptive.config.partition import parse_partition

__all__ = ["ScheduleConfig"]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Pipeline schedule and traces."""

    pipeline_schedule: str = flag(
        "Order of work: megatron-core's own code, a fixed order on our engine, or a choice made "
        "at run time from what has arrived.",
        default="adaptive",
        choices=("megatron", "1f1b", "interleaved", "adaptive"),
    )
    partition: tuple[int, ...] | None = flag(
        "Layers of each stage in pipeline order, joined by '-'; 0 is allowed.",
        default=None,
        convert=parse_partition,
        unit="0-11-8-8",
        derived="the same number for each stage",
    )
    activation_cap: float | None = flag(
        "Most activations that a rank keeps, counted in microbatches over all its chunks; only "
        "for --pipeline-schedule adaptive.",
        default=None,
        minimum=1,
        unit="MICROBATCHES",
        derived="chosen from the pipeline's shape",
    )
    pipeline_timeout_s: float = flag(
        "Time limit of every wait for a message of the pipeline.",
        default=600.0,
        above=0,
        unit="SECONDS",
        derived="--distributed-timeout-minutes",
    )
    trace_dir: str | None = flag(
        "Folder for traces; none are written without it.", default=None, unit="DIR"
    )
    trace_interval: int = flag(
        "Trace one iteration in this many.", default=1, minimum=1, unit="ITERATIONS"
    )
    trace_iterations: int | None = flag(
        "Stop after this many traced iterations.",
        default=None,
        minimum=1,
        unit="ITERATIONS",
        derived="no limit",
    )

    def traces(self, iterations_done: int) -> bool:
        """Whether the next iteration is traced.

        Args:
            iterations_done: iterations that this process has finished, 0 at its first one, also
                after a checkpoint was loaded.
        """
        if self.trace_dir is None or iterations_done % self.trace_interval != 0:
            return False
        traced = iterations_done // self.trace_interval
        return self.trace_iterations is None or traced < self.trace_iterations
