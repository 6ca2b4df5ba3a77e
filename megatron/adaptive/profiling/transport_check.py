"""Tries every transport between some pairs of a job's ranks; what ``transport --check`` runs.

Owns the rendezvous of the ranks, which pairs are tried, and that all ranks go through the same
steps whatever fails. On each pair and transport::

    contents     one message of each size both ways, compared bit by bit
    latency      1 KiB to and fro for a quarter of the time
    bandwidth    bursts of 4 MiB messages for the rest of it
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.accelerator import agree_on_sharing, detect
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.parallel import TRANSPORTS, TransportConfig
from megatron.adaptive.engine.process_context import Job, gather
from megatron.adaptive.engine.rendezvous import MeetingError, meet, no_rendezvous
from megatron.adaptive.errors import SetupError, TransportError
from megatron.adaptive.profiling.links import NO_STEP, measure_link, process_groups, receive
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.interface import Endpoint, Label, Transport
from megatron.adaptive.transport.liveness import here
from megatron.adaptive.transport.select import Choice, choose, why_not

_LIMIT_S = 30.0
_WAIT_S = 10.0
_BURST = 8
_LEAST_ROUNDS = 3  # a slow network shall not take much longer than asked for
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 4 << 20
_SIZES = (0, 1, 1000, _SMALL_BYTES, 1 << 20, _LARGE_BYTES + 1)
_PATTERN = 251  # prime, so that a payload that is shifted by a slot is not the same


class TransportCheck:
    """Takes one rank's part in the check; all ranks call the same methods in one order.

    Args:
        options: the user's settings.
        environment: who this rank is and where all meet.
        timeout: limit of the rendezvous.

    Raises:
        TransportError: the ranks do not meet.
    """

    def __init__(
        self, options: TransportConfig, environment: Environment, timeout: timedelta
    ) -> None:
        self._options = options
        self.rank = environment.rank
        if environment.master_port is None:
            raise SetupError("the ranks have nowhere to meet: start them with torchrun")
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
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", self._store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
        self._job = Job(
            environment=environment,
            accelerator=accelerator,
            control_group=dist.group.WORLD,
            places=gather(here(0)),
        )
        self._groups = process_groups(self._job, in_flight=2 * _BURST, timeout_s=_LIMIT_S)
        self._own = self._groups.own_end(self._job.places, options, environment.master_addr)
        self._ends: list[Endpoint] = gather(self._own)

    def outcomes(self, seconds: float) -> list[dict[str, Any]]:
        """Tries every transport between every pair. Collective; the same on every rank.

        Pairs are rank 0 with the first other rank of its machine, and of every other machine.

        Args:
            seconds: for each of them.

        Returns:
            What ``transport --check`` prints of each, as the fields of its ``Outcome``.

        Raises:
            TransportError: a rank is gone.
        """
        first: dict[str, int] = {}
        for end in self._ends[1:]:
            first.setdefault(end.machine, end.rank)
        forced = self._options.forced
        kinds = TRANSPORTS if forced is None else (forced,)
        pairs = [(0, rank) for rank in sorted(first.values())]
        return [self._outcome(pair, kind, seconds) for pair in pairs for kind in kinds]

    def _outcome(self, pair: tuple[int, int], kind: str, seconds: float) -> dict[str, Any]:
        one, other = self._ends[pair[0]], self._ends[pair[1]]
        try:
            choice = choose(one, other, self._options.forced)
        except SetupError as error:
            choice = Choice(str(self._options.forced), str(error))
        chosen = choice.kind == kind
        hosts = one.host, other.host
        facts = {"ranks": pair, "hosts": hosts, "transport": kind, "chosen": chosen}
        if (reason := why_not(kind, one, other)) is not None:
            return {**facts, "note": reason}
        try:
            measured = self._run(pair, kind, seconds)
        except TransportError as error:
            return {**facts, "note": str(error)}
        return {**facts, **measured, "works": True, "note": choice.reason if chosen else ""}

    def _run(self, pair: tuple[int, int], kind: str, seconds: float) -> dict[str, Any]:
        """Connects a pair and tries it out. Collective over all ranks, also those of no part in it.

        Raises:
            TransportError: it did not work; on all ranks alike.
        """
        peers = [sum(pair) - self.rank] if self.rank in pair else []
        slot_bytes = self._options.transport_slot_bytes or _LARGE_BYTES
        options = TransportConfig(
            **{**vars(self._options), "transport": kind, "transport_slot_bytes": slot_bytes}
        )
        transport = self._groups.connect(self._own, peers, options)
        mine: dict[str, Any] = {}
        if transport is not None:
            try:
                mine = self._measure(transport, peers[0], self.rank == pair[0], seconds)
                transport.close()
            except TransportError as error:
                mine = {"error": f"rank {self.rank} on {self._ends[self.rank].host}: {error}"}
        try:
            gathered = gather(mine)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TransportError(f"a rank of the check is gone: {reason}") from error
        errors = [one["error"] for one in gathered if "error" in one]
        if errors:
            raise TransportError(errors[0])
        return gathered[pair[0]]

    def _measure(
        self, transport: Transport, peer: int, leads: bool, seconds: float
    ) -> dict[str, Any]:
        """Returns half of a round trip of 1 KiB, and the pace of 4 MiB that follow each other."""
        device = self._job.accelerator.device
        check_contents(transport, peer, device)
        small, large = (
            measure_link(
                transport,
                peer,
                leads=leads,
                payload=torch.zeros(size, dtype=torch.uint8, device=device),
                timeout_s=_WAIT_S,
                burst=_BURST,
                rounds=_LEAST_ROUNDS,
                seconds=part * seconds / 2,
            )
            for size, part in ((_SMALL_BYTES, 0.25), (_LARGE_BYTES, 0.75))
        )
        transport.flush(_WAIT_S)
        # Without a difference between bursts, a message takes what it takes alone.
        each_s = large.occupancy_s or large.latency_s
        return {
            "latency_us": (small.latency_s + small.occupancy_s) * 1e6,
            "gb_per_s": _LARGE_BYTES / max(each_s, 1e-9) / 1e9,
        }

    def close(self) -> None:
        """Leaves the job, rank 0 after all others."""
        dist.barrier()
        dist.destroy_process_group()
        if self.rank == 0:
            keys = [f"left/{rank}" for rank in range(1, len(self._ends))]
            self._store.wait(keys, timedelta(seconds=_LIMIT_S))
        else:
            self._store.set(f"left/{self.rank}", "")


def check_contents(transport: Transport, peer: int, device: torch.device) -> None:
    """Sends messages of some sizes both ways and compares them; the peer does so too.

    Raises:
        DeadlineError: the peer did not answer.
        TransportError: a payload came otherwise than it was sent, or the peer is gone.
    """
    for size in _SIZES:
        payload = (torch.arange(size, device=device) % _PATTERN).to(torch.uint8)
        transport.send(peer, Label(NO_STEP, Action(ActionKind.F, 0, 0)), payload)
        if not torch.equal(receive(transport, peer, _WAIT_S).take(), payload):
            raise TransportError(
                f"{size} bytes from rank {peer} over {transport.name} came changed; try "
                "--transport-crc, and look at the memory and the network of both nodes"
            )
