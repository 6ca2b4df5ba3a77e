"""Finds outliers among the measurements of a probe.

A measurement is compared with the median of the other measurements of its class, for example of all
links between two nodes. It is an outlier if both conditions hold:

- It is worse than the median of the other measurements by at least the factor of its quantity
  (:data:`MEASURES`).
- Its distance from the median is more than four times the usual distance. The usual distance is
  1.4826 times the median of the absolute distances from the median. For normally distributed
  measurements, it equals the standard deviation. Speeds are converted to times for this comparison,
  because the time of a slow rank may be far from the median, but its speed is never below 0.

The first condition matters on quiet machines, where measurements hardly differ, and the second on
noisy machines. If there is a data sheet, the measurements are also compared with it. Every
measurement is the better of two measurements at different times, because a program that runs
briefly disturbs at most one of them.

If other programs use all machines, even the better measurement of a healthy rank may be poor. On
such machines, the two measurements of each rank differ from each other. Therefore, the factor of an
outlier must also exceed the factor between the two measurements of nearly every other rank.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.adaptive.profiling.probe_layout import Ranks

MATRIX_PRODUCT = "matrix product"
MEMORY = "memory bandwidth"
TO_DEVICE = "copy to the GPU"
FROM_DEVICE = "copy from the GPU"
CLOCK = "processor clock"
SMALL_MESSAGE = "small message"
LARGE_MESSAGE = "large message"
ALL_REDUCE = "all-reduce"
ALL_TO_ALL = "all-to-all"
WRITE = "write to the checkpoint folder"
READ = "read from the checkpoint folder"

_DEVIATIONS = 4.0
_OF_NORMAL = 1.4826
_LEAST = 1e-12
_MOST_OTHERS = 0.97
"""Minimum fraction of the other measurements in a class whose spread is below an outlier's factor.

