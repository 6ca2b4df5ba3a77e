"""Determines the layout of a pipeline from the user's settings, the planner or a launcher.

``python -m megatron.adaptive train elastic`` is the launcher of an elastic job, in which the layout
may change. The launcher passes the layout to the ranks as a :class:`JobOrder`::

    first start     measure the model ──> model.json ──> all ranks exit, and the launcher plans
    later starts    use the layout in the JobOrder, or measure again if the model has changed

The launcher plans the layout, because only the launcher knows which machines join and leave.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.adaptive.config.environment import EXIT_MEASURED, JobOrder
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.config.schedule_specs import schedule_spec, why_whole_backward
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.modules.assembly import PipelineSettings
from megatron.adaptive.modules.batch import is_list, require_whole
from megatron.adaptive.modules.cutting import (
    balanced,
    check_weights,
    given_partition,
    read_partition,
)
from megatron.adaptive.modules.mesh import Mesh, check_pipeline_size, join_job, make_mesh
from megatron.adaptive.modules.profiler import ModuleProfile, Profiler
from megatron.adaptive.modules.recording import RecordingCache, SampledModel
from megatron.adaptive.modules.request_checks import request_signature, require_alike
from megatron.adaptive.planner.job_shape import Option, Running, choose_option
from megatron.adaptive.planner.measured_module import MeasuredModule, measured_cluster, node_numbers
from megatron.adaptive.schedule.catalog import is_rule, placement_for, splits_backward
from megatron.adaptive.schedule.stage_placement import Placement

# Number of W actions per weight gradient under a run-time rule.
_PIECES = 4


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Contains the layout that the planner chose, and alternatives.

    Attributes:
        best: Chosen layout, with ``pipeline_size``, ``replicas``, ``micro_batch_size``,
            ``partition``, and the predicted time of a step in ``seconds``.
        others: Other simulated layouts, fastest first.
        batch_size: Number of samples per step, over all replicas.
        weights: Time of each segment for a microbatch of the chosen size, in seconds.
        profile: Measurements on which the choice is based.
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
            return f"{text}; no other layout is possible"
        other = self.others[0]
        more = 100 * (other.seconds / best.seconds - 1) if best.seconds else 0.0
        return f"{text}; next best is {other}: {_time(other.seconds)}, {more:.0f}% more"


def _time(seconds: float) -> str:
    return f"{number_text(seconds)} s" if seconds >= 1 else f"{number_text(seconds * 1e3)} ms"


class JobEnded(SystemExit):
    """Raised to exit a rank's program on purpose. The job may continue in another layout."""


@dataclass(frozen=True, kw_only=True)
class SettledSizes:
    """Contains the layout of a job and its origin (the settings, the planner or a launcher).

    Attributes:
        mesh: Replica and pipeline position of this process, and its process groups.
        request: Settings of the user, with all sizes set.
        plan: Layout that the planner chose; ``None`` if the planner was not used.
        order: Layout from the launcher of an elastic job; ``None`` if the job is not elastic.
        recordings: Recordings of the model that were made while the layout was determined.
    """

    mesh: Mesh
    request: PipelineSettings
    plan: Chosen | None
    order: JobOrder | None
    recordings: RecordingCache


def settle_sizes(request: PipelineSettings) -> SettledSizes:
    """Connects to the other processes, and determines the layout. All ranks must call this.

    Args:
        request: Settings of the user, in which sizes may be missing.

    Raises:
        ConfigError: If no layout is possible, or a setting is invalid.
        JobEnded: If the model was measured only for the launcher, which then plans a layout and
            restarts the ranks.
    """
    job = join_job(request.timeout_s)
    plan: Chosen | None = None
    recordings = RecordingCache()
    try:
        # Compare the settings of all ranks first, because the sizes in them determine which process
        # groups are created.
        require_alike(request, job)
        text = job.environment.job
        order = None if text is None else JobOrder.from_text(text)
        if order is not None:
            request = _ordered(job, order, request)
        elif (alone := _of_one_process(job, request, recordings)) is not None:
            request = alone
        elif request.micro_batch_size is None or request.pipeline_size == "auto":
            plan = _choose(job, request, recordings)
            best = plan.best
            request = dataclasses.replace(
                request,
                pipeline_size=best.pipeline_size,
                micro_batch_size=best.micro_batch_size,
                partition=best.partition,
                weights=plan.weights,
            )
        assert request.pipeline_size != "auto"
        mesh = make_mesh(job, request.pipeline_size)
    except Exception:
        job.close_after_error()
        raise
    return SettledSizes(mesh=mesh, request=request, plan=plan, order=order, recordings=recordings)


