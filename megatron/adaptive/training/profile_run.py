"""Measures the layers of a GPT, each kind by itself, and the links between the job's ranks.

A model of few layers is cut into three stages, so that every kind is alone in one::

    stage 0     embedding
    stage 1     layers of one kind: once 1 of them, once 3; the difference is 2 layers
    stage 2     last normalization, logits and loss, after layers that predict further tokens

One process takes the part of each stage in turn; no pipeline is needed. Ranks of a tensor-parallel
group work together, and all ranks of the job measure at the same time, as they would train. Owns
the order of measurements and how stages are built; timing and links are in ``profiling``.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator as device

# Before the modules below import megatron-core.
device.install()
with device.quiet_imports():
    from megatron.core import parallel_state

    from megatron.adaptive.accelerator import Accelerator
    from megatron.adaptive.config.arguments import parse
    from megatron.adaptive.config.environment import Environment
    from megatron.adaptive.config.input_files import say
    from megatron.adaptive.config.megatron_core_flags import CoreConfig
    from megatron.adaptive.config.trainer import TrainerConfig
    from megatron.adaptive.data.tokenizer import padded_vocab_size
    from megatron.adaptive.engine.deferred_layers import attach_stores
    from megatron.adaptive.engine.rendezvous import MeetingError, no_rendezvous
    from megatron.adaptive.engine.stages import (
        ActivationMeter,
        MegatronStages,
        default_process_groups,
    )
    from megatron.adaptive.errors import ConfigError, SetupError
    from megatron.adaptive.gpt.build_model import build_chunks, build_optimizer, transformer_config
    from megatron.adaptive.gpt.forward import DropoutKeys, GptForward, feed
    from megatron.adaptive.gpt.initialize import end_job, remake_mesh, start_job
    from megatron.adaptive.gpt.setup import payload_shape
    from megatron.adaptive.planner import profile_file
    from megatron.adaptive.profiling.action_timing import (
        WARM_UP,
        spread,
        time_call,
        time_microbatches,
    )
    from megatron.adaptive.profiling.free_memory import gpu_name, node_facts
    from megatron.adaptive.profiling.links import measure_links, measure_reductions
    from megatron.adaptive.schedule.stage_placement import Placement


STAGES = 3
FEW, MANY = 1, 3
"""Transformer layers of the middle stage; their difference separates a layer from a stage."""
_LEAST_SHARE = 0.5  # of the mean that a layer takes at least, where the difference is smaller
_FIGURES = ("forward_s", "backward_input_s", "backward_weight_s", "kept_bytes", "parameters")

Figures = dict[str, float]
"""Figures of a stage or layer on this rank, named as in a row of the profile.

