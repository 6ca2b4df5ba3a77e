"""One process of a profiling run: meets the others, measures layers and links, tells the first.

Owns the order of measurements and what of them goes into the profile file; how each is made is in
``layer_profile`` and ``profiling.links``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import accelerator as device
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError, SetupError, TransportError
from megatron.adaptive.profiling.nodes import gpu_name, node_facts

__all__ = ["ProfileOptions", "profile_layers"]

FORMAT = 1
_TIMES = ("forward_s", "backward_input_s", "backward_weight_s", "kept_bytes", "parameters")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What is measured.

    Attributes:
        name: of the model.
        arguments: the trainer's arguments that give the model its shape, vocabulary included.
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
    widths: tuple[int, ...] = ()
    widest: int = 1
    micro_batches: tuple[int, ...] = (1, 2, 4)
    repeats: int = 7
    node: str = ""
    links: bool = True
    backend: str | None = None


def profile_layers(options: ProfileOptions, environment: Environment) -> dict[str, Any] | None:
    """Measure. Collective over all processes of the job.

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
    device.install()
    device.quiet_libraries()
    # megatron-core may only be imported from here on.
    from megatron.adaptive.gpt.initialize import end_job, remake_mesh, start_job

    if environment.omp_num_threads is None:
        torch.set_num_threads(1)
    widths = _widths(options, environment)
    world = environment.world_size
    try:
        job = start_job(_mesh_config(options, 1, world), environment, accelerator)
    except (dist.DistError, ValueError) as error:
        raise TransportError(
            f"rank {environment.rank} cannot meet the other ranks at {environment.master_addr}:"
            f"{environment.master_port} ({str(error).splitlines()[0]}): start with torchrun"
        ) from error
    try:
        gpu = gpu_name(accelerator)
        told = job.gather({"name": options.node or gpu, **node_facts(accelerator, environment)})
        names = [one["name"] for one in told]
        layers: list[dict[str, Any]] = []
        others: dict[str, dict[str, list[float]]] = {"launch": {}, "optimizer": {}, "sigma": {}}
        for tp in widths:
            job = replace(job, config=_mesh_config(options, tp, world))
            remake_mesh(job)
            for size in options.micro_batches:
                layers += _measure(options, job, gpu, tp, size, others, first=not layers)
        links: list[Any] = []
        reductions: list[Any] = []
        if options.links and world > 1:
            from megatron.adaptive.profiling.links import measure_links, measure_reductions

            _say(job, "links")
            links = measure_links(job, names)
            reductions = measure_reductions(job, names, [tp for tp in widths if tp > 1])
        dist.barrier(group=job.control_group)
        if not job.is_first:
            return None
        return _as_file(options, told, layers, others, links, reductions)
    finally:
        end_job()


def _widths(options: ProfileOptions, environment: Environment) -> list[int]:
    """Tensor-parallel widths that fit into a node."""
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


def _mesh_config(options: ProfileOptions, tp: int, world: int) -> TrainerConfig:
    return _config(options, 1, world, ("--tensor-model-parallel-size", str(tp)))


def _stage_config(options: ProfileOptions, tp: int, size: int, layers: int, world: int) -> Any:
    """Settings of a run with three stages, of which the middle one holds the layers."""
    from megatron.adaptive.training.layer_profile import STAGES

    more = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {STAGES}"
    more += f" --partition 0-{layers}-0 --num-layers {layers}"
    # Each stage is alone here; a head of its own costs what a copy of the embedding does.
    more += " --untie-embeddings-and-output-weights"
    return _config(options, size, STAGES * world, more.split())


def _config(options: ProfileOptions, size: int, world: int, more: Sequence[str]) -> TrainerConfig:
    run = "--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-4"
    run += f" --micro-batch-size {size}"
    if options.backend is not None:
        run += f" --distributed-backend {options.backend}"
    return parse([*options.arguments, *run.split(), *more], world_size=world, last_wins=True)


