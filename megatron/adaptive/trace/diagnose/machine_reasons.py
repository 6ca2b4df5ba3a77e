"""Uses the counters of a rank's machine to find the reason why the rank did not compute.

Most of these counters measure waiting time. Such a counter explains why a rank is slow if its
excess over the usual value makes up a large part of the time that the rank lost. The usual value
comes from other ranks, or from other iterations of the same rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.diagnose.finding import Reason
from megatron.adaptive.trace.diagnose.samples import Floats, Measured
from megatron.adaptive.trace.gpu_counters import (
    GPU_CLOCK,
    GPU_ERRORS,
    GPU_HOT,
    GPU_OTHERS,
    GPU_POWER_LIMITED,
    GPU_REPLAYS,
)
from megatron.adaptive.trace.machine_counters import (
    CLOCK,
    CLOCK_LIMIT,
    DISK_PAGES,
    DISK_READ,
    DISK_WAIT,
    ELAPSED,
    FULL_CLOCK,
    KERNEL,
    MACHINE_BUSY,
    MEMORY_WAIT,
    OWN_BUSY,
    PROCESSOR_WAIT,
    PROCESSORS,
    STEAL,
    THROTTLED,
    TURN_WAIT,
)
from megatron.adaptive.trace.network_counters import (
    LINK_ERRORS,
    LINK_PAUSES,
    LINK_RETRIES,
    LINK_SPEED,
    RESENT_SEGMENTS,
    SENT_SEGMENTS,
)
from megatron.adaptive.trace.span_columns import Ints

EXPLAINS = 0.4
"""Minimum fraction of the lost time that all reasons must explain together."""

STARVED = 0.5
"""Minimum fraction of the step time that a rank must wait for a processor to be called starved.

If ranks are starved, differences between their times may be random.
"""

EXPLAINS_TOO = 0.2
"""Minimum fraction of the lost time that a single counter must explain to be one of the reasons."""

COUNTS = 0.05
"""Minimum fraction of the step time that a counter must reach to be reported as a reason."""

OTHERS_USE = 0.1
"""Minimum number of processors that other processes must keep busy for this to be a reason."""

SLOWER_CLOCK = 0.95
"""Maximum ratio of a processor's clock rate to the usual rate for a slow clock to be reported."""

LOSES = 0.005
"""Minimum fraction of TCP segments that must be retransmitted for packet loss to be reported."""

LOSES_OFTEN = 0.5
"""Minimum number of retransmitted segments or of faults per iteration to report them."""

FAULT_TIMES = 4.0
"""Minimum ratio of the faults of a port or GPU to the usual number of faults to report them."""

SLOWER_PORT = 0.6
"""Maximum ratio of a slow interface's speed to the usual speed on other machines."""

OVER_TCP = ("gloo", "tcp")
"""Names of transports that use TCP even between ranks on the same machine."""

OWN_PAGES = 4.0
"""Minimum ratio of a rank's page reads to the page reads of other ranks on its machine.

A rank with at least this ratio is considered the cause of the disk waits on its machine.
"""


@dataclass(frozen=True)
class _Wait:
    """Contains the texts for a counter that measures time in which a rank could not compute.

    The texts may contain placeholders:

    - ``{share}``: fraction of the step time that was lost
    - ``{host}``: name of the machine
    - ``{processors}``: number of processors of the machine that the ranks may use
    - ``{ranks}``: number of the run's ranks on the machine
    - ``{others}``: number of processors that other processes kept busy

    Attributes:
        counter: Name of the counter.
        text: Sentence with the measured values.
        remedy: Instruction for the user to remove the cause.
    """

    counter: str
    text: str
    remedy: str


