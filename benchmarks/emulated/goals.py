"""What the measurements of the emulated pipeline are to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .competitors import BASELINE, COMPETITORS
from .report import Record, Row, Shape, ratio

MAIN: Shape = (8, 32)
ADAPTIVE = "adaptive, V"
"""The policy that the speed goals are about."""
TIGHT = "hinted, V, memory p"
"""The policy for the memory of 1F1B."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One line of the table of goals.

    Attributes:
        text: what is measured.
        limit: least value that will do.
        value: what was measured, ``None`` where it was not.
    """

    text: str
    limit: float
    value: float | None

    @property
    def met(self) -> bool:
        """Whether it was measured and will do."""
        return self.value is not None and self.value >= self.limit

    @property
    def line(self) -> str:
        """The goal as a line of Markdown."""
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        return f"| {self.text} | {value} | >= {self.limit} | {'met' if self.met else 'MISSED'} |"


def goals(records: Sequence[Record], rows: Sequence[Row]) -> list[Goal]:
    """Compare records and their rows with the goals."""

    def over(scenario: str, slower: str, faster: str) -> float | None:
        return ratio(_of(records, MAIN, scenario), slower, faster)

    jitter = "jitter 0.3"
    return [
        Goal(
            text=f"{ADAPTIVE} over {BASELINE}, {jitter}",
            limit=1.25,
            value=over(jitter, BASELINE, ADAPTIVE),
        ),
        Goal(
            text=f"{ADAPTIVE} over megatron interleaved, {jitter}",
            limit=1.08,
            value=over(jitter, "megatron interleaved", ADAPTIVE),
        ),
        Goal(
            text=f"{ADAPTIVE} over the best fixed order in no more memory, {jitter}",
            limit=1.03,
            value=_least(over_fixed(records, rows, ADAPTIVE, MAIN, jitter)),
        ),
        Goal(
            text=f"{ADAPTIVE} over {BASELINE}, lengths",
            limit=1.4,
            value=over("lengths", BASELINE, ADAPTIVE),
        ),
        Goal(
            text=f"{TIGHT} over zb-v, quiet",
            limit=0.99,
            value=over("quiet", "zb-v", TIGHT),
        ),
        *(_never_slower(records, rows, name) for name in (ADAPTIVE, TIGHT)),
        _simulation(rows),
    ]


def over_fixed(
    records: Sequence[Record], rows: Sequence[Row], policy: str, shape: Shape, scenario: str
) -> Iterator[tuple[float, str]]:
    """How much longer each fixed order takes that held no more activations than the policy may.

    Yields:
        The ratio, and the fixed order with the scenario.
    """
    here = [row for row in rows if row.shape == shape and row.scenario == scenario]
    cap = COMPETITORS[policy].cap_for(*shape)
    assert cap is not None
    for row in here:
        if COMPETITORS[row.competitor].is_policy or row.peak > cap + 1e-6:
            continue
        value = ratio(_of(records, shape, scenario), row.competitor, policy)
        if value is not None:
            yield value, f"{row.competitor}, {scenario}, {shape[0]} ranks, {shape[1]} microbatches"


def _never_slower(records: Sequence[Record], rows: Sequence[Row], policy: str) -> Goal:
    found = [
        one
        for shape, scenario in dict.fromkeys((row.shape, row.scenario) for row in rows)
        for one in over_fixed(records, rows, policy, shape, scenario)
    ]
    worst = min(found, default=None)
    text = f"{policy} over any fixed order in no more memory, worst"
    return Goal(
        text=text if worst is None else f"{text}: {worst[1]}",
        limit=0.99,
        value=None if worst is None else worst[0],
    )


def _simulation(rows: Sequence[Row]) -> Goal:
    """Simulated by measured, or the inverse: the worst of all rows."""
    checks = [
        (min(row.simulated_ratio, 1 / row.simulated_ratio), row)
        for row in rows
        if row.simulated_ratio
    ]
    worst = min(checks, key=lambda check: check[0], default=None)
    text = "agreement of simulation and measurement, worst"
    if worst is not None:
        row = worst[1]
        text += f": {row.competitor}, {row.scenario}, {row.num_ranks} ranks,"
        text += f" {row.num_microbatches} microbatches"
    return Goal(text=text, limit=0.97, value=None if worst is None else worst[0])


def _least(found: Iterator[tuple[float, str]]) -> float | None:
    return min((value for value, _ in found), default=None)


def _of(records: Sequence[Record], shape: Shape, scenario: str) -> list[Record]:
    return [
        record
        for record in records
        if (record["num_ranks"], record["num_microbatches"]) == shape
        and record["scenario"] == scenario
    ]
