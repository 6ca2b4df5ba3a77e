"""One contract, kept by every transport between real processes.

The programs that the ranks run are in ``contract.py``. Where a transport does more or less than the
others, the test says so: gloo keeps no bound on what waits at the receiver.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from megatron.adaptive import extension

from .contract import SHAPES
from .contract_rank import SLOTS
from .pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

NATIVE = ("shm", "tcp")
# Soft-RoCE needs a kernel module: tests/labs/rdma_lab boots one and asks for rdma here.
if os.environ.get("TRANSPORT_CONTRACT"):
    NATIVE = tuple(os.environ["TRANSPORT_CONTRACT"].split(","))
ALL = (*NATIVE, "gloo")

all_kinds = pytest.mark.parametrize("kind", ALL)
natively = pytest.mark.parametrize("kind", NATIVE)


@pytest.fixture(autouse=True)
def _needs_extension(request: pytest.FixtureRequest) -> None:
    kind = getattr(request.node, "callspec", None)
    wanted = kind.params.get("kind", "shm") if kind is not None else "shm"
    if wanted != "gloo" and extension.load() is None:
        pytest.skip(str(extension.why_missing()))


class Pools:
    """The pool of the module, made again when a test has used it up."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def get(self) -> Pool:
        if self._pool is None or not self._pool.is_whole:
            self.stop()
            self._pool = Pool(4)
        return self._pool

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.stop()


@pytest.fixture
def pool(pools: Pools) -> Pool:
    """Workers that outlive the test."""
    return pools.get()


@pytest.fixture
def victims() -> Iterator[Pool]:
    """Two workers of this test alone."""
    made = Pool(2)
    yield made
    made.stop()


@all_kinds
def test_any_type_shape_and_size_arrives_in_order(pool: Pool, kind: str) -> None:
    """From no element to many times the channel's memory, strided ones by value, both ways."""
    counts = pool.run("exchange", 2, kind=kind)
    assert len(set(counts)) == 1
    assert counts[0] > 20 * len(SHAPES)


@natively
def test_checksums_change_nothing(pool: Pool, kind: str) -> None:
    assert min(pool.run("exchange", 2, kind=kind, crc=True)) > 20 * len(SHAPES)


@all_kinds
def test_slots_are_used_again_and_again(pool: Pool, kind: str) -> None:
    assert pool.run("wrap_around", 2, kind=kind)[0] == 300


@all_kinds
def test_sending_never_waits_for_the_peers_work(pool: Pool, kind: str) -> None:
    results = pool.run("far_ahead", 2, kind=kind, count=400, nbytes=4096)
    longest_s, total = results[0][0], results[-1][-1]
    assert longest_s < 1.0
    assert total == 400


@natively
def test_what_waits_takes_no_memory_of_the_receiver(pool: Pool, kind: str) -> None:
    """128 MiB are sent to one who takes nothing; the channel holds 256 KiB."""
    _, (grown_mib, total) = pool.run("far_ahead", 2, kind=kind, count=2000, nbytes=1 << 16)
    assert total == 2000
    assert grown_mib < 16


@all_kinds
def test_many_channels(pool: Pool, kind: str) -> None:
    results = pool.run("all_to_all", 4, kind=kind, count=40)
    assert results == [{p: 40 for p in range(4) if p != rank} for rank in range(4)]


@all_kinds
def test_payloads_may_be_kept_and_let_go_in_any_order(pool: Pool, kind: str) -> None:
    """More of them than the channel has slots: what comes next is then copied out."""
    assert pool.run("hold", 2, kind=kind, count=6 * SLOTS)[0] == 6 * SLOTS


@all_kinds
def test_autograd_takes_payloads_as_its_own(pool: Pool, kind: str) -> None:
    expected = sum(64 * 2.0 * number for number in range(60))
    results = pool.run("train", 2, kind=kind, count=60)
    assert results == [expected] * 2


@all_kinds
def test_wait_ends_at_its_deadline(pool: Pool, kind: str) -> None:
    assert pool.run("deadline", 2, kind=kind)[-1] == [True, True, True, True, 7]


@natively
def test_flush_has_a_deadline(pool: Pool, kind: str) -> None:
    name, text = pool.run("slow_flush", 2, kind=kind)[0]
    assert name == "DeadlineError"
    assert "within 0.2 s by rank 1 (stage 1 on host-1)" in text


@all_kinds
def test_sender_may_replace_its_tensors(pool: Pool, kind: str) -> None:
    pool.run("reuse", 2, kind=kind)


