"""Tests that both ranks of a channel choose the same transport, and log a readable reason."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from megatron.adaptive.config.parallel import TRANSPORTS
from megatron.adaptive.errors import SetupError
from megatron.adaptive.transport.interface import Endpoint
from megatron.adaptive.transport.select import (
    Choice,
    candidates,
    choose,
    log_lines,
    rounds_of,
    size_of_channel,
    why_not,
)

MIB = 1 << 20
NO_GPU = {"nccl": "it has no GPU"}
NO_PORT = {"rdma": "it has no RDMA device", **NO_GPU}
NOT_BUILT = dict.fromkeys(("shm", "rdma", "tcp"), "the extension is not built") | NO_GPU


def end(rank: int, **changes: Any) -> Endpoint:
    """Returns a description of ``rank``. Unless changed, its machine has RDMA but no GPU."""
    machine = changes.pop("machine", "a")
    facts: dict[str, Any] = {
        "host": f"host-{machine}",
        "machine": machine,
        "user": 1000,
        "addresses": {"tcp": f"10.0.0.{rank + 1}"},
        "ports": ("mlx5_0:1",),
        "lacks": NO_GPU,
    }
    return Endpoint(rank=rank, **(facts | changes))


def far(rank: int, **changes: Any) -> Endpoint:
    return end(rank, machine=f"m{rank}", **changes)


@pytest.mark.parametrize(
    ("first", "second", "kind", "reason"),
    [
        (end(0), end(1), "shm", "same machine"),
        (far(0), far(1), "rdma", "both have an active port"),
        (far(0), far(1, lacks=NO_PORT, ports=()), "tcp", "no rdma: rank 1 on host-m1: it has no"),
        (end(0), end(1, user=7), "tcp", "no shm: rank 0 belongs to user 1000 and rank 1 to user 7"),
        (end(0), end(1, lacks=NOT_BUILT), "gloo", "no shm: rank 1 on host-a: the extension is not"),
        (far(0, lacks=NOT_BUILT), far(1), "gloo", "no rdma: rank 0 on host-m0: the extension"),
        (
            end(0, device="cuda", lacks={}),
            end(1, device="cuda", lacks={}),
            "nccl",
            "GPU of its own",
        ),
        (far(0, device="cuda", lacks={}), far(1, device="cuda", lacks={}), "nccl", "of its own"),
        (end(0, device="cuda"), end(1, device="cuda"), "shm", "same machine"),
        (end(0, device="cuda", lacks={}), end(1, device="cuda"), "shm", "no nccl: rank 1"),
    ],
)
def test_each_pair_gets_its_best(first: Endpoint, second: Endpoint, kind: str, reason: str) -> None:
    chosen = choose(first, second)
    assert chosen.kind == kind
    assert reason in chosen.reason
    assert choose(second, first) == chosen


def test_loopback_address_is_no_way_to_another_machine() -> None:
    alone = far(1, addresses={"tcp": "127.0.1.1"}, lacks=NO_PORT)
    chosen = choose(far(0), alone)
    assert chosen.kind == "gloo"
    assert "rank 1 on host-m1 has only the address 127.0.1.1" in chosen.reason
    assert "--transport-interface" in chosen.reason


def test_the_choice_does_not_depend_on_who_asks() -> None:
    ends = [
        builder(rank, lacks=lacks, user=user, addresses={"tcp": address})
        for rank, (builder, lacks, user, address) in enumerate(
            itertools.product(
                (end, far), (NO_GPU, NO_PORT, NOT_BUILT, {}), (0, 1), ("127.0.0.1", "10.0.0.1")
            )
        )
    ]
    for first, second in itertools.combinations(ends, 2):
        assert choose(first, second) == choose(second, first)
        for forced in TRANSPORTS:
            possible = why_not(forced, first, second) is None
            assert possible == (why_not(forced, second, first) is None)
            assert candidates(first, second) == candidates(second, first)


@pytest.mark.parametrize(
    ("forced", "first", "second", "said"),
    [
        (
            "shm",
            far(0),
            far(3),
            "ranks 0 and 3: rank 0 on host-m0 and rank 3 on host-m3 do not see",
        ),
        ("rdma", end(2), end(1, lacks=NO_PORT), "ranks 1 and 2: rank 1 on host-a: it has no RDMA"),
        ("tcp", end(0), end(1, lacks=NOT_BUILT), "rank 1 on host-a: the extension is not built"),
        ("nccl", end(0), end(1), "ranks 0 and 1: rank 0 on host-a: it has no GPU"),
    ],
)
def test_a_forced_transport_that_cannot_be_is_an_error(
    forced: str, first: Endpoint, second: Endpoint, said: str
) -> None:
    with pytest.raises(SetupError) as caught:
        choose(first, second, forced)
    assert f"--transport {forced} cannot connect {said.split(':')[0].split(' and ')[0]}"[
        :30
    ] in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("forced", ["shm", "rdma", "tcp", "gloo"])
def test_a_forced_transport_wins(forced: str) -> None:
    assert choose(end(0), end(1), forced) == Choice(forced, "asked for")


def test_the_log_names_every_pair_once() -> None:
    same, other = Choice("shm", "same machine"), Choice("tcp", "no rdma: none")
    choices = {(rank, rank + 1): same for rank in range(0, 20, 2)}
    choices |= {(rank, rank + 1): other for rank in range(1, 19, 2)}
    lines = log_lines(choices)
    assert (
        lines[0] == "transport: shm for ranks 0-1 2-3 4-5 6-7 8-9 10-11 12-13 14-15 (same machine)"
    )
    assert all(len(line) < 120 for line in lines)
    named = [word for line in lines for word in line.split() if word[0].isdigit()]
    assert sorted(named) == sorted(f"{low}-{high}" for low, high in choices)


@pytest.mark.parametrize(
    ("payload_bytes", "in_flight", "slot_bytes", "slots"),
    [
        (None, None, MIB, 8),
        (3 * MIB, 6, 3 * MIB, 10),
        (3 * MIB, 1000, 3 * MIB, 64),
        (10, 2, 4096, 6),  # A slot is at least as large as a memory page.
        (0, 1, 4096, 5),
        (32 * MIB, 20, 32 * MIB, 8),  # All slots of a channel together take at most 256 MiB.
        (200 * MIB, 20, 64 * MIB, 4),  # Messages of this size are sent in several pieces.
    ],
)
def test_a_channel_has_a_slot_for_each_microbatch_in_flight(
    payload_bytes: int | None, in_flight: int | None, slot_bytes: int, slots: int
) -> None:
    size = size_of_channel(payload_bytes, in_flight)
    assert (size.slot_bytes, size.slots) == (slot_bytes, slots)


def test_the_user_may_size_channels() -> None:
    size = size_of_channel(MIB, 6, slot_bytes=5000, slots=3)
    assert (size.slot_bytes, size.slots) == (5000, 3)
    # The last free slots must not be reserved, because they are needed for the next message.
    assert (size.reservable, size.least_free) == (0, 2)


@pytest.mark.parametrize("slots", range(1, 65))
def test_there_is_always_a_slot_for_the_next_message(slots: int) -> None:
    """Checks that two slots remain free for messages if all other slots are held or reserved."""
    size = size_of_channel(MIB, 1, slots=slots)
    held = max(0, slots - size.least_free)
    assert held + size.reservable <= max(0, slots - 2)


@pytest.mark.parametrize(
    ("size", "ring", "rounds"),
    [(2, False, 1), (8, False, 2), (8, True, 2), (9, True, 3), (64, True, 2)],
)
def test_channels_of_a_row_open_side_by_side(size: int, ring: bool, rounds: int) -> None:
    """Checks that channels between different ranks are opened at the same time."""
    pairs = [(rank, rank + 1) for rank in range(size - 1)] + [(0, size - 1)] * ring
    order = rounds_of(set(pairs))
    assert sorted(order) == sorted(pairs)
    assert last_round(order) == rounds


def test_channels_of_any_ranks_open_in_a_bounded_number_of_rounds() -> None:
    rng = random.Random(3)
    for _ in range(200):
        everyone = list(itertools.combinations(range(rng.randint(2, 12)), 2))
        pairs = rng.sample(everyone, rng.randint(1, len(everyone)))
        most = max(sum(rank in pair for pair in pairs) for rank in range(12))
        order = rounds_of(pairs)
        assert sorted(order) == sorted(pairs)
        assert last_round(order) <= 2 * most - 1


def last_round(order: list[tuple[int, int]]) -> int:
    """Returns the number of rounds that are needed to open all channels.

    A rank opens at most one channel per round, in the order of ``order``.
    """
    done = dict.fromkeys(itertools.chain(*order), 0)
    for low, high in order:
        done[low] = done[high] = max(done[low], done[high]) + 1
    return max(done.values())


def test_ranks_on_processors_of_their_own_do_not_share_them() -> None:
    bound = [end(0, cpus=(0, 1)), end(1, cpus=(2, 3)), end(2, cpus=(1, 2)), end(3)]
    assert not bound[0].shares_cpus(bound[1])
    assert bound[0].shares_cpus(bound[0])
    assert bound[0].shares_cpus(bound[2])
    # The processors of this rank are unknown, so it may share them with other ranks.
    assert bound[0].shares_cpus(bound[3])
    assert not bound[0].shares_cpus(end(4, machine="b", cpus=(0,)))
