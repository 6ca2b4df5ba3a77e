"""Checks that the settings of a run are compatible with each other.

Most checks are rules in tables, in the notation of :mod:`~megatron.adaptive.config.flag_rules`. All
other checks are functions. Error messages contain the values, the problem and a remedy. Checks of a
single value (ranges, choices) are declared with the fields, and mutually exclusive flags are in
``arguments.py``. This module does not change settings. Only :func:`check_output_folders` writes to
the disk, and it removes the files that it creates.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megatron.adaptive.config.adapters import adapted_parts, linear_names
from megatron.adaptive.config.collector import collector_url
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.flag_effects import effect_warning
from megatron.adaptive.config.flag_rules import GivenFlags, order_rules
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.layer_partition import layer_rules
from megatron.adaptive.config.megatron_core_flags import (
    EXPERT_SETTINGS,
    LATENT_SETTINGS,
    parse_pattern,
)
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import schedule_spec
from megatron.adaptive.config.trainer import TrainerConfig, groups
from megatron.adaptive.errors import ConfigError

Rules: TypeAlias = Iterator[tuple[object, str]]
"""Pairs of a condition and an error message. If the condition is true, an error with this message
is raised.
"""

_MAX_SPLITS = 3
_UNLIKE = "heterogeneous_layers_config_path"
_ENGINE = "transformer_impl=transformer_engine"
_BEFORE_ORDER = """\
swiglu excludes squared_relu quick_geglu geglu openai_gelu | a model has only one activation
squared_relu excludes quick_geglu geglu openai_gelu | a model has only one activation
quick_geglu excludes geglu openai_gelu | a model has only one activation
geglu excludes openai_gelu | a model has one activation
seq_length within max_position_embeddings pack_to
min_lr lr_warmup_init within lr
decoupled_min_lr within decoupled_lr
min_loss_scale within initial_loss_scale
start_weight_decay within end_weight_decay | the weight decay can only increase
global_batch_size within train_samples
profile_step_start within profile_step_end
trace_detail=kernels excludes profile profile_execution | both use torch's profiler
tensor_model_parallel_size divides num_attention_heads ffn_hidden_size
    | every rank has an equal share
expert_model_parallel_size divides num_moe_experts | every rank has the same number of experts
expert_tensor_parallel_size divides moe_ffn_hidden_size | every rank has an equal share
sequence_parallel+tensor_model_parallel_size*context_parallel_size divides seq_length
    | these ranks have equal shares of each sequence
context_parallel_size>1+2*context_parallel_size divides seq_length
    | every rank has an early and a late part of each sequence
num_query_groups divides num_attention_heads | every group serves the same number of heads
stage_data_parallel_sizes excludes tensor_model_parallel_size>1 context_parallel_size>1
    num_virtual_stages_per_pipeline_rank>1 use_distributed_optimizer mtp_num_layers num_moe_experts
    ddp_average_in_collective repartition trace_dir calculate_per_token_loss record_schedule
    replay_schedule | stages of unequal sizes do not support this
overlap_moe_expert_parallel_comm needs expert_model_parallel_size>1
    | otherwise no tokens are exchanged
"""
_AFTER_ORDER = f"""\
pipeline_schedule=megatron+num_virtual_stages_per_pipeline_rank>1+overlap_p2p_comm=False
    needs pipeline_model_parallel_size>2 | messages between the same two ranks could be mixed up
repartition needs pipeline_model_parallel_size>1
repartition excludes pipeline_schedule=file,megatron
    | orders of these schedules cannot be simulated for another partition; use adaptive
record_schedule replay_schedule excludes pipeline_schedule=auto,megatron
    | auto changes its order during the run, and megatron-core's order cannot be read or set
transport excludes pipeline_schedule=megatron | this schedule uses megatron-core's communication
rdma_device rdma_gid_index rdma_mtu_bytes needs transport=auto,rdma
overlap_moe_expert_parallel_comm excludes repartition recompute_granularity=full moe_layer_recompute
    | while a forward pass is paused, other work would change the results or the time of this pass
