"""Measures each kind of layer of a GPT model, and the links between the ranks of a job.

A model with few layers is divided into three stages, so that each kind of layer has a separate
stage::

    stage 0     embedding
    stage 1     layers of one kind: first 1 layer, then 3; the difference is the cost of 2 layers
    stage 2     multi-token prediction layers, last normalization, logits and loss

Each rank runs one stage after another, without a pipeline. Ranks of a tensor-parallel group measure
a stage together. All ranks of the job measure at the same time, because they would also train at
the same time. This module builds the stages and calls the measurements in order. Timing and the
measurement of links are in ``profiling``.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator as device

# install() lets megatron-core run without CUDA. Call it before the modules below import
# megatron-core.
device.install()
with device.quiet_imports():
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.adaptive.accelerator import Accelerator
    from megatron.adaptive.config.arguments import parse
    from megatron.adaptive.config.environment import Environment
    from megatron.adaptive.config.input_files import say
    from megatron.adaptive.config.megatron_core_flags import CoreConfig
    from megatron.adaptive.config.trainer import TrainerConfig
    from megatron.adaptive.data.tokenizer import padded_vocab_size
    from megatron.adaptive.engine.deferred_layers import attach_stores
    from megatron.adaptive.engine.executor import ActivationMeter
    from megatron.adaptive.engine.rendezvous import MeetingError, no_rendezvous
    from megatron.adaptive.engine.stages import MegatronStages, default_process_groups
    from megatron.adaptive.errors import ConfigError, SetupError
    from megatron.adaptive.gpt.build_model import build_chunks, build_optimizer, transformer_config
    from megatron.adaptive.gpt.forward import DropoutKeys, GptForward, feed
    from megatron.adaptive.gpt.initialize import (
        TrainingJob,
        end_job,
        remake_mesh,
        start_alone,
        start_job,
    )
    from megatron.adaptive.gpt.setup import payload_shape
    from megatron.adaptive.planner import profile_file
    from megatron.adaptive.profiling.action_timing import (
        WARM_UP,
        spread,
        time_call,
        time_microbatches,
    )
    from megatron.adaptive.profiling.free_memory import (
        KEPT_FREE,
        free_memory_bytes,
        gpu_name,
        node_facts,
    )
    from megatron.adaptive.profiling.links import measure_links, measure_reductions
    from megatron.adaptive.schedule.stage_placement import Placement


STAGES = 3
FEW, MANY = 1, 3
"""Number of layers of the middle stage in the first and in the second measurement."""
# Minimum cost of a layer, as a fraction of the mean cost of the stage's layers.
_LEAST_SHARE = 0.5
_FIGURES = ("forward_s", "backward_input_s", "backward_weight_s", "kept_bytes", "parameters")

Figures = dict[str, float]
"""Measurements of a stage or layer on this rank, keyed by the column names of the profile.

Times in seconds are medians over microbatches. ``forward_s`` is the duration of the forward pass.
``backward_input_s`` and ``backward_weight_s`` are the durations of the backward passes for input
gradients and for weight gradients. If the backward pass is not split, ``backward_input_s`` is the
duration of the whole backward pass. ``kept_bytes`` is the size of the activations kept from the
forward to the backward pass, in bytes.
"""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Settings that select what to measure.

    Attributes:
        name: Name of the model in the profile.
        arguments: Command-line arguments of the trainer for the model's dimensions, including the
            vocabulary size.
        kinds: Kinds of layers to measure, including ``embedding`` and ``head``, named as in
            ``planner.model_description``.
        last: Kind of the last layer. Multi-token prediction layers have the same kind.
        widths: Tensor-parallel sizes to measure. If empty, all powers of two that the nodes and the
            model allow are measured.
        widest: Common multiple of all possible tensor-parallel sizes, computed from the model's
            dimensions.
        micro_batches: Microbatch sizes to measure, in samples.
        repeats: Number of microbatches to time for each measurement.
        node: Name of this node's type, or an empty string to use the name of its GPU.
        links: Whether to measure links between ranks and all-reduces.
        backend: Communication backend, ``nccl`` or ``gloo``, or ``None`` for the backend that
            training would use.
        alone: Whether this process measures without the other ranks of the job. If so, collectives
            with the other ranks count as 0 s.
    """

    name: str
    arguments: tuple[str, ...]
    kinds: tuple[str, ...] = ("embedding", "transformer", "head")
    last: str = "transformer"
    widths: tuple[int, ...] = ()
    widest: int = 1
    micro_batches: tuple[int, ...] = (1, 2, 4)
    repeats: int = 7
    node: str = ""
    links: bool = True
    backend: str | None = None
    alone: bool = False


