"""Joins the job, and determines this process's device, replica, pipeline rank and groups."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.accelerator import agree_on_sharing, detect, keep_freed_memory
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.executor_setup import gather_places
from megatron.adaptive.engine.process_context import (
    Job,
    device_in_groups,
    environment_of_rank,
    process_groups,
)
from megatron.adaptive.engine.rendezvous import MeetingError, meet, no_rendezvous
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.transport.liveness import here

_JOBS = "megatron-adaptive-jobs"


@dataclass(frozen=True, kw_only=True)
class Mesh(Job):
    """Contains this process's replica, its position in the pipeline, and its process groups.

    Attributes:
        pipeline_size: Number of ranks per pipeline.
        pp_rank: Position of this rank in its pipeline.
        dp_size: Number of replicas (pipelines) in the job.
        dp_rank: Index of this rank's replica, starting at 0.
        pp_ranks: Global ranks of this replica's pipeline, ordered by position.
        dp_group: Process group of the ranks with the same position in all pipelines.
    """

    pipeline_size: int
    pp_rank: int
    dp_size: int
    dp_rank: int
    pp_ranks: list[int]
    dp_group: Any

    def groups_of(self, position_sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Creates a process group for each set of pipeline positions, in each replica.

        All ranks must call this together.

        Args:
            position_sets: Sets of pipeline positions. All ranks must pass the same sets.

        Returns:
            Groups that contain this rank, keyed by the set of positions.
        """
        groups = {}
        for positions in position_sets:
            for pp_ranks in sorted(set(map(tuple, self.gather(self.pp_ranks)))):
                members = [pp_ranks[position] for position in positions]
                group = dist.new_group(
                    members, backend=self.accelerator.backend, timeout=self.timeout
                )
                if list(pp_ranks) == self.pp_ranks and self.pp_rank in positions:
                    groups[positions] = group
        return groups

    def over_replicas(self, numbers: Sequence[float]) -> list[list[float]]:
        """Returns the ``numbers`` of each replica. All ranks of ``dp_group`` must call this.

        Args:
            numbers: Numbers of this replica. All replicas must pass lists of the same length.
        """
        if self.dp_size == 1:
            return [list(numbers)]
        local = torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device)
        gathered = [torch.empty_like(local) for _ in range(self.dp_size)]
        dist.all_gather(gathered, local, group=self.dp_group)
        return [of_replica.tolist() for of_replica in gathered]

    def _end(self, *, with_groups: bool) -> None:
        parallel_state.destroy_model_parallel()
        super()._end(with_groups=with_groups)


_store_of_process = functools.cache(meet)
"""Returns the key-value store through which the processes of the job find each other.

All jobs that this process joins use the same store.
"""


def join_job(timeout_s: float) -> Job:
    """Connects this process to the other processes of the job. All processes must call this.

    Args:
        timeout_s: Maximum time in seconds to wait for another rank.

    Raises:
        TransportError: If the processes cannot connect to each other.
    """
    environment = Environment.read()
    accelerator = detect(environment.local_rank)
    keep_freed_memory()
    timeout = datetime.timedelta(seconds=timeout_s)
    owns = not dist.is_initialized()
    before = () if owns else tuple(process_groups())
    if owns:
        try:
            store = _store_of_process(environment, timeout)
        except (dist.DistError, MeetingError, ValueError) as error:
            raise no_rendezvous(environment, error) from error
        # Use a new key prefix for each job, because the store still contains the addresses of
        # earlier jobs.
        turn = store.add(f"{_JOBS}/{environment.rank}", 1)
        store = dist.PrefixStore(f"{_JOBS}/{turn}", store)
        accelerator = agree_on_sharing(
            accelerator, store, rank=environment.rank, world_size=environment.world_size
        )
        dist.init_process_group(
            accelerator.backend,
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    group = dist.new_group(backend="gloo", timeout=timeout)
    if not owns:
        accelerator = device_in_groups(accelerator, group)
    job = Job(
        environment=environment_of_rank(),
        accelerator=accelerator,
        control_group=group,
        places=[],
        timeout=timeout,
        owns_process_group=owns,
        groups_before=before,
        launcher=os.getppid() if environment.has_agent_store else None,
    )
    return dataclasses.replace(job, places=job.gather(here(0)))


def check_pipeline_size(size: int) -> int:
    """Checks that the number of processes is a multiple of ``size``, and returns ``size``.

    Raises:
        ConfigError: If the number of processes is not a multiple of ``size``.
    """
    world_size = dist.get_world_size()
    if type(size) is not int or size < 1 or world_size % size:
        raise ConfigError(
            f"the number of processes must be a multiple of pipeline_size {size!r}, got "
            f"{world_size}; choose another pipeline_size"
        )
    return size


def make_mesh(job: Job, pipeline_size: int | None) -> Mesh:
    """Divides the ranks of the job into pipelines. All ranks must call this.

    Args:
        job: Job that all ranks have joined.
        pipeline_size: Number of ranks per pipeline; ``None`` puts all ranks into one pipeline.

    Raises:
        ConfigError: If the number of ranks is not a multiple of ``pipeline_size``, or
            megatron-core's parallel state is already initialized.
    """
    world_size = dist.get_world_size()
    size = check_pipeline_size(world_size if pipeline_size is None else pipeline_size)
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "megatron-core's parallel state is already initialized; close the other Pipeline "
            "first, or remove the call of initialize_model_parallel"
        )
    minutes = math.ceil(job.timeout.total_seconds() / 60)
    parallel_state.initialize_model_parallel(1, size, distributed_timeout_minutes=minutes)
    return Mesh(
        **{**vars(job), "places": gather_places()},
        pipeline_size=size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_size=world_size // size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        pp_ranks=dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
        dp_group=parallel_state.get_data_parallel_group(),
    )
