"""Times the actions of one stage, with the same clock, warm-up and statistics for all callers.

Actions are the forward pass (F), the backward pass (B) and weight gradients as a separate pass
(W)::

    F 0, B 0, W 0   F 1, B 1, W 1   F 2, B 2, W 2 ...      microbatches of one stage, alone
    └── warmup ─┘   └───── count: their medians ─────

:func:`time_microbatches` runs both kinds of stages: layers of megatron-core's GPT, built by
``training``, and segments of a user's recorded module, built by ``modules``.
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
"""Number of warm-up runs, whose times are discarded."""

_LEAST_LOGS = 4
_QUARTILES_OF_SIGMA = 1.349
"""Interquartile range of a normal distribution, in standard deviations."""


def now(device: torch.device) -> float:
    """Waits until ``device`` is idle, and returns the value of a monotonic clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_call(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Returns the median time of ``call`` in seconds.

    Args:
        call: Function to time.
        device: Device that the function uses.
        repeats: Number of timed calls, after the warm-up call.
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
    enough_s: float = math.inf,
    warm_up: int = WARM_UP,
) -> tuple[list[list[float]], torch.Tensor | None]:
    """Runs and times microbatches on chunk 0 of a rank's stages, one after another.

    Args:
        stages: Object that runs the actions of a rank's stages. It has the methods that the
            executor calls. It must be created for ``WARM_UP + repeats`` microbatches. Its
            ``finish`` method is always called at the end.
        received: Function that creates the input of a forward pass, or returns ``None`` for the
            first stage.
        gradient: Function that creates the input of a backward pass, or returns ``None`` for the
            last stage.
        device: Device on which the stages run.
        repeats: Maximum number of microbatches to time, after the warm-up.
        split: Whether weight gradients are computed as a separate action W.
        enough_s: Duration in seconds. If a timed microbatch takes at least this long, no further
            microbatches are timed.
        warm_up: Number of microbatches at the beginning whose times are discarded.

    Returns:
        Three lists of durations in seconds, and the output of the last forward pass. The lists
        contain the durations of the forward, backward and weight-gradient passes. The last list
        contains zeros unless ``split`` is true.
    """
    rows: list[list[float]] = [[], [], []]
    output = None
    try:
        for index in range(warm_up + repeats):
            message = received()
            returned = gradient()
            marks = [now(device)]
            output = stages.forward(0, index, message)
            marks.append(now(device))
            stages.release(0, index)
            stages.backward(0, index, returned)
            marks.append(now(device))
            stages.after_backward(0, index)
            if split:
                stages.weights(0, index, 0, 1)
            marks.append(now(device) if split else marks[-1])
            if index >= warm_up:
                for row, (begin_s, end_s) in zip(rows, itertools.pairwise(marks), strict=True):
                    row.append(end_s - begin_s)
                if marks[-1] - marks[0] >= enough_s:
                    break
    finally:
        stages.finish()
    return rows, output


def spread(lanes: Iterable[Sequence[float]]) -> float:
    """Returns the relative standard deviation of the durations of actions.

    Each duration is divided by the median of its sequence. The result is the standard deviation of
    the logarithms of these ratios. It is estimated from quartiles, which change little if the
    operating system interrupts a few actions.

    Args:
        lanes: Durations in any unit, as one sequence for each kind of work.
    """
    logs: list[float] = []
    for values in lanes:
        if len(values) < 2:
            continue  # A single duration says nothing about the variation.
        middle = statistics.median(values)
        logs += [math.log(value / middle) for value in values if middle > 0 and value > 0]
    if len(logs) < _LEAST_LOGS:
        return 0.0
    low, _, high = statistics.quantiles(logs, n=4)
    return (high - low) / _QUARTILES_OF_SIGMA
