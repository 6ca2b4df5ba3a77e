"""Settles the sizes of a job: as given, as the planner chooses here, or as a job orders them.

A job that changes its shape is started by ``python -m megatron.adaptive run``::

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
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron.adaptive.config.environment import EXIT_MEASURED, JobOrder
from megatron.adaptive.config.schedule import SEVERAL_CHUNKS, parse_partition
from megatron.adaptive.engine.job import Job
from megatron.adaptive.engine.orders import Orders, weight_pieces
from megatron.adaptive.errors import AdaptiveError, CheckpointError, ConfigError
from megatron.adaptive.modules.assembly import Cut, check_weights
from megatron.adaptive.modules.cutting import balanced, given_partition
from megatron.adaptive.modules.mesh import Mesh, check_pipeline_size, join_job, make_mesh
from megatron.adaptive.modules.profiler import ModuleProfile, ProfileRequest, measure_profile
from megatron.adaptive.modules.recording import Forward
from megatron.adaptive.planner.measured_module import MeasuredHost, MeasuredModule
from megatron.adaptive.planner.running import Option, Running, choose_option
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.registry import is_rule, placement_for, splits_backward

__all__ = [
    "Chosen",
    "JobEnded",
    "Placed",
    "Wanted",
    "check_wanted",
    "choose_shape",
    "measure",
    "place",
]


_PIECES = 4  # of a weight gradient, under a rule
_SPLITTING_RULES = ("adaptive", "hinted")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Holds what a user gave of the shape.

    Attributes:
        pipeline_size: processes of a pipeline; ``auto``, or ``None`` without a microbatch, leaves
            them to the planner.
        micro_batch_size: samples of a microbatch; ``None`` leaves them to the planner.
        batch_size: samples of a step over all replicas.
        schedule, chunks, cap, split: see :class:`~megatron.adaptive.modules.pipeline.Pipeline`.
    """

    pipeline_size: int | Literal["auto"] | None
    micro_batch_size: int | None
    batch_size: int
    schedule: str
    chunks: int | None
    cap: float | None
    split: bool | None

    @property
    def is_open(self) -> bool:
        """Whether anything is left to the planner."""
        return self.micro_batch_size is None or self.pipeline_size == "auto"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Holds the planner's choice, and its reasons.

    Attributes:
        best: what is used; its ``pipeline_size``, ``replicas``, ``micro_batch_size``,
            ``partition`` and ``seconds``, which are predicted for a step.
        others: next best shapes that were timed, best first.
        batch_size: samples of a step over all replicas.
        weights: seconds of each segment with microbatches of that size.
        profile: what the choice stands on.
    """

    best: Option
    others: tuple[Option, ...]
    batch_size: int
    weights: tuple[float, ...]
    profile: ModuleProfile

    def __str__(self) -> str:
        best = self.best
        text = f"{best}: {_time(best.seconds)} predicted for a step of {self.batch_size} samples"
        if not self.others:
            return f"{text}; no other shape is possible"
        other = self.others[0]
        more = 100 * (other.seconds / best.seconds - 1) if best.seconds else 0.0
        return f"{text}; next best is {other}: {_time(other.seconds)}, {more:.0f}% more"


def choose_placement(schedule: str, num_ranks: int, chunks: int | None) -> Placement:
    """Return where stages live under a schedule.

    Args:
        schedule: its name.
        num_ranks: ranks of the pipeline.
        chunks: stages of each rank, chosen by the schedule where ``None``.

    Raises:
        ConfigError: the schedule has another number.
        ScheduleError: there is no such schedule.
    """
    if schedule == "forward-only":
        raise ConfigError("schedule forward-only trains nothing: eval() uses it; choose another")
    wanted = (2 if schedule in SEVERAL_CHUNKS else 1) if chunks is None else chunks
    placement = placement_for(schedule, num_ranks, wanted)
    if chunks is not None and placement.num_chunks != chunks:
        raise ConfigError(
            f"chunks {chunks} was given with schedule {schedule}, which has "
            f"{placement.num_chunks} per rank: leave chunks out"
        )
    return placement


def choose_orders(
    schedule: str,
    num_ranks: int,
    pp_rank: int,
    *,
    chunks: int | None = None,
    cap: float | None = None,
    split: bool | None = None,
) -> Orders:
    """Returns the order of work of a rank under a schedule.

    Args:
        schedule: its name.
        num_ranks: ranks of the pipeline.
        pp_rank: which of them.
        chunks: stages of each rank, chosen by the schedule where ``None``.
        cap: most activations of a rank, in microbatches over all its chunks; ``None`` for the
            default.
        split: backwards leave weight gradients; chosen by the schedule where ``None``.

    Raises:
        ConfigError: the schedule has another number of chunks, or splits backwards otherwise.
        ScheduleError: there is no such schedule.
    """
    placement = choose_placement(schedule, num_ranks, chunks)
    rule = is_rule(schedule)
    if rule:
        splits = num_ranks > 1 and schedule in _SPLITTING_RULES if split is None else split
    else:
        splits = splits_backward(schedule)
        if split not in (None, splits):
            raise ConfigError(
                f"split_backward={split} was given, but schedule {schedule} "
                f"{'has' if splits else 'has no'} weight gradients as work of their own: leave it "
                "out"
            )
    return Orders(
        schedule=schedule,
        placement=placement,
        pp_rank=pp_rank,
        cap=cap,
        weight_pieces=weight_pieces(_PIECES, splits=splits, is_rule=rule),
    )


def choose_shape(
    job: Job,
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    cut: Cut,
    wanted: Wanted,
    memory_limit_bytes: float | None,
) -> Chosen:
    """Profile and plan. Collective over all ranks; the same on all of them.

    Args:
        job: this process among all.
        forward: the model, wholly there.
        sample: a batch.
        cut: how the model is to be cut.
        wanted: what the user gave.
        memory_limit_bytes: of a process; what is free where ``None``.

    Raises:
        ConfigError: nothing is possible; says what would help.
    """
    wanted = check_wanted(wanted)
    profile, chunks, splits = measure(job, forward, sample, cut, wanted, memory_limit_bytes)
    answer: Chosen | AdaptiveError | None = None
    if job.rank == 0:
        try:
            answer = _plan(profile, wanted, cut, chunks, splits=splits)
        except AdaptiveError as error:
            answer = error
    answer = job.from_first(answer)
    if isinstance(answer, AdaptiveError):
        raise answer
    assert answer is not None
    if job.rank == 0:
        print(f"plan: {answer}", flush=True)
    return answer


def check_wanted(wanted: Wanted) -> Wanted:
    """Return what the user gave with a pipeline size that is a number or ``None``.

    Raises:
        ConfigError: a size is wrong.
    """
    if type(wanted.batch_size) is not int or wanted.batch_size < 1:
        raise ConfigError(
            f"batch_size {wanted.batch_size!r}: give a whole number of samples from 1 on"
        )
    if wanted.pipeline_size == "auto":
        return dataclasses.replace(wanted, pipeline_size=None)
    if wanted.pipeline_size is not None:
        check_pipeline_size(wanted.pipeline_size)
    return wanted


def measure(
    job: Job,
    forward: Forward,
    sample: Mapping[str, torch.Tensor],
    cut: Cut,
    wanted: Wanted,
    memory_limit_bytes: float | None,
) -> tuple[ModuleProfile, int, bool]:
    """Profile a model as a plan needs it. Collective; arguments as of :func:`choose_shape`.

    Returns:
        The profile, stages of each process, and whether the schedule splits backwards.

    Raises:
        ConfigError: the model or a setting breaks a rule.
    """
    size = wanted.micro_batch_size
    # As several ranks would run it; what is wrong with it is said before anything is measured.
    orders = choose_orders(wanted.schedule, 2, 0, chunks=wanted.chunks, split=wanted.split)
    splits = orders.weight_pieces > 0
    request = ProfileRequest(
        forward=forward,
        sample=sample,
        groups=cut.groups,
        slicing=cut.slicing,
        sizes=() if size is None else (size,),
        # With larger ones there would be fewer microbatches than processes.
        most=max(1, wanted.batch_size // dist.get_world_size()),
        split=splits,
        memory_limit_bytes=memory_limit_bytes,
        name=type(forward.model).__name__,
    )
    return measure_profile(job, request), orders.placement.num_chunks, splits


def _plan(profile: ModuleProfile, wanted: Wanted, cut: Cut, chunks: int, *, splits: bool) -> Chosen:
    count = len(profile.cut_points) + 1
    check_weights(cut.weights, count)
    size = wanted.pipeline_size
    sizes: tuple[int, ...] = (size,) if isinstance(size, int) else ()
    if not sizes and cut.partition is not None:
        sizes = _sizes_of(wanted, cut, count)

    def partition(num_stages: int) -> tuple[int, ...] | None:
        if cut.partition is not None:
            return given_partition(cut.partition, count, num_stages)
        return None if cut.weights is None else balanced(cut.weights, num_stages)

    found = choose_option(
        Running(
            model=profile.model,
            cluster=profile.cluster,
            order=profile.order,
            batch=wanted.batch_size,
            schedule=wanted.schedule,
            chunks=chunks,
            whole=profile.times(split=False),
            split=profile.times(split=True) if splits else None,
            cap=wanted.cap,
        ),
        pipeline_sizes=sizes,
        micro_batches=() if wanted.micro_batch_size is None else (wanted.micro_batch_size,),
        partition=partition,
        most=profile.micro_batch_sizes[-1],
    )
    best, *others = found
    nearest = max(s for s in profile.micro_batch_sizes if s <= best.micro_batch_size)
    return Chosen(
        best=best,
        others=tuple(others),
        batch_size=wanted.batch_size,
        weights=tuple(cut.weights or profile.weights(nearest)),
        profile=profile,
    )


def _sizes_of(wanted: Wanted, cut: Cut, num_segments: int) -> tuple[int, ...]:
    """Return the pipeline size that a given partition makes."""
    assert cut.partition is not None
    stages = len(
        cut.partition.split("-") if isinstance(cut.partition, str) else tuple(cut.partition)
    )
    sizes: Sequence[int] = [
        size
        for size in range(1, dist.get_world_size() + 1)
        if choose_placement(wanted.schedule, size, wanted.chunks).num_stages == stages
    ]
    if not sizes:
        given_partition(cut.partition, num_segments, stages)
        raise ConfigError(
            f"partition of {stages} stages: no number of processes has so many under schedule "
            f"{wanted.schedule}; give another partition, or chunks"
        )
    return tuple(sizes)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


class JobEnded(SystemExit):
    """Ends a rank's program in good order: the job goes on without it, or in another shape."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Places a process in its job, with what was settled of the shape.

    Attributes:
        mesh: the job.
        cut: how the model is cut.
        wanted: sizes, none of them open.
        plan: the choice, where one was made here.
        order: of the job, ``None`` where nothing changes its shape.
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
    """Return sizes and partition as given, chosen here or ordered by the job."""
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
    """Returns a digest of this model and of what is wanted of it."""
    content: dict[str, Any] = {
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
    text = json.dumps(content, default=list, sort_keys=True)
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
