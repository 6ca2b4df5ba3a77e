"""Rules between settings: each a condition that breaks it, and the message.

Every message names the values, the rule and the remedy. Rules of a single value (ranges, choices)
are on the fields, pairs of flags that exclude each other in ``arguments.py``, rules of the model in
``check_model.py``. Nothing here changes a setting. :func:`check_output_folders` alone touches the
disk; it leaves nothing behind.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.adaptive.config.adapters import adapted_parts, linear_names
from megatron.adaptive.config.check_model import Given, Rules, model_rules
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.layers import layer_rules
from megatron.adaptive.config.optimizer import LoraConfig
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
)
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

_MAX_SPLITS = 3
_MIN_PIPELINE_WITHOUT_OVERLAP = 3


def check_config(config: TrainerConfig, installed: Installed) -> None:
    """Hold a configuration against every rule.

    Raises:
        ConfigError: the first rule that is broken.
    """
    given = Given(config)
    for rules in (
        _unequal_widths(config, given),
        model_rules(config, given, installed),
        _parallel(config, given),
        layer_rules(config, given),
        _batch(config, given),
        _lengths(config, given),
        _balance(config, given),
        _chunks_and_placement(config, given),
        _order(config, given),
        _microbatch_groups(config, given),
        _optimizer_state(config),
        _precision(config, given),
        _learning_rate(config, given),
        _recompute(config),
        _adapters(config, given),
        _data(config, given),
        _run(config, given),
    ):
        for broken, message in rules:
            if broken:
                raise ConfigError(message)


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
    if widths is None:
        size = tensor * pipeline * context
        if world_size < 1 or world_size % size != 0:
            raise ConfigError(
                f"world size {world_size} is not a multiple of tensor {tensor} x pipeline "
                f"{pipeline} x context {context} = {size}: start a multiple of {size} processes "
                "or change the parallel sizes"
            )
        return
    given = f"--stage-data-parallel-sizes {format_partition(widths)}"
    if len(widths) != pipeline:
        raise ConfigError(
            f"{given} gives the ranks of {len(widths)} stages, --pipeline-model-parallel-size is "
            f"{pipeline}: give one number for each stage"
        )
    needed = sum(widths) * tensor * context
    if needed != world_size:
        raise ConfigError(
            f"{given} needs {needed} processes, this run has {world_size}: start as many or "
            "change the sizes"
        )


def _unequal_widths(config: TrainerConfig, given: Given) -> Rules:
    """Refuses what stages of unequal widths cannot do."""
    parallel, schedule = config.parallel, config.schedule
    if parallel.unequal_sizes is None:
        return
    for what, is_given in (
        (given.tensor_model_parallel_size, parallel.tensor_model_parallel_size > 1),
        (given.context_parallel_size, parallel.context_parallel_size > 1),
        (f"--model-chunks {parallel.num_chunks}", parallel.num_chunks > 1),
        (given.use_distributed_optimizer, parallel.use_distributed_optimizer),
        (given.mtp_num_layers, config.model.mtp_num_layers is not None),
        (given.ddp_average_in_collective, parallel.ddp_average_in_collective),
        (given.repartition, schedule.repartition != "off"),
        (given.trace_dir, schedule.trace_dir is not None),
        (given.calculate_per_token_loss, config.core.calculate_per_token_loss),
        (given.record_schedule, schedule.record_schedule is not None),
        (given.replay_schedule, schedule.replay_schedule is not None),
    ):
        yield (
            is_given,
            f"{given.stage_data_parallel_sizes} with {what}: stages of unequal sizes do without "
            "it; drop it, or use the same number of ranks for each stage",
        )
    yield (
        schedule.pipeline_schedule not in UNEQUAL_SCHEDULES,
        f"{given.stage_data_parallel_sizes} with {given.pipeline_schedule}, which is made for "
        f"stages of equal sizes: use one of {', '.join(UNEQUAL_SCHEDULES)}",
    )


def _parallel(config: TrainerConfig, given: Given) -> Rules:
    model = config.model
    tensor = config.parallel.tensor_model_parallel_size
    context = config.parallel.context_parallel_size
    yield (
        model.num_attention_heads % tensor != 0,
        f"{given.num_attention_heads} is not a multiple of {given.tensor_model_parallel_size}: "
        "every rank takes whole heads; change one",
    )
    yield (
        model.query_groups % tensor != 0 and tensor % model.query_groups != 0,
        f"--num-query-groups {model.query_groups} is neither a multiple nor a divisor of "
        f"{given.tensor_model_parallel_size}: change one of them",
    )
    yield (
        model.ffn_hidden_size % tensor != 0,
        f"{given.ffn_hidden_size} is not a multiple of {given.tensor_model_parallel_size}: every "
        "rank takes an equal share; change one",
    )
    if config.parallel.sequence_parallel:
        yield (
            tensor == 1,
            "--sequence-parallel with --tensor-model-parallel-size 1 splits nothing: it needs a "
            "tensor parallel size above 1; raise it or drop the flag",
        )
        yield (
            model.seq_length % (tensor * context) != 0,
            f"{given.seq_length} is not a multiple of {tensor * context}, the ranks that "
            "--sequence-parallel splits it over: change one of them",
        )
    if context > 1:
        yield (
            config.core.window_size is not None
            and (model.transformer_impl == "local" or model.attention_softcap is not None),
            f"{given.window_size} with {given.context_parallel_size}: local layers attend to all "
            "tokens before each; use --transformer-impl transformer_engine, or drop one of them",
        )
        yield (
            model.seq_length % (2 * context) != 0,
            f"{given.seq_length} is not a multiple of 2 x {given.context_parallel_size} = "
            f"{2 * context}: change one of them",
        )


def _batch(config: TrainerConfig, given: Given) -> Rules:
    batch = config.batch
    replicas = config.parallel.data_parallel_size
    unit = batch.micro_batch_size * replicas
    multiple = f"{given.micro_batch_size} x data parallel size {replicas} = {unit}"
    yield (
        batch.global_batch_size % unit != 0,
        f"{given.global_batch_size} is not a multiple of {multiple}: change one of them",
    )
    if batch.rampup_batch_size is None:
        return
    start, increment, _ = batch.rampup_batch_size
    distance = batch.global_batch_size - start
    yield (
        distance <= 0,
        f"{given.rampup_batch_size} starts at {start}, not below {given.global_batch_size}: start "
        "lower or drop the flag",
    )
    yield (
        distance % increment != 0,
        f"{given.rampup_batch_size} never reaches {given.global_batch_size}: the increment "
        f"{increment} must divide the distance {distance}",
    )
    yield (
        start % unit != 0 or increment % unit != 0,
        f"{given.rampup_batch_size} passes through batches that are not a multiple of {multiple}: "
        "make start and increment multiples of it",
    )


def _lengths(config: TrainerConfig, given: Given) -> Rules:
    """Samples of different lengths."""
    data, parallel, pack = config.data, config.parallel, config.data.pack_to
    if not data.variable_seq_lengths:
        for what, is_given in ((given.pack_to, pack is not None), ("--sft", data.sft)):
            yield (is_given, f"{what} has no effect by itself: add --variable-seq-lengths")
        return
    for what, is_given in (
        (given.stage_data_parallel_sizes, parallel.unequal_sizes is not None),
        (given.ddp_average_in_collective, parallel.ddp_average_in_collective),
        ("--reset-position-ids", data.reset_position_ids),
        ("--reset-attention-mask", data.reset_attention_mask),
        ("--eod-mask-loss", data.eod_mask_loss),
    ):
        yield (
            is_given,
            f"{what} with --variable-seq-lengths, whose documents are never glued and whose loss "
            "is per token: drop one of them",
        )
    yield (
        data.sft and data.mock_data,
        "--sft with --mock-data: conversations come from files; drop one of them",
    )
    if pack is None:
        return
    schedule = config.schedule.pipeline_schedule
    for what, is_given in (
        (given.micro_batch_size, config.batch.micro_batch_size > 1),
        (given.context_parallel_size, parallel.context_parallel_size > 1),
        (f"--pipeline-schedule {schedule}", schedule == "file"),
        ("--multi-latent-attention", config.core.multi_latent_attention),
    ):
        yield (
            is_given,
            f"{what} with {given.pack_to}: a microbatch is one row of whole documents on one rank, "
            "with plain attention, and their number differs from step to step; drop one of them",
        )
    yield (
        pack < config.model.seq_length,
        f"{given.pack_to} is below {given.seq_length}, the longest document: raise it",
    )
    unit = parallel.data_parallel_size * config.microbatch_group
    yield (
        any(size % unit for size in config.batch.batch_sizes()),
        f"{given.global_batch_size} with {given.pack_to} and {given.pipeline_schedule}: it must be "
        f"a multiple of {unit}, so that the microbatches of each replica fill groups of "
        f"{config.microbatch_group}; change it or the schedule",
    )


def _balance(config: TrainerConfig, given: Given) -> Rules:
    """Microbatches that are dealt to replicas."""
    how = config.schedule.balance_replicas
    for what in () if how in (None, "off") else config.fixes_replicas:
        yield (
            True,
            f"{given.balance_replicas} with {what}, under which every replica has the same number "
            "of microbatches: drop one of them",
        )
    yield (
        how == "lengths" and not config.data.variable_seq_lengths,
        f"{given.balance_replicas} has no effect by itself: add --variable-seq-lengths, or use "
        "speed",
    )


def _chunks_and_placement(config: TrainerConfig, given: Given) -> Rules:
    schedule = config.schedule.pipeline_schedule
    pipeline, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.num_chunks
    order = given.pipeline_schedule
    yield (
        chunks > 1 and pipeline == 1,
        f"--model-chunks {chunks} with pipeline size 1: megatron-core splits a model into chunks "
        "only over at least 2 pipeline ranks; raise --pipeline-model-parallel-size or drop "
        "--model-chunks",
    )
    yield (
        schedule in SEVERAL_CHUNKS and (chunks == 1 or pipeline == 1),
        f"{order} with {chunks} chunks and pipeline size {pipeline}: it needs two of each at "
        "least; raise --model-chunks and --pipeline-model-parallel-size or use 1f1b",
    )
    yield (
        schedule in ONE_CHUNK and chunks > 1,
        f"{order} with {chunks} chunks: it knows one chunk for each rank; use interleaved or "
        "adaptive, or drop --model-chunks",
    )
    yield (
        schedule in TWO_CHUNKS and chunks != 2,
        f"{order} with {chunks} chunk{'s' * (chunks > 1)}: it needs two for each rank; set "
        "--model-chunks 2",
    )
    batched = schedule == "megatron" and chunks > 1 and not config.parallel.overlap_p2p_comm
    yield (
        batched and pipeline < _MIN_PIPELINE_WITHOUT_OVERLAP,
        f"{order} with {chunks} chunks, pipeline size {pipeline} and "
        "--no-overlap-p2p-communication: two messages between the same ranks would mix; drop the "
        "last flag or use a pipeline size of 3 at least",
    )
    in_a_v = config.placement_kind == "v"
    yield (
        schedule in V_ONLY and not in_a_v,
        f"--pipeline-placement loop with {order}, which runs stages there and back: drop "
        "--pipeline-placement",
    )
    yield (
        in_a_v and schedule not in V_SCHEDULES,
        f"--pipeline-placement v with {order}, which runs stages in a loop: use one of "
        f"{', '.join(V_SCHEDULES)}, or --pipeline-placement loop",
    )
    yield (
        in_a_v and chunks == 1,
        "--pipeline-placement v with 1 chunk: the way back of a V needs a second one on each "
        "rank; add --model-chunks 2 or use --pipeline-placement loop",
    )


def _order(config: TrainerConfig, given: Given) -> Rules:
    """Settings of the order of work, of its files and messages."""
    settings = config.schedule
    schedule, order = settings.pipeline_schedule, given.pipeline_schedule
    split = settings.split_backward
    yield (
        not settings.is_rule and settings.activation_cap is not None,
        f"{given.activation_cap} has no effect with {order}, whose order fixes what is kept: drop "
        f"it or use one of {', '.join(RULES)}",
    )
    yield (
        split is False and schedule in SPLIT_SCHEDULES,
        f"--split-backward False with {order}, whose order has weight gradients as work of their "
        "own: drop it or choose another schedule",
    )
    yield (
        split and not settings.is_rule and schedule not in (*SPLIT_SCHEDULES, "file"),
        f"--split-backward True with {order}, whose order has whole backwards: use one of "
        f"{', '.join((*RULES, *SPLIT_SCHEDULES))}, or drop it",
    )
    yield (
        (schedule == "file") != (settings.schedule_file is not None),
        f"{order} with {given.schedule_file}: the two go together; give both or neither",
    )
    for what, path in (
        (given.record_schedule, settings.record_schedule),
        (given.replay_schedule, settings.replay_schedule),
    ):
        yield (
            path is not None and schedule == "megatron",
            f"{what} with {order}, whose order megatron-core keeps to itself: use a schedule of "
            "this project",
        )
        yield (
            path is not None and schedule == "auto",
            f"{what} with {order}, which changes the order's shape after a few steps: name the "
            "schedule that it chose",
        )
    moves = settings.repartition != "off"
    yield (
        moves and config.parallel.pipeline_model_parallel_size == 1,
        "--repartition auto with pipeline size 1: there is no other stage to give layers to; "
        "raise --pipeline-model-parallel-size or drop the flag",
    )
    yield (
        moves and schedule in ("file", "megatron"),
        f"--repartition auto with {order}, which cannot be simulated under another partition: use "
        "adaptive or another schedule of this project",
    )
    transport = config.transport
    yield (
        transport.forced is not None and schedule == "megatron",
        f"{given.transport} with {order}, whose messages are megatron-core's own: drop it or use "
        "a schedule of this project",
    )
    for what, value in (
        (given.rdma_device, transport.rdma_device),
        (given.rdma_gid_index, transport.rdma_gid_index),
        (given.rdma_mtu_bytes, transport.rdma_mtu_bytes),
    ):
        yield (
            transport.forced not in (None, "rdma") and value is not None,
            f"{what} has no effect with {given.transport}: drop it or use --transport rdma",
        )
    yield (
        schedule == "varuna" and config.recompute.recompute_granularity != "full",
        f"{order} keeps the inputs of many microbatches and repeats their forwards: add "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    )


def _microbatch_groups(config: TrainerConfig, given: Given) -> Rules:
    """The interleaved order runs microbatches in groups, none smaller than the pipeline."""
    schedule, parallel = config.schedule.pipeline_schedule, config.parallel
    if schedule != "interleaved" and not (schedule == "megatron" and parallel.num_chunks > 1):
        return
    pipeline = parallel.pipeline_model_parallel_size
    group = parallel.microbatch_group_size_per_vp_stage or pipeline
    yield (
        group < pipeline,
        f"{given.microbatch_group_size_per_vp_stage} is below the pipeline size {pipeline}: give "
        f"{pipeline} at least or drop the flag",
    )
    per_step = config.batch.micro_batch_size * parallel.data_parallel_size
    for size in config.batch.batch_sizes():
        count = size // per_step
        yield (
            count < group or 0 < count % group < pipeline,
            f"{given.pipeline_schedule} with {count} microbatches (global batch {size}): they "
            f"must fill groups of {group}, the last of {pipeline} at least; choose a global batch "
            f"that is a multiple of {group * per_step}, or adaptive",
        )


def _optimizer_state(config: TrainerConfig) -> Rules:
    parallel = config.parallel
    yield (
        parallel.use_distributed_optimizer and config.optimizer.optimizer == "sgd",
        "--use-distributed-optimizer with --optimizer sgd: megatron-core splits only the state of "
        "adam; drop one of them",
    )
    for flag, is_given in (
        ("--use-distributed-optimizer", parallel.use_distributed_optimizer),
        ("--overlap-grad-reduce", parallel.overlap_grad_reduce),
    ):
        yield (
            parallel.overlap_param_gather and not is_given,
            f"--overlap-param-gather works only with {flag}: add it as well",
        )


def _precision(config: TrainerConfig, given: Given) -> Rules:
    own = config.precision
    half = own.fp16 or own.bf16
    for flag, is_given, needed, fulfilled in (
        (given.fp16_lm_cross_entropy, own.fp16_lm_cross_entropy, "--fp16", own.fp16),
        (given.grad_reduce_in_bf16, own.grad_reduce_in_bf16, "--bf16", own.bf16),
        (given.fp32_residual_connection, own.fp32_residual_connection, "--fp16 or --bf16", half),
        (given.loss_scale, own.loss_scale is not None, "--fp16", own.fp16),
    ):
        yield (
            is_given and not fulfilled,
            f"{flag} works only with {needed}: add it or drop the flag",
        )
    yield (
        own.min_loss_scale > own.initial_loss_scale,
        f"{given.min_loss_scale} is above {given.initial_loss_scale}: lower it or raise the other",
    )


def _learning_rate(config: TrainerConfig, given: Given) -> Rules:
    """Learning rate and weight decay."""
    own, run = config.optimizer, config.run
    for what, value in ((given.min_lr, own.min_lr), (given.lr_warmup_init, own.lr_warmup_init)):
        yield (
            value > own.lr,
            f"{what} is above {given.lr}: the rate never leaves this range; lower it",
        )
    yield (
        own.decoupled_min_lr is not None and own.decoupled_lr is None,
        "--decoupled-min-lr has no effect by itself: add --decoupled-lr",
    )
    yield (
        (own.decoupled_min_lr or 0) > (own.decoupled_lr or 0),
        f"{given.decoupled_min_lr} is above {given.decoupled_lr}: lower it",
    )
    unit, length = "iters", own.lr_decay_iters or run.train_iters or 0
    warmup, last_part = own.lr_warmup_iters, own.lr_wsd_decay_iters
    if run.train_iters is None:
        unit, length = "samples", own.lr_decay_samples or run.train_samples or 0
        warmup, last_part = own.lr_warmup_samples, own.lr_wsd_decay_samples
    yield (
        warmup >= length,
        f"--lr-warmup-{unit} {warmup} does not end before the decay of {length} {unit} does: "
        f"lower it or raise --lr-decay-{unit}",
    )
    if own.lr_decay_style == "WSD":
        yield (
            last_part is None,
            f"--lr-decay-style WSD needs the length of its last part: add --lr-wsd-decay-{unit}",
        )
        yield (
            (last_part or 0) > length,
            f"--lr-wsd-decay-{unit} {last_part} is longer than the decay of {length} {unit}: "
            "lower it",
        )
    start, end = own.start_weight_decay, own.end_weight_decay
    constant = own.weight_decay_incr_style == "constant"
    yield (
        constant and (start is not None or end is not None),
        "--start-weight-decay and --end-weight-decay have no effect with "
        f"{given.weight_decay_incr_style}: use --weight-decay, or linear or cosine",
    )
    yield (
        not constant and (start is None or end is None),
        f"{given.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay: add "
        "both",
    )
    yield (
        (start or 0) > (end or 0),
        f"{given.start_weight_decay} is above {given.end_weight_decay}: the weight decay can only "
        "grow; swap them",
    )


def _recompute(config: TrainerConfig) -> Rules:
    own = config.recompute
    granularity, full = own.recompute_granularity, own.recompute_granularity == "full"
    parts = (own.recompute_method, own.recompute_num_layers)
    yield (
        own.recompute_activations and granularity != "selective",
        f"--recompute-activations contradicts --recompute-granularity {granularity}: it means "
        "selective; keep one of them",
    )
    yield (
        full and None in parts,
        "--recompute-granularity full needs to know which layers: add --recompute-method and "
        "--recompute-num-layers, for example uniform and 1",
    )
    yield (
        full and own.recompute_modules is not None,
        "--recompute-modules has no effect with --recompute-granularity full: use selective or "
        "drop the modules",
    )
    yield (
        not full and parts != (None, None),
        "--recompute-method and --recompute-num-layers have no effect with "
        f"--recompute-granularity {granularity or 'none'}: use full or drop them",
    )
    yield (
        granularity is None and own.recompute_modules is not None,
        "--recompute-modules has no effect by itself: add --recompute-granularity selective",
    )
    if own.distribute_saved_activations:
        flag = "--distribute-saved-activations"
        yield (
            not full,
            f"{flag} works only with --recompute-granularity full: add it or drop the flag",
        )
        yield (
            config.parallel.tensor_model_parallel_size == 1,
            f"{flag} with --tensor-model-parallel-size 1 splits nothing: raise it or drop the flag",
        )
        yield (
            config.parallel.sequence_parallel,
            f"{flag} does not work with --sequence-parallel, which splits them already: drop it",
        )


def _adapters(config: TrainerConfig, given: Given) -> Rules:
    own, core = config.lora, config.core
    if not own.is_on:
        yield (
            own != LoraConfig(),
            "--lora-rank is missing, which other flags of adapters need: add it",
        )
        return
    for what, is_given in (
        ("--heterogeneous-layers-config-path", core.heterogeneous_layers_config_encoded_json),
        ("--overlap-moe-expert-parallel-comm", config.schedule.overlap_moe_expert_parallel_comm),
    ):
        yield is_given, f"{given.lora_rank} with {what}: such layers have no adapters; drop one"
    short = ",".join(
        name.rpartition(".")[2]
        for ours, theirs in linear_names(config).items()
        for name in theirs * ours.startswith("self_attention.")
    )
    yield (
        "mlp" in " ".join(adapted_parts(config)) and core.num_moe_experts is not None,
        f"{given.lora_targets} with {given.num_moe_experts}: experts have no adapters here; name "
        f"linear layers of attention: {short}",
    )


def _data(config: TrainerConfig, given: Given) -> Rules:
    data = config.data
    yield (
        not (data.data_path or data.mock_data or data.has_path_per_split),
        "no data is given: add --data-path with a prefix of .bin and .idx files, or --mock-data",
    )
    yield (
        data.has_path_per_split and not data.train_data_path and not config.run.skip_train,
        "--valid-data-path and --test-data-path leave nothing to train on: add --train-data-path",
    )
    apart = {
        "--context-parallel-size": config.parallel.context_parallel_size > 1,
        "--mtp-num-layers": config.model.mtp_num_layers is not None,
        "--variable-seq-lengths": data.variable_seq_lengths,
    }
    yield (
        config.run.sample_prompt is not None and any(apart.values()),
        "--sample-prompt runs one plain text and does not work with "
        f"{', '.join(name for name in apart if apart[name])}: drop one of them",
    )
    yield (
        data.reset_attention_mask and not data.create_attention_mask_in_dataloader,
        "--reset-attention-mask and --no-create-attention-mask-in-dataloader exclude each other: "
        "a mask that ends at documents comes with the data; keep one of them",
    )
    yield (
        data.split is not None and not _is_split(data.split),
        f"--split {data.split!r} is not a list of one to three shares of at least 0 and a sum "
        "above 0: write training, validation and test as in 949,50,1",
    )
    hint = "" if data.missing == ["--vocab-size"] else ", or use NullTokenizer with --vocab-size"
    needed = " and ".join(data.missing)
    yield (
        data.missing,
        f"{given.tokenizer_type} needs {needed}, which is not given: add {needed}{hint}",
    )


def _is_split(text: str) -> bool:
    """Returns whether a text is one to three shares that are not all 0."""
    try:
        shares = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        return False
    return 1 <= len(shares) <= _MAX_SPLITS and min(shares) >= 0 and 0 < sum(shares) < float("inf")


def _run(config: TrainerConfig, given: Given) -> Rules:
    run, checkpoint = config.run, config.checkpoint
    yield (
        checkpoint.save is not None and checkpoint.save_interval is None,
        f"{given.save} does not say how often: add --save-interval",
    )
    yield (
        checkpoint.save_local is not None and checkpoint.save is None,
        f"{given.save_local} is where checkpoints are on their way to --save, which is missing: "
        "add --save DIR on storage that all nodes share",
    )
    yield (
        run.train_samples is not None and run.train_samples < config.batch.global_batch_size,
        f"{given.train_samples} is less than one batch of {config.batch.global_batch_size}: raise "
        "it",
    )
    yield (
        run.profile_step_end <= run.profile_step_start,
        f"{given.profile_step_end} is not after {given.profile_step_start}: raise it",
    )
    highest = max(run.profile_ranks)
    yield (
        highest >= config.world_size,
        f"--profile-ranks {highest} does not exist among {config.world_size} ranks: give ranks "
        f"from 0 to {config.world_size - 1}",
    )


def check_output_folders(config: TrainerConfig) -> None:
    """Every folder the run writes to can be made or written; nothing is left behind.

    Raises:
        ConfigError: one cannot.
    """
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
    """Try to make a file in the nearest part of the path that exists."""
    try:
        nearest = folder.absolute()
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise NotADirectoryError(0, f"{nearest} is a file")
        with tempfile.TemporaryDirectory(prefix=".write-check-", dir=nearest):
            pass
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else str(error)) or str(error)
        raise ConfigError(
            f"{flag} {folder} cannot be written ({why}): name a folder that this user may write"
        ) from None