@all_kinds
def test_payloads_can_be_computed_in_reserved_memory(pool: Pool, kind: str) -> None:
    assert pool.run("reserve", 2, kind=kind) == [6, 6]


@pytest.mark.parametrize("kind", [kind for kind in NATIVE if kind == "shm"])
def test_reserved_memory_is_handed_over_without_a_copy(pool: Pool, kind: str) -> None:
    seen = pool.run("reserved_is_shared", 2, kind=kind)[-1]
    assert seen == [True] * 2


@all_kinds
def test_close_drains(pool: Pool, kind: str) -> None:
    assert pool.run("drain", 2, kind=kind)[-1] == list(range(4 * SLOTS))


@natively
def test_forked_child_gives_nothing_back(pool: Pool, kind: str) -> None:
    """Loaders of data are forked: what they inherit and drop is still in use here."""
    pool.run("child", 2, kind=kind)


@natively
def test_pieces_move_on_while_the_receiver_computes(pool: Pool, kind: str) -> None:
    assert pool.run("pieces", 2, kind=kind, count=20)[-1] == 20


@all_kinds
def test_arrivals_are_heard_while_the_process_computes(pool: Pool, kind: str) -> None:
    heard, values, ended = pool.run("listen", 2, kind=kind, count=20)[-1]
    assert heard == [[number, True] for number in range(20)] or heard == [
        (number, True) for number in range(20)
    ]
    assert values == [float(number) for number in range(20)]
    assert ended == ["AdaptiveError", "from here"]


@all_kinds
def test_arrivals_tell_when_they_came(pool: Pool, kind: str) -> None:
    """A thread that takes messages off a network sees each come; nobody sees a peer's stores."""
    told = pool.run("arrivals", 2, kind=kind, count=8)[-1]
    assert len(told) == 8
    if kind in ("tcp", "gloo"):
        assert told[0][0] < told[0][1]  # before anybody looked
        assert all(0 < arrived_ns < taken_ns for arrived_ns, _, taken_ns in told)
    else:
        assert [arrived_ns for arrived_ns, _, _ in told] == [None] * 8


@all_kinds
def test_what_no_message_can_carry_is_refused_by_the_sender(pool: Pool, kind: str) -> None:
    types, dimensions = pool.run("refused", 2, kind=kind)[0]
    assert "torch.bits8 cannot be sent" in types
    assert "8 dimensions" in dimensions


def test_one_rank_may_use_several_transports(pool: Pool) -> None:
    """Rank 2 has no extension: its channel is gloo's, and rank 1 has one queue for both."""
    first, middle, last = pool.run("mixed", 3)
    assert first == ["shm", {1: "shm"}, 10.0]
    assert last == ["gloo", {1: "gloo"}, 12.0]
    name, links, came = middle
    assert name == "shm+gloo"
    assert links == {0: "shm", 2: "gloo"}
    assert came == [(peer, float(number)) for peer in (0, 2) for number in range(3)]


@pytest.mark.parametrize("doing", ["sending", "receiving", "waiting"])
@all_kinds
def test_killed_peer_is_named(victims: Pool, kind: str, doing: str) -> None:
    victims.start("meet_killed", [0, 1], kind=kind, doing=doing)
    victims.await_mark("ready")
    time.sleep(0.3)
    killed_s = time.time()
    victims.signal(0)
    first, sending, closing, closing_s, noticed_s = victims.result(1)
    for name, text in (first, sending):
        assert name == "PeerLostError", text
        assert "rank 0 (stage 0 on host-0)" in text
        assert "\n" not in text
    assert noticed_s - killed_s < 5.0
    assert closing_s < 5.0
    if kind != "gloo":
        assert "F" in first[1], first
        assert "of step 3" in first[1], first
        assert closing[0] in ("none", "PeerLostError")


@natively
def test_new_job_starts_while_ranks_of_the_old_one_live(
    victims: Pool, pool: Pool, kind: str
) -> None:
    victims.start("survive", [0, 1], kind=kind)
    for rank in range(2):
        victims.await_mark(f"open-{rank}")
    victims.signal(1)
    # Rank 0 of the old job still listens.
    assert pool.run("ping_pong", 2, kind=kind, rounds=20, value=2.0) == [40.0, 40.0]


@all_kinds
def test_jobs_side_by_side(pool: Pool, kind: str) -> None:
    pool.start("ping_pong", [0, 1], kind=kind, rounds=50, value=1.0)
    pool.start("ping_pong", [3, 2], kind=kind, rounds=50, value=3.0)
    assert [pool.result(worker) for worker in range(4)] == [50.0, 50.0, 150.0, 150.0]
