"""Tests that all ranks of a job choose the same transports. The ranks run in threads."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megatron.adaptive import extension, network
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.errors import ConfigError, SetupError, TransportError
from megatron.adaptive.network import own_address
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.transport.connect import CompositeTransport, Connector, own_endpoint
from megatron.adaptive.transport.interface import (
    CompletionQueue,
    Completions,
    HeldArrival,
    Label,
    Transport,
)
from megatron.adaptive.transport.kind import Payloads, transport_kind
from megatron.adaptive.transport.native_kinds import rdma_ports

from .ends import CPU, LIMIT_S, close_all, take

LABEL = Label(0, Action(ActionKind.F, 0, 1))
ROW = [[1], [0, 2], [1]]

needs_extension = pytest.mark.skipif(extension.load() is None, reason=str(extension.why_missing()))


class Gather:
    """Gathers values from ranks that run as threads."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return gather


class Wire:
    """Replaces the gloo transport. Sending a tensor adds it to the receiver's queue."""

    name = "gloo"

    def __init__(self, net: dict[int, Wire], rank: int, completions: Completions | None) -> None:
        self.completions: Completions = completions or CompletionQueue()
        self.is_closed = False
        self._net = net
        self._rank = rank
        net[rank] = self

    def send(self, peer: int, label: Label, tensor: torch.Tensor) -> None:
        item = HeldArrival(label, self._rank, tensor.nbytes, lambda: tensor)
        self._net[peer].completions.put(item)

    def reserve(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def describe_links(self) -> dict[int, dict[str, Any]]:
        return {peer: {"kind": self.name} for peer in ROW[self._rank]}

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True, kw_only=True)
class Wired(Connector):
    net: dict[int, Wire]
    rank: int
    calls: list[Any]

    def open_part(
        self,
        name: str,
        peers: Sequence[int],
        options: TransportConfig,
        completions: Completions | None,
    ) -> Transport | None:
        self.calls.append((self.rank, name, list(peers)))
        return Wire(self.net, self.rank, completions) if peers else None


class Outcome:
    """Result of connecting several ranks.

    Attributes:
        made: Transport of each rank, or the error that was raised on the rank.
        log: Lines that the ranks have logged.
        calls: Rank, name of the transport, and peers of each call that opens channels of gloo or
            NCCL.
    """

    def __init__(self, size: int) -> None:
        self.made: list[Any] = [None] * size
        self.log: list[str] = []
        self.calls: list[Any] = []


