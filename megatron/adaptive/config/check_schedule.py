"""Rules of the order of work: what a schedule needs of chunks, placement, batch and backwards."""

from __future__ import annotations

from megatron.adaptive.config.schedule import (
    ONE_CHUNK,
    RULES,
    SEVERAL_CHUNKS,
    SPLIT_SCHEDULES,
    TWO_CHUNKS,
    V_ONLY,
    V_SCHEDULES,
)
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

__all__ = ["check_schedule"]

_MIN_PIPELINE_WITHOUT_OVERLAP = 3


def check_schedule(config: TrainerConfig) -> None:
    """Hold the order of work against the rest of a configuration.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _check_chunks(config)
    _check_placement(config)
    _check_rule_settings(config)
    _check_split(config)
    _check_files(config)
    _check_repartition(config)
    _check_transport(config)
    schedule, chunks = config.schedule.pipeline_schedule, config.parallel.num_chunks
    if schedule == "interleaved" or (schedule == "megatron" and chunks > 1):
        _check_microbatch_groups(config)
    if schedule == "varuna" and config.recompute.recompute_granularity != "full":
        raise ConfigError(
            "--pipeline-schedule varuna keeps the inputs of many microbatches and repeats their "
            "forwards: add --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"
        )


def _check_chunks(config: TrainerConfig) -> None:
    schedule = config.schedule.pipeline_schedule
    pipeline = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.num_chunks
    given = f"--pipeline-schedule {schedule}"
    if chunks > 1 and pipeline == 1:
        raise ConfigError(
            f"--model-chunks {chunks} with pipeline size 1: megatron-core splits a model into "
            "chunks only over at least 2 pipeline ranks; raise --pipeline-model-parallel-size or "
            "drop --model-chunks"
        )
    if schedule in SEVERAL_CHUNKS and (chunks == 1 or pipeline == 1):
        raise ConfigError(
            f"{given} with {chunks} chunks and pipeline size {pipeline}: it needs two of each at "
            "least; raise --model-chunks and --pipeline-model-parallel-size or use 1f1b"
        )
    if schedule in ONE_CHUNK and chunks > 1:
        raise ConfigError(
            f"{given} with {chunks} chunks: it knows one chunk for each rank; use interleaved or "
            "adaptive, or drop --model-chunks"
        )
    if schedule in TWO_CHUNKS and chunks != 2:
        raise ConfigError(
            f"{given} with {chunks} chunk{'s' * (chunks > 1)}: it needs two for each rank; set "
            "--model-chunks 2"
        )
    batched = schedule == "megatron" and chunks > 1 and not config.parallel.overlap_p2p_comm
    if batched and pipeline < _MIN_PIPELINE_WITHOUT_OVERLAP:
        raise ConfigError(
            f"{given} with {chunks} chunks, pipeline size {pipeline} and "
            "--no-overlap-p2p-communication: two messages between the same ranks would mix; "
            "drop the last flag or use a pipeline size of 3 at least"
        )


def _check_placement(config: TrainerConfig) -> None:
    schedule = config.schedule.pipeline_schedule
    chunks = config.parallel.num_chunks
    if config.placement_kind != "v":
        if schedule in V_ONLY:
            raise ConfigError(
                f"--pipeline-placement loop with --pipeline-schedule {schedule}, which runs stages "
                "there and back: drop --pipeline-placement"
            )
        return
    if schedule not in V_SCHEDULES:
        raise ConfigError(
            f"--pipeline-placement v with --pipeline-schedule {schedule}, which runs stages in a "
            f"loop: use one of {', '.join(V_SCHEDULES)}, or --pipeline-placement loop"
        )
    if chunks == 1:
        raise ConfigError(
            f"--pipeline-placement v with {chunks} chunk: the way back of a V needs a second one "
            "on each rank; add --model-chunks 2 or use --pipeline-placement loop"
        )


def _check_rule_settings(config: TrainerConfig) -> None:
    if config.schedule.is_rule or config.schedule.activation_cap is None:
        return
    raise ConfigError(
        f"--activation-cap {config.schedule.activation_cap:g} has no effect with "
        f"--pipeline-schedule {config.schedule.pipeline_schedule}, whose order fixes what is kept: "
        f"drop it or use one of {', '.join(RULES)}"
    )


def _check_split(config: TrainerConfig) -> None:
    schedule = config.schedule.pipeline_schedule
    given = config.schedule.split_backward
    if given is False and schedule in SPLIT_SCHEDULES:
        raise ConfigError(
            f"--split-backward False with --pipeline-schedule {schedule}, whose order has weight "
            "gradients as work of their own: drop it or choose another schedule"
        )
    if given and not config.schedule.is_rule and schedule not in (*SPLIT_SCHEDULES, "file"):
        raise ConfigError(
            f"--split-backward True with --pipeline-schedule {schedule}, whose order has whole "
            f"backwards: use one of {', '.join((*RULES, *SPLIT_SCHEDULES))}, or drop it"
        )
    if config.splits_backward and config.model.transformer_impl != "local":
        raise ConfigError(
            f"--pipeline-schedule {schedule} with split backwards and --transformer-impl "
            f"{config.model.transformer_impl}: its layers compute weight gradients within the "
            "backward; use --transformer-impl local, or a schedule with whole backwards"
        )


def _check_files(config: TrainerConfig) -> None:
    settings = config.schedule
    schedule = settings.pipeline_schedule
    if (schedule == "file") != (settings.schedule_file is not None):
        raise ConfigError(
            f"--pipeline-schedule {schedule} with --schedule-file {settings.schedule_file}: the "
            "two go together; give both or neither"
        )
    for name, path in (
        ("--record-schedule", settings.record_schedule),
        ("--replay-schedule", settings.replay_schedule),
    ):
        if path is not None and schedule == "megatron":
            raise ConfigError(
                f"{name} {path} with --pipeline-schedule megatron, whose order megatron-core keeps "
                "to itself: use a schedule of this project"
            )
        if path is not None and schedule == "auto":
            raise ConfigError(
                f"{name} {path} with --pipeline-schedule auto, which changes the order's shape "
                "after a few steps: name the schedule that it chose"
            )


def _check_repartition(config: TrainerConfig) -> None:
    if config.schedule.repartition == "off":
        return
    pipeline = config.parallel.pipeline_model_parallel_size
    if pipeline == 1:
        raise ConfigError(
            "--repartition auto with pipeline size 1: there is no other stage to give layers to; "
            "raise --pipeline-model-parallel-size or drop the flag"
        )
    schedule = config.schedule.pipeline_schedule
    if schedule in ("file", "megatron"):
        raise ConfigError(
            f"--repartition auto with --pipeline-schedule {schedule}, which cannot be simulated "
            "under another partition: use adaptive or another schedule of this project"
        )


def _check_transport(config: TrainerConfig) -> None:
    given = config.transport
    schedule = config.schedule.pipeline_schedule
    if given.forced is not None and schedule == "megatron":
        raise ConfigError(
            f"--transport {given.forced} with --pipeline-schedule megatron, whose messages are "
            "megatron-core's own: drop it or use a schedule of this project"
        )
    if given.forced in ("shm", "tcp", "gloo", "nccl"):
        for name, value in (
            ("--rdma-device", given.rdma_device),
            ("--rdma-gid-index", given.rdma_gid_index),
            ("--rdma-mtu-bytes", given.rdma_mtu_bytes),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} {value} has no effect with --transport {given.forced}: drop it or "
                    "use --transport rdma"
                )


def _check_microbatch_groups(config: TrainerConfig) -> None:
    """The interleaved order runs microbatches in groups, none smaller than the pipeline."""
    pipeline = config.parallel.pipeline_model_parallel_size
    group = config.parallel.microbatch_group_size_per_vp_stage or pipeline
    if group < pipeline:
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below the pipeline "
            f"size {pipeline}: give {pipeline} at least or drop the flag"
        )
    per_step = config.batch.micro_batch_size * config.parallel.data_parallel_size
    for size in config.batch.batch_sizes():
        count = size // per_step
        rest = count % group
        if count < group or 0 < rest < pipeline:
            schedule = config.schedule.pipeline_schedule
            raise ConfigError(
                f"--pipeline-schedule {schedule} with {count} microbatches (global batch {size}): "
                f"they must fill groups of {group}, the last of {pipeline} "
                f"at least; choose a global batch that is a multiple of {group * per_step}, or "
                "adaptive"
            )
