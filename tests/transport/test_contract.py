"""Tests that all transports give the same guarantees, between real processes.

The ranks run the programs in ``contract.py``. This module lists which transports differ in some
guarantees. For example, gloo does not limit the memory of messages that wait at the receiver.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron.adaptive import extension
from megatron.adaptive.config.transport_specs import BUILT_IN

from .contract_rank import OVER_TORCH
from .pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

NATIVE = tuple(name for name in BUILT_IN if name not in (*OVER_TORCH, "rdma"))
# RDMA over Ethernet in software (Soft-RoCE) needs a kernel module. tests/labs/rdma_lab boots a
# kernel that has this module, and sets the variable to rdma.
if os.environ.get("TRANSPORT_CONTRACT"):
    NATIVE = tuple(os.environ["TRANSPORT_CONTRACT"].split(","))
ALL = (*NATIVE, *OVER_TORCH)
OWN = "examples.own_transport.files:Files"
SHM = tuple(kind for kind in NATIVE if kind == "shm")

OWN_PROGRAMS = (
    "exchange",
    "wrap_around",
    "far_ahead",
    "all_to_all",
    "hold",
    "train",
    "deadline",
    "reuse",
    "reserve",
    "drain",
    "listen",
    "arrivals",
    "refused",
)
"""Programs that user-defined transports must also pass. The tests use an example transport."""

all_kinds = pytest.mark.parametrize("kind", ALL)
natively = pytest.mark.parametrize("kind", NATIVE)

PROGRAMS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("exchange", ALL, {}),
    ("exchange", NATIVE, {"crc": True}),
    ("wrap_around", ALL, {}),
    ("far_ahead", ALL, {"count": 400, "nbytes": 4096}),
    # Rank 0 sends 40 MiB while the receiver takes no messages. The channel can hold 256 KiB.
    ("far_ahead", NATIVE, {"count": 640, "nbytes": 1 << 16, "is_bounded": True}),
    ("all_to_all", ALL, {"num_ranks": 4}),
    ("hold", ALL, {}),
    ("train", ALL, {}),
    ("deadline", ALL, {}),
    ("slow_flush", NATIVE, {}),
    ("reuse", ALL, {}),
    ("reserve", ALL, {}),
    ("reserved_is_shared", SHM, {}),
    ("drain", ALL, {}),
    ("child", NATIVE, {}),
    ("pieces", NATIVE, {}),
    ("listen", ALL, {}),
    ("arrivals", ALL, {}),
    ("refused", ALL, {}),
)
"""Programs of the contract, with the transports that they test and with their arguments."""


@pytest.fixture(autouse=True)
def _needs_extension(request: pytest.FixtureRequest) -> None:
    kind = getattr(request.node, "callspec", None)
    transport = kind.params.get("kind", "shm") if kind is not None else "shm"
    if transport not in OVER_TORCH and extension.load() is None:
        pytest.skip(str(extension.why_missing()))


@pytest.mark.parametrize(
    ("program", "kind", "arguments"),
    [
        pytest.param(program, kind, arguments, id="-".join([program, kind, *arguments]))
        for program, kinds, arguments in PROGRAMS
        for kind in kinds
    ],
)
def test_contract(pool: Pool, program: str, kind: str, arguments: dict[str, Any]) -> None:
    pool.run(f"contract.{program}", **{"num_ranks": 2, "kind": kind, **arguments})


@pytest.mark.parametrize("program", OWN_PROGRAMS)
def test_contract_of_a_transport_of_the_user(pool: Pool, program: str) -> None:
    arguments = {"far_ahead": {"count": 400, "nbytes": 4096}, "all_to_all": {"num_ranks": 4}}
    options = {"num_ranks": 2, **arguments.get(program, {})}
    pool.run(f"contract.{program}", kind=OWN, **options)


def test_one_rank_may_use_several_transports(pool: Pool) -> None:
    pool.run("contract.mixed", 3)


@pytest.mark.parametrize("doing", ["sending", "receiving", "waiting"])
@all_kinds
def test_killed_peer_is_named(start: Callable[..., Pool], kind: str, doing: str) -> None:
    victims = start("contract.meet_killed", 2, kind=kind, doing=doing)
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
    assert closing[0] in ("none", "PeerLostError")
    if kind not in OVER_TORCH:
        assert "F" in first[1], first
        assert "of step 3" in first[1], first


@all_kinds
def test_a_stopped_peer_goes_on_within_the_limit_and_is_lost_beyond_it(
    start: Callable[..., Pool], kind: str
) -> None:
    """Checks that a rank may be suspended for a short time, but is lost after a longer time."""
    limit_s = 3.0
    ranks = start("contract.meet_stopped", 2, kind=kind, limit_s=limit_s)
    ranks.await_mark("ready")
    ranks.signal(0, signal.SIGSTOP)
    ranks.mark("stopped")
    time.sleep(0.5 * limit_s)
    ranks.signal(0, signal.SIGCONT)
    ranks.await_mark("went on")
    ranks.signal(0, signal.SIGSTOP)
    name, text = ranks.result(1)
    if kind in OVER_TORCH:
        return
    assert name == "PeerLostError", text
    assert "rank 0 (stage 0 on host-0)" in text
    match = re.search(r"came from it for (\S+) s \(limit 3 s, --transport-silence-s\)", text)
    assert match is not None, text
    assert float(match[1]) >= limit_s - 1, text
    last = "the last message from it was F chunk 0 microbatch 1 of step 3; seen by rank 1"
    assert text.endswith(last), text


@natively
def test_new_job_starts_while_ranks_of_the_old_one_live(
    start: Callable[..., Pool], pool: Pool, kind: str
) -> None:
    victims = start("contract.survive", 2, kind=kind)
    for rank in range(2):
        victims.await_mark(f"open-{rank}")
    victims.signal(1)
    # Rank 0 of the old job is still alive, and must not disturb the new job.
    pool.run("contract.ping_pong", 2, kind=kind, rounds=20, value=2.0)


@all_kinds
def test_jobs_side_by_side(pool: Pool, kind: str) -> None:
    pool.start("contract.ping_pong", [0, 1], kind=kind, rounds=50, value=1.0)
    pool.start("contract.ping_pong", [3, 2], kind=kind, rounds=50, value=3.0)
    for worker in range(4):
        pool.result(worker)
