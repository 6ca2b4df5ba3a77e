"""Checks estimates of a clock's offset and drift, even if some messages are late."""

import numpy as np
import numpy.typing as npt
import pytest

from megatron.adaptive.trace.clock import ClockFit, fit_clock, settle, shift

Ints = npt.NDArray[np.int64]


def exchanges(
    seed: int, seconds: float, offset_s: float, drift_ppm: float, bend: float = 0.0
) -> tuple[Ints, Ints, Ints]:
    """Simulates two clocks, and returns samples that compare them.

    A series of samples is taken every 10 s. In each direction, a third of the messages are late.
    The run takes ``seconds`` seconds. The offset oscillates slowly with an amplitude of ``bend``
    seconds.

    Returns:
        Samples with the shape ``[n, 4]``, their start times on the local clock, and the same times
        on the reference clock.
    """
    rng = np.random.default_rng(seed)
    bursts = np.arange(0, seconds, 10.0)
    true = (bursts[:, None] + np.arange(16) * 2e-3).reshape(-1) * 1e9
    passed = true / 1e9
    ahead = offset_s * 1e9 + drift_ppm * 1e3 * passed + bend * np.sin(passed / 600) * 1e9
    way = rng.exponential(25e3, (2, len(true))) + 12e3
    late = rng.random((2, len(true))) < 0.33
    way += late * rng.exponential(4e6, (2, len(true)))
    reference = (true + 5e14).astype(np.int64)
    local = reference - ahead.astype(np.int64)
    received = reference + way[0].astype(np.int64)
    answered = received + 30_000
    back = local + way.sum(axis=0).astype(np.int64) + 30_000
    return np.stack([local, received, answered, back], axis=1), local, reference


@pytest.mark.parametrize(
    ("seed", "offset_s", "drift_ppm"), [(0, -5.0, -50.0), (1, 5.0, 50.0), (2, -5.0, 50.0)]
)
def test_offset_and_drift_are_found(seed: int, offset_s: float, drift_ppm: float) -> None:
    samples, local, reference = exchanges(seed, 120, offset_s, drift_ppm)
    fit = fit_clock(samples)
    errors = np.abs(fit.apply(local) - reference)
    assert np.median(errors) < 10_000
    assert errors.max() < 30_000
    assert fit.drift_ppm == pytest.approx(drift_ppm, abs=1)
    assert fit.residual_ns < 50_000
    assert 24_000 <= fit.delay_ns < 40_000
    assert fit.num_samples < len(samples) / 2
    order = np.random.default_rng(seed).permutation(len(samples))
    assert np.array_equal(fit_clock(samples[order]).apply(local), fit.apply(local))


def test_a_short_run_trusts_no_drift() -> None:
    samples, local, reference = exchanges(1, 1, 2.0, 0.0)
    fit = fit_clock(samples)
    assert abs(fit.drift_ppm) < 100
    assert np.abs(fit.apply(local) - reference).max() < 50_000


def test_a_clock_that_is_corrected_on_the_way() -> None:
    samples, local, reference = exchanges(2, 3600, 1.0, 20.0, bend=5e-4)
    fit = fit_clock(samples)
    assert len(fit.knots_ns) > 2
    assert np.median(np.abs(fit.apply(local) - reference)) < 20_000


def test_one_exchange_is_enough_for_an_offset() -> None:
    fit = fit_clock([(1000, 501_100, 501_300, 1400)])
    assert fit.apply(np.array([1000, 2000])).tolist() == [501_000, 502_000]
    assert (fit.residual_ns, fit.delay_ns, fit.drift_ppm) == (0, 200, 0)


def test_a_fit_goes_on_beyond_its_samples_and_takes_a_constant() -> None:
    fit = ClockFit(
        pivot_ns=1000,
        base_ns=10**18,
        knots_ns=np.array([0.0, 100.0, 200.0]),
        offsets_ns=np.array([0.0, 10.0, 40.0]),
    )
    moved = fit.apply(np.array([900, 1000, 1050, 1150, 1300])) - 10**18
    assert moved.tolist() == [890, 1000, 1055, 1175, 1370]
    assert (fit.plus(7).apply(np.array([1000])) - 10**18).tolist() == [1007]
    assert shift(5).apply(np.array([1])).tolist() == [6]


def test_messages_correct_what_they_contradict_and_nothing_else() -> None:
    assert settle({(0, 1): 900, (1, 0): 300}, 2) == ([0, 0], 0)
    assert settle({(0, 1): -500, (1, 0): 900}, 2) == ([0, 500], 0)
    moves, left = settle({(0, 1): 900, (1, 0): 900, (1, 2): -200, (2, 1): 900}, 3)
    assert left <= 1
    assert moves[2] - moves[1] >= 199
    assert settle({}, 3, unsure=[1, 2]) == ([0, 0, 0], 0)


def test_an_unsure_clock_goes_half_way() -> None:
    slack = {(0, 1): -5000, (1, 0): 9000, (1, 2): 100, (2, 1): 300, (0, 3): 5}
    assert settle(slack, 4, unsure=[1, 2, 3]) == ([0, 7000, 7100, 0], 0)


def test_contradictions_are_reported() -> None:
    moves, left = settle({(0, 1): -5000, (1, 0): 1000}, 2, unsure=[1])
    assert (moves, left) == ([0, 3000], 2000)
