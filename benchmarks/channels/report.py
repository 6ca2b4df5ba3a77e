"""Rows of the table, their goals, and the chart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured.
        value: the median, ``None`` where it was not measured.
        unit: of the value; empty for a ratio.
        goal: what the value has to be, ``None`` where it is only reported.
        least: whether the goal is a lower limit, else an upper one.
        samples: all repetitions.
        note: what else a reader should know; why there is no value.
        optional: a missing value is no failure (a peer that is not installed).
    """

    what: str
    value: float | None
    unit: str = ""
    goal: float | None = None
    least: bool = False
    samples: Sequence[float] = ()
    note: str = ""
    optional: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; ``None`` where there is none, or nothing to compare."""
        if self.goal is None or (self.value is None and self.optional):
            return None
        if self.value is None:
            return False
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def line(self) -> str:
        """The row in Markdown."""
        value = "not measured" if self.value is None else f"{self.value:.3g} {self.unit}".strip()
        if len(self.samples) > 1:
            low, high = quartiles(self.samples)
            value += f" ({low:.3g}-{high:.3g})"
        goal = ""
        if self.goal is not None:
            goal = f"{'>=' if self.least else '<='} {self.goal:g}"
        state = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"| {self.what} | {value} | {goal} | {state} | {self.note} |"

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**vars(self), "samples": list(self.samples), "met": self.met}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One transport at one size, for the chart.

    Attributes:
        name: of the transport.
        pattern: what was measured.
        nbytes: size of a message.
        seconds: per message, all repetitions.
    """

    name: str
    pattern: str
    nbytes: int
    seconds: Sequence[float]

    @property
    def gigabytes_per_s(self) -> float:
        """Median bandwidth in GB/s."""
        return self.nbytes / statistics.median(self.seconds) / 1e9


@dataclass
class Result:
    """What a part of the benchmark hands back."""

    rows: list[Row] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Result) -> None:
        """Take over another part's."""
        self.rows += other.rows
        self.points += other.points
        self.facts.update(other.facts)


def measured(what: str, samples: Sequence[float], **others: Any) -> Row:
    """The row of the median of ``samples``; other arguments are :class:`Row`'s."""
    value = statistics.median(samples) if samples else None
    return Row(what=what, value=value, samples=tuple(samples), **others)


def missing(what: str, reason: str, **others: Any) -> Row:
    """A row without a value, which is no failure."""
    return Row(what=what, value=None, note=reason, optional=True, **others)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Quotients of two series, repetition by repetition."""
    return [a / b for a, b in zip(above, below, strict=True)]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The lower and upper quartile."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    head = ["| what | median (quartiles) | goal | | note |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(row.line for row in rows)]) + "\n"


def bandwidths(points: Sequence[Point]) -> str:
    """Bandwidth in GB/s: a line per transport, a column per size."""
    parts = []
    for pattern in dict.fromkeys(point.pattern for point in points):
        here = [point for point in points if point.pattern == pattern]
        sizes = sorted({point.nbytes for point in here})
        cells: Mapping[tuple[str, int], Point] = {(p.name, p.nbytes): p for p in here}
        parts += [f"| {pattern}, GB/s | {' | '.join(map(size_text, sizes))} |"]
        parts += [f"|---|{'---|' * len(sizes)}"]
        for name in dict.fromkeys(point.name for point in here):
            found = [cells.get((name, size)) for size in sizes]
            texts = ["" if cell is None else f"{cell.gigabytes_per_s:.3g}" for cell in found]
            parts.append(f"| {name} | {' | '.join(texts)} |")
        parts.append("")
    return "\n".join(parts)


def size_text(nbytes: int) -> str:
    """``64 KiB``, ``16 MiB``."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def chart(points: Sequence[Point], title: str, path: Path) -> None:
    """Draw bandwidth over size, a picture per pattern."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    patterns = list(dict.fromkeys(point.pattern for point in points))
    figure, panels = pyplot.subplots(
        1, len(patterns), figsize=(2 + 5.5 * len(patterns), 5), layout="constrained", squeeze=False
    )
    names = list(dict.fromkeys(point.name for point in points))
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    for axes, pattern in zip(panels[0], patterns, strict=True):
        for name in names:
            line = sorted(
                (point for point in points if (point.name, point.pattern) == (name, pattern)),
                key=lambda point: point.nbytes,
            )
            if line:
                axes.plot(
                    [point.nbytes for point in line],
                    [point.gigabytes_per_s for point in line],
                    marker="o",
                    markersize=4,
                    linestyle="--" if name.startswith("memcpy") else "-",
                    color=colours[name],
                    label=name,
                )
        sizes = sorted({point.nbytes for point in points if point.pattern == pattern})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
        axes.set_yscale("log")
        axes.set_xlabel("size of a message")
        axes.set_ylabel("GB/s")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.set_title(pattern)
    handles = {
        label: handle
        for axes in panels[0]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside right center", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
