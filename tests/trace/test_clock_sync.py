"""Tests that clocks are compared over real connections, and that unknown clients are rejected."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.handshake import dial
from megatron.adaptive.trace import clock
from megatron.adaptive.trace.clock import ClockSampler, ClockServer, fit_clock, start_clock_sync
from megatron.adaptive.trace.trace_format import ClockSamples
from tests.soak.tracing.clocks import sample, wrong

WATCHDOG_S = 30.0


@pytest.fixture
def server() -> Iterator[ClockServer]:
    with closing(ClockServer()) as server:
        yield server


@pytest.mark.multiprocess
def test_a_wrong_clock_of_a_process_is_found(server: ClockServer) -> None:
    offset_s, drift_ppm, seconds = -5, 50, 4
    sampled = sample(server, offset_s, drift_ppm, seconds)
    assert sampled["bursts"] >= 5
    assert len(sampled["samples"]) == sampled["bursts"] * clock.BURST
    true = sampled["start_ns"] + np.linspace(0, seconds * 1e9, 101).astype(np.int64)
    fit = fit_clock(sampled["samples"])
    errors = np.abs(fit.apply(wrong(true, sampled["start_ns"], offset_s, drift_ppm)) - true)
    assert np.median(errors) <= 50_000, f"{np.median(errors)} ns, {fit}"
    assert fit.residual_ns <= 50_000
    assert abs(fit.drift_ppm + drift_ppm) < 40


def test_a_burst_is_taken_at_once_and_another_at_the_end(server: ClockServer) -> None:
    bursts: list[ClockSamples] = []
    came = threading.Event()

    def deliver(samples: ClockSamples) -> None:
        bursts.append(samples)
        came.set()

    sampler = ClockSampler("localhost", server.port, server.secret, deliver=deliver)
    assert came.wait(WATCHDOG_S)
    sampler.close()
    assert len(bursts) >= 2
    for t0, t1, t2, t3 in bursts[0].samples:
        # The client and the server of this test use the same clock, so the times must be in order.
        assert t0 <= t1 <= t2 <= t3
    sampler.close()


def test_strangers_are_turned_away(server: ClockServer) -> None:
    with closing(socket.create_connection(("localhost", server.port), 5)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" * 9)
        # The server closes the connection without reading all data, which may reset the connection.
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(64) == b""


def test_a_connection_that_gets_no_thread_is_closed(
    server: ClockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_other(thread: threading.Thread) -> None:
        if thread.name == "clock-connection":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_other)
    address = "localhost", server.port
    with dial(address, server.secret, clock._PURPOSE, WATCHDOG_S).socket as connection:
        connection.settimeout(WATCHDOG_S)
        assert connection.recv(1) == b""
    server.close()


def test_a_server_that_is_gone_ends_the_sampler() -> None:
    server = ClockServer()
    bursts: list[ClockSamples] = []
    sampler = ClockSampler(
        "localhost", server.port, "not this", deliver=bursts.append, periods_s=(0.01, 0.01)
    )
    sampler._thread.join(WATCHDOG_S)
    assert not sampler._thread.is_alive()
    assert bursts == []
    server.close()
    assert not server._gate._thread.is_alive()


def test_without_the_kernels_stamps_the_threads_own_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_SO_TIMESTAMPNS", 0x7FFF)
    bursts: list[ClockSamples] = []
    with closing(ClockServer()) as server:
        sampler = ClockSampler("localhost", server.port, server.secret, deliver=bursts.append)
        sampler.close()
    assert abs(fit_clock(bursts[0].samples).base_ns) < 10**8


@pytest.mark.parametrize(
    ("clocks", "asking"), [("aaaa", []), ("aabb", [2]), ("abcb", [1, 2]), ("abca", [1, 2])]
)
def test_one_rank_of_each_other_clock_asks(clocks: str, asking: list[int]) -> None:
    places: list[Any] = []

    def gather(value: Any) -> list[Any]:
        """Simulates an all-gather of ``value``, and returns the values of all ranks.

        The first call gathers the names of the clocks, and the second call gathers the address of
        the server on rank 0.
        """
        if isinstance(value, str):
            return list(clocks)
        places.append(value)
        return places

    came = {rank: threading.Event() for rank in asking}
    syncs = [
        start_clock_sync(
            rank=rank,
            clock_id=clock,
            address="localhost",
            gather=gather,
            deliver=lambda _, rank=rank: came[rank].set(),  # type: ignore[misc]
        )
        for rank, clock in enumerate(clocks)
    ]
    for event in came.values():
        assert event.wait(WATCHDOG_S)
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("clock-sampler") == len(asking)
    for sync in reversed(syncs):
        sync.close()
    assert not any(thread.name.startswith("clock-") for thread in threading.enumerate())
