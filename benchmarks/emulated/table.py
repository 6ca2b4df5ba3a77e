"""Creates the table, goals and chart of the measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.report import Row
from megatron.adaptive.schedule.simulate import simulate

from .competitors import ADAPTIVE, BASELINE, COMPETITORS, INTERLEAVED, PLUG_IN, TIGHT, Competitor
from .scenarios import SCENARIOS, Draws, Times

Record = Mapping[str, Any]
LEAST_OF_BOUND = 0.9
"""Minimum simulated duration of a step, as a fraction of the measured duration."""
LEAST_OF_GAIN = 0.97
"""Minimum measured gain over another order, as a fraction of the simulated gain."""
GAINS = (
    (ADAPTIVE, BASELINE, "jitter 0.3"),
    (ADAPTIVE, INTERLEAVED, "jitter 0.3"),
    (PLUG_IN, INTERLEAVED, "jitter 0.3"),
    (ADAPTIVE, BASELINE, "lengths"),
)
"""Rule, competitor and scenario of each comparison whose gain has a goal."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of one competitor in one scenario.

    Attributes:
        competitor: Competitor that ran the steps.
        scenario: Name of the scenario.
        peak: Maximum number of activations that a rank stored, in microbatches of a whole rank.
        measured_s: Duration of each step in seconds, keyed by the index of the repetition.
        simulated_s: Simulated duration of each step in seconds, keyed by the index of the
            repetition. In the simulation, only actions and messages take time.
    """

    competitor: Competitor
    scenario: str
    peak: float
    measured_s: Mapping[int, float]
    simulated_s: Mapping[int, float]

    @property
    def of_bound(self) -> float:
        """Returns the ratio of simulated to measured step time, as the median over all steps."""
        return statistics.median(
            self.simulated_s[number] / seconds for number, seconds in self.measured_s.items()
        )


Table = Mapping[tuple[str, str], Steps]
"""Measured steps, keyed by the names of the competitor and of the scenario."""


def simulated_s(competitor: Competitor, draws: Draws) -> float:
    """Returns the simulated duration in seconds of a step of ``competitor``.

    ``draws`` contains the durations of actions and messages. Nothing else takes time.
    """
    ranks, microbatches = draws.num_ranks, draws.num_microbatches
    result = simulate(
        competitor.placement(ranks),
        microbatches,
        competitor.policies(ranks, microbatches),
        draws.workload(competitor.placement(ranks)),
        cap=competitor.cap_for(ranks, microbatches),
        weight_pieces=competitor.weight_pieces,
        compiled=True,
    )
    return float(result.makespan_s)


def make_table(
    records: Sequence[Record], *, ranks: int, microbatches: int, times: Times, seed: int
) -> dict[tuple[str, str], Steps]:
    """Returns the steps of a run, keyed by the names of the competitor and of the scenario.

    Args:
        records: Records of steps, as returned by ``worker.Rank.measure``.
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step.
        times: Mean durations of the run.
        seed: Seed of all random numbers in the run.
    """
    table = {}
    for name, scenario in dict.fromkeys((r["competitor"], r["scenario"]) for r in records):
        steps = {
            record["repetition"]: record
            for record in records
            if (record["competitor"], record["scenario"]) == (name, scenario)
        }
        draws = {
            repetition: Draws(
                scenario=SCENARIOS[scenario],
                num_ranks=ranks,
                num_microbatches=microbatches,
                times=times,
                seed=seed,
                repetition=repetition,
            )
            for repetition in steps
        }
        competitor = COMPETITORS[name]
        table[name, scenario] = Steps(
            competitor=competitor,
            scenario=scenario,
            peak=max(record["peak"] for record in steps.values()),
            measured_s={number: record["makespan_s"] for number, record in steps.items()},
            simulated_s={number: simulated_s(competitor, draws[number]) for number in draws},
        )
    return table


def ratio(slower: Mapping[int, float], faster: Mapping[int, float]) -> float:
    """Returns ``slower`` divided by ``faster``, as the median over all repetitions."""
    return statistics.median(slower[number] / seconds for number, seconds in faster.items())


def speedup(table: Table, name: str, scenario: str) -> float | None:
    """Returns the speed of the competitor ``name`` as a multiple of the baseline's speed.

    The result is the median over all repetitions of ``scenario``, or ``None`` if ``table`` lacks
    the steps.
    """
    steps, base = table.get((name, scenario)), table.get((BASELINE, scenario))
    if steps is None or base is None:
        return None
    return ratio(base.measured_s, steps.measured_s)


def markdown(table: Table) -> str:
    """Returns the speed-ups in ``table`` as a Markdown table with one row per competitor."""
    scenarios = list(dict.fromkeys(scenario for _, scenario in table))
    lines = [
        f"| | memory | {' | '.join(scenarios)} | simulated / measured |",
        f"|---|---|{'---|' * len(scenarios)}---|",
    ]
    for name in dict.fromkeys(name for name, _ in table):
        of_name = [steps for (other, _), steps in table.items() if other == name]
        speeds = [speedup(table, name, scenario) for scenario in scenarios]
        cells = ["" if speed is None else f"{speed:.3f}" for speed in speeds]
        bounds = [steps.of_bound for steps in of_name]
        peak = max(steps.peak for steps in of_name)
        lines.append(
            f"| {name} | {peak:.3g} | {' | '.join(cells)} | {min(bounds):.3f}-{max(bounds):.3f} |"
        )
    return "\n".join(lines) + "\n"


def goals(table: Table, *, ranks: int, microbatches: int) -> list[Row]:
    """Compares measured with simulated step times, and run-time rules with fixed orders.

    Returns one row for each comparison. ``table`` contains the steps of a pipeline with ``ranks``
    ranks and ``microbatches`` microbatches per step.
    """
    rows = [_gain(table, *gain) for gain in GAINS if {(gain[0], gain[2]), gain[1:]} <= set(table)]
    of_executor = [steps for steps in table.values() if steps.competitor.engine == "ours"]
    if of_executor:
        worst = min(of_executor, key=lambda steps: steps.of_bound)
        title = "step without any cost over the measured one, worst"
        note = f"{worst.competitor.name}, {worst.scenario}"
        rows.append(_least(title, worst.of_bound, LEAST_OF_BOUND, note))
    for name in (ADAPTIVE, TIGHT):
        cap = COMPETITORS[name].cap_for(ranks, microbatches)
        assert cap is not None
        over = list(_over_fixed(table, name, cap))
        if over:
            value, note = min(over)
            title = f"{name} over any fixed order in no more memory, worst"
            rows.append(_least(title, value, LEAST_OF_GAIN, note))
    for (name, scenario), steps in table.items():
        if (name, scenario) == (PLUG_IN, "jitter 0.3"):
            cap = steps.competitor.cap_for(ranks, microbatches)
            title = f"{name}: activations held, {scenario}"
            rows.append(Row(what=title, value=steps.peak, goal=cap))
    return rows


def _gain(table: Table, policy: str, rival: str, scenario: str) -> Row:
    """Returns a row with the ratio of the measured to the simulated gain of ``policy``.

    The gain is the speed relative to the competitor ``rival`` in ``scenario``.
    """
    fast, slow = table[policy, scenario], table[rival, scenario]
    measured = ratio(slow.measured_s, fast.measured_s)
    simulated = ratio(slow.simulated_s, fast.simulated_s)
    title = f"{policy} over {rival}, {scenario}: share of the simulated gain"
    note = f"{measured:.3f} times as fast, simulated {simulated:.3f}"
    return _least(title, measured / simulated, LEAST_OF_GAIN, note)


def _over_fixed(table: Table, policy: str, cap: float) -> Iterator[tuple[float, str]]:
    """Compares ``policy`` with each fixed order that stores at most ``cap`` microbatches.

    Yields pairs of a gain and a text with the names of the order and the scenario.
    """
    for (name, scenario), steps in table.items():
        if steps.competitor.is_policy or steps.peak > cap + 1e-6:
            continue
        if (policy, scenario) in table:
            faster = table[policy, scenario].measured_s
            yield ratio(steps.measured_s, faster), f"{name}, {scenario}"


def _least(title: str, value: float, goal: float, note: str) -> Row:
    return Row(what=title, value=value, goal=goal, least=True, note=note)


def chart(table: Table, title: str, path: Path) -> None:
    """Draws the speed-ups in ``table`` as a bar chart with the title ``title``.

    The chart is saved to ``path``. Bars are grouped by scenario, and the bars of rules have an
    outline.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenarios = list(dict.fromkeys(scenario for _, scenario in table))
    names = [name for name in dict.fromkeys(name for name, _ in table) if name != BASELINE]
    width = 0.85 / len(names)
    figure, axes = pyplot.subplots(figsize=(6 + 2 * len(scenarios), 5), layout="constrained")
    colours = matplotlib.colormaps["tab20"]
    for index, name in enumerate(names):
        axes.bar(
            [group + (index - (len(names) - 1) / 2) * width for group in range(len(scenarios))],
            [speedup(table, name, scenario) or 0.0 for scenario in scenarios],
            width,
            label=name,
            color=colours(index % 20),
            edgecolor="black" if COMPETITORS[name].is_policy else "none",
            linewidth=0.8,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(scenarios)), scenarios)
    axes.set_ylim(bottom=0.6)
    axes.set_ylabel(f"speed-up over {BASELINE}")
    axes.set_title(title)
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