def _measure(
    options: ProfileOptions,
    job: Any,
    gpu: str,
    tp: int,
    size: int,
    others: dict[str, dict[str, list[float]]],
    *,
    first: bool,
) -> list[dict[str, Any]]:
    """Measure all kinds for one width and size; returns the rows of all GPUs, on every rank."""
    from megatron.adaptive.training.layer_profile import (
        FEW,
        MANY,
        STAGES,
        layer_samples,
        measure_stage,
    )

    def stage(number: int, layers: int, *, optimizer: bool = False) -> Any:
        config = _stage_config(options, tp, size, layers, job.environment.world_size)
        multiple = config.model.make_vocab_size_divisible_by * tp
        return measure_stage(
            config,
            job.accelerator,
            number,
            rows=-(-config.data.vocab_size // multiple) * multiple,
            repeats=options.repeats,
            optimizer=optimizer,
        )

    _say(job, f"tp {tp}, microbatch {size}")
    mine = None
    try:
        few, many = stage(1, FEW, optimizer=first), stage(1, MANY)
        samples, launch_s = layer_samples(stage(0, FEW), few, many, stage(STAGES - 1, FEW))
        mine = {
            "gpu": gpu,
            "kinds": [(one.kind, [getattr(one.sample, n) for n in _TIMES]) for one in samples],
            "launch": launch_s,
            "sigma": (few.sigma + many.sigma) / 2,
            "optimizer": few.optimizer_s / few.parameters,
        }
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    told = [one for one in job.gather(mine) if one is not None]
    if mine is None:
        _say(job, f"tp {tp}, microbatch {size}: not enough memory for {MANY} layers, left out")
    rows = []
    for name in dict.fromkeys(one["gpu"] for one in told):
        its = [one for one in told if one["gpu"] == name]
        for key in ("launch", "sigma"):
            others[key].setdefault(name, []).append(statistics.fmean(one[key] for one in its))
        if first:
            others["optimizer"].setdefault(name, []).extend(one["optimizer"] for one in its)
        rows += _rows(name, tp, size, its)
    return rows


def _rows(gpu: str, tp: int, size: int, told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for index, (kind, _) in enumerate(told[0]["kinds"]):
        columns = zip(*(one["kinds"][index][1] for one in told), strict=True)
        means = dict(zip(_TIMES, map(statistics.fmean, columns), strict=True))
        rows.append(
            {"kind": kind, "gpu": gpu, "tp": tp, "micro_batch": size, "tp_included": True, **means}
        )
    return rows


def _as_file(
    options: ProfileOptions,
    told: Sequence[dict[str, Any]],
    layers: list[dict[str, Any]],
    others: dict[str, dict[str, list[float]]],
    links: Sequence[Any],
    reductions: Sequence[Any],
) -> dict[str, Any]:
    if not layers:
        raise SetupError(
            "nothing was measured: memory does not suffice for the layers; profile with a smaller"
            " --micro-batch-sizes or a wider --tp"
        )
    from megatron.adaptive.profiling.links import link_rows, reduce_rows

    nodes = {}
    for one in told:
        facts = dict(one)
        nodes[facts.pop("name")] = facts
    return {
        "format": FORMAT,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": {"name": options.name, "arguments": list(options.arguments)},
        "nodes": nodes,
        "layers": layers,
        "links": link_rows(links),
        "all_reduce": reduce_rows(reductions),
        "optimizer_s_per_parameter": {
            gpu: statistics.median(values) for gpu, values in others["optimizer"].items()
        },
        "action_sigma": statistics.fmean(map(statistics.median, others["sigma"].values())),
        "launch_s": {gpu: statistics.median(values) for gpu, values in others["launch"].items()},
    }


def _say(job: Any, text: str) -> None:
    """Tell the user what is measured, for it takes minutes."""
    if job.is_first:
        print(f"profile: {text}", file=sys.stderr, flush=True)