_WAITS = (
    # A thread that is stopped by a quota is also counted as waiting for a processor, so the quota
    # comes first.
    _Wait(
        THROTTLED,
        "a quota on processor time stops this job on {host} for {share:.0%} of a step",
        "raise the quota on {host} (cpu.max of the control group, or the CPU limit of the pod)",
    ),
    _Wait(
        STEAL,
        "the host of virtual machine {host} takes its processors away for {share:.0%} of the time",
        "use a machine that does not share its processors instead of {host}",
    ),
    _Wait(
        GPU_HOT,
        "the temperature of its GPU on {host} lowers the GPU's clock for {share:.0%} of the time",
        "check the cooling of {host} (nvidia-smi -q -d TEMPERATURE)",
    ),
    _Wait(
        GPU_POWER_LIMITED,
        "the power limit of its GPU on {host} lowers the GPU's clock for {share:.0%} of the time",
        "raise the power limit on {host} (nvidia-smi -pl), or set the same limit for all GPUs",
    ),
    _Wait(
        PROCESSOR_WAIT,
        "waits for a processor take {share:.0%} of a step, while other processes keep"
        " {others:.1f} processors of {host} busy",
        "stop the other processes on {host}, or keep processors free for this job",
    ),
    _Wait(
        MEMORY_WAIT,
        "{host} is short of memory: programs wait for memory for {share:.0%} of the time",
        "free memory on {host}, or place fewer ranks there",
    ),
    _Wait(
        DISK_WAIT,
        "its memory or its files are read from disk, and programs on {host} wait for disks for "
        "{share:.0%} of the time",
        "free memory on {host}, and look for programs that read or write large amounts of data",
    ),
)
_PINNED = _Wait(
    PROCESSOR_WAIT,
    "waits for a processor take {share:.0%} of a step, because the rank may use fewer processors"
    " than other ranks (number on {host}: {processors})",
    "let the rank use more processors (taskset, numactl, or --cpu-bind of srun)",
)
_CROWDED = _Wait(
    PROCESSOR_WAIT,
    "waits for a processor take {share:.0%} of a step, because ranks share processors of {host}"
    " (ranks: {ranks}, processors: {processors})",
    "run fewer ranks on {host}, or fewer threads per rank (OMP_NUM_THREADS)",
)


_FAULTS = (
    (
        LINK_RETRIES,
        "an RDMA port of {host} retransmits {count} packets per step",
        "check the cable and the port of {host} (perfquery, ibdiagnet, rdma statistic)",
    ),
    (
        LINK_ERRORS,
        "a port of {host} counts {count} faulty or dropped packets per step",
        "check the cable and the port of {host} (ip -s link, ethtool -S)",
    ),
    (
        LINK_PAUSES,
        "an RDMA port of {host} has data but cannot send for {count} ticks per step, because "
        "the network is congested",
        "look for other jobs on the network of {host}, and check its routes",
    ),
)
"""Counter, description and remedy for each kind of fault of a network port."""

_GPU_FAULTS = (
    (
        GPU_ERRORS,
        "the memory of its GPU on {host} has {count} uncorrectable errors per step",
        "exclude {host}, and check its GPU (nvidia-smi -q -d ECC,ROW_REMAPPER)",
    ),
    (
        GPU_REPLAYS,
        "its GPU on {host} retransmits {count} PCIe packets per step",
        "check the slot and the PCIe link of the GPU on {host} (nvidia-smi -q, lspci -vv)",
    ),
)
"""Counter, description and remedy for each kind of fault of a GPU."""

_OF_MACHINE = frozenset((MEMORY_WAIT, DISK_WAIT))
"""Names of the counters that measure the waits of all programs on a machine."""

_CONTAINED = frozenset(((THROTTLED, PROCESSOR_WAIT), (STEAL, PROCESSOR_WAIT)))
"""Pairs of counters. The time of the second counter includes the time of the first."""

_LIMITS = (CLOCK_LIMIT, FULL_CLOCK)