def _ordered(job: Job, order: JobOrder, request: PipelineSettings) -> PipelineSettings:
    """Returns ``request`` with the layout in ``order``, which an elastic job's launcher planned.

    If the launcher planned the layout for a different model, the current model is measured and the
    program exits.
    """
    if is_list(request.sample_batch):
        raise ConfigError(
            "sample_batch must be a dictionary of tensors in an elastic job, because the "
            "launcher cannot choose a microbatch size for a list; pass a dictionary as "
            "sample_batch (Pipeline.step still accepts lists)"
        )
    world_size = dist.get_world_size()
    if order.signature and order.pipeline_size * order.replicas != world_size:
        raise ConfigError(
            f"the job planned {order.replicas} pipelines of {order.pipeline_size} processes, but "
            f'there are {world_size} processes; start the script only with "python -m '
            'megatron.adaptive train elastic"'
        )
    if request_signature(request) != order.signature:
        _measure_for_job(job, order, request)
    settled = dataclasses.replace(
        request,
        pipeline_size=order.pipeline_size,
        micro_batch_size=order.micro_batch_size,
        partition=order.partition,
    )
    model = MeasuredModule.read(Path(order.model)) if request.weights is None else None
    if model is None:
        return settled
    # Also set the costs of the segments, because the search for slow ranks compares the time of
    # each stage with its cost.
    return dataclasses.replace(settled, weights=model.costs(order.micro_batch_size))


def choose_placement(schedule: str, num_ranks: int, chunks: int | None) -> Placement:
    """Returns the assignment of stages to ranks that a schedule uses.

    Args:
        schedule: Name of the schedule.
        num_ranks: Number of ranks of the pipeline.
        chunks: Number of stages per rank; ``None`` uses the schedule's default.

    Raises:
        ConfigError: If the schedule requires a different number of stages per rank, or does not
            support training.
        ScheduleError: If the schedule does not exist.
    """
    if schedule == "forward-only":
        raise ConfigError(
            "schedule forward-only does not support training; choose another schedule"
        )
    num_chunks = schedule_spec(schedule).least_chunks if chunks is None else chunks
    placement = placement_for(schedule, num_ranks, num_chunks)
    if chunks is not None and placement.num_chunks != chunks:
        raise ConfigError(
            f"schedule {schedule} requires chunks={placement.num_chunks}, got {chunks}; remove "
            "chunks"
        )
    return placement


def choose_orders(request: PipelineSettings, num_ranks: int, pp_rank: int) -> Orders:
    """Returns the object that determines the order of a rank's actions.

    Args:
        request: Settings of the pipeline.
        num_ranks: Number of ranks of the pipeline.
        pp_rank: Position of this rank in the pipeline.

    Raises:
        ConfigError: If ``chunks`` or ``split_backward`` contradicts the schedule.
        ScheduleError: If the schedule does not exist.
    """
    schedule = request.schedule
    split = request.split_backward
    placement = choose_placement(schedule, num_ranks, request.chunks)
    if is_rule(schedule):
        recompute = "full" if request.recompute == "all" else None
        by_default = (
            num_ranks > 1
            and schedule_spec(schedule).splits_backward == "by default"
            and not why_whole_backward(recompute=recompute, overlaps=False, replicas=1)
        )
        splits = by_default if split is None else split
    else:
        splits = splits_backward(schedule)
        if split not in (None, splits):
            raise ConfigError(
                f"split_backward={split} conflicts with schedule {schedule}, which "
                f"{'splits' if splits else 'does not split'} the backward pass; remove "
                "split_backward"
            )
    return Orders(
        schedule=schedule,
        placement=placement,
        pp_rank=pp_rank,
        cap=request.activation_cap,
        splits=splits,
        pieces=_PIECES,
    )


