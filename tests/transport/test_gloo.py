"""Tests channels of gloo for tensors of a single shape, between real processes.

``test_contract.py`` tests gloo with messages of different shapes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from .pool import Pool

pytestmark = pytest.mark.multiprocess

Start = Callable[..., Pool]


@pytest.mark.parametrize(
    "shape", [(5, 2, 8), (0, 8), (), (700, 1000)], ids=["packets", "empty", "scalar", "large"]
)
def test_both_directions_keep_order_and_content(pool: Pool, shape: tuple[int, ...]) -> None:
    pool.run("contract.exchange", 2, kind="gloo", shape=shape)


def test_sending_does_not_wait_for_the_peers_work(pool: Pool) -> None:
    pool.run("contract.far_ahead", 2, kind="gloo", count=300, nbytes=1 << 14, fixed=True)


def test_what_a_channel_does_not_carry_is_refused_by_the_sender(pool: Pool) -> None:
    """Checks that a message of another shape is rejected, and that the channel still works."""
    pool.run("programs.refused", 2)


@pytest.mark.parametrize("shape", [None, (4,)], ids=["any-shape", "fixed-shape"])
@pytest.mark.parametrize("header", [[1, 2, 3], [0x4D415031, 9, 0, 0, 0, 0, 0, 1, 4]])
def test_foreign_header_ends_the_channel(
    start: Start, header: list[int], shape: tuple[int, ...] | None
) -> None:
    """Checks that headers that are invalid or have a wrong sequence number raise an error."""
    kind, text = start("programs.foreign", 2, header=header, shape=shape).result(1)
    assert kind == "TransportError"
    assert "rank 0" in text


@pytest.mark.parametrize("shape", [(3, 2), (4, 4)])
def test_ranks_that_disagree_about_the_shape_are_told(start: Start, shape: tuple[int, ...]) -> None:
    """Checks that a tensor of an unexpected shape raises an error on the receiver."""
    kind, text = start("programs.disagree", 2, shape=shape).result(1)
    assert kind == "TransportError"
    assert "(2, 3)" in text
    assert str(shape) in text


def test_flush_has_a_deadline(start: Start) -> None:
    """Checks that a flush times out if the receiver is suspended while it stays connected."""
    job = start("programs.stuck", 2)
    job.await_mark("ready")
    job.signal(1, signal.SIGSTOP)
    job.mark("stopped")
    kind, text = job.result(0)
    assert kind == "DeadlineError"
    assert "rank 1 (stage 1 on host-1)" in text
