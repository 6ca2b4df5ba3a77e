"""A pipeline within a job that changes its shape: started by ``python -m megatron.adaptive run``.

::

    first start     measure the model ──> model.json ──> all ranks end: the job plans with it
    every other     shape of the order, if the model is the one that was measured; else measure anew

The job plans, not its ranks: only it knows which machines come and go.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.config.job import EXIT_MEASURED, JobOrder
from megatron.adaptive.config.partition import parse_partition
from megatron.adaptive.errors import AdaptiveError, CheckpointError, ConfigError
from megatron.adaptive.modules.assembly import Cut, check_weights
from megatron.adaptive.modules.automatic import Chosen, Wanted, choose_shape, measure
from megatron.adaptive.modules.forwards import Forward
from megatron.adaptive.modules.mesh import Job, Mesh, join_job, make_mesh
from megatron.adaptive.modules.profiler import ModuleProfile
from megatron.adaptive.planner.measured_module import MeasuredHost, MeasuredModule

__all__ = ["JobEnded", "Placed", "place"]


class JobEnded(SystemExit):
    """Ends a rank's program in good order: the job goes on without it, or in another shape."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a pipeline's process stands, and what was settled of its shape.

    Attributes:
        mesh: the job.
        cut: how the model is cut.
        wanted: sizes, none of them open.
        plan: the choice, where one was made here.
        order: what the job told, ``None`` where nothing changes its shape.
    """

    mesh: Mesh
    cut: Cut
    wanted: Wanted
    plan: Chosen | None
    order: JobOrder | None


def place(
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    cut: Cut,
    wanted: Wanted,
    memory_limit_bytes: float | None,
    timeout_s: float,
) -> Placed:
    """Meet the other processes, and take or choose the shape of the job. Collective.

    Args:
        forward: the model, wholly there.
        sample: a batch.
        cut: how the model is to be cut.
        wanted: what the user gave.
        memory_limit_bytes: of a process; what is free where ``None``.
        timeout_s: limit of waits for other processes.

    Raises:
        ConfigError: nothing is possible, or a setting breaks a rule.
        JobEnded: the model was measured, and the job is to start it in a shape.
    """
    job = join_job(timeout_s)
    try:
        text = job.environment.job
        order = None if text is None else JobOrder.from_text(text)
        cut, wanted, plan = _settle(job, order, forward, sample, cut, wanted, memory_limit_bytes)
        mesh = make_mesh(job, wanted.pipeline_size)  # type: ignore[arg-type]
    except AdaptiveError:
        job.close()
        raise
    return Placed(mesh=mesh, cut=cut, wanted=wanted, plan=plan, order=order)


def _settle(
    job: Job,
    order: JobOrder | None,
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    cut: Cut,
    wanted: Wanted,
    memory_limit_bytes: float | None,
) -> tuple[Cut, Wanted, Chosen | None]:
    """Return sizes and partition as given, chosen here or told by the job."""
    if order is not None:
        _require_world(order)
        sizes = (order.pipeline_size, order.micro_batch_size, order.partition)
        if _signature(forward, sample, cut, wanted, memory_limit_bytes) != order.signature:
            _measure(job, order, forward, sample, cut, wanted, memory_limit_bytes)
        plan, (pipeline_size, micro_batch_size, partition) = None, sizes
        known = MeasuredModule.read(Path(order.model)) if cut.weights is None else None
        if known is not None:  # a diagnosis needs to know what each stage should take
            cut = dataclasses.replace(cut, weights=known.costs(micro_batch_size))
    elif wanted.is_open:
        plan = choose_shape(job, forward, sample, cut, wanted, memory_limit_bytes)
        best = plan.best
        pipeline_size, micro_batch_size = best.pipeline_size, best.micro_batch_size
        partition = best.partition
        cut = dataclasses.replace(cut, weights=plan.weights)
    else:
        return cut, wanted, None
    cut = dataclasses.replace(cut, partition=partition)
    wanted = dataclasses.replace(
        wanted, pipeline_size=pipeline_size, micro_batch_size=micro_batch_size
    )
    return cut, wanted, plan


def _measure(
    job: Job,
    order: JobOrder,
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    cut: Cut,
    wanted: Wanted,
    memory_limit_bytes: float | None,
) -> None:
    """Measure the model for the job, and end; it starts the ranks again.

    Raises:
        JobEnded: always, where nothing is wrong.
    """
    size = wanted.micro_batch_size
    if size is not None and wanted.batch_size % size:
        raise ConfigError(
            f"batch_size {wanted.batch_size} does not divide into microbatches of {size}: give a"
            f" multiple of {size}, or leave micro_batch_size to the job"
        )
    # Of how many processes a pipeline is, the job decides for whatever is there.
    open_ = dataclasses.replace(wanted, pipeline_size=None)
    profile, chunks, splits = measure(job, forward, sample, cut, open_, memory_limit_bytes)
    check_weights(cut.weights, len(profile.cut_points) + 1)
    signature = _signature(forward, sample, cut, wanted, memory_limit_bytes)
    made = _module(job, profile, cut, wanted, signature, chunks=chunks, splits=splits)
    problem: AdaptiveError | None = None
    if job.rank == 0:
        if order.signature:
            print("the model is not the one that the job was planned for: planned anew", flush=True)
        try:
            made.write(Path(order.model))
        except OSError as error:
            problem = CheckpointError(
                f"{order.model}: {error.strerror or error}: free space there, or name another"
                " folder with --checkpoint"
            )
    problem = job.from_first(problem)
    if problem is not None:
        raise problem
    job.close()
    raise JobEnded(EXIT_MEASURED)


def _module(
    job: Job,
    profile: ModuleProfile,
    cut: Cut,
    wanted: Wanted,
    signature: str,
    *,
    chunks: int,
    splits: bool,
) -> MeasuredModule:
    hosts: dict[str, MeasuredHost] = {}
    for place, name, node in zip(job.places, profile.names, profile.nodes, strict=True):
        hosts.setdefault(
            place["host"],
            MeasuredHost(
                host=place["host"],
                type=name,
                gpu=node["facts"]["gpu"],
                processes=node["processes"],
                memory_bytes=node["limit"],
                shares_memory=not job.accelerator.is_cuda,
            ),
        )
    size = wanted.pipeline_size
    return MeasuredModule(
        signature=signature,
        name=profile.name,
        whole=profile.document(split=False),
        split=profile.document(split=True) if splits else None,
        element_bytes=profile.parts[0].element_bytes,
        hosts=tuple(hosts.values()),
        batch_size=wanted.batch_size,
        most=profile.micro_batch_sizes[-1],
        schedule=wanted.schedule,
        chunks=chunks,
        cap=wanted.cap,
        pipeline_size=size if isinstance(size, int) else None,
        micro_batch_size=wanted.micro_batch_size,
        partition=_numbers(cut.partition),
        weights=None if cut.weights is None else tuple(cut.weights),
        is_random=any(part.is_random for part in profile.parts),
    )


def _numbers(partition: str | Sequence[int] | None) -> tuple[int, ...] | None:
    if partition is None:
        return None
    try:
        return parse_partition(partition) if isinstance(partition, str) else tuple(partition)
    except ValueError as error:
        raise ConfigError(f"partition: {error}") from None


def _signature(
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    cut: Cut,
    wanted: Wanted,
    memory_limit_bytes: float | None,
) -> str:
    """What tells this model, and what is wanted of it, from another one."""
    told: dict[str, Any] = {
        "model": type(forward.model).__qualname__,
        "parameters": [
            [name, list(one.shape), str(one.dtype)]
            for name, one in forward.model.named_parameters()
        ],
        "cuts": [
            name for name, one in forward.model.named_modules() if type(one).__name__ == "CutPoint"
        ],
        "sample": [[name, list(one.shape[1:]), str(one.dtype)] for name, one in sample.items()],
        "cut": dataclasses.astuple(cut),
        "wanted": dataclasses.astuple(wanted),
        "memory": memory_limit_bytes,
        "autocast": str(forward.autocast),
    }
    text = json.dumps(told, default=list, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _require_world(order: JobOrder) -> None:
    """Refuse an order for another number of processes.

    Raises:
        ConfigError: there are more or fewer.
    """
    if order.signature and order.pipeline_size * order.replicas != dist.get_world_size():
        raise ConfigError(
            f"the job planned {order.replicas} pipelines of {order.pipeline_size} processes, and"
            f" there are {dist.get_world_size()}: start the script with python -m megatron.adaptive"
            " run alone"
        )
