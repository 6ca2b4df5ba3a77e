"""A process within its job: device, host-side messages between all ranks, the job's end."""

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


def gather(mine: T, group: Any = None) -> list[T]:
    """Returns what every rank of a group gave, by rank. Collective; over all ranks by default."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def from_first(mine: T, group: Any = None) -> T:
    """Returns what the first rank of a group gave. Collective; over all ranks by default."""
    box = [mine]
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
                "or cannot be reached; the job cannot go on without it, start again from the last "
                "checkpoint"
            )
        cause = cause.__cause__
    return None


def _broken_connection(error: BaseException) -> str | None:
    """Returns a library's reason for a broken connection, ``None`` for any other error."""
    text = str(error)
    if isinstance(error, RuntimeError) and (found := _GLOO.search(text)) is not None:
        return found[1]
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
    """This process among all of the job.

    Attributes:
        environment: what the launcher said, with rank and world size as they are.
        accelerator: this process's device.
        control_group: gloo group of all ranks for small host-side messages.
        places: where every rank runs, by global rank; see ``liveness.here``.
        timeout: limit of waits for other ranks.
        owns_process_group: torch's default process group was made for this job and ends with it.
        groups_before: process groups that were there before the job.
        groups: those that end with :meth:`close`; all that came since while it is empty.
        leases: rights to write folders of checkpoints, by path; they end with the job.
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
        """Global rank."""
        return self.environment.rank

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0."""
        return self.environment.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """Returns what every rank gave, by rank. Collective over all ranks."""
        return gather(mine, self.control_group)

    def from_first(self, mine: Any) -> Any:
        """Returns what rank 0 gave. Collective over all ranks."""
        return from_first(mine, self.control_group)

    def on_first(self, action: Callable[[], T]) -> T:
        """Returns what ``action`` gives on rank 0. Collective over all ranks.

        Raises:
            AdaptiveError: what it raised there, on all ranks.
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
        found: T = answer
        return found

    def settle(self) -> None:
        """Takes the process groups that are there as the job's: later ones are the user's."""
        self.groups[:] = [group for group in process_groups() if group not in self.groups_before]

    def end_leases(self) -> None:
        """Lets other jobs write where this one has saved; idempotent."""
        for lease in self.leases.values():
            lease.end()

    def close(self) -> None:
        """Ends the job, or its process groups where it was joined. Collective over all ranks."""
        self.end_leases()
        if self.owns_process_group:
            dist.destroy_process_group()
            return
        if not self.groups:
            self.settle()
        dist.barrier()  # nobody waits in one of them any more
        destroy_groups(self.groups)


def environment_of_rank() -> Environment:
    """Returns what the launcher said, with rank and world size of the process group."""
    return dataclasses.replace(
        Environment.read(), rank=dist.get_rank(), world_size=dist.get_world_size()
    )


def process_groups() -> list[Any]:
    """Returns this process's groups in the order they were made in, which all members share."""
    return list(dist.distributed_c10d._world.pg_map)


def destroy_groups(groups: Iterable[Any]) -> None:
    """Destroys those of ``groups`` that are still there; each has threads. Collective."""
    for group in list(groups):
        if group in process_groups():
            dist.destroy_process_group(group)
