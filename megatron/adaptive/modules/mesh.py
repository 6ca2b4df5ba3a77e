"""This process within the job: device, replicas and pipelines, and the groups for their sums."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.accelerator import Accelerator, detect
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.build import gather_places
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.transport.liveness import here

__all__ = ["Job", "Mesh", "check_pipeline_size", "join_job", "make_mesh"]

_JOBS = "megatron-adaptive-jobs"


@dataclass(kw_only=True)
class Job:
    """This process among all of the job.

    Attributes:
        environment: what the launcher said.
        accelerator: its device.
        control_group: gloo group of all ranks.
        places: where every rank runs.
        owns_job: the job was begun here and ends with :meth:`close`.
        timeout: limit of waits for other ranks.
        before: process groups that were there before.
        made: those that end with :meth:`close`; ``None`` for all that came since.
    """

    environment: Environment
    accelerator: Accelerator
    control_group: Any
    places: list[dict[str, Any]]
    owns_job: bool
    timeout: datetime.timedelta
    before: Sequence[Any] = ()
    made: Sequence[Any] | None = None

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank gave, by rank. Collective over all ranks."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine, group=self.control_group)
        return told

    def from_first(self, mine: Any) -> Any:
        """Return what rank 0 gave. Collective over all ranks."""
        told = [mine]
        dist.broadcast_object_list(told, src=0, group=self.control_group)
        return told[0]

    def settle(self) -> None:
        """Say that all groups are made: those that come later are the user's."""
        self.made = [group for group in _groups() if group not in self.before]

    def close(self) -> None:
        """End what :func:`join_job` began, and groups made since. Collective over all ranks."""
        if self.owns_job:
            dist.destroy_process_group()
            return
        if self.made is None:
            self.settle()
        dist.barrier()  # nobody waits in one of them any more
        # Each has threads. In the order they were made in, which is that of all members of each.
        for group in self.made or ():
            if group in _groups():
                dist.destroy_process_group(group)


@dataclass(kw_only=True)
class Mesh(Job):
    """Where this process stands in its pipeline.

    Attributes:
        pipeline_size, pp_rank: stages' ranks of a replica, and which of them this is.
        dp_size, dp_rank: replicas, and which of them this is.
        pp_ranks: global ranks of this replica, by position.
        dp_group: ranks of the same position in all replicas.
    """

    pipeline_size: int
    pp_rank: int
    dp_size: int
    dp_rank: int
    pp_ranks: list[int]
    dp_group: Any

    def groups_of(self, position_sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Make a group for each set of positions in each replica. Collective over all ranks.

        Args:
            position_sets: sets of positions in the pipeline, the same on all ranks.

        Returns:
            The groups that this rank is in.
        """
        found = {}
        for positions in position_sets:
            for pp_ranks in sorted(set(map(tuple, self.gather(self.pp_ranks)))):
                members = [pp_ranks[position] for position in positions]
                group = dist.new_group(
                    members, backend=self.accelerator.backend, timeout=self.timeout
                )
                if list(pp_ranks) == self.pp_ranks and self.pp_rank in positions:
                    found[positions] = group
        return found

    def close(self) -> None:
        """End what :func:`make_mesh` and :func:`join_job` began. Collective over all ranks."""
        parallel_state.destroy_model_parallel()
        super().close()


def _groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)


@functools.cache
def _store_of_process(timeout: datetime.timedelta) -> Any:
    """What ranks meet in, for all jobs that the process begins: rank 0 may serve it."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


def join_job(timeout_s: float) -> Job:
    """Connect this process with the others. Collective over all ranks.

    Args:
        timeout_s: limit of waits for other ranks.
    """
    environment = Environment.read()
    accelerator = detect(environment.local_rank)
    timeout = datetime.timedelta(seconds=timeout_s)
    owns_job = not dist.is_initialized()
    before = [] if owns_job else _groups()
    if owns_job and environment.is_launched:
        rank, world_size = environment.rank, environment.world_size
        store = _store_of_process(timeout)
        # Under other names in every job: in the store are the addresses of those before.
        turn = store.add(f"{_JOBS}/{rank}", 1)
        dist.init_process_group(
            accelerator.backend,
            store=dist.PrefixStore(f"{_JOBS}/{turn}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    elif owns_job:
        store = dist.HashStore()
        dist.init_process_group(
            accelerator.backend, store=store, rank=0, world_size=1, timeout=timeout
        )
    job = Job(
        environment=environment,
        accelerator=accelerator,
        control_group=dist.new_group(backend="gloo", timeout=timeout),
        places=[],
        owns_job=owns_job,
        timeout=timeout,
        before=before,
    )
    job.places = job.gather(here(0))
    return job


def check_pipeline_size(size: int) -> int:
    """Return a pipeline size that divides the job's processes.

    Raises:
        ConfigError: it does not.
    """
    world_size = dist.get_world_size()
    if type(size) is not int or size < 1 or world_size % size:
        raise ConfigError(
            f"pipeline_size {size!r} was given to {world_size} processes: give a divisor of their "
            "number"
        )
    return size


def make_mesh(job: Job, pipeline_size: int | None) -> Mesh:
    """Divide the job into pipelines. Collective over all ranks.

    Args:
        job: of all ranks.
        pipeline_size: ranks of a pipeline, all of them where ``None``.

    Raises:
        ConfigError: the ranks do not divide into such pipelines.
    """
    world_size = dist.get_world_size()
    size = check_pipeline_size(world_size if pipeline_size is None else pipeline_size)
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "megatron-core's parallel state is in use already: close the Pipeline before, or do "
            "not initialize it"
        )
    minutes = math.ceil(job.timeout.total_seconds() / 60)
    parallel_state.initialize_model_parallel(1, size, distributed_timeout_minutes=minutes)
    return Mesh(
        environment=job.environment,
        accelerator=job.accelerator,
        control_group=job.control_group,
        places=gather_places(),
        owns_job=job.owns_job,
        timeout=job.timeout,
        before=job.before,
        pipeline_size=size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_size=world_size // size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        pp_ranks=dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
        dp_group=parallel_state.get_data_parallel_group(),
    )
