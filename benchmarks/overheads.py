"""Measures how much traces, the hang detector, checkpoints and copies slow down a small GPT.

    python benchmarks/overheads.py [--quick] [--part PART ...] [--json FILE]

Parts: ``trace`` measures a traced step. ``layers``, ``collectives`` and ``evidence`` measure the
times of layers, the times of collectives and the counters of the machine in traced steps. ``watch``
measures the hang detector. ``checkpoint`` measures a checkpoint every ten steps that is written
while training continues. ``copies`` measures in-memory copies of the state, in every step and in
one of ten. Steps with and without the feature alternate in one job. Exits with status 1 if a goal
is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpt_turns  # noqa: E402
from harness.report import Result, Row, measure, measured, parser_of  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Feature whose cost is measured.

    Attributes:
        kind: Kind of steps, which are described in :mod:`gpt_turns`.
        title: Name of the feature in the rows.
        most: Maximum time that the feature may add, relative to a step without the feature.
            ``None`` means that there is no limit.
        rounds: Number of rounds with ``--quick``, and number of rounds without it.
        unit: ``s`` if the limit applies to elapsed time, ``cpu_s`` if it applies to CPU time.
    """

    kind: str
    title: str
    most: float | None
    rounds: tuple[int, int]
    unit: str = "s"


def _detail(kind: str, title: str, most: float | None) -> Feature:
    return Feature(kind=kind, title=title, most=most, rounds=(4, 24), unit="cpu_s")


FEATURES = {
    "trace": [Feature(kind="traced", title="trace", most=0.01, rounds=(40, 240))],
    "layers": [_detail("layers", "times of layers", 0.03)],
    "collectives": [_detail("collectives", "times of collectives", 0.03)],
    # The step time varies by more than the permitted cost, so the limit applies to the time of the
    # reads instead.
    "evidence": [_detail("evidence", "counters of the machine", None)],
    "watch": [Feature(kind="watched", title="watch for hangs", most=0.01, rounds=(3, 12))],
    "checkpoint": [
        Feature(kind="saving", title="a checkpoint every ten steps", most=0.03, rounds=(6, 24))
    ],
    "copies": [
        Feature(
            kind="copying tenth",
            title="copies in memory, one step in ten",
            most=0.05,
            rounds=(3, 8),
        ),
        Feature(
            kind="copying each", title="copies in memory, every step", most=None, rounds=(3, 8)
        ),
    ],
}
MOST_READ_SHARE = 0.005
"""Maximum time to read the machine's counters, as a fraction of the step time."""
MOST_BYTES = 3000
"""Maximum number of bytes that details of traces add per rank and step."""
UNITS = {"s": "longer steps", "cpu_s": "more processor time"}


def costs(features: Sequence[Feature], quick: bool) -> Result:
    """Measures the costs of ``features``, in fewer rounds if ``quick`` is true."""
    total = Result()
    for feature in features:
        result = gpt_turns.measure(feature.kind, feature.rounds[0 if quick else 1])
        rows = [
            measured(
                f"{feature.title}: {text}",
                gpt_turns.costs(result, unit),
                goal=feature.most if unit == feature.unit else None,
                note=note_of(feature, result),
            )
            for unit, text in UNITS.items()
        ]
        if "read_share" in result:
            title = f"{feature.title}: time of the reads"
            rows.append(Row(what=title, value=result["read_share"], goal=MOST_READ_SHARE))
        if "marker_bytes" in result:
            title = f"{feature.title}: bytes per rank and step"
            rows.append(Row(what=title, value=result["marker_bytes"], goal=MOST_BYTES))
        total.add(Result(rows=rows, facts={feature.kind: result}))
    return total


def note_of(feature: Feature, result: dict[str, Any]) -> str:
    """Returns a summary of the measurements ``result`` of ``feature``, for the note of a row."""
    ranks = gpt_turns.RANKS.get(feature.kind, 2)
    note = f"steps of {1e3 * result['step_s']:.0f} ms on {ranks} processes"
    if "spans" in result:
        return f"{result['spans']:.0f} spans in {note}"
    if "size_bytes" in result:
        return f"{result['size_bytes'] / 1e6:.1f} MB, {note}"
    return f"{result['notice']}; {note}" if "notice" in result else note


def main() -> int:
    """Measures the features and prints the results. Returns 1 if a goal is missed, otherwise 0."""
    options = parser_of(__doc__, tuple(FEATURES), "fewer rounds").parse_args()
    return measure(
        {name: partial(costs, features, options.quick) for name, features in FEATURES.items()},
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
