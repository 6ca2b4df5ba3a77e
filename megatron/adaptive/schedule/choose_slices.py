"""Chooses the number of slices of each sequence by simulation, for ``--sequence-slices auto``.

The first steps run with two different numbers of slices, such as 8 and 4. With n slices, a stage
takes ``whole + (n - 1) * added`` for a microbatch, where ``whole`` is the time without slices, and
``added`` is the extra time of each slice after the first. Two measurements determine both values::

    measured    8 slices  2.14 s       added = (2.14 - 2.06) / 4 = 0.02 s for each further slice
                4 slices  2.06 s       whole = 2.06 - 3 * 0.02   = 2.00 s

Steps with other numbers of slices are simulated with these times, and the number with the shortest
step is chosen. If several numbers have nearly the same step time, the smallest of these numbers is
chosen.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.choose_by_simulation import ScheduleChoice
from megatron.adaptive.schedule.workload import StageProfile, StageTimes

_ALIKE = 0.01
"""Relative difference up to which two step times are treated as equal."""
_LEAST_WHOLE = 0.25
"""Minimum fraction of a measured time that is attributed to the work of a whole microbatch. Without
this limit, noise in the measurements could make the work of a microbatch zero or negative."""


@dataclass(frozen=True, kw_only=True)
class SliceTrial:
    """Stage times measured with a certain number of slices.

    Attributes:
        num_slices: Number of slices of each microbatch.
        times: Times of a microbatch on each stage, summed over its slices.
    """

    num_slices: int
    times: StageTimes


@dataclass(frozen=True, kw_only=True)
class NextTrial:
    """Decision to measure some steps with a different number of slices on all ranks.

    Attributes:
        text: Description of the decision, as one line for the log.
        trial: Times measured with the previous number of slices.
        num_slices: Number of slices to measure next.
    """

    text: str
    trial: SliceTrial
    num_slices: int


@dataclass(frozen=True, kw_only=True)
class SliceChoice:
    """Number of slices that was chosen, with the schedule to run.

    Attributes:
        num_slices: Number of slices of each microbatch.
        schedule: Fastest schedule with this number of slices.
        text: Simulated step time with each number of slices, as one line for the log.
    """

    num_slices: int
    schedule: ScheduleChoice
    text: str


def added_s(first: SliceTrial, second: SliceTrial) -> float:
    """Returns the time in seconds that each slice after the first adds to F or B.

    The result is the mean over all stages and over F and B, and is at least 0.

    Args:
        first: Times measured with one number of slices.
        second: Times measured with another number of slices.
    """
    further = first.num_slices - second.num_slices
    whole_s = [
        statistics.fmean(map(sum, zip(*_rows(trial.times), strict=True)))
        for trial in (first, second)
    ]
    return max(0.0, (whole_s[0] - whole_s[1]) / further / 2)


def _rows(times: StageTimes) -> list[tuple[float, ...]]:
    """Returns the times of F, B and W in ``times``, each as a tuple with an entry per stage."""
    return [row for row in (times.forward_s, times.backward_s, times.weight_s) if row]


def without_slices(profile: StageProfile, num_slices: int, slice_s: float) -> StageProfile:
    """Separates the cost of slicing from the stage times of a profile.

    Returns a copy of ``profile`` that contains the times of whole microbatches, and separately the
    time that each slice after the first adds.

    Args:
        profile: Profile measured with slices.
        num_slices: Number of slices during the measurement.
        slice_s: Time in seconds that each slice after the first adds to F and to B.
    """
    times = profile.times
    added = (num_slices - 1) * slice_s

    def whole(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(seconds - added, _LEAST_WHOLE * seconds) for seconds in row)

    times = replace(times, forward_s=whole(times.forward_s), backward_s=whole(times.backward_s))
    return replace(profile, times=times, slice_s=slice_s)


def memory_factor(num_slices: int, measured: int) -> float:
    """Returns an upper bound on a microbatch's activation memory, relative to a measurement.

    The bound applies to ``num_slices`` slices, while the memory was measured with ``measured``
    slices. Without a fused attention kernel, a slice keeps its attention scores with all earlier
    tokens. So n slices keep ``(1 + 1 / n) / 2`` of the scores of a whole sequence. They keep less
    if the slices are long, because long slices are computed in blocks. The memory of other
    activations does not depend on the number of slices.

    Args:
        num_slices: Number of slices for which memory is predicted.
        measured: Number of slices during the measurement.
    """
    if num_slices == 1 < measured:
        # A measurement with many slices may include only a little more than half of the scores.
        return 2.0
    return max(1.0, (1 + 1 / num_slices) / (1 + 1 / measured))


def choose_number(
    numbers: Sequence[int], choose_for: Callable[[int], ScheduleChoice], until_s: float
) -> SliceChoice:
    """Chooses the number of slices whose fastest schedule has the shortest simulated step.

    Args:
        numbers: Numbers of slices to simulate. The first number is simulated even after
            ``until_s``.
        choose_for: Function that chooses the fastest schedule for a number of slices, and raises
            ``ScheduleError`` if no schedule fits into memory.
        until_s: Value of ``time.monotonic`` after which no more numbers are simulated.

    Raises:
        ScheduleError: No schedule fits into memory with any of the numbers.
    """
    schedules: dict[int, ScheduleChoice] = {}
    for number in numbers:
        if schedules and time.monotonic() >= until_s:
            break
        with contextlib.suppress(ScheduleError):
            schedules[number] = choose_for(number)
    if not schedules:
        raise ScheduleError(
            "no number of slices fits into memory; lower --micro-batch-size or recompute "
            "activations"
        )
    steps_s = {number: schedule.step_s for number, schedule in schedules.items()}
    least_s = min(steps_s.values())
    number = min(n for n, step_s in steps_s.items() if step_s <= least_s * (1 + _ALIKE))
    listed = ", ".join(f"{n}: {number_text(steps_s[n] * 1e3, 4)} ms" for n in sorted(steps_s))
    text = f"simulated step times by number of slices: {listed}"
    return SliceChoice(num_slices=number, schedule=schedules[number], text=text)


def ratio(whole: StageTimes, measured: StageTimes) -> float:
    """Returns the time without the cost of slicing, divided by the measured time.

    Both times are sums over all stages and kinds of action.

    Args:
        whole: Times without the cost of slicing.
        measured: Times measured with slices.
    """
    sums = [sum(map(sum, _rows(times))) for times in (whole, measured)]
    return sums[0] / sums[1] if sums[1] else 1.0
