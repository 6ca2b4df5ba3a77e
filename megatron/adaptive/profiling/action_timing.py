"""Times actions on one stage, with the same clock, warmup and statistics for all callers.

::

    F 0, B 0, W 0   F 1, B 1, W 1   F 2, B 2, W 2 ...      microbatches of one stage, alone
    └── warmup ─┘   └───── count: their medians ─────

The layers of megatron-core's GPT and the segments of a recorded module both run through
:func:`time_microbatches`; ``training`` and ``modules`` build them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

WARM_UP = 1
"""Number of first runs that do not count."""
_LEAST_LOGS = 4
_QUARTILES_OF_SIGMA = 1.349
"""Distance between the quartiles of a normal distribution in standard deviations."""


def now(device: torch.device) -> float:
    """Waits for all work on the device; returns the time of a monotonic clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_call(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Returns the median seconds of a call.

    Args:
        call: Function to time.
        device: Device that it uses.
        repeats: Number of timed calls, after the warmup.
    """
    times = []
    for _ in range(WARM_UP + repeats):
        begin_s = now(device)
        call()
        times.append(now(device) - begin_s)
    return statistics.median(times[WARM_UP:])


def time_microbatches(
    stages: Any,
    *,
    received: Callable[[], torch.Tensor | None],
    gradient: Callable[[], torch.Tensor | None],
    device: torch.device,
    repeats: int,
    split: bool,
) -> tuple[list[list[float]], torch.Tensor | None]:
    """Runs microbatches through chunk 0 of a rank's stages, one after the other.

    Args:
        stages: Stages as the executor runs them, made for ``WARM_UP + repeats`` microbatches. They
            are finished when this function returns or raises.
        received: Function that makes the input of a forward, ``None`` on the first stage.
        gradient: Function that makes the input of a backward, ``None`` on the last stage.
        device: Device of the stages.
        repeats: Number of timed microbatches.
        split: Whether gradients of weights are a separate action.

    Returns:
        Durations of forwards, of backwards and of weight gradients, which are 0 if they are not
        split; and the last output.
    """
    rows: list[list[float]] = [[], [], []]
    output = None
    try:
        for index in range(WARM_UP + repeats):
            message = received()
            returned = gradient()
            marks = [now(device)]
            output = stages.forward(0, index, message)
            marks.append(now(device))
            stages.release(0, index)
            stages.backward(0, index, returned)
            marks.append(now(device))
            if split:
                stages.weights(0, index, 0, 1)
            marks.append(now(device) if split else marks[-1])
            if index >= WARM_UP:
                for row, (begin_s, end_s) in zip(rows, itertools.pairwise(marks), strict=True):
                    row.append(end_s - begin_s)
    finally:
        stages.finish()
    return rows, output


def spread(lanes: Iterable[Sequence[float]]) -> float:
    """Returns the standard deviation of durations, as logarithms around the median of their kind.

    It is computed from quartiles, so that a few actions that the system interrupted do not matter.

    Args:
        lanes: Durations of each kind of work, in any unit.
    """
    logs: list[float] = []
    for values in lanes:
        middle = statistics.median(values)
        logs += [math.log(value / middle) for value in values if middle > 0 and value > 0]
    if len(logs) < _LEAST_LOGS:
        return 0.0
    low, _, high = statistics.quantiles(logs, n=4)
    return (high - low) / _QUARTILES_OF_SIGMA
