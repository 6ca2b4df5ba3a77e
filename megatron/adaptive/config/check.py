"""Rules between settings.

Every message names the values, the rule and the remedy. Rules of a single value (ranges, choices)
are on the fields, pairs of flags that exclude each other in ``arguments.py``, rules of precision,
optimizer, recompute, data and run in ``check_training.py``. Nothing here changes a setting.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.config.check_training import check_training
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.model import ModelConfig
from megatron.adaptive.config.schedule import (
    ONE_CHUNK,
    RULES,
    SEVERAL_CHUNKS,
    SPLIT_SCHEDULES,
    TWO_CHUNKS,
    UNEQUAL_SCHEDULES,
    V_ONLY,
    V_SCHEDULES,
    format_partition,
    nearly_even_split,
)
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

__all__ = [
    "check_config",
    "check_schedule",
    "check_sizes",
    "check_widths",
    "check_world_size",
    "chunks_of",
]


def check_config(config: TrainerConfig, installed: Installed) -> None:
    """Hold a configuration against every rule, those of ``check_training.py`` included.

    Raises:
        ConfigError: the first rule that is broken.
    """
    parallel = config.parallel
    check_world_size(
        config.world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        widths=parallel.stage_data_parallel_sizes,
    )
    check_widths(config)
    _check_model(config.model)
    _check_kernels(config.model, installed)
    _check_tensor_parallel(config)
    _check_sequence_parallel(config, installed)
    _check_context_parallel(config, installed)
    _check_stages(config)
    _check_batch(config)
    check_schedule(config)
    _check_data_parallel(config)
    check_training(config)


def check_world_size(
    world_size: int,
    *,
    tensor: int,
    pipeline: int,
    context: int,
    widths: tuple[int, ...] | None = None,
) -> None:
    """The processes must make up whole copies of the model, or the stages of given widths.

    Raises:
        ConfigError: they do not.
    """
    if widths is not None:
        check_sizes(widths, world_size, pipeline, of_each=tensor * context)
        return
    size = tensor * pipeline * context
    if world_size < 1 or world_size % size != 0:
        raise ConfigError(
            f"world size {world_size} is not a multiple of tensor {tensor} x pipeline {pipeline} "
            f"x context {context} = {size}: start a multiple of {size} processes or change the "
            "parallel sizes"
        )


def chunks_of(num_layers: int, pipeline: int, layers_per_chunk: int) -> int:
    """Chunks of each pipeline rank if every chunk holds ``layers_per_chunk`` layers.

    Raises:
        ConfigError: the layers do not divide evenly.
    """
    unit = pipeline * layers_per_chunk
    if num_layers % unit != 0:
        raise ConfigError(
            f"--num-layers {num_layers} is not a multiple of pipeline {pipeline} x "
            f"--num-layers-per-virtual-pipeline-stage {layers_per_chunk} = {unit}: change one of "
            "them, or give --model-chunks and --partition"
        )
    return num_layers // unit


def _check_model(model: ModelConfig) -> None:
    rest = model.hidden_size % model.num_attention_heads
    if rest != 0 and model.kv_channels == model.hidden_size // model.num_attention_heads:
        raise ConfigError(
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{model.num_attention_heads}: change one of them, or give --kv-channels"
        )
    if model.ffn_hidden_size < 1:
        raise ConfigError(
            f"--swiglu with --hidden-size {model.hidden_size} makes a feed-forward block of width "
            "0, rounded down to a multiple of 64: give --ffn-hidden-size"
        )
    if model.seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{model.max_position_embeddings}: raise the latter to {model.seq_length} at least"
        )
    if not model.group_query_attention and model.num_query_groups != 1:
        raise ConfigError(
            f"--num-query-groups {model.num_query_groups} has no effect by itself: add "
            "--group-query-attention"
        )
    if model.num_attention_heads % model.query_groups != 0:
        raise ConfigError(
            f"--num-attention-heads {model.num_attention_heads} is not a multiple of "
            f"--num-query-groups {model.query_groups}: every group serves the same number of heads"
        )
    if model.swiglu and model.squared_relu:
        raise ConfigError(
            "--swiglu and --squared-relu exclude each other: a model has one activation; keep one"
        )
    if not model.add_position_embedding and model.position_embedding_type == "learned_absolute":
        raise ConfigError(
            "--no-position-embedding contradicts --position-embedding-type learned_absolute: "
            "give --position-embedding-type rope or none"
        )


def _check_kernels(model: ModelConfig, installed: Installed) -> None:
    uses_engine = model.transformer_impl == "transformer_engine"
    if uses_engine and not installed.transformer_engine:
        raise ConfigError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not "
            "installed: install it or give --transformer-impl local"
        )
    needs_engine = {
        f"--attention-backend {model.attention_backend}": model.attention_backend
        in ("flash", "fused"),
        "--use-flash-attn": model.use_flash_attn,
        "--cross-entropy-fusion-impl te": model.cross_entropy_fusion_impl == "te",
    }
    for what, wanted in needs_engine.items():
        if wanted and not uses_engine:
            raise ConfigError(
                f"{what} needs Transformer Engine, but --transformer-impl is local: install it "
                "and use --transformer-impl transformer_engine, or drop the flag"
            )
    if model.attention_backend == "local" and uses_engine:
        raise ConfigError(
            "--attention-backend local belongs to --transformer-impl local, not to "
            "transformer_engine: change one of them"
        )
    if model.apply_layernorm_1p and not _norm_is_fused(model, installed):
        raise ConfigError(
            f"--apply-layernorm-1p needs a normalization that the local {model.normalization} of "
            "torch lacks: install Transformer Engine, or apex for LayerNorm, or drop the flag"
        )


def _norm_is_fused(model: ModelConfig, installed: Installed) -> bool:
    """Returns whether normalization is Transformer Engine's or apex's instead of torch's."""
    if model.transformer_impl == "transformer_engine":
        return True
    return installed.apex and model.normalization == "LayerNorm"


