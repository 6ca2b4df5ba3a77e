"""Builds all parts of a training run: model, optimizer, data, executor and trace.

All ranks build the parts in the same order, because many of them need collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.datasets import build_datasets
from megatron.adaptive.data.lengths import left_out
from megatron.adaptive.data.loader import BatchSizes, MicrobatchLoader, OnRead
from megatron.adaptive.data.tokenizer import Tokenizer
from megatron.adaptive.engine.collective_meter import CollectiveMeter, model_parallel_groups
from megatron.adaptive.engine.deferred_layers import attach_stores
from megatron.adaptive.engine.executor_setup import Wiring, build_executor, open_trace
from megatron.adaptive.engine.expert_load import measured_experts
from megatron.adaptive.engine.kernel_recorder import KernelRecorder
from megatron.adaptive.engine.layer_meter import LayerMeter
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.engine.schedule_record import Recording, RecordShape, Replay, ScheduleRecord
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.engine.tracing import OutsideTrace, Tracing
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.gpt.build_model import (
    build_chunks,
    build_optimizer,
    build_scheduler,
    load_tokenizer,
    stage_work,
    transformer_config,
)
from megatron.adaptive.gpt.initialize import TrainingJob
from megatron.adaptive.gpt.model_placement import finalize_gradients, placement_of, widths_of
from megatron.adaptive.gpt.sequence_slices import SequenceSlices
from megatron.adaptive.planner.model_file import trainer_shape
from megatron.adaptive.planner.transformer_layers import build_model
from megatron.adaptive.profiling.free_memory import total_host_bytes
from megatron.adaptive.schedule.document_rows import batching_of, most_slices
from megatron.adaptive.schedule.stage_placement import Placement

_SHORT = 0.5
"""Assumed ratio of the shortest to the mean microbatch length, used to choose buffer sizes."""


def _orders(job: TrainingJob, placement: Placement) -> Orders:
    """Creates the object that chooses the order of a rank's actions. All ranks must call this."""
    config = job.config
    settings = job.config.schedule
    orders = Orders(
        schedule=settings.pipeline_schedule,
        placement=placement,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cap=settings.activation_cap,
        splits=config.splits_backward,
        pieces=settings.weight_pieces,
        schedule_file=settings.schedule_file,
        group_size=config.parallel.microbatch_group_size_per_vp_stage,
        widths=widths_of(config),
        beside=settings.overlap_moe_expert_parallel_comm,
        auto_candidates=settings.auto_candidates or (),
        slice_shares=_slice_shares(config),
    )
    if (path := settings.replay_schedule) is not None:
        record = job.on_first(lambda: ScheduleRecord.load(path))
        orders.replay = Replay(record, _record_shape(config, orders), _record_index(config))
    return orders