The spread is the factor between the two measurements of the same quantity.
"""
_FEW = 100
_SLOW_RANK = (
    "check this rank for other programs, quotas, heat and power limits, or exclude the node"
)
_SLOW_LINK = "check the link's cables, interfaces and packet loss counters, or exclude the node"
_SLOW_DISK = "check the folder's mount on this node, and which other programs use the disk"


@dataclass(frozen=True)
class Measure:
    """Quantity that a probe measures, with the limits for outliers.

    Attributes:
        unit: Unit of the printed measurements.
        scale: Factor that converts a measurement from s, bytes/s, FLOP/s or Hz to ``unit``.
        least_factor: Minimum factor by which an outlier is worse than the median of its class.
        least_sheet: Minimum value as a fraction of the data sheet's value, or 0 without a data
            sheet.
        is_time: Whether smaller values are better.
        remedy: Advice about an outlier.
    """

    unit: str
    scale: float
    least_factor: float
    remedy: str
    least_sheet: float = 0.0
    is_time: bool = False


MEASURES: Mapping[str, Measure] = {
    MATRIX_PRODUCT: Measure("GFLOP/s", 1e-9, 1.3, _SLOW_RANK, least_sheet=0.5),
    MEMORY: Measure("GB/s", 1e-9, 1.5, _SLOW_RANK, least_sheet=0.5),
    TO_DEVICE: Measure(
        "GB/s", 1e-9, 1.5, "check the PCIe slot of this GPU and its number of lanes"
    ),
    FROM_DEVICE: Measure(
        "GB/s", 1e-9, 1.5, "check the PCIe slot of this GPU and its number of lanes"
    ),
    CLOCK: Measure("MHz", 1e-6, 1.3, _SLOW_RANK, least_sheet=0.5),
    SMALL_MESSAGE: Measure("us", 1e6, 3.0, _SLOW_LINK, is_time=True),
    LARGE_MESSAGE: Measure("ms", 1e3, 1.7, _SLOW_LINK, is_time=True),
    ALL_REDUCE: Measure("ms", 1e3, 1.7, _SLOW_LINK, is_time=True),
    ALL_TO_ALL: Measure("ms", 1e3, 1.7, _SLOW_LINK, is_time=True),
    WRITE: Measure("MB/s", 1e-6, 2.5, _SLOW_DISK),
    READ: Measure("MB/s", 1e-6, 2.5, _SLOW_DISK),
}
"""Description of each quantity, keyed by name."""

_OF_RANK = (MATRIX_PRODUCT, MEMORY, CLOCK)
OF_DEVICE = (MATRIX_PRODUCT, MEMORY, TO_DEVICE, FROM_DEVICE, CLOCK)
"""Quantities of a device, which a rank measures without other ranks."""
OF_LINK = (SMALL_MESSAGE, LARGE_MESSAGE)
"""Quantities of a link between two ranks."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Measured value of a rank, link or group.

    Attributes:
        measure: Name of the quantity, a key of :data:`MEASURES`.
        ranks: Global ranks that were measured.
        peers: Class of measurements with which this measurement is compared.
        value: Measured value in seconds, bytes/s, FLOP/s or Hz, or 0 if the measurement failed.
        sheet: Value of the data sheet in the same unit, or 0 if it is unknown.
        spread: Ratio of the worse to the better of the repeated measurements, at least 1.
        error: Error message if the measurement failed, otherwise empty.
    """

    measure: str
    ranks: Ranks
    peers: str
    value: float
    sheet: float = 0.0
    spread: float = 1.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """Measurement that is much worse than expected.

    Attributes:
        measure: Name of the quantity, a key of :data:`MEASURES`.
        ranks: Global ranks that were measured.
        nodes: Host name of each rank in ``ranks``, in the same order.
        peers: Class of measurements with which this measurement was compared.
        value: Measured value in ``unit``, or 0 if the measurement failed.
        median: Median of the other measurements of the class, in ``unit``, or the data sheet's
            value. It is 0 if the measurement failed.
        unit: Unit of ``value`` and ``median``.
        is_against_sheet: Whether ``median`` is the data sheet's value.
        text: Finding for the user, in one line.
        remedy: Advice for the user.
    """

    measure: str
    ranks: Ranks
    nodes: tuple[str, ...]
    peers: str
    value: float
    median: float
    unit: str
    is_against_sheet: bool
    text: str
    remedy: str


def better_of(first: Iterable[Figure], second: Iterable[Figure]) -> list[Figure]:
    """Returns the better of two measurements of each rank, link and group.

    Args:
        first: Results of the first measurements.
        second: Results of the second measurements, which were made later.

    Returns:
        Better measurement of each pair, in the order of ``first``. If one of the two measurements
        failed, the failed measurement is returned, so that the failure is reported.
    """
    again = {(figure.measure, figure.ranks, figure.peers): figure for figure in second}
    kept = []
    for figure in first:
        other = again.get((figure.measure, figure.ranks, figure.peers), figure)
        if figure.error or other.error:
            kept.append(figure if figure.error else other)
            continue
        choose = min if MEASURES[figure.measure].is_time else max
        low, high = sorted((figure.value, other.value))
        spread = max(figure.spread, high / max(low, _LEAST))
        kept.append(replace(figure, value=choose(figure.value, other.value), spread=spread))
    return kept


def find_outliers(figures: Sequence[Figure], hosts: Sequence[str]) -> list[Outlier]:
    """Returns the outliers among ``figures``, with the worst outlier of each quantity first.

    A slow rank also slows down its links and groups, and a slow link also slows down its groups.
    Such links and groups are neither reported as outliers nor used for comparisons.

    Args:
        figures: All measurements of the probe.
        hosts: Host name of each global rank.
    """
    of_ranks = [f for f in figures if len(f.ranks) == 1]
    outliers = _of_all(of_ranks, hosts)
    slow_ranks = {o.ranks[0] for o in outliers if o.measure in _OF_RANK}
    shared = [f for f in figures if len(f.ranks) > 1 and slow_ranks.isdisjoint(f.ranks)]
    slow_links = _of_all([f for f in shared if f.measure in OF_LINK], hosts)
    pairs = [set(outlier.ranks) for outlier in slow_links]
    groups = [
        f
        for f in shared
        if f.measure not in OF_LINK and not any(pair <= set(f.ranks) for pair in pairs)
    ]
    return [*outliers, *slow_links, *_of_all(groups, hosts)]


def _of_all(figures: Sequence[Figure], hosts: Sequence[str]) -> list[Outlier]:
    """Returns the outliers among ``figures``, which may belong to several classes.

    ``hosts`` contains the host name of each global rank.
    """
    classes: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        classes.setdefault((figure.measure, figure.peers), []).append(figure)
    return [
        outlier
        for name in MEASURES
        for (measure, _), members in classes.items()
        if measure == name
        for outlier in _of_class(members, hosts)
    ]


def _of_class(figures: Sequence[Figure], hosts: Sequence[str]) -> list[Outlier]:
    """Returns the outliers among ``figures``, which all belong to the same class.

    ``hosts`` contains the host name of each global rank.
    """
    outliers = [_failed(figure, hosts) for figure in figures if figure.error]
    valid = sorted((figure for figure in figures if not figure.error), key=lambda f: f.value)
    if not valid:
        return outliers
    measure = MEASURES[valid[0].measure]
    values = [figure.value for figure in valid]
    times = values if measure.is_time else [1 / max(value, _LEAST) for value in values]
    spreads = sorted(figure.spread for figure in valid)
    slow = []
    for index, figure in enumerate(valid):
        median = _median_without(values, index)
        ratio = _times_slower(figure.value, median, measure)
        least_factor = max(measure.least_factor, _usual_spread(spreads, figure.spread))
        is_far = ratio >= least_factor and _is_far(times, index)
        if is_far:
            slow.append((ratio, _outlier(figure, median, ratio, hosts, is_against_sheet=False)))
        elif figure.sheet and figure.value < measure.least_sheet * figure.sheet:
            ratio = _times_slower(figure.value, figure.sheet, measure)
            slow.append(
                (ratio, _outlier(figure, figure.sheet, ratio, hosts, is_against_sheet=True))
            )
    slow.sort(key=lambda entry: entry[0], reverse=True)
    return outliers + [outlier for _, outlier in slow]


def _is_far(times: Sequence[float], index: int) -> bool:
    """Returns whether ``times[index]`` is far above the median of the others, given their noise."""
    others = times
    if len(times) <= _FEW:
        others = [time_s for number, time_s in enumerate(times) if number != index]
    if len(others) < 2:
        return True
    middle_s = statistics.median(others)
    usual_s = _OF_NORMAL * statistics.median(abs(time_s - middle_s) for time_s in others)
    return times[index] - middle_s > _DEVIATIONS * usual_s


def _usual_spread(spreads: Sequence[float], left_out: float) -> float:
    """Returns the spread that the fraction ``_MOST_OTHERS`` of the other spreads do not exceed.

    ``spreads`` is sorted. One element that equals ``left_out`` is ignored.
    """
    if len(spreads) == 1:
        return 1.0
    position = int(_MOST_OTHERS * (len(spreads) - 2))
    return spreads[position + (position >= bisect.bisect_left(spreads, left_out))]


def _median_without(values: Sequence[float], left_out: int) -> float:
    """Returns the median of the sorted ``values`` without the value at index ``left_out``."""
    count = len(values) - 1
    if not count:
        return values[0]

    def at(index: int) -> float:
        return values[index + (index >= left_out)]

    return (at((count - 1) // 2) + at(count // 2)) / 2


def _times_slower(value: float, reference: float, measure: Measure) -> float:
    if measure.is_time:
        return value / max(reference, _LEAST)
    return reference / max(value, _LEAST)


def _name(ranks: Ranks, hosts: Sequence[str]) -> str:
    """Returns a description of ``ranks`` and their nodes in ``hosts``, for a message."""
    nodes = list(dict.fromkeys(hosts[rank] for rank in ranks))
    label = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes[:4])}"
    label += ", ..." if len(nodes) > 4 else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]} on {label}"
    if len(ranks) == 2:
        return f"ranks {ranks[0]} and {ranks[1]} on {label}"
    return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]} on {label}"


def _outlier(
    figure: Figure, median: float, ratio: float, hosts: Sequence[str], *, is_against_sheet: bool
) -> Outlier:
    measure = MEASURES[figure.measure]
    shown = [f"{value * measure.scale:.4g} {measure.unit}" for value in (figure.value, median)]
    against = "the data sheet" if is_against_sheet else "the others' median"
    quantity = figure.measure
    if len(figure.ranks) > 1 and figure.measure not in OF_LINK:
        quantity = f"{figure.peers} {quantity}"
    return Outlier(
        measure=figure.measure,
        ranks=figure.ranks,
        nodes=tuple(hosts[rank] for rank in figure.ranks),
        peers=figure.peers,
        value=figure.value * measure.scale,
        median=median * measure.scale,
        unit=measure.unit,
        is_against_sheet=is_against_sheet,
        text=f"{_name(figure.ranks, hosts)}: {quantity}: {shown[0]}, {against} {shown[1]}, "
        f"{ratio:.1f} times slower",
        remedy=measure.remedy,
    )


def _failed(figure: Figure, hosts: Sequence[str]) -> Outlier:
    measure = MEASURES[figure.measure]
    return Outlier(
        measure=figure.measure,
        ranks=figure.ranks,
        nodes=tuple(hosts[rank] for rank in figure.ranks),
        peers=figure.peers,
        value=0.0,
        median=0.0,
        unit=measure.unit,
        is_against_sheet=False,
        text=f"{_name(figure.ranks, hosts)}: {figure.measure} failed: {figure.error}",
        remedy=measure.remedy,
    )