``forward_s``, ``backward_input_s`` (the whole backward where it is not split) and
``backward_weight_s`` are medians over microbatches; ``kept_bytes`` stay from forward to backward.
"""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Names what is measured.

    Attributes:
        name: of the model.
        arguments: the trainer's arguments that give the model its shape, vocabulary included.
        kinds: of layers as ``planner.model_description`` names them, embedding and head included.
        last: kind of the last layer, which layers that predict further tokens are like.
        widths: tensor-parallel ranks; empty for every power of two that nodes and model allow.
        widest: what every width must divide, as the model's shape wants it.
        micro_batches: samples of a microbatch.
        repeats: microbatches that count.
        node: name of this node's type; empty for that of its GPU.
        links: whether to measure links and all-reduces.
        backend: ``nccl``, ``gloo``, or ``None`` for what a run would use.
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


def profile_layers(options: ProfileOptions, environment: Environment) -> dict[str, Any] | None:
    """Measures. Collective over all processes of the job.

    Args:
        options: the same on all processes, but for ``node``.
        environment: who this process is.

    Returns:
        What goes into the profile file on rank 0, ``None`` on others.

    Raises:
        ConfigError: a tensor-parallel width does not suit the nodes.
        TransportError: the processes cannot meet.
    """
    accelerator = device.detect(environment.local_rank, backend=options.backend)
    device.quiet_libraries()
    device.keep_freed_memory()
    if environment.omp_num_threads is None:
        torch.set_num_threads(1)
    widths = _widths(options, environment)
    world = environment.world_size
    try:
        job = start_job(_config(options, 1, 1, world), environment, accelerator)
    except (dist.DistError, MeetingError, ValueError) as error:
        raise no_rendezvous(environment, error) from error
    try:
        accelerator = job.accelerator
        gpu = gpu_name(accelerator)
        facts = node_facts(accelerator, environment.local_world_size)
        nodes = job.gather({"name": options.node or gpu, **facts})
        names = [one["name"] for one in nodes]
        mine: list[dict[str, Any]] = []
        for tp in widths:
            job = replace(job, config=_config(options, tp, 1, world))
            remake_mesh(job)
            for size in options.micro_batches:
                mine += _measure(options, job, tp, size, optimizer=not mine)
        measured: dict[str, list[dict[str, Any]]] = {}
        for name, found in job.gather((gpu, mine)):
            measured.setdefault(name, []).extend(found)
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
                "nothing was measured: memory does not suffice for the layers; profile with a"
                " smaller --micro-batch-sizes or a wider --tp"
            )
        return profile_file.document(
            {"name": options.name, "arguments": list(options.arguments)},
            [row for gpu, found in measured.items() for row in _rows(gpu, found)],
            made=profile_file.timestamp(),
            nodes={one["name"]: {key: one[key] for key in one if key != "name"} for one in nodes},
            links=links,
            all_reduce=reductions,
            optimizer_s_per_parameter=_medians(measured, "optimizer_s"),
            action_sigma=statistics.fmean(_medians(measured, "sigma").values()),
            launch_s=_medians(measured, "launch_s"),
        )
    finally:
        end_job()


def _medians(measured: dict[str, list[dict[str, Any]]], name: str) -> dict[str, float]:
    """Returns the median of a figure over all layers that have it, by GPU."""
    values = {gpu: [one[name] for one in found if name in one] for gpu, found in measured.items()}
    return {gpu: statistics.median(each) for gpu, each in values.items() if each}


def _rows(gpu: str, found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the mean of what ranks with a GPU measured of each kind, width and size."""
    alike: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for one in found:
        alike.setdefault((one["kind"], one["tp"], one["micro_batch"]), []).append(one)
    for (kind, tp, size), its in alike.items():
        means = {name: statistics.fmean(one[name] for one in its) for name in _FIGURES}
        row = {"kind": kind, "gpu": gpu, "tp": tp, "micro_batch": size, "tp_included": True}
        yield {**row, **means}


def _widths(options: ProfileOptions, environment: Environment) -> list[int]:
    """Returns tensor-parallel widths that fit into a node."""
    local, world = environment.local_world_size, environment.world_size
    if not options.widths:
        widths = [2**power for power in range(12)]
        return [tp for tp in widths if not (options.widest % tp or local % tp or world % tp)]
    for tp in options.widths:
        if local % tp:
            raise ConfigError(
                f"--tp {tp}: the {local} processes of a node do not divide into groups of {tp};"
                " start more with --nproc-per-node, or leave it out"
            )
    return list(options.widths)


def _config(
    options: ProfileOptions, tp: int, size: int, world: int, more: str = ""
) -> TrainerConfig:
    run = "--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-4"
    run += f" --micro-batch-size {size} --tensor-model-parallel-size {tp} {more}"
    if options.backend is not None:
        run += f" --distributed-backend {options.backend}"
    if tp > 1 and any(kind.startswith("experts") for kind in options.kinds):
        run += " --sequence-parallel"
    return parse([*options.arguments, *run.split()], world_size=world, last_wins=True)