def profile_layers(options: ProfileOptions, environment: Environment) -> dict[str, Any] | None:
    """Measures layers and links, and returns the profile. All processes must call this.

    Args:
        options: Measurements to make, equal on all processes except for ``node``.
        environment: Rank and job of this process, from its environment variables.

    Returns:
        Content of the profile file on rank 0, or ``None`` on other ranks.

    Raises:
        ConfigError: If the number of processes per node is not a multiple of a tensor-parallel
            size.
        TransportError: If the processes cannot connect to each other.
    """
    widths = _widths(options, environment)
    world = environment.world_size
    job = _start(options, environment)
    try:
        accelerator = job.accelerator
        gpu = gpu_name(accelerator)
        facts = node_facts(accelerator, environment.local_world_size)
        nodes = job.gather({"name": options.node or gpu, **facts})
        names = [node["name"] for node in nodes]
        job, measured = _measure_layers(options, job, gpu, widths)
        links: list[Any] = []
        reductions: list[Any] = []
        if options.links and world > 1:
            _report(job, "links")
            links = measure_links(job, names)
            reductions = measure_reductions(job, names, [tp for tp in widths if tp > 1])
        dist.barrier(group=job.control_group)
        if not job.is_first:
            return None
        if not any(measured.values()):
            raise SetupError(
                "no measurements, because memory is too small for every kind of layer; use "
                "smaller --micro-batch-sizes or a larger --tp"
            )
        facts_by_node = {
            node["name"]: {key: node[key] for key in node if key != "name"} for node in nodes
        }
        return profile_file.document(
            {"name": options.name, "arguments": list(options.arguments)},
            [
                row
                for gpu, of_gpu in measured.items()
                for row in _rows(gpu, of_gpu, alone=options.alone)
            ],
            made=profile_file.timestamp(),
            nodes=facts_by_node,
            links=links,
            all_reduce=reductions,
            optimizer_s_per_parameter=_medians(measured, "optimizer_s"),
            action_sigma=statistics.fmean(_medians(measured, "sigma").values()),
            launch_s=_medians(measured, "launch_s"),
        )
    finally:
        end_job()


def _start(options: ProfileOptions, environment: Environment) -> TrainingJob:
    """Configures this process and connects it to the job. All processes must call this."""
    accelerator = device.detect(environment.local_rank, backend=options.backend)
    device.quiet_libraries()
    device.keep_freed_memory()
    if environment.omp_num_threads is None:
        torch.set_num_threads(1)
    try:
        config = _config(options, 1, 1, environment.world_size)
        if options.alone:
            return start_alone(config, environment, accelerator)
        return start_job(config, environment, accelerator)
    except (dist.DistError, MeetingError, ValueError) as error:
        raise no_rendezvous(environment, error) from error


def _measure_layers(
    options: ProfileOptions, job: TrainingJob, gpu: str, widths: Sequence[int]
) -> tuple[TrainingJob, dict[str, list[dict[str, Any]]]]:
    """Measures layers for each tensor-parallel size in ``widths``. All ranks must call this.

    Returns:
        Tuple of the job, set up for the last tensor-parallel size, and the measurements of all
        ranks, keyed by the name of the rank's GPU.
    """
    samples: list[dict[str, Any]] = []
    for tp in widths:
        job = replace(job, config=_config(options, tp, 1, job.environment.world_size))
        remake_mesh(job)
        with _equal_memory(job, tp):
            for size in options.micro_batches:
                samples += _measure(options, job, tp, size, optimizer=not samples)
    measured: dict[str, list[dict[str, Any]]] = {}
    for name, rank_samples in job.gather((gpu, samples)):
        measured.setdefault(name, []).extend(rank_samples)
    return job, measured