overlap_moe_expert_parallel_comm excludes moe_shared_expert_overlap
    | both overlap the same token exchanges with computation
sequence_parallel needs tensor_model_parallel_size>1
window_size+context_parallel_size>1 excludes transformer_impl=local attention_softcap
    | these layers do not support sliding windows with context parallelism
pack_to sft needs variable_seq_lengths
variable_seq_lengths excludes stage_data_parallel_sizes ddp_average_in_collective
    reset_position_ids reset_attention_mask eod_mask_loss
    | documents are never joined, and the loss is per token
sft excludes mock_data | conversations come from files
pack_to excludes micro_batch_size>1 context_parallel_size>1 pipeline_schedule=file
    multi_latent_attention | packing requires microbatches of one row, whole rows on each rank,
    plain attention, and a schedule that supports any number of microbatches
balance_replicas=lengths needs variable_seq_lengths
    | otherwise, samples have equal lengths, so only the value speed has an effect
balance_replicas=lengths,speed,both excludes stage_data_parallel_sizes
    expert_model_parallel_size>1 moe_router_load_balancing_type=global_aux_loss
    ddp_average_in_collective pipeline_schedule=file,megatron
    | the second flag requires the same number of microbatches on all replicas
slice_tokens excludes sequence_slices pack_to
    | --slice-tokens already determines the length of a row and its number of slices
slice_tokens+variable_seq_lengths excludes micro_batch_size>1
    | a microbatch is a single row of documents
sequence_parallel+tensor_model_parallel_size divides slice_tokens
    | every rank has an equal share of each slice
sequence_slices=0 slice_tokens=0 needs pipeline_model_parallel_size>1
    | a single rank has no waiting time to reduce
sequence_slices=0 excludes variable_seq_lengths
    | auto can only compare steps whose sequences have equal length
sequence_slices slice_tokens needs transformer_impl=local
    | only local layers attend to earlier slices
sequence_slices slice_tokens excludes context_parallel_size>1 mtp_num_layers
    sample_prompt stage_data_parallel_sizes overlap_moe_expert_parallel_comm
    | sequence slices do not support the second flag
num_moe_experts+sequence_slices num_moe_experts+slice_tokens
    needs moe_router_load_balancing_type=none
    | load-balancing losses require whole microbatches
num_moe_experts+sequence_slices num_moe_experts+slice_tokens
    excludes moe_z_loss_coeff moe_expert_capacity_factor
    | the z-loss and the expert capacity require all tokens of a microbatch at the same time
slice_tokens excludes record_schedule replay_schedule balance_replicas=speed,both
    | the number of slices differs between steps
use_distributed_optimizer excludes optimizer=sgd,muon
    | megatron-core distributes only the state of adam
optimizer=muon excludes lora_rank
    | with adapters, the second optimizer that muon uses would have no weights
optimizer=muon excludes fp16 | megatron-core does not support loss scaling with muon; use bf16
optimizer=muon excludes expert_model_parallel_size>1 moe_grouped_gemm stage_data_parallel_sizes
    | muon requires whole experts on each rank, with separate weights
muon_momentum muon_nesterov muon_split_qkv=False muon_scale_mode muon_fp32_matmul_prec
    muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
    muon_scalar_optimizer needs optimizer=muon