def _check_tensor_parallel(config: TrainerConfig) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    model = config.model
    if model.num_attention_heads % tensor != 0:
        raise ConfigError(
            f"--num-attention-heads {model.num_attention_heads} is not a multiple of "
            f"--tensor-model-parallel-size {tensor}: every rank takes whole heads; change one"
        )
    groups = model.query_groups
    if groups % tensor != 0 and tensor % groups != 0:
        raise ConfigError(
            f"--num-query-groups {groups} is neither a multiple nor a divisor of "
            f"--tensor-model-parallel-size {tensor}: change one of them"
        )
    if model.ffn_hidden_size % tensor != 0:
        raise ConfigError(
            f"--ffn-hidden-size {model.ffn_hidden_size} is not a multiple of "
            f"--tensor-model-parallel-size {tensor}: every rank takes an equal share; change one"
        )


def _check_sequence_parallel(config: TrainerConfig, installed: Installed) -> None:
    if not config.parallel.sequence_parallel:
        return
    tensor = config.parallel.tensor_model_parallel_size
    if tensor == 1:
        raise ConfigError(
            "--sequence-parallel with --tensor-model-parallel-size 1 splits nothing: it needs a "
            "tensor parallel size above 1; raise it or drop the flag"
        )
    unit = tensor * config.parallel.context_parallel_size
    if config.model.seq_length % unit != 0:
        raise ConfigError(
            f"--seq-length {config.model.seq_length} is not a multiple of {unit}, the ranks that "
            "--sequence-parallel splits it over: change one of them"
        )
    if not _norm_is_fused(config.model, installed):
        raise ConfigError(
            f"--sequence-parallel does not work with the local {config.model.normalization} of "
            "torch: install Transformer Engine, or apex for LayerNorm, or drop the flag"
        )


def _check_context_parallel(config: TrainerConfig, installed: Installed) -> None:
    context = config.parallel.context_parallel_size
    if context == 1:
        return
    if config.model.transformer_impl != "transformer_engine":
        have = "is not in use" if installed.transformer_engine else "is not installed"
        raise ConfigError(
            f"--context-parallel-size {context} needs the attention of Transformer Engine, which "
            f"{have}: use --transformer-impl transformer_engine or --context-parallel-size 1"
        )
    if config.model.seq_length % (2 * context) != 0:
        raise ConfigError(
            f"--seq-length {config.model.seq_length} is not a multiple of 2 x "
            f"--context-parallel-size {context} = {2 * context}: change one of them"
        )


def _check_stages(config: TrainerConfig) -> None:
    pipeline = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.num_chunks
    layers, stages = config.model.num_layers, config.num_stages
    shape = f"pipeline {pipeline} x chunks {chunks}"
    partition = config.schedule.partition
    if partition is None:
        if layers % stages != 0:
            example = format_partition(nearly_even_split(layers, stages))
            raise ConfigError(
                f"--num-layers {layers} does not divide evenly into {stages} stages ({shape}): "
                f"choose a multiple of {stages} or give --partition, for example {example}"
            )
        return
    given = f"--partition {format_partition(partition)}"
    if len(partition) != stages:
        raise ConfigError(
            f"{given} has {len(partition)} stages but {shape} make {stages}: give one number for "
            "each stage"
        )
    if sum(partition) != layers:
        raise ConfigError(
            f"{given} holds {sum(partition)} layers but --num-layers is {layers}: make them equal"
        )


def _check_batch(config: TrainerConfig) -> None:
    batch = config.batch
    replicas = config.parallel.data_parallel_size
    unit = batch.micro_batch_size * replicas
    if batch.global_batch_size % unit != 0:
        raise ConfigError(
            f"--global-batch-size {batch.global_batch_size} is not a multiple of "
            f"--micro-batch-size {batch.micro_batch_size} x data parallel size {replicas} = "
            f"{unit}: change one of them"
        )
    if batch.rampup_batch_size is None:
        return
    start, increment, samples = batch.rampup_batch_size
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if start >= batch.global_batch_size:
        raise ConfigError(
            f"{given} starts at {start}, not below --global-batch-size "
            f"{batch.global_batch_size}: start lower or drop the flag"
        )
    if (batch.global_batch_size - start) % increment != 0:
        raise ConfigError(
            f"{given} never reaches --global-batch-size {batch.global_batch_size}: the increment "
            f"{increment} must divide the distance {batch.global_batch_size - start}"
        )
    if start % unit != 0 or increment % unit != 0:
        raise ConfigError(
            f"{given} passes through batches that are not a multiple of --micro-batch-size "
            f"{batch.micro_batch_size} x data parallel size {replicas} = {unit}: make start and "
            "increment multiples of it"
        )


def _check_data_parallel(config: TrainerConfig) -> None:
    parallel = config.parallel
    if parallel.use_distributed_optimizer and config.optimizer.optimizer == "sgd":
        raise ConfigError(
            "--use-distributed-optimizer with --optimizer sgd: megatron-core splits only the state "
            "of adam; drop one of them"
        )
    if not parallel.overlap_param_gather:
        return
    for flag, given in (
        ("--use-distributed-optimizer", parallel.use_distributed_optimizer),
        ("--overlap-grad-reduce", parallel.overlap_grad_reduce),
    ):
        if not given:
            raise ConfigError(f"--overlap-param-gather works only with {flag}: add it as well")


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
            f"{given} gives the ranks of {len(widths)} stages, --pipeline-model-parallel-size is "
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