def _of_one_process(
    job: Job, request: PipelineSettings, recordings: RecordingCache
) -> PipelineSettings | None:
    """Chooses the microbatch size without measurements if there is only one process.

    With a single process, the largest microbatch is the fastest.

    Args:
        job: Job that the process has joined.
        request: Settings of the user, in which sizes may be missing.
        recordings: Cache of recordings of the model.

    Returns:
        Settings with all sizes; ``None`` if there are several processes, if ``micro_batch_size`` is
            set, or if not even one sample is expected to fit in memory.
    """
    is_alone = dist.get_world_size() == 1 and request.pipeline_size in (None, "auto", 1)
    if not is_alone or request.micro_batch_size is not None:
        return None
    require_whole(1, batch_size=request.samples)
    profiler = Profiler(**_sampled_model(request), memory_limit_bytes=request.memory_limit_bytes)
    size = profiler.largest_that_fits(job, request.samples, recordings)
    if not size:
        return None
    plural = "" if size == 1 else "s"
    print(f"plan: 1 process, microbatches of {size} sample{plural}", flush=True)
    return dataclasses.replace(request, pipeline_size=1, micro_batch_size=size)


def _sampled_model(request: PipelineSettings) -> dict[str, Any]:
    """Returns the settings in ``request`` that belong to :class:`SampledModel`, keyed by name."""
    return {spec.name: getattr(request, spec.name) for spec in dataclasses.fields(SampledModel)}


def _choose(job: Job, request: PipelineSettings, recordings: RecordingCache) -> Chosen:
    """Measures the model, and plans a layout for all ranks. All ranks must call this.

    ``request`` contains the user's settings, and ``recordings`` is a cache of recordings.
    """
    require_whole(1, batch_size=request.samples)
    if request.pipeline_size == "auto":
        request = dataclasses.replace(request, pipeline_size=None)
    elif request.pipeline_size is not None:
        check_pipeline_size(request.pipeline_size)
    profile, module = _measure(job, request, recordings)
    answer = job.on_first(lambda: _plan(module, request, profile))
    if job.rank == 0:
        print(f"plan: {printable(str(answer))}", flush=True)
    return answer


