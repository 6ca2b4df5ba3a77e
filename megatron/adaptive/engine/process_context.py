"""Manages a process of a job: its device, its small messages to other ranks, and its cleanup."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.adaptive import device_collectives
from megatron.adaptive.accelerator import Accelerator, device_identity
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.folder_lease import Lease
from megatron.adaptive.errors import AdaptiveError, PeerLostError

T = TypeVar("T")

_FAILED_SETUPS = "megatron-adaptive-failed"
"""Prefix of the keys that count failed setups in the job's key-value store."""
_FAILED_TOGETHER_S = 3.0
"""Maximum time in seconds to wait for the setup to fail on all ranks."""
_POLL_S = 0.02
"""Interval in seconds between polls of the number of failed ranks."""


def is_alone() -> bool:
    """Returns whether this process simulates one rank of a job whose other ranks do not exist.

    Such a process uses torch's ``fake`` process groups: a gather returns this rank's value for
    every rank, and other collectives leave tensors unchanged or copy this rank's part.
    """
    return bool(dist.get_backend() == dist.Backend.FAKE)


def gather(value: T, group: Any = None) -> list[T]:
    """Gathers ``value`` from each rank of ``group``, and returns all values, ordered by rank.

    All ranks of the group must call this function. A ``group`` of ``None`` means all ranks.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(value: T, group: Any = None) -> T:
    """Broadcasts ``value`` from the first rank of ``group``, and returns the value of that rank.

    All ranks of the group must call this function. A ``group`` of ``None`` means all ranks.
    """
    if is_alone():
        return value
    box = [value]
    first = 0 if group is None else dist.get_process_group_ranks(group)[0]
    dist.broadcast_object_list(box, src=first, group=group)
    return box[0]


def device_in_groups(accelerator: Accelerator, group: Any = None) -> Accelerator:
    """Completes the description of this rank's device in a job that already has process groups.

    All ranks must call this function. For a GPU, the result contains the number of ranks that share
    it, even if each rank sees only one GPU, and the backend of the default process group.

    Args:
        accelerator: Device of this rank.
        group: Process group of all ranks, over which they exchange the IDs of their GPUs, or
            ``None`` for the default group.
    """
    if is_alone():
        return accelerator
    # Without the replacements that are installed here, gloo sends wrong data for some GPU tensors.
    backend = "nccl" if "cuda:nccl" in dist.get_backend_config() else "gloo"
    if accelerator.is_cuda and backend == "gloo":
        device_collectives.install()
    identity = device_identity(accelerator, dist.get_rank())
    identities = gather(identity, group)
    if not accelerator.is_cuda:
        return accelerator
    return dataclasses.replace(accelerator, backend=backend, shares=identities.count(identity))


_GLOO = re.compile(r"gloo/transport/[^]]*\] (.*?)(?:\. This is|\.?$)", re.MULTILINE)


def lost_peer(error: BaseException, rank: int) -> PeerLostError | None:
    """Converts a library's error about a broken connection to a ``PeerLostError``.

    Returns ``None`` if ``error`` is a different error.

    Args:
        error: Exception that a library raised. The chain of its causes is also checked.
        rank: Global rank of this process, for the error message.
    """
    cause: BaseException | None = error
    while cause is not None:
        if (reason := _broken_connection(cause)) is not None:
            return PeerLostError(
                f"rank {rank} lost its connection with another rank ({reason}), which exited "
                "(because of an error, or after fewer steps), hangs or cannot be reached; the job "
                "cannot continue without that rank; restart the job from the last checkpoint"
            )
        cause = cause.__cause__
    return None


def _broken_connection(error: BaseException) -> str | None:
    """Returns the library's description of a broken connection, or ``None`` for other errors."""
    text = str(error)
    if isinstance(error, RuntimeError) and (match := _GLOO.search(text)) is not None:
        return match[1]
    if isinstance(error, dist.DistNetworkError) or "ncclRemoteError" in text:
        return (text.splitlines() or [type(error).__name__])[0]
    return None