def connect_all(
    peers: list[list[int]],
    lacks: dict[int, dict[str, str]] | None = None,
    on_gpus: bool = False,
    collective_ranks: int = 1,
    **options: Any,
) -> Outcome:
    outcome = Outcome(len(peers))
    gather, net = Gather(len(peers)), dict[int, Wire]()
    config = TransportConfig(**options)

    def run(rank: int) -> None:
        host = {"host": "here", "machine": "m"}
        endpoint = own_endpoint(
            rank, host, device=CPU, own_gpu=False, options=config, address="127.0.0.1"
        )
        endpoint.lacks.update((lacks or {}).get(rank, {}))  # type: ignore[attr-defined]
        if on_gpus:
            endpoint = dataclasses.replace(endpoint, device="cuda", lacks={})
        try:
            connector = Wired(
                members=list(range(len(peers))),
                gather=gather.of(rank),
                accelerator=SimpleNamespace(device=CPU),  # type: ignore[arg-type]
                payloads=Payloads(shape=(4,), dtype=torch.float32, in_flight=2),
                describe=lambda peer: f"rank {peer}",
                timeout_s=LIMIT_S,
                collective_ranks=collective_ranks,
                net=net,
                rank=rank,
                calls=outcome.calls,
            )
            outcome.made[rank] = connector.connect(
                endpoint, peers[rank], config, outcome.log.append
            )
        except Exception as error:
            outcome.made[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(peers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive()
    return outcome


def exchange(made: list[Any], peers: list[list[int]]) -> None:
    for rank, transport in enumerate(made):
        for peer in peers[rank]:
            transport.send(peer, LABEL, torch.full((4,), float(rank)))
    for rank, transport in enumerate(made):
        arrivals = [take(transport) for _ in peers[rank]]
        assert sorted(arrival.peer for arrival in arrivals) == peers[rank]
        for arrival in arrivals:
            assert arrival.take().tolist() == [float(arrival.peer)] * 4


@needs_extension
def test_all_pairs_of_a_node_are_connected_by_memory() -> None:
    ring = [[1, 3], [0, 2], [1, 3], [0, 2]]
    outcome = connect_all(ring)
    assert [made.name for made in outcome.made] == ["shm"] * 4
    assert outcome.log == ["transport: shm for ranks 0-1 0-3 1-2 2-3 (same machine)"]
    assert outcome.calls == []
    exchange(outcome.made, ring)
    link = outcome.made[0].describe_links()[1]
    assert (link["kind"], link["slot_bytes"], link["slots"]) == ("shm", 4096, 6)
    close_all(outcome.made)


@pytest.mark.parametrize(
    ("queues", "collective_ranks", "on_gpus", "transport", "warns"),
    [
        ("1", 2, True, "nccl", True),
        ("8", 2, True, "nccl", False),
        (None, 2, True, "nccl", False),
        ("1", 1, True, "nccl", False),
        ("1", 2, False, "gloo", False),
        ("1", 2, True, "gloo", False),
    ],
)
def test_a_single_hardware_queue_is_told_where_messages_could_wait_in_it(
    queues: str | None,
    collective_ranks: int,
    on_gpus: bool,
    transport: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that rank 0 warns if NCCL messages may share a hardware queue with collectives.

    In a shared queue, a receive can wait forever behind a collective that waits for another rank.
    """
    if queues is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    outcome = connect_all(
        ROW, on_gpus=on_gpus, collective_ranks=collective_ranks, transport=transport
    )
    warnings = [line for line in outcome.log if line.startswith("warning: ")]
    assert len(warnings) == int(warns)
    if warns:
        assert "CUDA_DEVICE_MAX_CONNECTIONS is 1" in warnings[0]
        assert "of the 2 ranks that" in warnings[0]
        assert "set the variable to 8, unset it" in warnings[0]
    close_all(outcome.made)


@needs_extension
def test_a_rank_without_peers_takes_part() -> None:
    outcome = connect_all([[], [2], [1]])
    assert outcome.made[0] is None
    exchange(outcome.made[1:], [[], []])
    close_all(outcome.made)


@needs_extension
def test_a_rank_may_lack_what_others_have() -> None:
    outcome = connect_all(ROW, lacks={2: dict.fromkeys(("shm", "tcp", "rdma"), "not built")})
    assert [made.name for made in outcome.made] == ["shm", "shm+gloo", "gloo"]
    assert outcome.calls.count((0, "gloo", [])) == 1
    middle = outcome.made[1]
    assert isinstance(middle, CompositeTransport)
    exchange(outcome.made, ROW)
    middle.send(2, LABEL, middle.reserve(2, (4,), torch.float32).fill_(1.0))
    assert take(outcome.made[2]).take().tolist() == [1.0] * 4
    middle.flush(1.0)
    close_all(outcome.made)
    assert "transport: gloo for ranks 1-2 (no shm: rank 2 on here: not built;" in outcome.log[1]


def test_without_the_extension_everything_is_gloo() -> None:
    lacks = {rank: dict.fromkeys(("shm", "tcp", "rdma"), "not built") for rank in range(3)}
    outcome = connect_all(ROW, lacks=lacks)
    assert [made.name for made in outcome.made] == ["gloo"] * 3
    exchange(outcome.made, ROW)


@needs_extension
def test_what_fails_after_all_is_replaced_on_all_ranks() -> None:
    """Checks that all ranks use gloo if the shared memory for a channel cannot be allocated."""
    assert psutil.virtual_memory().total < 256 << 30
    outcome = connect_all(ROW, transport_slot_bytes=1 << 32, transport_slots=64)
    assert [made.name for made in outcome.made] == ["gloo"] * 3
    (line,) = outcome.log
    assert line.startswith("transport: gloo for ranks 0-1 1-2 (no shm: rank ")
    exchange(outcome.made, ROW)


@needs_extension
def test_what_fails_though_asked_for_is_an_error_on_all_ranks() -> None:
    outcome = connect_all(ROW, transport="shm", transport_slot_bytes=1 << 32, transport_slots=64)
    assert [type(error) for error in outcome.made] == [TransportError] * 3
    assert len({str(error) for error in outcome.made}) == 1
    assert "on here" in str(outcome.made[0])


def test_what_cannot_be_though_asked_for_is_an_error_on_all_ranks() -> None:
    outcome = connect_all(ROW, transport="nccl")
    assert [type(error) for error in outcome.made] == [SetupError] * 3
    assert "--transport nccl cannot connect ranks 0 and 1: rank 0 on here: it has no GPU" in str(
        outcome.made[2]
    )


def fake_module(*ports: tuple[str, int, str]) -> Any:
    devices: dict[str, Any] = {}
    for name, number, state in ports:
        device = devices.setdefault(name, SimpleNamespace(name=name, ports=[]))
        device.ports.append(SimpleNamespace(number=number, state=state))
    return SimpleNamespace(rdma_devices=lambda: list(devices.values()))


PORTS = fake_module(("mlx5_0", 1, "DOWN"), ("mlx5_0", 2, "ACTIVE"), ("mlx5_1", 1, "ACTIVE"))


@pytest.mark.parametrize(
    ("device", "ports", "why"),
    [
        (None, ("mlx5_0:2", "mlx5_1:1"), ""),
        ("mlx5_1", ("mlx5_1:1",), ""),
        ("mlx5_0:2", ("mlx5_0:2",), ""),
        ("mlx5_0:1", (), "its RDMA ports are not active: mlx5_0:1 is DOWN"),
        ("mlx4_0", (), "it has no RDMA device mlx4_0"),
    ],
)
def test_active_ports_are_found(device: str | None, ports: tuple[str, ...], why: str) -> None:
    assert rdma_ports(PORTS, device) == (ports, why)


def test_no_rdma_says_why() -> None:
    def fail() -> None:
        raise TransportError("built without RDMA")

    failing: Any = SimpleNamespace(rdma_devices=fail)
    assert rdma_ports(failing, None) == ((), "built without RDMA")
    assert rdma_ports(fake_module(), None) == ((), "it has no RDMA device")


def test_the_address_is_that_of_the_interface() -> None:
    assert own_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="network interface eth77 is unknown on .*one of .*lo"):
        own_address("eth77", alone=True)


def test_the_address_is_that_of_the_way_to_the_store() -> None:
    assert own_address(None, "127.0.0.1") == "127.0.0.1"
    for peer in (None, "no-such-host.invalid"):
        assert own_address(None, peer, alone=True)


def test_a_job_of_several_machines_has_no_use_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"master": "127.0.1.1", "": "10.1.2.3"}
    monkeypatch.setattr(network, "_source_towards", lambda host="": ways.get(host))
    assert own_address(None, "master", alone=True) == "127.0.1.1"
    assert own_address(None, "master") == "10.1.2.3"
    ways.clear()
    monkeypatch.setattr(network, "addresses", lambda: {"lo": ["127.0.0.1"], "e": ["10.9.9.9"]})
    assert own_address(None, "master") == "10.9.9.9"
    monkeypatch.setattr(network, "addresses", lambda: {"lo": ["127.0.0.1"]})
    with pytest.raises(SetupError, match="has only loopback addresses"):
        own_address(None, "master")


@pytest.mark.parametrize("name", ["shm", "rdma", "tcp"])
def test_a_transport_of_the_extension_is_not_opened_by_itself(name: str) -> None:
    opening: Any = None
    with pytest.raises(NotImplementedError, match="connect.py opens shm, tcp and rdma together"):
        transport_kind(name).open(opening)
