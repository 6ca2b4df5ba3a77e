"""Rules between settings of model, parallelism, batch and schedule.

Every message names the values, the rule and the remedy. Rules of a single value (ranges, choices)
are on the fields, pairs of flags that exclude each other in ``arguments.py``, rules of precision,
optimizer, recompute, data and run in ``check_training.py``, those of the order of work in
``check_schedule.py``. Nothing here changes a setting.
"""

from __future__ import annotations

from megatron.adaptive.config.check_schedule import check_schedule
from megatron.adaptive.config.check_training import check_training
from megatron.adaptive.config.check_widths import check_sizes, check_widths
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.model import ModelConfig
from megatron.adaptive.config.partition import format_partition, nearly_even_split
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

__all__ = ["check_config", "check_world_size", "chunks_of"]


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
    """Whether normalization layers come from Transformer Engine or apex instead of torch."""
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
