"""Connects the ranks of a command that checks a cluster, without a model or megatron-core."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron.adaptive.accelerator import agree_on_sharing, detect
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.engine.process_context import Job, gather
from megatron.adaptive.engine.rendezvous import MeetingError, meet, no_rendezvous
from megatron.adaptive.errors import SetupError
from megatron.adaptive.transport.liveness import here

_LIMIT_S = 30.0


class CheckJob:
    """Connects this rank to a job that only checks the cluster.

    Args:
        environment: Rank of this process, number of ranks, and address of the rendezvous.
        timeout: Maximum time to wait for the rendezvous.
        backend: Backend of torch's default process group, ``nccl`` or ``gloo``, or ``None`` for the
            backend that training would use.

    Attributes:
        job: Ranks, device and process groups of this process.

    Raises:
        TransportError: The rendezvous failed.
    """

    def __init__(
        self, environment: Environment, timeout: timedelta, backend: str | None = None
    ) -> None:
        if environment.master_port is None:
            raise SetupError("no address for the rendezvous; start the ranks with torchrun")
        try:
            self._store = meet(environment, timeout)
        except (dist.DistError, MeetingError, ValueError) as error:
            raise no_rendezvous(environment, error) from error
        accelerator = agree_on_sharing(
            detect(environment.local_rank),
            self._store,
            rank=environment.rank,
            world_size=environment.world_size,
        )
        backend = backend or accelerator.backend
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", self._store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
        control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
        self.job = Job(
            environment=environment,
            accelerator=accelerator,
            control_group=control,
            places=gather(here(0), control),
        )

    def close(self) -> None:
        """Disconnects from the other ranks. Rank 0 exits last, because it serves the store."""
        environment = self.job.environment
        dist.barrier(group=self.job.control_group)
        dist.destroy_process_group()
        if environment.rank == 0:
            keys = [f"left/{rank}" for rank in range(1, environment.world_size)]
            self._store.wait(keys, timedelta(seconds=_LIMIT_S))
        else:
            self._store.set(f"left/{environment.rank}", "")