def _slice_shares(config: TrainerConfig) -> list[float]:
    """Returns the length of each slice as a fraction of the sequence length.

    If microbatches are cut in different ways, the result assumes the largest possible number of
    slices and equal lengths.
    """
    if (rule := config.slice_rule) is not None:
        most = config.num_slices
        if rule.tokens is not None:
            most = most_slices(-(-config.model.seq_length // rule.tokens))
        return [1 / most] * most
    ends = config.slice_ends
    return [(end - start) / ends[-1] for start, end in pairwise((0, *ends))]


def _record_shape(config: TrainerConfig, orders: Orders) -> RecordShape:
    replicas = 0 if config.balance == "off" else config.parallel.data_parallel_size
    slices = config.constant_slices
    return RecordShape.of(orders.placement, orders.weight_pieces, replicas, slices)


def _record_index(config: TrainerConfig) -> int:
    """Returns the index of this rank's list of actions in a recorded step."""
    pp_rank: int = parallel_state.get_pipeline_model_parallel_rank()
    if config.balance == "off":
        return pp_rank  # Without balancing, only one replica is recorded.
    ranks = config.parallel.pipeline_model_parallel_size
    return int(parallel_state.get_data_parallel_rank()) * ranks + pp_rank


def make_recording(run: Run, after_step: int) -> Recording | None:
    """Creates the object that records the actions of all steps, for ``--record-schedule``.

    Args:
        run: Run whose model has been built.
        after_step: Number of steps that the job completed before it was restarted; 0 at the first
            start.

    Returns:
        Object that records actions, or ``None`` without ``--record-schedule``.
    """
    job = run.job
    path = job.config.schedule.record_schedule
    if path is None:
        return None
    assert isinstance(run.forward_backward, ForwardBackward)  # The flag parser has checked this.
    recorded = (
        (job.config.balance != "off" or parallel_state.get_data_parallel_rank() == 0)
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    return Recording(
        path,
        _record_shape(job.config, run.forward_backward.orders),
        order_index=_record_index(job.config) if recorded else None,
        is_writer=job.is_first,
        after_step=after_step,
    )


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Contains the datasets of a run, and how many samples to read from them.

    Attributes:
        iterations: Number of iterations in the whole training run.
        train_samples: Number of training samples in all iterations.
        valid_samples: Number of validation samples in all evaluations.
        train: Dataset for training, or ``None`` on a rank that does not need data.
        valid: Dataset for validation, or ``None`` on a rank that does not need data.
        test: Dataset for the evaluation after training, or ``None`` on a rank that does not need
            data.
    """

    iterations: int
    train_samples: int
    valid_samples: int
    train: Any
    valid: Any
    test: Any


@dataclass(frozen=True, kw_only=True)
class Run:
    """Contains all parts of a training run, which is ready for its first step.

    Attributes:
        job: Settings of the run, and the rank and process groups of this process.
        placement: Assignment of stages to pipeline ranks.
        chunks: Models of this rank's stages, each in megatron-core's data-parallel wrapper.
        core: megatron-core's configuration of the model, shared by the chunks.
        optimizer: megatron-core's optimizer.
        scheduler: megatron-core's scheduler for the learning rate and the weight decay.
        samples: Datasets, and how many samples to read from them.
        forward_backward: Function that runs the forward and backward passes of a step, with this
            program's executor or with megatron-core's schedule.
        wiring: Executor and its channels to other ranks, or ``None`` with megatron-core's schedule.
        tracing: Object that records the trace of the run.
        replay: Recording whose actions are replayed, or ``None`` without a recording.
        slices: Object that cuts sequences into slices, or ``None`` if sequences are not cut.
        padded_vocab_size: Number of rows of the embedding, including padding rows.
    """

    job: TrainingJob
    placement: Placement
    chunks: list[torch.nn.Module]
    core: TransformerConfig
    optimizer: Any
    scheduler: Any
    samples: Samples
    forward_backward: Callable[..., list[Any]]
    wiring: Wiring | None
    tracing: Tracing
    replay: Replay | None
    slices: SequenceSlices | None
    padded_vocab_size: int


class KeptParts(NamedTuple):
    """Contains the parts of a :class:`Run` that remain valid when the layer partition changes.

    ``orders`` is ``None`` if sequences are cut into different slices than before, because this
    changes the order of actions on every rank.
    """

    samples: Samples
    padded_vocab_size: int
    orders: Orders | None


def build_run(job: TrainingJob, kept: KeptParts | None = None) -> Run:
    """Builds model, optimizer, data, executor and trace. All ranks must call this.

    Args:
        job: Settings of the run, and the rank and process groups of this process.
        kept: Parts to reuse from an earlier run, or ``None`` to build all parts.
    """
    config = job.config
    placement = placement_of(config)
    if kept is None:
        tokenizer, rows = load_tokenizer(config)
        samples = _build_samples(job, placement, tokenizer)
    else:
        samples, rows, _ = kept
    core = transformer_config(config, job.accelerator)
    chunks = build_chunks(config, core, job.accelerator, placement, rows)
    optimizer = build_optimizer(config, chunks)
    scheduler = build_scheduler(config, optimizer, samples.train_samples)
    _connect_chunks(config, core, chunks, optimizer)
    tracing = _start_trace(job, placement, chunks, rows)
    core.finalize_model_grads_func = tracing.around(
        "reduce", partial(finalize_gradients, widths=widths_of(config))
    )
    replay = wiring = slices = None
    forward_backward: Callable[..., list[Any]]
    if config.schedule.pipeline_schedule == "megatron":
        outside = OutsideTrace(get_forward_backward_func(), tracing)
        tracing.watch(outside.snapshot)
        forward_backward = outside
    else:
        orders = (kept and kept.orders) or _orders(job, placement)
        replay = orders.replay
        wiring = _wire(job, placement, orders, core, tracing)
        if config.cuts_sequences:
            slices = SequenceSlices(config.slice_ends, rule=config.slice_rule)
            slices.attach(chunks)
        forward_backward = ForwardBackward(
            executor=wiring.executor,
            orders=orders,
            stores=attach_stores(chunks) if config.splits_backward else None,
            slices=slices,
        )
    return Run(
        job=job,
        placement=placement,
        chunks=chunks,
        core=core,
        optimizer=optimizer,
        scheduler=scheduler,
        samples=samples,
        forward_backward=forward_backward,
        wiring=wiring,
        tracing=tracing,
        replay=replay,
        slices=slices,
        padded_vocab_size=rows,
    )


def _start_trace(
    job: TrainingJob, placement: Placement, chunks: Sequence[torch.nn.Module], rows: int
) -> Tracing:
    """Opens the trace of a run.

    ``placement`` assigns the stages to ranks, ``chunks`` are this rank's chunks, and ``rows`` is
    the number of rows of the embedding.
    """
    config = job.config
    schedule = job.config.schedule
    tracing = open_trace(
        schedule.trace_dir,
        job,
        placement,
        schedule=schedule.pipeline_schedule,
        num_microbatches=config.num_microbatches,
        layers=config.layers_per_stage,
        work=stage_work(config, rows),
        num_slices=config.constant_slices,
        transport=config.transport.forced or "",
        token_ranks=config.token_ranks,
        collector=schedule.trace_otlp,
    )
    if schedule.trace_dir is not None:
        tracing.experts = measured_experts(chunks, job.accelerator)
        _add_details(tracing, schedule.trace_dir, job, chunks)
    return tracing


def _add_details(
    tracing: Tracing, folder: str, job: TrainingJob, chunks: Sequence[torch.nn.Module]
) -> None:
    """Adds the measurements that ``--trace-detail`` requests to ``tracing``.

    Recordings of kernels are written to files in ``folder``. Layers are measured in ``chunks``.
    """
    details = job.config.schedule.trace_details
    if "layers" in details:
        tracing.layers = LayerMeter(chunks, job.accelerator.clock())
    if "collectives" in details:
        groups = model_parallel_groups()
        tracing.collectives = CollectiveMeter(groups, job.accelerator.clock())
    run = job.config.run
    if "kernels" in details and job.rank in run.profile_ranks:
        tracing.kernels = KernelRecorder(
            folder,
            job.rank,
            range(run.profile_step_start, run.profile_step_end),
            on_gpu=job.accelerator.is_cuda,
            say=partial(print, flush=True),
        )


def _wire(
    job: TrainingJob,
    placement: Placement,
    orders: Orders,
    core: TransformerConfig,
    tracing: Tracing,
) -> Wiring:
    """Builds the executor and its channels to other ranks. All ranks must call this."""
    config = job.config
    widths = widths_of(config)
    return build_executor(
        placement=placement,
        accelerator=job.accelerator,
        places=job.places,
        payload_shape=payload_shape(config),
        payload_dtype=core.pipeline_dtype,
        payload_varies=config.data.variable_seq_lengths
        or passes_predictions(config)
        or len(set(_slice_shares(config))) > 1,
        timeout_s=config.schedule.pipeline_timeout_s,
        tracing=tracing,
        transport=config.transport,
        # Assume the worst case. If stages have unequal numbers of ranks, a stage with a single rank
        # gets all microbatches of the job. If microbatches are distributed by cost in each step, a
        # replica may get twice the average.
        in_flight=orders.inputs_in_flight(
            config.num_microbatches
            * (1 if widths is None else widths.round_size)
            * (1 if config.balance == "off" else 2),
            smallest=_SHORT if config.data.variable_seq_lengths else 1.0,
        ),
        widths=widths,
        model=core,
    )


def make_loader(
    run: Run, dataset: Any, consumed_samples: int, *, on_read: OnRead | None = None
) -> MicrobatchLoader | None:
    """Creates a loader that reads the microbatches of this rank.

    Args:
        run: Run whose model has been built.
        dataset: Dataset to read, or ``None`` on a rank that does not need data.
        consumed_samples: Number of samples to skip because the job has already used them.
        on_read: Function that is called after each read, or ``None`` to call no function.

    Returns:
        Loader, or ``None`` on a rank that does not need data.
    """
    if dataset is None:
        return None
    config = run.job.config
    is_cuda = run.job.accelerator.is_cuda
    return MicrobatchLoader(
        dataset,
        consumed_samples=consumed_samples,
        # Use the number of replicas of this rank's stage, because other stages may have a different
        # number.
        batching=replace(
            batching_of(config), replicas=parallel_state.get_data_parallel_world_size()
        ),
        dp_rank=parallel_state.get_data_parallel_rank(),
        reads=_needs_data(config, run.placement),
        num_workers=data_workers(config, is_cuda=is_cuda),
        pin_memory=is_cuda,
        on_read=on_read,
    )


def data_workers(config: TrainerConfig, *, is_cuda: bool) -> int:
    """Returns the number of worker processes that read data for a rank.

    Args:
        config: Settings of the run. ``--num-workers`` overrides the default.
        is_cuda: Whether the rank computes on a GPU.
    """
    if config.data.num_workers is not None:
        return config.data.num_workers
    # Start no workers on CPUs: the ranks already use all cores, and workers would slow them down.
    return 2 if is_cuda else 0


def payload_shape(config: TrainerConfig) -> tuple[int, ...]:
    """Returns the shape ``[s, b, h]`` of the largest tensor that stages send to each other."""
    longest = config.model.seq_length
    width = batching_of(config).row_tokens(config.data.pack_to or longest)
    if (rule := config.slice_rule) is not None:
        length = rule.most_tokens(width, longest)
    elif config.data.pack_to is not None:
        length = width
    else:
        length = max(end - start for start, end in pairwise((0, *config.slice_ends)))
        length //= config.parallel.context_parallel_size
    if config.parallel.sequence_parallel:
        length //= config.parallel.tensor_model_parallel_size
    if passes_predictions(config):
        length *= 1 + (config.model.mtp_num_layers or 0)
    return (length, config.batch.micro_batch_size, config.model.hidden_size)


def passes_predictions(config: TrainerConfig) -> bool:
    """Returns whether a stage before the last stage has multi-token prediction layers.

    Such a stage sends the hidden states of these layers on to the last stage.
    """
    return config.mtp_stage not in (None, config.num_stages - 1)


def _needs_data(config: TrainerConfig, placement: Placement) -> bool:
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = [placement.stage_of(pp_rank, chunk) for chunk in range(placement.num_chunks)]
    return not {0, config.mtp_stage, placement.num_stages - 1}.isdisjoint(stages)


def _build_samples(job: TrainingJob, placement: Placement, tokenizer: Tokenizer) -> Samples:
    config = job.config
    run = config.run
    data = config.data
    # All ranks need the data if lengths vary, because the microbatches depend on the lengths.
    needs_data = data.variable_seq_lengths or _needs_data(config, placement)
    sizes = BatchSizes(config.batch, config.parallel.data_parallel_size)
    if run.train_iters is not None:
        iterations = run.train_iters
        train_samples = iterations * config.batch.global_batch_size
    else:
        assert run.train_samples is not None  # The flag parser has checked this.
        train_samples = run.train_samples
        iterations = sizes.iterations_for(train_samples)
    per_validation = run.eval_iters * config.batch.global_batch_size
    valid_samples = (iterations // run.eval_interval + 1) * per_validation
    train, valid, test = build_datasets(
        data,
        tokenizer,
        seq_length=config.model.seq_length,
        seed=run.seed,
        train_samples=train_samples,
        valid_samples=valid_samples,
        test_samples=per_validation,
        is_built_on_rank=lambda: needs_data or dist.get_rank() == 0,
    )
    if not needs_data:
        train = valid = test = None
    missing = left_out((train, valid, test))
    if missing and job.is_first and not data.mock_data:
        print(f"--variable-seq-lengths: {printable(str(missing))}", flush=True)
    return Samples(
        iterations=iterations,
        train_samples=train_samples,
        valid_samples=valid_samples,
        train=train,
        valid=valid,
        test=test,
    )


def _connect_chunks(
    config: TrainerConfig,
    core: TransformerConfig,
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
) -> None:
    """Stores functions of ``chunks`` and ``optimizer`` in megatron-core's configuration ``core``.

    megatron-core's schedule and the executor call these functions to scale losses and to start or
    delay the communication of gradients and parameters. This function also enables megatron-core's
    timers.
    """
    parallel = config.parallel
    timing = config.logging
    if timing.timing_log_level:
        core.timers = Timers(timing.timing_log_level, timing.timing_log_option)
        core.barrier_with_L1_time = timing.barrier_with_L1_time
    core.grad_scale_func = optimizer.scale_loss
    single = len(chunks) == 1
    if parallel.overlap_grad_reduce:
        holds = [chunk.no_sync for chunk in chunks]
        core.no_sync_func = holds[0] if single else holds
        if parallel.align_grad_reduce:
            starts = [chunk.start_grad_sync for chunk in chunks]
            core.grad_sync_func = starts[0] if single else starts
    if parallel.overlap_param_gather and parallel.align_param_gather and not single:
        core.param_sync_func = [chunk.start_param_sync for chunk in chunks]


_GIB = 1 << 30


def require_room(config: TrainerConfig, accelerator: Accelerator) -> None:
    """Checks that the weights of a rank fit in the device's memory, before the model is built.

    Gradients, optimizer state and activations are not counted, so a model that passes this check
    may still be too large. The weights are assumed to be distributed equally over the ranks.

    Raises:
        ConfigError: If the weights alone are larger than the device's memory.
    """
    parallel = config.parallel
    shape = trainer_shape(config)
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    ranks *= parallel.expert_model_parallel_size
    count = build_model(shape).parameters
    rank_bytes = count * shape.precision.parameter_bytes / ranks
    if accelerator.device.type == "cuda":
        whole_bytes = torch.cuda.get_device_properties(accelerator.device).total_memory
    else:
        whole_bytes = total_host_bytes()
    if rank_bytes > whole_bytes:
        model = config.model
        raise ConfigError(
            f"a model of {count:.3g} parameters (--num-layers {model.num_layers} --hidden-size "
            f"{model.hidden_size} --ffn-hidden-size {model.ffn_hidden_size}) has "
            f"{rank_bytes / _GIB:,.0f} GiB of weights on each of {ranks} ranks, but "
            f"{accelerator.name} has {whole_bytes / _GIB:,.0f} GiB; use a smaller model or more "
            "ranks"
        )