overlap_param_gather needs use_distributed_optimizer overlap_grad_reduce
fp16_lm_cross_entropy loss_scale needs fp16
grad_reduce_in_bf16 needs bf16
fp32_residual_connection needs fp16/bf16
decoupled_min_lr needs decoupled_lr
start_weight_decay end_weight_decay needs weight_decay_incr_style=linear,cosine
weight_decay_incr_style=linear,cosine needs start_weight_decay end_weight_decay
recompute_activations needs recompute_granularity=selective | the first flag implies the second
recompute_granularity=full needs recompute_method recompute_num_layers | for example uniform and 1
recompute_modules needs recompute_granularity=selective
recompute_method recompute_num_layers distribute_saved_activations needs recompute_granularity=full
distribute_saved_activations needs tensor_model_parallel_size>1
distribute_saved_activations excludes sequence_parallel | the second flag already splits activations
lora_alpha lora_dropout lora_targets load_lora needs lora_rank
hf_family needs load_hf
perform_initialization=False needs load/load_hf | otherwise, the weights would be uninitialized
lora_rank excludes {_UNLIKE} overlap_moe_expert_parallel_comm | such layers do not support adapters
sample_prompt excludes context_parallel_size>1 mtp_num_layers variable_seq_lengths
    | text generation does not support the second flag
reset_attention_mask excludes create_attention_mask_in_dataloader=False
    | only the data loader can find the ends of documents
valid_data_path test_data_path needs train_data_path/skip_train | otherwise, training has no data
lr_decay_style=WSD needs lr_wsd_decay_iters/lr_wsd_decay_samples
    | the final part of the decay needs a length
save needs save_interval
save_local needs save | checkpoints are copied from the local to the shared storage
num_query_groups needs group_query_attention
position_embedding_type=learned_absolute excludes add_position_embedding=False | use rope or none
{" ".join(LATENT_SETTINGS)} needs multi_latent_attention
multi_latent_attention excludes group_query_attention | each head has a separate key and value
{" ".join(EXPERT_SETTINGS)} expert_model_parallel_size expert_tensor_parallel_size
    needs num_moe_experts
moe_router_topk within num_moe_experts
num_moe_experts excludes moe_expert_capacity_factor=0
    | experts would get no tokens; use a factor above 0, or remove the flag to keep all tokens
num_moe_experts+expert_tensor_parallel_size>1 needs add_bias_linear=False
    | every rank that shares an expert would add the bias
num_moe_experts+moe_token_dispatcher_type=allgather excludes variable_seq_lengths
    | the number of tokens differs between ranks; use alltoall
moe_grouped_gemm+transformer_impl=local needs bf16 | local grouped experts support only bf16
moe_grouped_gemm+transformer_impl=local moe_shared_expert_intermediate_size
    needs add_bias_linear=False
num_moe_experts+tensor_model_parallel_size>1 needs sequence_parallel
    | layers with experts require that these ranks share the tokens of a sequence
attention_softcap excludes use_flash_attn attention_backend=flash,fused
    | these kernels do not support soft-capping of attention scores
attention_backend=flash use_flash_attn cross_entropy_fusion_impl=te moe_latent_size
    use_te_activation_func fused_single_qkv_rope
    needs {_ENGINE}
attention_backend=local needs transformer_impl=local
window_rotary_base needs window_size position_embedding_type=rope
{_UNLIKE} excludes multi_latent_attention mtp_num_layers num_moe_experts pack_to
    | these features require layers of equal size
mtp_num_layers excludes position_embedding_type=learned_absolute
    | two stages would need the learned position embedding; use rope or none
mtp_num_layers+recompute_method=uniform needs recompute_num_layers=1
mtp_num_layers+context_parallel_size>1 needs calculate_per_token_loss
    | megatron-core would average the loss over the tokens of each rank separately