@contextlib.contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Makes a ``with`` block raise ``PeerLostError`` instead of errors about broken connections.

    Raises:
        PeerLostError: A collective operation failed because another rank has exited.
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
    """A process of a job, with its device, its process groups, and the folders it may write to.

    Attributes:
        environment: Settings from the launcher's environment variables, but with the rank and the
            world size of the process group.
        accelerator: CPU or GPU on which this process computes.
        control_group: Gloo group of all ranks for small messages between hosts.
        places: Host and process of every rank, indexed by global rank (see ``liveness.here``).
        timeout: Maximum time to wait for other ranks.
        owns_process_group: Whether torch's default process group was created for this job. If so,
            it is destroyed with the job.
        groups_before: Process groups that existed before the job started. The job does not destroy
            them.
        groups: Process groups that :meth:`close` destroys. If empty, :meth:`close` destroys all
            groups that were created since the job started.
        leases: Objects that reserve checkpoint folders for this job, keyed by the path of the
            folder. The folders are released at the end of the job.
        launcher: Process ID of the launcher that started this process, or ``None`` if there is no
            launcher.
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
    launcher: int | None = None

    @property
    def rank(self) -> int:
        """Returns the global rank of this process."""
        return self.environment.rank

    @property
    def is_first(self) -> bool:
        """Returns whether this process is global rank 0."""
        return self.environment.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Gathers ``value`` from each rank, and returns all values, ordered by rank.

        All ranks must call this method.
        """
        return gather(value, self.control_group)

    def from_first(self, value: Any) -> Any:
        """Broadcasts ``value`` from rank 0 and returns the value of rank 0.

        All ranks must call this method.
        """
        return from_first(value, self.control_group)

    def on_first(self, action: Callable[[], T]) -> T:
        """Calls ``action`` on rank 0 only, and returns its result on all ranks.

        All ranks must call this method.

        Raises:
            AdaptiveError: ``action`` raised this error on rank 0. The method raises the same error
                on all ranks.
        """
        answer: Any = None
        if self.is_first or is_alone():
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
        """Records that all process groups created so far belong to the job.

        Later groups belong to the user, and :meth:`close` does not destroy them.
        """
        self.groups[:] = [group for group in process_groups() if group not in self.groups_before]

    def check_launcher(self) -> None:
        """Checks that the launcher of this process is alive.

        Raises:
            PeerLostError: The launcher has exited, so nothing would stop this process if another
                rank failed.
        """
        if self.launcher not in (None, os.getppid()):
            raise PeerLostError(
                f"rank {self.rank}: its launcher (pid {self.launcher}) has exited without "
                "stopping its ranks, so this process exits; restart the job"
            )

    def end_leases(self) -> None:
        """Releases all checkpoint folders of this job. Safe to call more than once."""
        for lease in self.leases.values():
            lease.end()

    def close(self) -> None:
        """Ends the job and destroys its process groups. All ranks must call this method.

        If torch was initialized before the job started, the process groups of the caller remain.

        The checkpoint folders are released first.
        """
        if not self.owns_process_group:
            dist.barrier()  # After the barrier, no rank is waiting in any of these groups.
        self._end(with_groups=True)

    def _end(self, *, with_groups: bool) -> None:
        """Ends the job on this rank, without waiting for the other ranks.

        Args:
            with_groups: Whether the job's process groups are destroyed.
        """
        self.end_leases()
        if not with_groups:
            return
        if self.owns_process_group:
            dist.destroy_process_group()
            return
        if not self.groups:
            self.settle()
        destroy_groups(self.groups)

    def close_after_error(self) -> None:
        """Ends the job after its setup has failed, so that the process can set up another job.

        Often the setup fails on all ranks at the same time. If it fails only on this rank, however,
        this rank's error must become visible before the other ranks time out. This rank therefore
        waits only a few seconds for the setup to fail on the other ranks. If it has not failed
        there by then, the other ranks may still be using the job's groups. In that case, the job's
        groups are not destroyed if the default process group belongs to the caller.
        """
        self._end(with_groups=self.owns_process_group or self._have_all_failed())

    def _have_all_failed(self) -> bool:
        """Returns whether the setup fails on all ranks within a few seconds.

        A rank reports that its setup has failed by calling this method.
        """
        if is_alone():
            return True
        store = dist.distributed_c10d._get_default_store()
        if store is None:  # The MPI backend has no store.
            return False
        key = f"{_FAILED_SETUPS}/{self.control_group.group_name}"
        deadline_s = time.monotonic() + _FAILED_TOGETHER_S
        try:
            count = store.add(key, 1)
            while count < self.environment.world_size and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                count = store.add(key, 0)
        except (RuntimeError, OSError):  # The process that serves the store has exited.
            return False
        return bool(count >= self.environment.world_size)


def environment_of_rank() -> Environment:
    """Returns the launcher's settings, but with the rank and world size of the process group."""
    return dataclasses.replace(
        Environment.read(), rank=dist.get_rank(), world_size=dist.get_world_size()
    )


def process_groups() -> list[Any]:
    """Returns the process groups of this process, in the order of their creation.

    Two ranks that belong to the same groups list them in the same order.
    """
    return list(dist.distributed_c10d._world.pg_map)


def destroy_groups(groups: Iterable[Any]) -> None:
    """Destroys the process groups in ``groups`` that still exist.

    All ranks must call this function.
    """
    for group in list(groups):
        if group in process_groups():
            dist.destroy_process_group(group)
