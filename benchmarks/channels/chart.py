"""Bandwidth over size, as a table and as a chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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


def bandwidths(points: Sequence[Point]) -> str:
    """Bandwidth in GB/s: a line per transport, a column per size."""
    parts = []
    for pattern in dict.fromkeys(point.pattern for point in points):
        here = [point for point in points if point.pattern == pattern]
        sizes = sorted({point.nbytes for point in here})
        cells = {(p.name, p.nbytes): p for p in here}
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
    for axes, pattern in zip(panels[0], patterns, strict=True):
        here = sorted((p for p in points if p.pattern == pattern), key=lambda p: p.nbytes)
        for name in dict.fromkeys(point.name for point in points if point.pattern == pattern):
            line = [point for point in here if point.name == name]
            axes.plot(
                [point.nbytes for point in line],
                [point.gigabytes_per_s for point in line],
                marker="o",
                markersize=4,
                linestyle="--" if name.startswith("memcpy") else "-",
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
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