"""


def check_config(config: TrainerConfig, installed: Installed, *, needs_data: bool = True) -> None:
    """Checks that all settings of a run are compatible with each other.

    Args:
        config: Settings of the run, from the command line.
        installed: Optional packages that are installed. Some settings require one of them.
        needs_data: Whether the flags for data and for tokenizer files are required.

    Raises:
        ConfigError: Settings are incompatible. The message describes the first problem.
    """
    flags = _given_flags(config)
    order = order_rules(config.schedule.pipeline_schedule)
    for table in (_BEFORE_ORDER, order, _AFTER_ORDER):
        flags.require(table)
    for rules in (
        _shape(config, flags, installed),
        _experts(config, flags, installed),
        _expert_ranks(config, flags),
        layer_rules(config, flags),
        _batch(config, flags),
        _lengths(config, flags),
        _microbatch_groups(config, flags),
        _learning_rate(config, flags),
        _adapters(config, flags),
        _data(config, flags, needs_data),
    ):
        for is_broken, message in rules:
            if is_broken:
                raise ConfigError(message)
    if config.schedule.chooses_tokens and len(config.tokens_to_choose) == 1:
        raise ConfigError(
            "--slice-tokens auto requires documents of at least 32 tokens, got --seq-length "
            f"{config.model.seq_length}; increase --seq-length or remove --slice-tokens"
        )
    if config.schedule.chooses_slices and config.num_slices == 1:
        raise ConfigError(
            "--sequence-slices auto requires sequences of at least 32 tokens, got --seq-length "
            f"{config.model.seq_length}; increase --seq-length or remove --sequence-slices"
        )
    _ = config.slice_ends  # This property raises an error if sequences cannot be cut into slices.


def check_unequal_stages(config: TrainerConfig) -> None:
    """Checks that the settings of a run allow unequal stages (different numbers of replicas).

    Args:
        config: Settings of the run, which may have equal stages.

    Raises:
        ConfigError: A setting requires stages with equal numbers of replicas.
    """
    flags = _given_flags(config, stage_data_parallel_sizes=(2, 1))
    order = order_rules(config.schedule.pipeline_schedule)
    for table in (_BEFORE_ORDER, order, _AFTER_ORDER):
        flags.require(table)


def _given_flags(config: TrainerConfig, **changes: Any) -> GivenFlags:
    """Returns an object that checks the effective settings in ``config`` against rules.

    Args:
        config: Settings of the run.
        **changes: Values of settings that replace those in ``config``, keyed by name.
    """
    specs = {s.dest: s for kind in groups().values() for s in fields_of(kind) if s.has_flag}
    values = {
        dest: value
        for group in groups()
        for dest, value in vars(getattr(config, group)).items()
        if dest in specs
    }
    # The rules apply to effective values. The numbers of ranks per stage are replaced by None if
    # they are all equal. The number of chunks is 1 if no flag sets it.
    values["stage_data_parallel_sizes"] = config.parallel.unequal_sizes
    values["num_virtual_stages_per_pipeline_rank"] = config.parallel.num_chunks
    if config.core.num_moe_experts is not None:
        for of_experts, of_layers in (
            ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
            ("moe_ffn_hidden_size", "ffn_hidden_size"),
        ):
            values[of_experts] = values[of_experts] or values[of_layers]
    if config.core.heterogeneous_layers_config_encoded_json:
        values[_UNLIKE] = values[_UNLIKE] or "JSON"
    return GivenFlags(values | changes, specs)


def warning_about_effects(config: TrainerConfig) -> str | None:
    """Returns a warning that lists all flags without effect, or ``None`` if there are none.

    Args:
        config: Settings of the run, from the command line.
    """
    flags = _given_flags(config, split_backward=config.splits_backward)
    return effect_warning(flags, config.schedule.pipeline_schedule)


def replicas_of(world_size: int, values: Mapping[str, Any]) -> int:
    """Returns the data-parallel size of a job with ``world_size`` processes.

    Args:
        world_size: Number of processes of the job.
        values: Values of the flags that the user has set, keyed by the name of the setting.

    Raises:
        ConfigError: The number of processes does not match the parallel sizes.
    """
    tensor: int = values.get("tensor_model_parallel_size", 1)
    pipeline: int = values.get("pipeline_model_parallel_size", 1)
    context: int = values.get("context_parallel_size", 1)
    widths: tuple[int, ...] | None = values.get("stage_data_parallel_sizes")
    if widths is None:
        sizes = {"tensor": tensor, "pipeline": pipeline, "context": context}
        _require_whole(world_size, sizes, "the parallel sizes")
        return world_size // math.prod(sizes.values())
    flag = f"--stage-data-parallel-sizes {format_partition(widths)}"
    if len(widths) != pipeline:
        raise ConfigError(
            f"{flag} has {len(widths)} entries, but --pipeline-model-parallel-size is "
            f"{pipeline}; use one number for each stage"
        )
    needed = sum(widths) * tensor * context
    if needed != world_size:
        raise ConfigError(
            f"{flag} needs {needed} processes, but this run has {world_size}; start {needed} "
            "processes or change the sizes"
        )
    return math.lcm(*widths)


def _require_whole(world_size: int, sizes: Mapping[str, int], remedy: str) -> None:
    """Checks that ``world_size`` is a multiple of the product of ``sizes``."""
    unit = math.prod(sizes.values())
    if world_size < 1 or world_size % unit != 0:
        factors = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"world size {world_size} is not a multiple of {factors} = {unit}; start a multiple "
            f"of {unit} processes, or change {remedy}"
        )


def _shape(config: TrainerConfig, flags: GivenFlags, installed: Installed) -> Rules:
    model = config.model
    heads = model.num_attention_heads
    tensor = config.parallel.tensor_model_parallel_size
    yield (
        model.transformer_impl == "transformer_engine" and not installed.transformer_engine,
        "--transformer-impl transformer_engine needs Transformer Engine, which is not installed; "
        "install it or use --transformer-impl local",
    )
    yield (
        model.hidden_size % heads != 0 and model.kv_channels == model.hidden_size // heads,
        f"{flags.hidden_size} is not a multiple of {flags.num_attention_heads}; change one of "
        "them or add --kv-channels",
    )
    yield (
        model.ffn_hidden_size < 1,
        f"--swiglu with {flags.hidden_size} results in a feed-forward block of width 0, because "
        "the default width is rounded down to a multiple of 64; set --ffn-hidden-size",
    )
    yield (
        model.query_groups % tensor != 0 and tensor % model.query_groups != 0,
        f"--num-query-groups {model.query_groups} is neither a multiple nor a divisor of "
        f"{flags.tensor_model_parallel_size}; change one of them",
    )


def _experts(config: TrainerConfig, flags: GivenFlags, installed: Installed) -> Rules:
    core = config.core
    experts = config.core.num_moe_experts
    if experts is None:
        return
    groups = core.moe_router_num_groups
    best = config.model.moe_router_group_best
    yield (
        best is not None and (groups is None or best > experts // groups or core.moe_router_fusion),
        f"{flags.moe_router_group_best} requires at least this number of experts in each group of "
        "--moe-router-num-groups, and conflicts with --moe-router-fusion; change one of them",
    )
    pattern = parse_pattern(core.moe_layer_freq)
    layers = config.model.num_layers
    if isinstance(pattern, list):
        yield (
            len(pattern) != layers or not {*pattern} <= {0, 1},
            f"{flags.moe_layer_freq} has {len(pattern)} entries, which does not match "
            f"{flags.num_layers}; use one 0 or 1 for each layer",
        )
    else:
        yield (
            pattern < 1,
            f"{flags.moe_layer_freq} is invalid; use a number of at least 1, or a list of 0 and 1",
        )
    kinds = core.moe_router_load_balancing_type
    weights = core.moe_aux_loss_coeff
    yield (
        len(kinds) != len(weights),
        f"{flags.moe_router_load_balancing_type} and {flags.moe_aux_loss_coeff} must have the "
        "same number of entries; use one coefficient for each type",
    )
    for name in ("moe_permute_fusion", "moe_router_fusion"):
        yield (
            getattr(core, name) and not installed.transformer_engine,
            f"--{name.replace('_', '-')} requires Transformer Engine, which is not installed; "
            "install it, or remove the flag",
        )
    yield (
        core.moe_token_dispatcher_type == "flex" and not installed.flexible_dispatch,
        f"{flags.moe_token_dispatcher_type} requires GPUs and DeepEP, which is not installed; "
        "install it, or use alltoall",
    )


def _expert_ranks(config: TrainerConfig, flags: GivenFlags) -> Rules:
    """Yields the rules for the number of ranks over which experts are distributed."""
    parallel = config.parallel
    spread = parallel.expert_model_parallel_size
    tensor = parallel.expert_tensor_parallel_size
    if config.core.num_moe_experts is None:
        return
    tensor = tensor or parallel.tensor_model_parallel_size
    sizes = {"expert tensor": tensor, "expert": spread}
    sizes["pipeline"] = parallel.pipeline_model_parallel_size
    _require_whole(config.world_size, sizes, "--expert-model-parallel-size")
    yield (
        spread == 1 and tensor != parallel.tensor_model_parallel_size,
        f"{flags.expert_tensor_parallel_size} cannot be combined with "
        f"{flags.tensor_model_parallel_size} and {flags.expert_model_parallel_size}, because "
        "megatron-core would add up the experts' gradients over the wrong ranks; make the first "
        "two equal or raise --expert-model-parallel-size",
    )


def _batch(config: TrainerConfig, flags: GivenFlags) -> Rules:
    batch = config.batch
    replicas = config.parallel.data_parallel_size
    unit = batch.micro_batch_size * replicas
    multiple = f"{flags.micro_batch_size} x data parallel size {replicas} = {unit}"
    yield (
        batch.global_batch_size % unit != 0,
        f"{flags.global_batch_size} is not a multiple of {multiple}; change one of them",
    )
    if batch.rampup_batch_size is None:
        return
    start, increment, _ = batch.rampup_batch_size
    distance = batch.global_batch_size - start
    yield (
        distance <= 0,
        f"{flags.rampup_batch_size} starts at {start}, which is not below "
        f"{flags.global_batch_size}; start lower or remove the flag",
    )
    yield (
        distance % increment != 0,
        f"{flags.rampup_batch_size} never reaches {flags.global_batch_size}; the increment "
        f"{increment} must divide the difference, {distance}",
    )
    yield (
        start % unit != 0 or increment % unit != 0,
        f"{flags.rampup_batch_size} has batch sizes that are not a multiple of {multiple}; make "
        "start and increment multiples of it",
    )


def _lengths(config: TrainerConfig, flags: GivenFlags) -> Rules:
    """Yields the rules for the batch size if documents are packed."""
    parallel = config.parallel
    if not config.packs_documents:
        return
    packing = flags.slice_tokens if config.data.pack_to is None else flags.pack_to
    unit = parallel.data_parallel_size * config.microbatch_group
    yield (
        any(size % unit for size in config.batch.batch_sizes()),
        f"{flags.global_batch_size} with {packing} and {flags.pipeline_schedule} must be a "
        f"multiple of {unit}, so that the microbatches of each replica fill groups of "
        f"{config.microbatch_group}; change the batch size or the schedule",
    )


def _microbatch_groups(config: TrainerConfig, flags: GivenFlags) -> Rules:
    """Yields the rules for groups of microbatches in interleaved schedules."""
    parallel = config.parallel
    if not schedule_spec(config.schedule.pipeline_schedule).takes_group_size:
        return
    if parallel.num_chunks == 1:
        return
    pipeline = parallel.pipeline_model_parallel_size
    group = parallel.microbatch_group_size_per_vp_stage or pipeline
    yield (
        group < pipeline,
        f"{flags.microbatch_group_size_per_vp_stage} is below the pipeline size {pipeline}; use "
        f"at least {pipeline}, or remove the flag",
    )
    per_step = config.batch.micro_batch_size * parallel.data_parallel_size
    for size in config.batch.batch_sizes():
        count = size // per_step
        yield (
            count < group or 0 < count % group < pipeline,
            f"{flags.pipeline_schedule} cannot run {count} microbatches (global batch {size}), "
            f"because microbatches must fill groups of {group}, and the last group must have at "
            f"least {pipeline}; choose a global batch size that is a multiple of "
            f"{group * per_step}, or the schedule adaptive",
        )


def _learning_rate(config: TrainerConfig, flags: GivenFlags) -> Rules:
    """Yields the rules for the lengths of warmup and decay of the learning rate."""
    optimizer = config.optimizer
    run = config.run
    unit = "iters"
    length = optimizer.lr_decay_iters or run.train_iters or 0
    warmup = optimizer.lr_warmup_iters
    last_part = optimizer.lr_wsd_decay_iters
    if run.train_iters is None:
        unit = "samples"
        length = optimizer.lr_decay_samples or run.train_samples or 0
        warmup = optimizer.lr_warmup_samples
        last_part = optimizer.lr_wsd_decay_samples
    yield (
        warmup >= length,
        f"--lr-warmup-{unit} {warmup} must be less than the length of the decay, {length} "
        f"{unit}; lower it, or raise --lr-decay-{unit}",
    )
    yield (
        optimizer.lr_decay_style == "WSD" and (last_part or 0) > length,
        f"--lr-wsd-decay-{unit} {last_part} is longer than the decay of {length} {unit}; lower it",
    )


def _adapters(config: TrainerConfig, flags: GivenFlags) -> Rules:
    if not config.lora.is_on:
        return
    short = ",".join(
        name.rpartition(".")[2]
        for core, parts in linear_names(config).items()
        for name in parts * core.startswith("self_attention.")
    )
    yield (
        "mlp" in " ".join(adapted_parts(config)) and config.core.num_moe_experts is not None,
        f"{flags.lora_targets} cannot be used with {flags.num_moe_experts}, because experts "
        f"cannot have adapters; choose linear layers of attention ({short})",
    )


def _data(config: TrainerConfig, flags: GivenFlags, needs_data: bool) -> Rules:
    data = config.data
    yield (
        needs_data and not (data.data_path or data.mock_data or data.has_path_per_split),
        "there is no training data; add --data-path with a prefix of .bin and .idx files, or "
        "--mock-data",
    )
    yield (
        data.split is not None and not _is_split(data.split),
        "--split must be one to three non-negative shares with a positive sum, got "
        f"{data.split!r}; use shares of training, validation and test such as 949,50,1",
    )
    hint = "" if data.missing == ["--vocab-size"] else ", or use NullTokenizer with --vocab-size"
    needed = " and ".join(data.missing)
    yield (
        needs_data and data.missing,
        f"{flags.tokenizer_type} requires {needed}; add {needed}{hint}",
    )


def _is_split(text: str) -> bool:
    """Returns whether ``text`` is a valid split: one to three weights whose sum is positive."""
    try:
        shares = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        return False
    return 1 <= len(shares) <= _MAX_SPLITS and min(shares) >= 0 and 0 < sum(shares) < float("inf")


def check_output_folders(config: TrainerConfig) -> None:
    """Checks that every output folder of the run exists or can be created, and is writable.

    Files that the check creates are removed again.

    Raises:
        ConfigError: A folder cannot be created or is not writable, or the URL of a collector is
            invalid.
    """
    if (target := config.schedule.trace_otlp) is not None:
        collector_url("--trace-otlp", target)
    record = config.schedule.record_schedule
    for flag, folder in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--wandb-save-dir", config.logging.wandb_save_dir),
        ("--trace-dir", config.schedule.trace_dir),
        ("--data-cache-path", config.data.data_cache_path),
        ("--record-schedule", record and Path(record).absolute().parent),
    ):
        if folder is not None:
            _require_writable(flag, Path(folder))


def _require_writable(flag: str, folder: Path) -> None:
    """Checks that files can be created in ``folder``, or in its nearest existing parent."""
    try:
        nearest = folder.absolute()
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise NotADirectoryError(0, f"{nearest} is a file")
        with tempfile.TemporaryDirectory(prefix=".write-check-", dir=nearest):
            pass
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or str(error)
        raise ConfigError(
            f"cannot write to {flag} {folder} ({reason}); choose a folder that this user can "
            "write to"
        ) from None
