"""Started without sizes: profiles the model and takes the planner's best shape of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megatron.adaptive.errors import AdaptiveError, ConfigError
from megatron.adaptive.modules.assembly import Cut, check_weights
from megatron.adaptive.modules.forwards import Forward
from megatron.adaptive.modules.mesh import Job, check_pipeline_size
from megatron.adaptive.modules.orders import Orders, choose_placement
from megatron.adaptive.modules.partition import balanced, given_partition
from megatron.adaptive.modules.profiler import ModuleProfile, ProfileRequest, measure_profile
from megatron.adaptive.planner.running import Option, Running, choose_option

__all__ = ["Chosen", "Wanted", "check_wanted", "choose_shape", "measure"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a user gave of the shape.

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
    """What the planner chose, and why.

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
    placement = choose_placement(wanted.schedule, 2, wanted.chunks)
    orders = Orders(schedule=wanted.schedule, placement=placement, pp_rank=0, split=wanted.split)
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
    return measure_profile(job, request), placement.num_chunks, splits


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
