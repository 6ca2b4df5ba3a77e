"""Measures what traces, the watch for hangs, checkpoints and copies add to steps of a small GPT.

    python benchmarks/overheads.py [--quick] [--part PART ...] [--json FILE]

Parts: ``trace``, a traced step; ``layers``, ``collectives`` and ``evidence``, the times of layers,
those of collectives and the counters of the machine in traced steps; ``watch``, the watch for
hangs; ``checkpoint``, a checkpoint every ten steps that is written while training continues;
``copies``, copies of the state in memory, at every step and at one in ten. Steps with and without
the feature take turns in one job. Exits with status 1 if a goal is missed.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpt_turns  # noqa: E402
from harness.report import Result, Row, measure, measured, parser_of  # noqa: E402

DETAILS = {
    "layers": "times of layers",
    "collectives": "times of collectives",
    "evidence": "counters of the machine",
}
PARTS = ("trace", *DETAILS, "watch", "checkpoint", "copies")
MOST = {
    "traced": 0.01,
    "layers": 0.03,
    "collectives": 0.03,
    "evidence": 0.005,
    "watched": 0.01,
    "saving": 0.03,
    "copying": 0.05,
}
"""Largest addition to a step, as a share of the step without the feature."""


MOST_BYTES = 3000
"""Largest addition to the trace of a rank in a step with more detail, in bytes."""


def of_kind(kind: str, title: str, rounds: int) -> Result:
    """Returns the rows of a kind of :mod:`gpt_turns`.

    Args:
        kind: Kind of steps.
        title: Name of the feature in the rows.
        rounds: Number of rounds.
    """
    result = gpt_turns.measure(kind, rounds)
    note = f"steps of {1e3 * result['step_s']:.0f} ms on {gpt_turns.RANKS[kind]} processes"
    if "spans" in result:
        note = f"{result['spans']:.0f} spans in {note}"
    if "size_bytes" in result:
        note = f"{result['size_bytes'] / 1e6:.1f} MB, {note}"
    rows = [
        measured(
            f"{title}: longer steps", gpt_turns.costs(result, kind), goal=MOST[kind], note=note
        ),
        measured(f"{title}: more processor time", gpt_turns.costs(result, kind, "cpu_s")),
    ]
    return Result(rows=rows, facts={kind: result})


def of_detail(kind: str, rounds: int) -> Result:
    """Returns the rows of a kind of detail of traces; its goal is one of processor time."""
    result = gpt_turns.measure(kind, rounds)
    note = f"steps of {1e3 * result['step_s']:.0f} ms on {gpt_turns.RANKS[kind]} processes"
    rows = [
        measured(
            f"{DETAILS[kind]}: more processor time",
            gpt_turns.costs(result, kind, "cpu_s"),
            goal=MOST[kind],
            note=note,
        ),
        measured(f"{DETAILS[kind]}: longer steps", gpt_turns.costs(result, kind)),
        Row(
            what=f"{DETAILS[kind]}: bytes per rank and step",
            value=result["marker_bytes"],
            goal=MOST_BYTES,
        ),
    ]
    return Result(rows=rows, facts={kind: result})


def of_copies(rounds: int) -> Result:
    """Returns the rows of copies in memory."""
    result = gpt_turns.measure("copying", rounds)
    rows = []
    for name, text in (("tenth", "one step in ten"), ("each", "every step")):
        title = f"copies in memory, {text}"
        goal = MOST["copying"] if name == "tenth" else None
        elapsed, processor = (
            gpt_turns.costs(result[name], "copying", unit) for unit in ("s", "cpu_s")
        )
        rows.append(measured(f"{title}: longer steps", elapsed, goal=goal, note=result["notice"]))
        rows.append(measured(f"{title}: more processor time", processor))
    return Result(rows=rows, facts={"copies": result})


def main() -> int:
    """Measures and prints; returns 1 if a goal is missed."""
    options = parser_of(__doc__, PARTS, "fewer rounds").parse_args()
    quick = options.quick
    saving = "a checkpoint every ten steps"
    parts = {
        "trace": partial(of_kind, "traced", "trace", 40 if quick else 240),
        **{kind: partial(of_detail, kind, 4 if quick else 24) for kind in DETAILS},
        "watch": partial(of_kind, "watched", "watch for hangs", 3 if quick else 12),
        "checkpoint": partial(of_kind, "saving", saving, 6 if quick else 24),
        "copies": partial(of_copies, 3 if quick else 8),
    }
    return measure(parts, options)


if __name__ == "__main__":
    sys.exit(main())
