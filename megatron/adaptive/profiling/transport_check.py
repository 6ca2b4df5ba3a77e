"""Tests every transport between some pairs of a job's ranks, for ``transport --check``.

After the rendezvous, every rank chooses the same pairs. All ranks run the same tests even if a
transport fails. The tests of each pair and transport are::

    contents     a message of each size in both directions, compared bit by bit
    latency      1 KiB back and forth for a quarter of the time
    bandwidth    4 MiB messages in quick succession for the rest of the time
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from megatron.adaptive.config.environment import Environment
from megatron.adaptive.config.parallel import TRANSPORTS, TransportConfig
from megatron.adaptive.engine.process_context import gather
from megatron.adaptive.errors import SetupError, TransportError
from megatron.adaptive.profiling.check_job import CheckJob
from megatron.adaptive.profiling.links import NO_STEP, Rounds, make_connector, measure_link, receive
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.interface import Endpoint, Label, Transport
from megatron.adaptive.transport.select import Choice, choose, why_not

_LIMIT_S = 30.0
_WAIT_S = 10.0
_BURST = 8
# Keep this minimum small, so that the check of a slow network takes about the requested time.
_LEAST_ROUNDS = 3
_SMALL_BYTES = 1 << 10
_LARGE_BYTES = 4 << 20
_SIZES = (0, 1, 1000, _SMALL_BYTES, 1 << 20, _LARGE_BYTES + 1)
# The test data repeats after this number of bytes. The number is prime, so that data from a wrong
# position in a buffer is detected.
_PATTERN = 251


class TransportCheck:
    """Runs one rank's part of the test. All ranks must call the same methods in the same order.

    Args:
        options: Transport settings that the user set on the command line.
        environment: Rank of this process, number of ranks, and address of the rendezvous.
        timeout: Maximum time to wait for the rendezvous.

    Raises:
        TransportError: The rendezvous failed.
    """

    def __init__(
        self, options: TransportConfig, environment: Environment, timeout: timedelta
    ) -> None:
        self._options = options
        self.rank = environment.rank
        self._check_job = CheckJob(environment, timeout, backend="gloo")
        self._job = self._check_job.job
        self._connector = make_connector(self._job, in_flight=2 * _BURST, timeout_s=_LIMIT_S)
        self._endpoint = self._connector.own_end(self._job.places, options, environment.master_addr)
        self._endpoints: list[Endpoint] = gather(self._endpoint)

    def outcomes(self, seconds: float) -> list[dict[str, Any]]:
        """Tests every transport between all chosen pairs of ranks.

        All ranks must call this method together.

        A pair consists of rank 0 and the first other rank on each machine.

        Args:
            seconds: Duration in seconds of the measurements for each pair and transport.

        Returns:
            List with the fields of an ``Outcome`` of ``transport --check`` for each pair and
            transport. The list is equal on all ranks.

        Raises:
            TransportError: A rank has exited.
        """
        first: dict[str, int] = {}
        for endpoint in self._endpoints[1:]:
            first.setdefault(endpoint.machine, endpoint.rank)
        forced = self._options.forced
        kinds = TRANSPORTS if forced is None else (forced,)
        pairs = [(0, rank) for rank in sorted(first.values())]
        return [self._outcome(pair, kind, seconds) for pair in pairs for kind in kinds]

    def _outcome(self, pair: tuple[int, int], kind: str, seconds: float) -> dict[str, Any]:
        source = self._endpoints[pair[0]]
        target = self._endpoints[pair[1]]
        try:
            choice = choose(source, target, self._options.forced)
        except SetupError as error:
            choice = Choice(str(self._options.forced), str(error))
        chosen = choice.kind == kind
        hosts = source.host, target.host
        facts = {"ranks": pair, "hosts": hosts, "transport": kind, "chosen": chosen}
        if (reason := why_not(kind, source, target)) is not None:
            return {**facts, "note": reason}
        try:
            measured = self._run(pair, kind, seconds)
        except TransportError as error:
            return {**facts, "note": str(error)}
        return {**facts, **measured, "works": True, "note": choice.reason if chosen else ""}

    def _run(self, pair: tuple[int, int], kind: str, seconds: float) -> dict[str, Any]:
        """Connects ``pair`` by a transport, and measures the connection.

        All ranks must call this method together. ``kind`` is the name of the transport, and the
        measurements take ``seconds`` seconds.

        Raises:
            TransportError: The transport did not work. All ranks raise this error, even those
                outside the pair.
        """
        peers = [sum(pair) - self.rank] if self.rank in pair else []
        slot_bytes = self._options.transport_slot_bytes or _LARGE_BYTES
        options = TransportConfig(
            **{**vars(self._options), "transport": kind, "transport_slot_bytes": slot_bytes}
        )
        transport = self._connector.connect(self._endpoint, peers, options)
        result: dict[str, Any] = {}
        if transport is not None:
            try:
                result = self._measure(transport, peers[0], self.rank == pair[0], seconds)
                transport.close()
            except TransportError as error:
                result = {"error": f"rank {self.rank} on {self._endpoint.host}: {error}"}
        try:
            gathered = gather(result)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TransportError(f"a rank failed during the check: {reason}") from error
        errors = [of_rank["error"] for of_rank in gathered if "error" in of_rank]
        if errors:
            raise TransportError(errors[0])
        return gathered[pair[0]]

    def _measure(
        self, transport: Transport, peer: int, leads: bool, seconds: float
    ) -> dict[str, Any]:
        """Checks the contents of messages to ``peer``, then measures latency and bandwidth.

        ``leads`` is true on the rank that sends first. The measurements take ``seconds`` seconds.
        The latency is half of a round trip of 1 KiB, in microseconds. The bandwidth, in GB/s, is
        measured with bursts of 4 MiB messages, which are sent in quick succession.
        """
        device = self._job.accelerator.device
        check_contents(transport, peer, device)
        small, large = (
            measure_link(
                transport,
                peer,
                leads=leads,
                payload=torch.zeros(size, dtype=torch.uint8, device=device),
                timeout_s=_WAIT_S,
                rounds=Rounds(burst=_BURST, least=_LEAST_ROUNDS, seconds=part * seconds / 2),
            )
            for size, part in ((_SMALL_BYTES, 0.25), (_LARGE_BYTES, 0.75))
        )
        transport.flush(_WAIT_S)
        # Several messages in a row may take no longer than a single message. The occupancy
        # (additional time per message) is then 0, so use the latency instead.
        message_s = large.occupancy_s or large.latency_s
        return {
            "latency_us": (small.latency_s + small.occupancy_s) * 1e6,
            "gb_per_s": _LARGE_BYTES / max(message_s, 1e-9) / 1e9,
        }

    def close(self) -> None:
        """Disconnects from the other ranks. Rank 0 exits last, because it serves the store."""
        self._check_job.close()


def check_contents(transport: Transport, peer: int, device: torch.device) -> None:
    """Exchanges messages of several sizes with ``peer``, and compares them bit by bit.

    The peer must call this function at the same time.

    Raises:
        DeadlineError: The peer did not respond in time.
        TransportError: A message was corrupted, or the peer has exited.
    """
    for size in _SIZES:
        payload = (torch.arange(size, device=device) % _PATTERN).to(torch.uint8)
        transport.send(peer, Label(NO_STEP, Action(ActionKind.F, 0, 0)), payload)
        if not torch.equal(receive(transport, peer, _WAIT_S).take(), payload):
            raise TransportError(
                f"{size} bytes from rank {peer} over {transport.name} were corrupted; try "
                "--transport-crc, and check the memory and the network of both nodes"
            )
