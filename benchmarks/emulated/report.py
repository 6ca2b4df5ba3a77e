"""Turns the records of the emulated pipeline into rows, Markdown and a chart."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import quartiles

from .competitors import BASELINE, COMPETITORS
from .scenarios import SCENARIOS, Draws, Times
from .simulated import Runtime, nearest_makespan_s

Record = Mapping[str, Any]
Shape = tuple[int, int]
"""Ranks and microbatches."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One competitor in one scenario.

    Attributes:
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches per step.
        scenario: name of the scenario.
        competitor: name of the competitor.
        makespan_s: median over the repetitions.
        speedup: median over the repetitions of the baseline's makespan by this one's.
        quartiles: of that ratio.
        peak: most activations that a rank held, in microbatches of a whole rank.
        simulated_ratio: median of simulated by measured makespan, see ``nearest_makespan_s``;
            ``None`` for other runtimes.
        overhead_us: what ``overhead.Overhead`` says, in microseconds.
    """

    num_ranks: int
    num_microbatches: int
    scenario: str
    competitor: str
    makespan_s: float
    speedup: float
    quartiles: tuple[float, float]
    peak: float
    simulated_ratio: float | None
    overhead_us: Mapping[str, float]

    @property
    def shape(self) -> Shape:
        """Ranks and microbatches."""
        return self.num_ranks, self.num_microbatches


def make_rows(records: Sequence[Record], *, times: Times, seed: int) -> list[Speed]:
    """Sum up records.

    Args:
        records: of ``worker.Rank``, also of several pipelines.
        times: that they were measured with.
        seed: that they were measured with.
    """
    steps: dict[tuple[Any, ...], dict[int, Record]] = defaultdict(dict)
    for record in records:
        key = tuple(record[n] for n in ("num_ranks", "num_microbatches", "scenario", "competitor"))
        steps[key][record["repetition"]] = record
    runtimes = {
        ranks: _runtime(records, ranks) for ranks in {record["num_ranks"] for record in records}
    }
    rows = []
    for key, of_row in steps.items():
        ranks, microbatches, scenario, competitor = key
        base = steps.get((ranks, microbatches, scenario, BASELINE), {})
        ratios = _ratios(base, of_row) or [float("nan")]
        rows.append(
            Speed(
                num_ranks=ranks,
                num_microbatches=microbatches,
                scenario=scenario,
                competitor=competitor,
                makespan_s=statistics.median(r["makespan_s"] for r in of_row.values()),
                speedup=statistics.median(ratios),
                quartiles=quartiles(ratios),
                peak=max(record["peak"] for record in of_row.values()),
                simulated_ratio=_simulated_ratio(of_row.values(), runtimes[ranks], times, seed),
                overhead_us={
                    name: statistics.fmean(r[f"{name}_s"] for r in of_row.values()) * 1e6
                    for name in ("late", "after_f", "after_b", "after_w", "message")
                },
            )
        )
    return rows


def ratio(records: Iterable[Record], slower: str, faster: str) -> float | None:
    """Median over repetitions of one competitor's makespan by another's, in the same step.

    Args:
        records: of one shape and scenario.
        slower: name of the numerator.
        faster: name of the denominator.

    Returns:
        ``None`` where one of them did not take part.
    """
    steps: dict[str, dict[int, Record]] = defaultdict(dict)
    for record in records:
        steps[record["competitor"]][record["repetition"]] = record
    ratios = _ratios(steps[slower], steps[faster])
    return statistics.median(ratios) if ratios else None


def _ratios(slower: Mapping[int, Record], faster: Mapping[int, Record]) -> list[float]:
    """Ratios of makespans in the repetitions that both took part in."""
    return [
        slower[repetition]["makespan_s"] / record["makespan_s"]
        for repetition, record in faster.items()
        if repetition in slower
    ]


def markdown(rows: Sequence[Speed]) -> str:
    """One table per shape: a line per competitor, a column per scenario."""
    parts = []
    for shape in dict.fromkeys(row.shape for row in rows):
        cells = {(row.competitor, row.scenario): row for row in rows if row.shape == shape}
        scenarios = list(dict.fromkeys(scenario for _, scenario in cells))
        parts += [
            f"### {shape[0]} ranks, {shape[1]} microbatches: speed-up over {BASELINE}",
            "",
            f"| | memory | {' | '.join(scenarios)} | simulated / measured |",
            f"|---|---|{'---|' * len(scenarios)}---|",
        ]
        for competitor in dict.fromkeys(competitor for competitor, _ in cells):
            line = [cells.get((competitor, scenario)) for scenario in scenarios]
            present = [row for row in line if row is not None]
            texts = ["" if row is None else f"{row.speedup:.3f}" for row in line]
            peak = max(row.peak for row in present)
            checks = [row.simulated_ratio for row in present if row.simulated_ratio is not None]
            check = f"{min(checks):.3f}-{max(checks):.3f}" if checks else ""
            parts.append(f"| {competitor} | {peak:.3g} | {' | '.join(texts)} | {check} |")
        parts.append("")
    return "\n".join(parts)


def chart(rows: Sequence[Speed], path: Path) -> None:
    """Draw the speed-ups of the largest pipeline as bars, a group per scenario."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shape = max(row.shape for row in rows)
    cells = {(row.competitor, row.scenario): row.speedup for row in rows if row.shape == shape}
    scenarios = list(dict.fromkeys(scenario for _, scenario in cells))
    competitors = [name for name in dict.fromkeys(c for c, _ in cells) if name != BASELINE]
    width = 0.85 / len(competitors)
    figure, axes = pyplot.subplots(figsize=(6 + 2 * len(scenarios), 5), layout="constrained")
    colours = matplotlib.colormaps["tab20"]
    for index, competitor in enumerate(competitors):
        axes.bar(
            [at + (index - (len(competitors) - 1) / 2) * width for at in range(len(scenarios))],
            [cells.get((competitor, scenario), 0.0) for scenario in scenarios],
            width,
            label=competitor,
            color=colours(index % 20),
            edgecolor="black" if COMPETITORS[competitor].is_policy else "none",
            linewidth=0.8,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(scenarios)), scenarios)
    axes.set_ylim(bottom=0.6)
    axes.set_ylabel(f"speed-up over {BASELINE}")
    axes.set_title(
        f"{shape[0]} ranks, {shape[1]} microbatches, emulated compute (outlined: run-time policies)"
    )
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _runtime(records: Sequence[Record], num_ranks: int) -> Runtime:
    """What our executor adds on this machine, from the quiet steps of that many ranks."""
    ours = [
        record
        for record in records
        if record["num_ranks"] == num_ranks and COMPETITORS[record["competitor"]].engine == "ours"
    ]
    return Runtime.measured([r for r in ours if r["scenario"] == "quiet"] or ours)


def _simulated_ratio(
    records: Iterable[Record], runtime: Runtime, times: Times, seed: int
) -> float | None:
    ratios = []
    for record in records:
        competitor = COMPETITORS[record["competitor"]]
        if competitor.engine != "ours":
            return None
        draws = Draws(
            scenario=SCENARIOS[record["scenario"]],
            num_ranks=record["num_ranks"],
            num_microbatches=record["num_microbatches"],
            times=times,
            seed=seed,
            repetition=record["repetition"],
        )
        measured_s = record["makespan_s"]
        added = Runtime.measured([record], runtime)  # in this very step
        nearest_s = nearest_makespan_s(competitor, draws, added, measured_s)
        ratios.append(nearest_s / measured_s)
    return statistics.median(ratios)
