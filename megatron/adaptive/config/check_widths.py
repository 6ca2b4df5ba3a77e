"""Rules of stages that have unequal numbers of ranks (``--stage-data-parallel-sizes``)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.config.partition import format_partition
from megatron.adaptive.config.schedule import UNEQUAL_SCHEDULES
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

__all__ = ["check_sizes", "check_widths"]


def check_sizes(widths: Sequence[int], world_size: int, pipeline: int, of_each: int = 1) -> None:
    """The ranks of all stages must be those of the job.

    Args:
        widths: copies of each stage.
        world_size: processes of the job.
        pipeline: stages.
        of_each: ranks of each copy.

    Raises:
        ConfigError: they are not, or there are other stages.
    """
    given = f"--stage-data-parallel-sizes {format_partition(widths)}"
    if len(widths) != pipeline:
        raise ConfigError(
            f"{given} tells the ranks of {len(widths)} stages, --pipeline-model-parallel-size is "
            f"{pipeline}: give one number for each stage"
        )
    if sum(widths) * of_each != world_size:
        raise ConfigError(
            f"{given} needs {sum(widths) * of_each} processes, this run has {world_size}: start as "
            "many or change the sizes"
        )


def check_widths(config: TrainerConfig) -> None:
    """Refuse what stages of unequal widths cannot do.

    Raises:
        ConfigError: the first such setting, by name.
    """
    widths = config.parallel.unequal_sizes
    if widths is None:
        return
    parallel, schedule = config.parallel, config.schedule
    given = f"--stage-data-parallel-sizes {format_partition(widths)}"
    for what, is_given in (
        (f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size}",
         parallel.tensor_model_parallel_size > 1),
        (f"--context-parallel-size {parallel.context_parallel_size}",
         parallel.context_parallel_size > 1),
        (f"--model-chunks {parallel.num_chunks}", parallel.num_chunks > 1),
        ("--use-distributed-optimizer", parallel.use_distributed_optimizer),
        ("--ddp-average-in-collective", parallel.ddp_average_in_collective),
        ("--repartition auto", schedule.repartition != "off"),
        (f"--trace-dir {schedule.trace_dir}", schedule.trace_dir is not None),
        (f"--record-schedule {schedule.record_schedule}", schedule.record_schedule is not None),
        (f"--replay-schedule {schedule.replay_schedule}", schedule.replay_schedule is not None),
    ):  # fmt: skip
        if is_given:
            raise ConfigError(
                f"{given} with {what}: stages of unequal sizes do without it; drop it, or use the "
                "same number of ranks for each stage"
            )
    if schedule.pipeline_schedule not in UNEQUAL_SCHEDULES:
        raise ConfigError(
            f"{given} with --pipeline-schedule {schedule.pipeline_schedule}, which is made for "
            f"stages of equal sizes: use one of {', '.join(UNEQUAL_SCHEDULES)}"
        )
