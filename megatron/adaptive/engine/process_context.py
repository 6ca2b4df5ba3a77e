"""Describes a process within its job: device, messages between all hosts, end of the job."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.folder_lease import Lease
from megatron.adaptive.errors import AdaptiveError, PeerLostError

T = TypeVar("T")


def gather(value: T, group: Any = None) -> list[T]:
    """Returns the values of all ranks of a group, by rank.

    Collective over the group, by default over all ranks.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(value: T, group: Any = None) -> T:
    """Returns the value of the first rank of a group.

    Collective over the group, by default over all ranks.
    """
    box = [value]
    first = 0 if group is None else dist.get_process_group_ranks(group)[0]
    dist.broadcast_object_list(box, src=first, group=group)
    return box[0]


_GLOO = re.compile(r"gloo/transport/[^]]*\] (.*?)(?:\. This is|\.?$)", re.MULTILINE)


def lost_peer(error: BaseException, rank: int) -> PeerLostError | None:
    """Returns the error of a connection that broke, ``None`` for any other error.

    Args:
        error: Exception of a library. Exceptions that it wraps are searched too.
        rank: Global rank of this process, for the message.
    """
    cause: BaseException | None = error
    while cause is not None:
        if (reason := _broken_connection(cause)) is not None:
            return PeerLostError(
                f"rank {rank} lost its connection with another rank ({reason}), which ended, hangs "
                "or cannot be reached; the job cannot continue without it, start again from "
                "the last checkpoint"
            )
        cause = cause.__cause__
    return None


def _broken_connection(error: BaseException) -> str | None:
    """Returns a library's reason for a broken connection, ``None`` for any other error."""
    text = str(error)
    if isinstance(error, RuntimeError) and (match := _GLOO.search(text)) is not None:
        return match[1]
    if isinstance(error, dist.DistNetworkError) or "ncclRemoteError" in text:
        return (text.splitlines() or [type(error).__name__])[0]
    return None


@contextlib.contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Turns a library's error about a broken connection into ``PeerLostError``.

    Raises:
        PeerLostError: A collective failed because another rank is gone.
    """
    try:
        yield
    except AdaptiveError:
        raise
    except (RuntimeError, OSError) as error:
        rank = dist.get_rank() if dist.is_initialized() else Environment.read().rank
        if (lost := lost_peer(error, rank)) is not None:
            raise lost from error
        raise


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describes this process and its job.

    Attributes:
        environment: Settings of the launcher, with the rank and world size of the process group.
        accelerator: Device of this process.
        control_group: Gloo group of all ranks for small messages between hosts.
        places: Host and process of every rank, by global rank (see ``liveness.here``).
        timeout: Time limit of waits for other ranks.
        owns_process_group: True if torch's default process group was made for this job and ends
            with it.
        groups_before: Process groups that existed before the job.
        groups: Process groups that :meth:`close` destroys; empty for all that were made since.
        leases: Rights to write folders of checkpoints, by path; they end with the job.
    """

    environment: Environment
    accelerator: Accelerator
    control_group: Any
    places: list[dict[str, Any]]
    timeout: datetime.timedelta = datetime.timedelta(minutes=10)
    owns_process_group: bool = True
    groups_before: tuple[Any, ...] = ()
    groups: list[Any] = field(default_factory=list)
    leases: dict[Path, Lease] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Returns the global rank of this process."""
        return self.environment.rank

    @property
    def is_first(self) -> bool:
        """Returns whether this process is global rank 0."""
        return self.environment.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank. Collective over all ranks."""
        return gather(value, self.control_group)

    def from_first(self, value: Any) -> Any:
        """Returns the value of rank 0. Collective over all ranks."""
        return from_first(value, self.control_group)

    def on_first(self, action: Callable[[], T]) -> T:
        """Calls ``action`` on rank 0 and returns its result on all ranks. Collective.

        Raises:
            AdaptiveError: ``action`` raised it on rank 0; all ranks raise it.
        """
        answer: Any = None
        if self.is_first:
            try:
                answer = action()
            except AdaptiveError as error:
                answer = error
        answer = self.from_first(answer)
        if isinstance(answer, AdaptiveError):
            raise answer
        result: T = answer
        return result

    def settle(self) -> None:
        """Records the present process groups as those of the job; later ones belong to the user."""
        self.groups[:] = [group for group in process_groups() if group not in self.groups_before]

    def end_leases(self) -> None:
        """Gives back the rights to write folders; idempotent."""
        for lease in self.leases.values():
            lease.end()

    def close(self) -> None:
        """Ends the job, or only its process groups if torch was initialized before it.

        Collective.
        """
        self.end_leases()
        if self.owns_process_group:
            dist.destroy_process_group()
            return
        if not self.groups:
            self.settle()
        dist.barrier()  # after it, no rank waits in one of these groups
        destroy_groups(self.groups)


def environment_of_rank() -> Environment:
    """Returns the settings of the launcher, with rank and world size of the process group."""
    return dataclasses.replace(
        Environment.read(), rank=dist.get_rank(), world_size=dist.get_world_size()
    )


def process_groups() -> list[Any]:
    """Returns this process's groups in the order they were made, the same on all members."""
    return list(dist.distributed_c10d._world.pg_map)


def destroy_groups(groups: Iterable[Any]) -> None:
    """Destroys the groups that still exist, which ends their threads. Collective."""
    for group in list(groups):
        if group in process_groups():
            dist.destroy_process_group(group)
