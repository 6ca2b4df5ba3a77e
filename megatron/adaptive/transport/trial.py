"""Tries every transport between some pairs of a job's ranks; what ``transport --check`` runs.

Owns the meeting of the ranks, which pairs are tried, and that all ranks go through the same steps
whatever fails. The measurement is in ``selftest.py``.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import detect
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.parallel import TRANSPORTS, TransportConfig
from megatron.adaptive.errors import SetupError, TransportError
from megatron.adaptive.transport.connect import (
    Payloads,
    connect_ranks,
    network_address,
    own_endpoint,
)
from megatron.adaptive.transport.exchange import StoreGather
from megatron.adaptive.transport.groups import ProcessGroups
from megatron.adaptive.transport.interface import Endpoint
from megatron.adaptive.transport.liveness import here
from megatron.adaptive.transport.select import Choice, choose, why_not
from megatron.adaptive.transport.selftest import LARGE_BYTES, Speed, try_out

__all__ = ["Trial"]

_LIMIT_S = 30.0
_IN_FLIGHT = 16


class Trial:
    """One rank's part in the trials. All ranks make one and call the same methods in one order.

    Args:
        options: the user's settings.
        environment: who this rank is and where all meet.
        timeout: limit of the meeting.

    Raises:
        TransportError: the ranks do not meet.
    """

    def __init__(
        self, options: TransportConfig, environment: Environment, timeout: timedelta
    ) -> None:
        self._options = options
        self._environment = environment
        self._accelerator = detect(environment.local_rank)
        self._store = _meet(environment, timeout)
        self._gather = StoreGather(
            self._store, environment.rank, environment.world_size, "transport", _LIMIT_S
        )
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self._store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
        place = here(0)
        machines = self._gather(place["machine"])
        self._own = own_endpoint(
            environment.rank,
            place,
            device=self._accelerator.device,
            own_gpu=self._accelerator.backend == "nccl",
            options=options,
            address=network_address(
                options.transport_interface or environment.socket_interface,
                environment.master_addr,
                alone=len(set(machines)) == 1,
            ),
        )
        self._ends = [Endpoint.decode(text) for text in self._gather(self._own.encode())]

    def pairs(self) -> list[tuple[int, int]]:
        """Return rank 0 with the first other rank of its machine, and of every other machine."""
        first: dict[str, int] = {}
        for end in self._ends[1:]:
            first.setdefault(end.machine, end.rank)
        return [(0, rank) for rank in sorted(first.values())]

    def kinds(self) -> tuple[str, ...]:
        """Return the transports to try."""
        return TRANSPORTS if self._options.forced is None else (self._options.forced,)

    def hosts_of(self, pair: tuple[int, int]) -> tuple[str, str]:
        """Return the hosts of a pair."""
        return self._ends[pair[0]].host, self._ends[pair[1]].host

    def choice_of(self, pair: tuple[int, int]) -> Choice:
        """Return what a run would use between a pair, possible or not."""
        try:
            return choose(self._ends[pair[0]], self._ends[pair[1]], self._options.forced)
        except SetupError as error:
            return Choice(str(self._options.forced), str(error))

    def why_not(self, pair: tuple[int, int], kind: str) -> str | None:
        """Return why a transport cannot connect a pair, ``None`` where it can."""
        return why_not(kind, self._ends[pair[0]], self._ends[pair[1]])

    def run(self, pair: tuple[int, int], kind: str, seconds: float) -> Speed:
        """Connect a pair and try it out. Collective over all ranks, also those of no part in it.

        Raises:
            TransportError: it did not work; on all ranks alike.
        """
        rank = self._environment.rank
        peers = [sum(pair) - rank] if rank in pair else []
        payloads = Payloads(shape=None, dtype=torch.uint8, in_flight=_IN_FLIGHT)
        options = TransportConfig(
            **{
                **vars(self._options),
                "transport": kind,
                "transport_slot_bytes": self._options.transport_slot_bytes or LARGE_BYTES,
            }
        )
        transport = connect_ranks(
            own=self._own,
            peers=peers,
            gather=self._gather,
            groups=ProcessGroups(
                members=list(range(self._environment.world_size)),
                gather=self._gather,
                accelerator=self._accelerator,
                payloads=payloads,
                describe=self._describe,
                timeout_s=_LIMIT_S,
            ),
            options=options,
            payloads=payloads,
            device=self._accelerator.device,
            describe=self._describe,
            timeout_s=_LIMIT_S,
        )
        told: dict[str, object] = {}
        if transport is not None:
            try:
                speed = try_out(
                    transport,
                    peers[0],
                    leads=rank == pair[0],
                    device=self._accelerator.device,
                    seconds=seconds,
                )
                if speed is not None:
                    told = {"latency_s": speed.latency_s, "bytes_per_s": speed.bytes_per_s}
                transport.close()
            except TransportError as error:
                told = {"error": f"{self._describe(rank)}: {error}"}
        seen = self._gather(told)
        errors = [one["error"] for one in seen if "error" in one]
        if errors:
            raise TransportError(errors[0])
        return Speed(**seen[pair[0]])

    def close(self) -> None:
        """Leave the job, rank 0 after all others."""
        dist.barrier()
        dist.destroy_process_group()
        self._gather(None)
        if self._environment.rank == 0:
            keys = [f"left/{rank}" for rank in range(1, self._environment.world_size)]
            self._store.wait(keys, timedelta(seconds=_LIMIT_S))
        else:
            self._store.set(f"left/{self._environment.rank}", "")

    def _describe(self, rank: int) -> str:
        return f"rank {rank} on {self._ends[rank].host}"


def _meet(environment: Environment, timeout: timedelta) -> dist.Store:
    """Return the store that all ranks meet in; rank 0 serves it unless torchrun's agent does."""
    if environment.master_port is None:
        raise SetupError(
            "the ranks have nowhere to meet: give --master-addr and --master-port, or use torchrun"
        )
    try:
        return dist.TCPStore(
            environment.master_addr,
            environment.master_port,
            environment.world_size,
            is_master=environment.rank == 0 and not environment.has_agent_store,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TransportError(
            f"rank {environment.rank} cannot meet the others at {environment.master_addr}:"
            f"{environment.master_port} ({reason}): is rank 0 started, and the port open?"
        ) from error