def _measure(
    job: Job, request: PipelineSettings, recordings: RecordingCache
) -> tuple[ModuleProfile, MeasuredModule]:
    """Measures the model, and returns its profile and the measured model for the planner.

    All ranks must call this. ``request`` contains the user's settings, and ``recordings`` is a
    cache of recordings.
    """
    size = request.micro_batch_size
    pipeline_size = request.pipeline_size
    # Call choose_orders() before measuring, so that invalid settings raise an error early.
    orders = choose_orders(request, 2, 0)
    # Also measure the split backward pass in an elastic job with one process, because the job may
    # continue with more processes.
    may_split = dist.get_world_size() > 1 or job.environment.job is not None
    splits = orders.weight_pieces > 0 and may_split
    profiler = Profiler(
        **_sampled_model(request),
        micro_batch_sizes=None if size is None else (size,),
        split_backward=splits,
        memory_limit_bytes=request.memory_limit_bytes,
    )
    # Larger microbatches would leave fewer microbatches per step than there are processes.
    most = max(1, request.samples // dist.get_world_size())
    profile = profiler.measure(
        job, batch_size=request.samples, most=most, is_quick=True, recordings=recordings
    )
    check_weights(request.weights, len(profile.cut_points) + 1)
    return profile, MeasuredModule(
        signature=request_signature(request),
        name=profile.name,
        whole=profile.document(split=False),
        split=profile.document(split=True) if splits else None,
        element_bytes=profile.parts[0].element_bytes,
        hosts=profile.hosts,
        batch_size=request.samples,
        most=profile.micro_batch_sizes[-1],
        schedule=request.schedule,
        chunks=orders.placement.num_chunks,
        cap=request.activation_cap,
        pipeline_size=pipeline_size if isinstance(pipeline_size, int) else None,
        micro_batch_size=size,
        partition=None if request.partition is None else read_partition(request.partition),
        weights=None if request.weights is None else tuple(request.weights),
        is_random=any(part.is_random for part in profile.parts),
    )


def _plan(module: MeasuredModule, request: PipelineSettings, profile: ModuleProfile) -> Chosen:
    """Returns the layout that the planner chooses for the measured model ``module``.

    The planner keeps the sizes that the user set in ``request``. ``profile`` contains the
    measurements on which the choice is based.
    """
    count = len(profile.cut_points) + 1
    size = request.pipeline_size
    sizes: tuple[int, ...] = (size,) if isinstance(size, int) else ()
    if not sizes and request.partition is not None:
        sizes = _sizes_of(request, count)

    def partition(num_stages: int) -> tuple[int, ...] | None:
        if request.partition is not None:
            return given_partition(request.partition, count, num_stages)
        return None if request.weights is None else balanced(request.weights, num_stages)

    micro_batch_size = module.micro_batch_size
    whole = module.profile(split=False)
    best, *others = choose_option(
        Running(
            model=module.model,
            cluster=measured_cluster(module.hosts, whole),
            order=node_numbers([host.type for host in module.hosts]),
            batch=module.batch_size,
            schedule=module.schedule,
            chunks=module.chunks,
            whole=whole,
            split=None if module.split is None else module.profile(split=True),
            cap=module.cap,
        ),
        pipeline_sizes=sizes,
        micro_batches=() if micro_batch_size is None else (micro_batch_size,),
        partition=partition,
        least=module.least,
        most=module.most,
    )
    return Chosen(
        best=best,
        others=tuple(others),
        batch_size=module.batch_size,
        weights=module.weights or module.costs(best.micro_batch_size),
        profile=profile,
    )


def _sizes_of(request: PipelineSettings, num_segments: int) -> tuple[int, ...]:
    """Returns the pipeline sizes that match the number of stages in the user's partition.

    ``request`` contains the partition, and ``num_segments`` is the number of segments of the model.
    """
    partition = request.partition
    assert partition is not None
    stages = len(partition.split("-") if isinstance(partition, str) else tuple(partition))
    sizes = [
        size
        for size in range(1, dist.get_world_size() + 1)
        if choose_placement(request.schedule, size, request.chunks).num_stages == stages
    ]
    if not sizes:
        given_partition(partition, num_segments, stages)
        raise ConfigError(
            f"partition has {stages} stages, but no number of processes gives {stages} stages "
            f"with schedule {request.schedule}; use another partition, or set chunks"
        )
    return tuple(sizes)


def _measure_for_job(job: Job, order: JobOrder, request: PipelineSettings) -> None:
    """Measures the model for the launcher, which then plans a layout and restarts the ranks.

    Raises:
        JobEnded: Always raised after the measurement.
    """
    size = request.micro_batch_size
    if size is not None and request.samples % size:
        raise ConfigError(
            f"batch_size must be a multiple of micro_batch_size {size}, got {request.samples}; "
            f"use a multiple of {size}, or remove micro_batch_size"
        )
    _, module = _measure(job, request, RecordingCache())

    def write() -> None:
        if order.signature:
            print(
                "the model differs from the model that the job was planned for; planning again",
                flush=True,
            )
        try:
            module.write(Path(order.model))
        except OSError as error:
            raise CheckpointError(
                f"{order.model}: {error.strerror or error}; free space there, or choose another"
                " folder with --checkpoint"
            ) from error

    job.on_first(write)
    job.close()
    raise JobEnded(EXIT_MEASURED)
