"""Names what kept a rank from computing, by the counters of its machine.

A reason explains a slow rank if the time that the counter shows beyond the usual is a large part of
the time that the rank lost. Usual is what the counter shows on other ranks, or on the same rank in
other iterations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.trace.diagnose.finding import Reason
from megatron.adaptive.trace.diagnose.samples import Floats, Measured
from megatron.adaptive.trace.machine_counters import (
    DISK_PAGES,
    DISK_WAIT,
    ELAPSED,
    MACHINE_BUSY,
    MEMORY_WAIT,
    OWN_BUSY,
    PROCESSOR_WAIT,
    PROCESSORS,
    STEAL,
    THROTTLED,
)

EXPLAINS = 0.4
"""Minimum fraction of the lost time that a counter must show to be the reason."""

COUNTS = 0.05
"""Minimum fraction of the steps in which a counter must show a wait, to be named at all."""


OTHERS_USE = 0.1
"""Minimum processor time of other processes, in processors, to name them as the reason."""


@dataclass(frozen=True)
class _Wait:
    """Describes a counter of lost time in words.

    The texts may contain ``{share}``, the fraction of the steps that was lost, ``{host}``, the name
    of the machine, ``{processors}``, the number of its processors that the ranks may use,
    ``{ranks}``, the number of ranks of the run on the machine, and ``{others}``, the number of
    processors that other processes kept busy.

    Attributes:
        counter: Name of the counter.
        text: Measured values and what they mean.
        remedy: Action that users can take, in the imperative.
    """

    counter: str
    text: str
    remedy: str


_WAITS = (
    # A thread that a quota has stopped also counts as one that waits for a processor.
    _Wait(
        THROTTLED,
        "a quota on processor time on {host} takes {share:.0%} of a step",
        "raise the quota on {host} (cpu.max of the control group, or the CPU limit of the pod)",
    ),
    _Wait(
        STEAL,
        "the host of virtual machine {host} takes its processors away for {share:.0%} of the time",
        "use a machine that does not share its processors instead of {host}",
    ),
    _Wait(
        PROCESSOR_WAIT,
        "waits for a processor take {share:.0%} of a step, while other processes keep"
        " {others:.1f} processors of {host} busy",
        "stop the other processes on {host}, or keep processors free for this job",
    ),
    _Wait(
        MEMORY_WAIT,
        "{host} is short of memory: programs wait for it in {share:.0%} of the time",
        "free memory on {host}, or place fewer ranks there",
    ),
    _Wait(
        DISK_WAIT,
        "its memory is read from disk, and programs on {host} wait for disks in {share:.0%} of the"
        " time",
        "free memory on {host}, and look for programs that read or write much",
    ),
)
_PINNED = _Wait(
    PROCESSOR_WAIT,
    "waits for a processor take {share:.0%} of a step; number of processors of {host} that the rank"
    " may use: {processors}, fewer than other ranks",
    "let the rank use more processors (taskset, numactl, or --cpu-bind of srun)",
)
_CROWDED = _Wait(
    PROCESSOR_WAIT,
    "waits for a processor take {share:.0%} of a step; ranks on {host}: {ranks}, processors that"
    " they share: {processors}",
    "run fewer ranks on {host}, or fewer threads per rank (OMP_NUM_THREADS)",
)


def shares(m: Measured, counter: str) -> Floats:
    """Returns a counter of time as a fraction of the iteration, ``[iterations, ranks]`` or NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Floats = m.machine[counter] / m.machine[ELAPSED]
    return result


def reason_of(m: Measured, column: int, chosen: slice, factor: float) -> Reason | None:
    """Returns what made a rank slow; ``None`` if no counter explains enough of the lost time.

    Args:
        m: Measured times of the run.
        column: Column of the rank.
        chosen: Indices of the iterations in which it is slow.
        factor: Ratio of the rank's computing time to the expected time.
    """
    elapsed_ns = float(np.nansum(m.machine[ELAPSED][chosen, column]))
    if not elapsed_ns or factor <= 1:
        return None
    busy_ns = float(np.nansum(m.action_ns[chosen, column].astype(np.float64)))
    lost = busy_ns / elapsed_ns * (1 - 1 / factor)
    for wait in _WAITS:
        share = shares(m, wait.counter)
        mean = float(np.nanmean(share[chosen, column]))
        if mean >= COUNTS and mean - _usual(share, column, chosen) >= EXPLAINS * lost:
            # Pressure on disks is that of all programs, of which this rank need not be one.
            waits_for_disk = bool(np.nansum(m.machine[DISK_PAGES][chosen, column]))
            if wait.counter != DISK_WAIT or waits_for_disk:
                return _reason(m, wait, [column], chosen)
    return None


def waits_of(m: Measured, columns: Sequence[int]) -> Iterator[tuple[str, Floats]]:
    """Iterates over the counters that concern all ranks of a machine.

    Args:
        m: Measured times of the run.
        columns: Columns of ranks on the same machine.

    Yields:
        Name of a counter, and the mean fraction of each iteration that the ranks waited,
        ``[iterations]``; 0 where it is unknown.
    """
    for wait in _WAITS:
        if wait.counter != DISK_WAIT:
            share = np.nan_to_num(shares(m, wait.counter)[:, list(columns)])
            yield wait.counter, share.mean(axis=1)


def reason_by(m: Measured, counter: str, columns: Sequence[int], chosen: slice) -> Reason:
    """Describes a counter as the reason for which ranks of a machine waited.

    Args:
        m: Measured times of the run.
        counter: Name of the counter, from :func:`waits_of`.
        columns: Columns of the ranks.
        chosen: Indices of the affected iterations.
    """
    (wait,) = (wait for wait in _WAITS if wait.counter == counter)
    return _reason(m, wait, columns, chosen)


def _usual(share: Floats, column: int, chosen: slice) -> float:
    """Returns what a counter shows on other ranks or in other iterations, whichever is less."""
    others = np.delete(share[chosen], column, axis=1)
    before = np.delete(share[:, column], np.s_[chosen])
    usual = [float(np.nanmedian(part)) for part in (others, before) if np.isfinite(part).any()]
    return min(usual, default=0.0)


def _reason(m: Measured, wait: _Wait, columns: Sequence[int], chosen: slice) -> Reason:
    columns = list(columns)
    host = m.headers[columns[0]].host
    on_host = [column for column, header in enumerate(m.headers) if header.host == host]
    elapsed_ns = np.nansum(m.machine[ELAPSED][chosen][:, on_host]) / len(on_host)
    machine_ns = np.nansum(m.machine[MACHINE_BUSY][chosen][:, on_host]) / len(on_host)
    own_ns = np.nansum(m.machine[OWN_BUSY][chosen][:, on_host])
    others = max(0.0, float((machine_ns - own_ns) / elapsed_ns))
    processors = m.machine[PROCESSORS][chosen]
    allowed = int(np.nanmin(processors[:, columns]))
    if wait.counter == PROCESSOR_WAIT:
        if allowed < int(np.nanmax(processors[:, on_host])):
            wait = _PINNED
        elif others < OTHERS_USE:
            wait = _CROWDED
    values = {
        "share": float(np.nanmean(shares(m, wait.counter)[chosen][:, columns])),
        "host": host,
        "processors": allowed,
        "ranks": len(on_host),
        "others": others,
    }
    return Reason(
        counter=wait.counter, text=wait.text.format(**values), remedy=wait.remedy.format(**values)
    )
