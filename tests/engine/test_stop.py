"""Tests that a signal or a time limit stops all ranks at the same iteration."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from megatron.adaptive.engine.stop import StopRequest

from .conftest import Start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signal_is_only_noted(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.agreed(None)
        assert not any(stop._requests())
        os.kill(os.getpid(), number)
        assert any(stop._requests())
        assert stop.reason is None
        assert stop.agreed(None)
        assert stop.agreed(None)
        assert stop.reason == f"signal {number.name}"
        assert stop.finish()


def test_second_interrupt_ends_at_once() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert any(stop._requests())
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_hangup_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_handlers_are_given_back() -> None:
    def mine(*_: object) -> None:
        pass

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, mine)
    try:
        handlers = [signal.getsignal(number) for number in numbers]
        stop = StopRequest()
        assert signal.getsignal(signal.SIGUSR1) is not mine
        stop.close()
        stop.close()
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("minutes", "reason"), [(None, None), (30, None), (0, "time limit of 0 minutes")]
)
def test_time_limit_of_one_process(minutes: float | None, reason: str | None) -> None:
    with StopRequest(minutes) as stop:
        assert stop.agreed(None) == (reason is not None)
        assert stop.reason == reason
        assert stop.finish() == (reason is not None)


@pytest.mark.multiprocess
def test_signal_to_one_rank_stops_all_at_one_iteration(start: Start) -> None:
    results = start("run", "30,30,30", 3)
    assert results[1:] == results[:1] * 2
    assert results[0][1] == "signal SIGTERM"


@pytest.mark.multiprocess
def test_clock_that_is_first_stops_all(start: Start) -> None:
    """Checks that all ranks stop as soon as the time limit of one rank has passed."""
    assert [iteration for iteration, _ in start("run", "30,0,30", 3)] == [1, 1, 1]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        # Rank 0 must not wait for the request of a rank that is one iteration behind.
        ("late", [False, False, False, False, None]),
        # A stop that is requested in the last iteration must be reported at the end.
        ("last", [False, None, True, True, "signal SIGTERM"]),
    ],
)
def test_answers_of_both_ranks(start: Start, program: str, expected: list[Any]) -> None:
    assert start(program, "30,30", 2) == [expected] * 2


@pytest.mark.multiprocess
def test_a_rank_that_ends_is_an_error_of_the_others(start: Start) -> None:
    kind, text = start("lost", "30,30", 2)[0]
    assert kind == "PeerLostError"
    assert text.startswith("a rank failed while the ranks agreed whether to stop: ")
    assert "\n" not in text
