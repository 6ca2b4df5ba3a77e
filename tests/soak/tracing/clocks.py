"""Measures the error of clock alignment between processes, which run this module as a script.

Every process shifts its clock by an offset and a drift. While the process computes, it samples the
clock of the first process over a real connection. The true offset is known, because all processes
share the machine's clock.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import Any

import numpy as np

from harness.processes import run_module
from megatron.adaptive.trace.clock import ClockSampler, ClockServer, fit_clock
from megatron.adaptive.trace.trace_format import ClockSamples

WRONG: tuple[tuple[float, float], ...] = ((5, 50), (-5, -50), (5, -50), (-5, 50))
"""Offset in seconds and drift in ppm of each wrong clock."""

PERIODS_S = (0.1, 0.5)


def measure(seconds: float, repetitions: int) -> dict[str, list[float]]:
    """Samples wrong clocks of other processes, and compares the fitted clocks with the true clock.

    Args:
        seconds: Time in seconds for which each process samples.
        repetitions: Number of repetitions with each wrong clock.

    Returns:
        Dict of lists with a value for each process: ``error_us`` (median error of its fitted
        times), ``residual_us`` (error that the fit itself estimates) and ``drift_error_ppm``.

    Raises:
        RuntimeError: A process failed.
    """
    errors_of: dict[str, list[float]] = {"error_us": [], "residual_us": [], "drift_error_ppm": []}
    with closing(ClockServer()) as server:
        for _ in range(repetitions):
            for offset_s, drift_ppm in WRONG:
                sampled = sample(server, offset_s, drift_ppm, seconds)
                fit = fit_clock(sampled["samples"])
                true = sampled["start_ns"] + np.linspace(0, seconds * 1e9, 101).astype(np.int64)
                errors = np.abs(
                    fit.apply(wrong(true, sampled["start_ns"], offset_s, drift_ppm)) - true
                )
                errors_of["error_us"].append(float(np.median(errors)) / 1e3)
                errors_of["residual_us"].append(fit.residual_ns / 1e3)
                errors_of["drift_error_ppm"].append(abs(fit.drift_ppm + drift_ppm))
    return errors_of


def sample(
    server: ClockServer, offset_s: float, drift_ppm: float, seconds: float
) -> dict[str, Any]:
    """Starts a process with a wrong clock, and returns the clock samples and the start time.

    The clock is wrong by ``offset_s`` seconds at first, and drifts by ``drift_ppm`` parts per
    million.

    The process samples the clock of ``server`` for ``seconds`` seconds.

    Raises:
        RuntimeError: The process failed.
    """
    numbers = (server.port, server.secret, offset_s, drift_ppm, seconds)
    return dict(run_module("tests.soak.tracing.clocks", *numbers, limit_s=seconds + 60))


def wrong(true: Any, start_ns: int, offset_s: float, drift_ppm: float) -> Any:
    """Returns the times that a wrong clock shows at the true times ``true``, in nanoseconds.

    The clock is off by ``offset_s`` at ``start_ns``, and then drifts by ``drift_ppm``.
    """
    return true + round(offset_s * 1e9) + ((true - start_ns) * drift_ppm * 1e-6).astype(np.int64)


def main() -> int:
    """Runs a process with a wrong clock, and prints its clock samples."""
    port, secret, offset_s, drift_ppm, seconds = sys.argv[1:]
    start_ns = time.monotonic_ns()

    def now() -> int:
        true = np.array([time.monotonic_ns()])
        return int(wrong(true, start_ns, float(offset_s), float(drift_ppm))[0])

    bursts: list[ClockSamples] = []
    sampler = ClockSampler(
        *("localhost", int(port), secret), deliver=bursts.append, now=now, periods_s=PERIODS_S
    )
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        sum(range(2000))  # Keep the interpreter lock busy, as the threads of a real rank do.
    sampler.close()
    samples = [sample for burst in bursts for sample in burst.samples]
    print(json.dumps({"samples": samples, "start_ns": start_ns, "bursts": len(bursts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