def _alone(kind: str, layers: int, core: CoreConfig) -> str:
    """Returns arguments that make so many layers of one kind.

    A rank of experts that are spread over 4 ranks, ``experts/4``, computes as many tokens with as
    many experts as one that has a quarter of them, all by itself; their way is not measured.
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
    """Measures all kinds for one width and size on this rank, as far as memory suffices."""
    core = job.config.core

    def stage(number: int, kind: str, layers: int = FEW, *, optimizer: bool = False) -> Figures:
        # The middle one of three stages holds the layers. Each is alone here; a head of its own
        # costs what a copy of the embedding does.
        more = f"--pipeline-model-parallel-size {STAGES} --partition 0-{layers}-0"
        more += f" --untie-embeddings-and-output-weights{_alone(kind, layers, core)}"
        config = _config(options, tp, size, STAGES * job.environment.world_size, more)
        return _measure_stage(config, job.accelerator, number, options.repeats, optimizer=optimizer)

    found: list[dict[str, Any]] = []
    for kind in options.kinds:
        _report(job, f"tp {tp}, microbatch {size}, {kind}")
        name, mark, spread_over = kind.partition("/")
        try:
            if name in ("embedding", "head"):
                number = 0 if name == "embedding" else STAGES - 1
                alone = stage(number, options.last + (mark + spread_over) * (name == "head"))
                figures = {figure: alone[figure] for figure in _FIGURES}
            else:
                few = stage(1, kind, optimizer=optimizer)
                figures = layer_sample(few, stage(1, kind, MANY))
                optimizer = False
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _report(job, f"tp {tp}, microbatch {size}, {kind}: not enough memory, left out")
            continue
        found.append({"kind": kind, "tp": tp, "micro_batch": size, **figures})
    return found


def _report(job: Any, text: str) -> None:
    """Prints what is measured, for it takes minutes."""
    if job.is_first:
        say(f"profile: {text}")


def layer_sample(few: Figures, many: Figures) -> Figures:
    """Derives what a layer takes from what a stage of ``FEW`` and one of ``MANY`` took.

    Returns:
        Figures of one layer, and ``launch_s``, the seconds that a forward costs beyond its layers.
    """
    layer = {
        # Noise may make the difference small; a layer is never far from the mean.
        name: max((many[name] - few[name]) / (MANY - FEW), _LEAST_SHARE * many[name] / MANY)
        for name in _FIGURES
    }
    layer["launch_s"] = max(0.0, few["forward_s"] - FEW * layer["forward_s"])
    layer["sigma"] = (few["sigma"] + many["sigma"]) / 2
    return layer | {name: few[name] for name in ("optimizer_s",) if name in few}


def _measure_stage(
    config: TrainerConfig, accelerator: Accelerator, stage: int, repeats: int, *, optimizer: bool
) -> Figures:
    """Builds one of the three stages and runs microbatches through it.

    Collective over the tensor-parallel group. The mesh has pipeline size 1; ``config`` has 3.

    Args:
        config: settings of a run with three stages.
        accelerator: this rank's device.
        stage: which one.
        repeats: microbatches that count.
        optimizer: whether to measure a step of the optimizer too: ``optimizer_s`` of a parameter.
    """
    placement = Placement(num_ranks=STAGES, num_chunks=1)
    groups, meter = default_process_groups(), ActivationMeter()
    split, count = config.splits_backward, WARM_UP + repeats
    assert config.data.vocab_size is not None
    divisor, tp = (
        config.model.make_vocab_size_divisible_by,
        config.parallel.tensor_model_parallel_size,
    )
    rows = padded_vocab_size(config.data.vocab_size, divisor, tp)
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(STAGES)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    # Modules ask their pipeline's group alone which stage they are on.
    place = SimpleNamespace(rank=lambda: stage, size=lambda: STAGES)
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = place
    try:
        core = transformer_config(config, accelerator)
        chunks: list[Any] = build_chunks(config, core, accelerator, placement, rows)
        dropout = DropoutKeys(
            config.run.seed,
            enabled=config.model.hidden_dropout > 0 or config.model.attention_dropout > 0,
        )
        dropout.attach(chunks)
        batches = [_batch(config)] * count if stage in (0, STAGES - 1) else None
        for chunk in chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        stages = MegatronStages(
            forward_step_func=dropout.keyed(GptForward(accelerator), chunks, step=1),
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
        shape, dtype = payload_shape(config), core.pipeline_dtype

        def message() -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, device=accelerator.device)

        lanes, _ = time_microbatches(
            stages,
            received=lambda: message() if stage else None,
            gradient=lambda: message() if stage < STAGES - 1 else None,
            device=accelerator.device,
            repeats=repeats,
            split=split,
        )
    finally:
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = pipeline
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
    sample = {name: statistics.median(lane) for name, lane in zip(_FIGURES, lanes, strict=False)}
    sample |= {"kept_bytes": float(meter.bytes_of(0)), "sigma": spread(lanes)}
    sample["parameters"] = float(sum(one.numel() for one in chunks[0].parameters()))
    if optimizer:
        step = build_optimizer(config, chunks).step
        seconds = time_call(step, accelerator.device, repeats)
        sample["optimizer_s"] = seconds / sample["parameters"]
    del chunks, stages
    gc.collect()
    if accelerator.is_cuda:
        torch.cuda.empty_cache()
    return sample


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