def _medians(measured: dict[str, list[dict[str, Any]]], name: str) -> dict[str, float]:
    """Returns the median of the measurement ``name`` for each GPU type, keyed by the GPU's name."""
    values = {
        gpu: [sample[name] for sample in samples if name in sample]
        for gpu, samples in measured.items()
    }
    return {gpu: statistics.median(each) for gpu, each in values.items() if each}


def _rows(gpu: str, samples: Sequence[dict[str, Any]], *, alone: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of the profile for the GPU type ``gpu``.

    There is one row for each combination of layer kind, tensor-parallel size and microbatch size.
    The values in a row are means over all ``samples`` of its combination.
    If ``alone`` is true, the samples do not include tensor-parallel communication.
    """
    alike: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for sample in samples:
        alike.setdefault((sample["kind"], sample["tp"], sample["micro_batch"]), []).append(sample)
    for (kind, tp, size), same in alike.items():
        means = {name: statistics.fmean(sample[name] for sample in same) for name in _FIGURES}
        row = {"kind": kind, "gpu": gpu, "tp": tp, "micro_batch": size, "tp_included": not alone}
        yield {**row, **means}


def _widths(options: ProfileOptions, environment: Environment) -> list[int]:
    """Returns the tensor-parallel sizes to measure. They divide the number of ranks per node."""
    local = environment.local_world_size
    world = environment.world_size
    if not options.widths:
        widths = [2**power for power in range(12)]
        return [tp for tp in widths if not (options.widest % tp or local % tp or world % tp)]
    for tp in options.widths:
        if local % tp:
            raise ConfigError(
                f"--tp {tp} must divide the {local} processes of a node; start a multiple of {tp} "
                "processes with --nproc-per-node, or remove --tp"
            )
    return list(options.widths)


def _config(
    options: ProfileOptions, tp: int, size: int, world: int, more: str = ""
) -> TrainerConfig:
    # Disable slices, because the profile contains the costs of whole sequences.
    run = "--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-4"
    run += " --sequence-slices 1"
    run += f" --micro-batch-size {size} --tensor-model-parallel-size {tp} {more}"
    if options.backend is not None:
        run += f" --distributed-backend {options.backend}"
    if tp > 1 and any(kind.startswith("experts") for kind in options.kinds):
        run += " --sequence-parallel"
    config = parse([*options.arguments, *run.split()], world_size=world, last_wins=True)
    return replace(config, schedule=replace(config.schedule, slice_tokens=None))


def _alone(kind: str, layers: int, core: CoreConfig) -> str:
    """Returns command-line arguments for a model like ``core``, with ``layers`` layers of ``kind``.

    The kind ``experts/4`` is a layer whose experts are distributed over 4 ranks. Each of these
    ranks does the same work as a single rank with a quarter of the experts, so a layer with a
    quarter of the experts is measured. Communication between the ranks is not measured.
    """
    name, _, spread = kind.partition("/")
    more = f" --num-layers {layers}"
    if core.num_moe_experts:
        more += f" --num-experts {core.num_moe_experts // int(spread or 1)}"
        more += f" --moe-layer-freq [{int(name.startswith('experts'))}]*{layers}"
    if core.window_attn_skip_freq is not None:
        more += f" --window-attn-skip-freq [{int(name.endswith('-window'))}]*{layers}"
    return more


def _measure(
    options: ProfileOptions, job: Any, tp: int, size: int, *, optimizer: bool
) -> list[dict[str, Any]]:
    """Measures all kinds of layers that fit into memory on this rank.

    Args:
        options: Measurements to make.
        job: Settings of the run, and rank and process groups of this process.
        tp: Tensor-parallel size.
        size: Number of samples per microbatch.
        optimizer: Whether to also measure the optimizer, with the first kind of transformer layer.
    """
    core = job.config.core

    def stage(number: int, kind: str, layers: int = FEW, *, optimizer: bool = False) -> Figures:
        # Put all layers on the middle stage. Untie the output matrix, which does not change the
        # times.
        more = f"--pipeline-model-parallel-size {STAGES} --partition 0-{layers}-0"
        more += f" --untie-embeddings-and-output-weights{_alone(kind, layers, core)}"
        config = _config(options, tp, size, STAGES * job.environment.world_size, more)
        return _measure_stage(config, job.accelerator, number, options.repeats, optimizer=optimizer)

    samples: list[dict[str, Any]] = []
    for kind in options.kinds:
        _report(job, f"tp {tp}, microbatch {size}, {kind}")
        name, mark, spread_over = kind.partition("/")
        figures: Figures | None = None
        measures_optimizer = optimizer
        try:
            if name in ("embedding", "head"):
                number = 0 if name == "embedding" else STAGES - 1
                alone = stage(number, options.last + (mark + spread_over) * (name == "head"))
                figures = {figure: alone[figure] for figure in _FIGURES}
            else:
                few = stage(1, kind, optimizer=optimizer)
                figures = layer_sample(few, stage(1, kind, MANY))
                measures_optimizer = False
        except torch.OutOfMemoryError:
            pass  # Memory is freed below, because here the traceback still refers to the tensors.
        if figures is None:
            job.accelerator.free_unused_memory()
        if _is_skipped(job, tp, fits=figures is not None):
            _report(job, f"tp {tp}, microbatch {size}, {kind}: skipped, not enough memory")
            continue
        assert figures is not None
        optimizer = measures_optimizer
        samples.append({"kind": kind, "tp": tp, "micro_batch": size, **figures})
    return samples


def _is_skipped(job: Any, tp: int, *, fits: bool) -> bool:
    """Returns whether at least one rank of the tensor-parallel group had too little memory.

    All ranks must call this if ``tp``, the tensor-parallel size, is above 1. ``fits`` states
    whether this rank had enough memory for the measurement.
    """
    if tp == 1:
        return not fits
    all_fit = job.gather(fits)
    group = parallel_state.get_tensor_model_parallel_group()
    return not all(all_fit[rank] for rank in dist.get_process_group_ranks(group))


@contextlib.contextmanager
def _equal_memory(job: Any, tp: int) -> Iterator[None]:
    """Limits the GPU memory of all ranks of a tensor-parallel group to the same size.

    Without this limit, only the rank with the least memory would run out of memory, and the other
    ranks would wait for it in a collective until the timeout. All ranks must call this if ``tp``,
    the tensor-parallel size, is above 1.
    """
    device = job.accelerator.device
    if tp == 1 or not job.accelerator.is_cuda:
        yield
        return
    free = (1 - KEPT_FREE) * free_memory_bytes(job.accelerator, tp)
    available = job.gather(torch.cuda.memory_allocated(device) + free)
    group = parallel_state.get_tensor_model_parallel_group()
    limit = min(available[rank] for rank in dist.get_process_group_ranks(group))
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _report(job: Any, text: str) -> None:
    """Prints ``text`` as progress, because measuring takes minutes."""
    if job.is_first:
        say(f"profile: {text}")


def layer_sample(few: Figures, many: Figures) -> Figures:
    """Computes the cost of a layer from the measurements of two stages.

    Args:
        few: Measured values of a stage with :data:`FEW` layers.
        many: Measured values of a stage with :data:`MANY` layers.

    Returns:
        Measurements of one layer, and ``launch_s``: the part of a forward pass in seconds that does
        not depend on the number of layers.
    """
    layer = {
        # Noise may make the difference too small, so enforce a minimum. The cost of a layer is
        # never far below the mean over the stage's layers.
        name: max((many[name] - few[name]) / (MANY - FEW), _LEAST_SHARE * many[name] / MANY)
        for name in _FIGURES
    }
    layer["launch_s"] = max(0.0, few["forward_s"] - FEW * layer["forward_s"])
    layer["sigma"] = (few["sigma"] + many["sigma"]) / 2
    return layer | {name: few[name] for name in ("optimizer_s",) if name in few}


def _measure_stage(
    config: TrainerConfig, accelerator: Accelerator, stage: int, repeats: int, *, optimizer: bool
) -> Figures:
    """Builds one of the three stages and measures microbatches on it.

    All ranks of the tensor-parallel group must call this. The process groups are created for
    pipeline size 1, although the pipeline size in ``config`` is 3.

    Args:
        config: Settings of a run with three stages.
        accelerator: Device of this rank.
        stage: Index of the stage, 0 to 2.
        repeats: Number of microbatches to time.
        optimizer: Whether to also measure an optimizer step. ``optimizer_s`` is the time of the
            step in seconds, divided by the number of parameters.
    """
    placement = Placement(num_ranks=STAGES, num_chunks=1)
    groups = default_process_groups()
    meter = ActivationMeter()
    split = config.splits_backward
    count = WARM_UP + repeats
    with _on_stage(stage):
        core = transformer_config(config, accelerator)
        chunks = _build_chunks(config, core, accelerator, placement)
        batches = [_batch(config)] * count if stage in (0, STAGES - 1) else None
        stages = MegatronStages(
            forward_step_func=_keyed_forward(config, accelerator, chunks),
            data_iterators=[feed(batches, count)],
            chunks=chunks,
            placement=placement,
            pp_rank=stage,
            num_microbatches=count,
            groups=groups,
            meter=meter,
            forward_only=False,
            collect_non_loss_data=False,
            first_val_step=None,
            stores=attach_stores(chunks) if split else None,
        )
        message = partial(
            torch.randn, payload_shape(config), dtype=core.pipeline_dtype, device=accelerator.device
        )
        lanes, _ = time_microbatches(
            stages,
            received=lambda: message() if stage else None,
            gradient=lambda: message() if stage < STAGES - 1 else None,
            device=accelerator.device,
            repeats=repeats,
            split=split,
        )
    sample = {name: statistics.median(lane) for name, lane in zip(_FIGURES, lanes, strict=False)}
    sample |= {"kept_bytes": float(meter.bytes_of(0)), "sigma": spread(lanes)}
    sample["parameters"] = float(sum(weight.numel() for weight in chunks[0].parameters()))
    if optimizer:
        step = build_optimizer(config, chunks).step
        seconds = time_call(step, accelerator.device, repeats)
        sample["optimizer_s"] = seconds / sample["parameters"]
    del chunks, stages
    accelerator.free_unused_memory()
    return sample


def _build_chunks(
    config: TrainerConfig, core: TransformerConfig, accelerator: Accelerator, placement: Placement
) -> list[Any]:
    """Builds the model of a stage, and prepares it for a forward pass in training mode.

    ``placement`` assigns the stages to ranks.
    """
    assert config.data.vocab_size is not None
    divisor = config.model.make_vocab_size_divisible_by
    ranks = config.parallel.tensor_model_parallel_size
    rows = padded_vocab_size(config.data.vocab_size, divisor, ranks)
    chunks: list[Any] = build_chunks(config, core, accelerator, placement, rows)
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    return chunks


@contextlib.contextmanager
def _on_stage(stage: int) -> Iterator[None]:
    """Makes megatron-core build modules for the stage ``stage`` within the ``with`` block."""
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(STAGES)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    # Replace the pipeline's process group, because modules read their stage only from it.
    stage_group = SimpleNamespace(rank=lambda: stage, size=lambda: STAGES)
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = stage_group
    try:
        yield
    finally:
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = pipeline
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)


def _keyed_forward(
    config: TrainerConfig, accelerator: Accelerator, chunks: Sequence[torch.nn.Module]
) -> Callable[..., Any]:
    """Returns the forward step function of ``chunks``, with dropout seeded as in training.

    ``config`` contains the settings of the run.
    """
    dropout = DropoutKeys(
        config.run.seed,
        enabled=config.model.hidden_dropout > 0 or config.model.attention_dropout > 0,
    )
    dropout.attach(chunks)
    return dropout.keyed(GptForward(accelerator), chunks, step=1)


def _batch(config: TrainerConfig) -> dict[str, torch.Tensor]:
    shape = (config.batch.micro_batch_size, config.model.seq_length)
    assert config.data.vocab_size is not None
    generator = torch.Generator().manual_seed(config.run.seed)
    tokens = torch.randint(config.data.vocab_size, shape, generator=generator)
    return {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        "loss_mask": torch.ones(shape),
    }