def shares(m: Measured, counter: str) -> Floats:
    """Returns the time counted by ``counter`` as a fraction of each iteration's duration.

    The result has the shape ``[iterations, ranks]``.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Floats = m.machine[counter] / m.machine[ELAPSED]
    return result


def starved(m: Measured, column: int, chosen: Ints | slice) -> float:
    """Returns the fraction of the step time that a rank waited for a processor, or 0.

    Args:
        m: Measured times of the run.
        column: Index of the rank on the rank axis.
        chosen: Indices of the iterations to use.

    Returns:
        Fraction between :data:`STARVED` and 0.99, or 0 if the fraction is smaller than
        :data:`STARVED` or the waits were not counted.
    """
    share = shares(m, PROCESSOR_WAIT)[chosen, column]
    mean = float(np.nanmean(share)) if np.isfinite(share).any() else 0.0
    return min(0.99, mean) if mean >= STARVED else 0.0


def turn_wait_ns(m: Measured, columns: Sequence[int], chosen: Ints) -> float:
    """Returns the mean duration in ns of a single wait for a processor, summed over several ranks.

    Args:
        m: Measured times of the run.
        columns: Indices of the ranks on the rank axis.
        chosen: Indices of the iterations to use.

    Returns:
        Mean duration over the iterations, or 0 if the waits were not counted.
    """
    return float(np.nan_to_num(m.machine[TURN_WAIT][chosen][:, list(columns)]).mean(axis=0).sum())


def reasons_of(m: Measured, column: int, chosen: slice, factor: float) -> list[Reason]:
    """Returns the reasons why a rank was slow, with the main reason first.

    The list is empty if no reason is known.

    Args:
        m: Measured times of the run.
        column: Index of the rank on the rank axis.
        chosen: Indices of the iterations in which the rank is slow.
        factor: Ratio of the rank's computing time to the expected time.
    """
    elapsed_ns = float(np.nansum(m.machine[ELAPSED][chosen, column]))
    if not elapsed_ns or factor <= 1:
        return []
    busy_ns = float(np.nansum(m.action_ns[chosen, column].astype(np.float64)))
    lost = busy_ns / elapsed_ns * (1 - 1 / factor)
    parts: list[tuple[float, _Wait]] = []
    for wait in _WAITS:
        share = shares(m, wait.counter)
        mean = float(np.nanmean(share[chosen, column]))
        excess = mean - _usual(m, share, wait.counter, column, chosen)
        if wait.counter == MEMORY_WAIT and mean >= COUNTS:
            excess += _kernel_excess(m, column, chosen)
        # The counter for disk waits includes all processes of the machine, so check whether this
        # rank reads from the disk.
        is_own = wait.counter != DISK_WAIT or _reads(m, column, chosen)
        is_contained = any((other.counter, wait.counter) in _CONTAINED for _, other in parts)
        if is_own and not is_contained and mean >= COUNTS and excess >= EXPLAINS_TOO * lost:
            parts.append((excess, wait))
    reasons = []
    if sum(excess for excess, _ in parts) >= EXPLAINS * lost:
        # All reasons that explain enough of the lost time have the same sort key. They keep the
        # order of the table, because the sort is stable.
        parts.sort(key=lambda part: -min(part[0], EXPLAINS * lost))
        reasons = [_reason(m, wait, [column], chosen) for _, wait in parts]
    further = (
        _slow_clock(m, column, chosen, factor),
        _slow_gpu_clock(m, column, chosen, factor),
        _shared_gpu(m, column, chosen),
        _faulty_gpu(m, column, chosen),
    )
    reasons += [reason for reason in further if reason is not None]
    return reasons


def reading_reason(m: Measured, column: int, chosen: Ints) -> Reason | None:
    """Returns a reason if a slow disk explains a rank's slow data reads, and ``None`` otherwise.

    Args:
        m: Measured times of the run.
        column: Index of the rank on the rank axis.
        chosen: Indices of the iterations in which the rank reads slowly.
    """
    elapsed_ns = m.machine[ELAPSED][chosen, column]
    if not np.nansum(elapsed_ns):
        return None
    bytes_read = float(np.nanmean(m.machine[DISK_READ][chosen, column]))
    reading = float(np.nansum(m.read_ns[chosen, column]) / np.nansum(elapsed_ns))
    waiting = float(np.nanmean(shares(m, DISK_WAIT)[chosen, column]))
    if not bytes_read or waiting < max(COUNTS, EXPLAINS * reading):
        return None
    host = m.headers[column].host
    return Reason(
        counter=DISK_WAIT,
        text=(
            f"it reads {number_text(bytes_read / 1e6)} MB per step from a disk, and programs on "
            f"{host} wait for disks for {waiting:.0%} of the time"
        ),
        remedy=f"read from a faster disk, or copy the data to the memory of {host} (/dev/shm)",
    )


def link_reason(m: Measured, columns: Sequence[int], chosen: Ints) -> Reason | None:
    """Returns the reason for a slow link if the network counters show one, and ``None`` otherwise.

    Args:
        m: Measured times of the run.
        columns: Indices of the sender and the receiver on the rank axis.
        chosen: Indices of the affected iterations.
    """
    reason = lost_packets(m, columns, chosen) if may_use_tcp(m, columns) else None
    if reason is not None or len({m.headers[column].host for column in columns}) == 1:
        # Messages within a machine do not use the network, so no port can be the reason.
        return reason
    return _port_counts(m, columns, chosen) or _slow_port(m, columns, chosen)


def may_use_tcp(m: Measured, columns: Sequence[int]) -> bool:
    """Returns whether the messages between two ranks may use TCP.

    Args:
        m: Measured times of the run.
        columns: Indices of the sender and the receiver on the rank axis.
    """
    source, target = (m.headers[column] for column in columns)
    return source.host != target.host or source.transport in OVER_TCP


def lost_packets(m: Measured, columns: Sequence[int], chosen: Ints) -> Reason | None:
    """Returns the reason why a link is slow if its ranks retransmit many TCP segments, or ``None``.

    ``columns`` contains the indices of the link's ranks on the rank axis, and ``chosen`` contains
    the indices of the iterations to use.
    """
    worst, host = 0.0, ""
    for column in columns:
        sent = float(np.nansum(m.machine[SENT_SEGMENTS][chosen, column]))
        resent = float(np.nansum(m.machine[RESENT_SEGMENTS][chosen, column]))
        if sent and resent >= LOSES_OFTEN * len(chosen) and resent / sent > worst:
            worst, host = resent / sent, m.headers[column].host
    if worst < LOSES:
        return None
    return Reason(
        counter=RESENT_SEGMENTS,
        text=f"{host} retransmits {worst:.1%} of its TCP segments, so packets are lost or late",
        remedy=(
            f"look for a faulty cable or port and for full queues on {host} (ip -s link, "
            "ethtool -S, tc -s qdisc)"
        ),
    )


def _port_counts(m: Measured, columns: Sequence[int], chosen: Ints) -> Reason | None:
    """Returns a reason if a port of a slow link has many more faults than ports of other machines.

    Returns ``None`` if there are few faults. ``columns`` contains the indices of the link's ranks,
    and ``chosen`` contains the indices of the iterations.
    """
    hosts = [header.host for header in m.headers]
    for counter, text, remedy in _FAULTS:
        means = np.nan_to_num(m.machine[counter][chosen]).mean(axis=0)
        worst = max(columns, key=lambda column: float(means[column]))
        others = [float(means[c]) for c, host in enumerate(hosts) if host != hosts[worst]]
        usual = float(np.median(others)) if others else 0.0
        if means[worst] >= max(LOSES_OFTEN, FAULT_TIMES * usual):
            values = {"count": number_text(float(means[worst])), "host": hosts[worst]}
            return Reason(
                counter=counter, text=text.format(**values), remedy=remedy.format(**values)
            )
    return None


def _slow_port(m: Measured, columns: Sequence[int], chosen: Ints) -> Reason | None:
    """Returns a reason if an interface of a slow link is slower than interfaces of other machines.

    Returns ``None`` if the interface is as fast as the others, or its speed is unknown. ``columns``
    contains the indices of the link's ranks, and ``chosen`` contains the indices of the iterations.
    """
    speeds = np.where(m.machine[LINK_SPEED] > 0, m.machine[LINK_SPEED], np.nan)[chosen]
    measured = [column for column in columns if np.isfinite(speeds[:, column]).any()]
    if not measured:
        return None
    worst = min(measured, key=lambda column: float(np.nanmedian(speeds[:, column])))
    host = m.headers[worst].host
    others = [column for column, header in enumerate(m.headers) if header.host != host]
    if not np.isfinite(speeds[:, others]).any():
        return None
    speed, usual = float(np.nanmedian(speeds[:, worst])), float(np.nanmedian(speeds[:, others]))
    if speed > SLOWER_PORT * usual:
        return None
    return Reason(
        counter=LINK_SPEED,
        text=f"the interface of {host} that the job uses runs at {speed:,.0f} Mbit/s, but the "
        f"interfaces of other machines run at {usual:,.0f} Mbit/s",
        remedy=f"check the cable and the port of {host} (ethtool, ibstat)",
    )


def waits_of(m: Measured, columns: Sequence[int]) -> Iterator[tuple[str, Floats]]:
    """Yields, for each counter of waits, the fraction of time that ranks on one machine waited.

    Args:
        m: Measured times of the run.
        columns: Indices of ranks on the same machine.

    Yields:
        Name of a counter, and the mean fraction of each iteration that the ranks waited,
        ``[iterations]``. Unknown fractions are 0.
    """
    for wait in _WAITS:
        if wait.counter != DISK_WAIT:
            share = np.nan_to_num(shares(m, wait.counter)[:, list(columns)])
            yield wait.counter, share.mean(axis=1)


def reason_by(m: Measured, counter: str, columns: Sequence[int], chosen: slice) -> Reason:
    """Returns the reason why ranks on one machine wait, according to ``counter``.

    Args:
        m: Measured times of the run.
        counter: Name of the counter, as yielded by :func:`waits_of`.
        columns: Indices of the ranks on the rank axis.
        chosen: Indices of the affected iterations.
    """
    (wait,) = (wait for wait in _WAITS if wait.counter == counter)
    return _reason(m, wait, columns, chosen)


def _usual(m: Measured, share: Floats, counter: str, column: int, chosen: slice) -> float:
    """Returns the median of a counter on other ranks or in other iterations, whichever is lower.

    ``share`` contains the counter as a fraction of each iteration, ``[iterations, ranks]``. "Other
    ranks" means all ranks except ``column``, and "other iterations" means the iterations of this
    rank that are not in ``chosen``.
    """
    compared = [other for other in range(len(m.headers)) if other != column]
    if counter in _OF_MACHINE and _reads_most(m, column, chosen):
        # The waits are counted per machine, so a rank that reads a lot increases the count of all
        # ranks on its machine. Therefore, compare only with ranks on other machines.
        compared = [c for c in compared if m.headers[c].host != m.headers[column].host]
    others = share[chosen][:, compared]
    before = np.delete(share[:, column], np.s_[chosen])
    usual = [float(np.nanmedian(part)) for part in (others, before) if np.isfinite(part).any()]
    return min(usual, default=0.0)


def _kernel_excess(m: Measured, column: int, chosen: slice) -> float:
    """Returns a rank's time in the Linux kernel beyond the usual time, as a fraction of a step.

    If memory is short, the kernel needs additional time to free memory and to read pages for the
    rank. ``chosen`` contains the indices of the iterations to use.
    """
    share = shares(m, KERNEL)
    mean = float(np.nanmean(share[chosen, column]))
    return min(1.0, max(0.0, mean - _usual(m, share, KERNEL, column, chosen)))


def _reads(m: Measured, column: int, chosen: slice) -> bool:
    """Returns whether the rank with index ``column`` reads pages or files from a disk.

    ``chosen`` contains the indices of the iterations to use.
    """
    pages, size_bytes = (m.machine[name][chosen, column] for name in (DISK_PAGES, DISK_READ))
    return bool(np.nansum(pages)) or bool(np.nansum(size_bytes))


def _reads_most(m: Measured, column: int, chosen: slice) -> bool:
    """Returns whether a rank reads many more pages from disk than other ranks on its machine.

    ``column`` is the index of the rank, and ``chosen`` contains the indices of the iterations to
    use.
    """
    pages = np.nan_to_num(m.machine[DISK_PAGES][chosen]).mean(axis=0)
    host = m.headers[column].host
    others = [
        float(pages[other])
        for other, header in enumerate(m.headers)
        if header.host == host and other != column
    ]
    return float(pages[column]) >= OWN_PAGES * max([0.25, *others])


def _slow_clock(m: Measured, column: int, chosen: slice, factor: float) -> Reason | None:
    """Returns a reason if a slow processor clock explains enough of the slowdown of a rank.

    Otherwise returns ``None``. Skips ranks that compute on a GPU, because the processor's clock
    rate has little effect on them. ``factor`` is the ratio of the rank's computing time to the
    expected time.
    """
    if m.headers[column].device != "cpu":
        return None
    clocks = _clocks(m, CLOCK, column, chosen, factor)
    if clocks is None:
        return None
    host = m.headers[column].host
    limit, full = (float(np.nanmedian(m.machine[name][chosen, column])) for name in _LIMITS)
    is_capped = 0 < limit < SLOWER_CLOCK * full
    cap = f", because its limit is {limit / 1e6:.2f} GHz" if is_capped else ""
    return Reason(
        counter=CLOCK,
        text=(
            f"its processor on {host} runs at {clocks[0] / 1e6:.2f} GHz instead of "
            f"{clocks[1] / 1e6:.2f} GHz{cap}"
        ),
        remedy=(
            f"raise the limit of the clock on {host} (scaling_max_freq, cpupower frequency-set)"
            if is_capped
            else f"check temperature, power limit and governor of {host}"
        ),
    )


def _slow_gpu_clock(m: Measured, column: int, chosen: slice, factor: float) -> Reason | None:
    """Returns a reason if a slow GPU clock explains enough of the slowdown of a rank.

    Otherwise returns ``None``.
    ``factor`` is the ratio of the rank's computing time to the expected time.
    """
    clocks = _clocks(m, GPU_CLOCK, column, chosen, factor)
    if clocks is None:
        return None
    host = m.headers[column].host
    return Reason(
        counter=GPU_CLOCK,
        text=f"its GPU on {host} runs at {clocks[0]:.0f} MHz instead of {clocks[1]:.0f} MHz",
        remedy=f"check limits, power and temperature of the GPU on {host} (nvidia-smi -q)",
    )


def _shared_gpu(m: Measured, column: int, chosen: slice) -> Reason | None:
    """Returns a reason if more other processes use a slow rank's GPU than the GPUs of other ranks.

    Otherwise returns ``None``. Processes of this job are not counted. ``column`` is the index of
    the rank, and ``chosen`` contains the indices of the iterations to use.
    """
    others = np.nan_to_num(m.machine[GPU_OTHERS][chosen])
    count = float(np.median(others[:, column]))
    elsewhere = np.delete(others, column, axis=1)
    if count < 1 or (elsewhere.size and float(np.median(elsewhere)) >= count):
        return None
    host = m.headers[column].host
    return Reason(
        counter=GPU_OTHERS,
        text=f"{count:.0f} other process{'es' * (count != 1)} on {host} use the rank's GPU",
        remedy=f"stop the other processes on the GPU of {host} (nvidia-smi)",
    )


def _faulty_gpu(m: Measured, column: int, chosen: slice) -> Reason | None:
    """Returns a reason if the GPU of a slow rank has far more faults than other GPUs.

    Otherwise returns ``None``. ``column`` is the index of the rank, and ``chosen`` contains the
    indices of the iterations to use.
    """
    for counter, text, remedy in _GPU_FAULTS:
        means = np.nan_to_num(m.machine[counter][chosen]).mean(axis=0)
        others = np.delete(means, column)
        usual = float(np.median(others)) if others.size else 0.0
        count = float(means[column])
        # Report even a single uncorrectable memory error.
        least = LOSES_OFTEN if counter != GPU_ERRORS else 0.0
        if count > least and count >= FAULT_TIMES * usual:
            host = m.headers[column].host
            return Reason(
                counter=counter,
                text=text.format(count=number_text(count), host=host),
                remedy=remedy.format(host=host),
            )
    return None


def _clocks(
    m: Measured, counter: str, column: int, chosen: slice, factor: float
) -> tuple[float, float] | None:
    """Returns a rank's clock rate and the usual rate if their ratio explains the slowdown.

    The usual rate is the rate on other ranks or in other iterations, whichever is higher. Returns
    ``None`` if the ratio of the rates explains too little of ``factor``, the ratio of the rank's
    computing time to the expected time.
    """
    clocks = np.where(m.machine[counter] > 0, m.machine[counter], np.nan)
    if not np.isfinite(clocks[chosen, column]).any():
        return None
    clock = float(np.nanmedian(clocks[chosen, column]))
    others = np.delete(clocks[chosen], column, axis=1)
    before = np.delete(clocks[:, column], np.s_[chosen])
    usual = max(
        (float(np.nanmedian(part)) for part in (others, before) if np.isfinite(part).any()),
        default=clock,
    )
    if clock > SLOWER_CLOCK * usual or usual / clock - 1 < EXPLAINS * (factor - 1):
        return None
    return clock, usual


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
