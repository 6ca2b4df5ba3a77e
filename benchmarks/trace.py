"""What tracing costs and what traces are good for, against their goals.

    python benchmarks/trace.py [--quick] [--part PART ...] [--json FILE]

Parts: ``cost``, what tracing adds to the steps of a real GPT; ``detection``, how often the
diagnosis names the right fault, in made-up runs; ``real``, the same in processes that work by
sleeping; ``clock``, how far processes with wrong clocks are apart at last; ``bubble``, the bubble
that a trace says against the true one; ``aggregate``, ten million spans. Exits with status 1 where
a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.channels.machine import others_busy  # noqa: E402
from benchmarks.channels.report import Result, Row, markdown, measured  # noqa: E402
from benchmarks.tracing import aggregate, cases, clocks, cost, emulated  # noqa: E402
from benchmarks.tracing.cases import WEAK, Outcome  # noqa: E402

BUSY = 0.1
MILLION = 1_000_000


def of_cost(options: argparse.Namespace) -> Result:
    """Part ``cost``."""
    result = cost.measure(options.rounds or (40 if options.quick else 240))
    each = 1e3 * result["step_s"]
    note = f"{result['spans']:.0f} spans in a step of {each:.0f} ms on {cost.RANKS} processes"
    rows = [
        measured("cost: step traced by untraced", cost.ratios(result), goal=1.01, note=note),
        measured(
            "the same, processor time of all", cost.ratios(result, "cpu_s"), goal=1.01, note=note
        ),
    ]
    return Result(rows=rows, facts={"cost": result})


def of_detection(options: argparse.Namespace) -> Result:
    """Part ``detection``."""
    found = list(cases.outcomes(40 if options.quick else 200, options.seed))
    facts = {"detection": [outcome.as_dict() for outcome in found]}
    return Result(rows=_rates("made-up", found), facts=facts)


def of_real(options: argparse.Namespace) -> Result:
    """Part ``real``."""
    found = emulated.measure(7 if options.quick else 30, options.seed, limit_s=1800)
    facts = {"real": [outcome.as_dict() for outcome in found]}
    return Result(rows=_rates("real", found), facts=facts)


def _rates(kind: str, outcomes: list[Outcome]) -> list[Row]:
    """Rows of the shares of right answers."""
    groups = {
        "x1.3 and above, links, spikes, data": [
            o for o in outcomes if o.group not in (WEAK, "quiet")
        ],
        "x1.1": [o for o in outcomes if o.group == WEAK],
    }
    rows = []
    for (text, found), goal in zip(groups.items(), (0.95, 0.80), strict=True):
        right = sum(o.right for o in found)
        wrong = sorted({f"{o.group} {o.case.get('number', '')}" for o in found if not o.right})
        rows.append(
            Row(
                what=f"detection, {kind}: {text}, right cause and culprit",
                value=right / len(found) if found else None,
                goal=goal,
                least=True,
                note=f"{right} of {len(found)} runs" + (f"; not {wrong[:6]}" if wrong else ""),
                optional=not found,
            )
        )
    quiet = [o for o in outcomes if o.group == "quiet"]
    false = sum(not o.right for o in quiet)
    rows.append(
        Row(
            what=f"detection, {kind}: false alarms in quiet runs",
            value=false / len(quiet) if quiet else None,
            goal=0.02,
            note=f"{false} of {len(quiet)} runs",
            optional=not quiet,
        )
    )
    return rows


def of_clock(options: argparse.Namespace) -> Result:
    """Part ``clock``."""
    found = clocks.measure(4.0 if options.quick else 10.0, 1 if options.quick else 4)
    rows = [
        measured(
            "clock: median error, offsets of 5 s and drifts of 50 ppm",
            found["error_us"],
            unit="us",
            goal=50,
        ),
        measured("clock: error of the drift", found["drift_error_ppm"], unit="ppm"),
    ]
    return Result(rows=rows, facts={"clock": found})


def of_bubble(options: argparse.Namespace) -> Result:
    """Part ``bubble``."""
    rows, facts = [], {}
    for what, half_s in emulated.HALF_S.items():
        errors = emulated.bubble_errors(2 if options.quick else 6, options.seed, half_s)
        facts[what] = errors
        note = f"trace minus truth: {', '.join(f'{error:+.2f}' for error in errors)}"
        rows.append(
            measured(
                f"bubble: trace against emulated truth, {what}",
                [abs(error) for error in errors],
                unit="points",
                goal=0.5,
                note=note,
            )
        )
    return Result(rows=rows, facts={"bubble": facts})


def of_aggregate(options: argparse.Namespace) -> Result:
    """Part ``aggregate``; the short form reads fewer spans in as much less time."""
    spans = MILLION if options.quick else 10 * MILLION
    found = aggregate.measure(spans)
    note = f"{found['spans']:.0f} spans of {aggregate.RANKS} ranks"
    rows = [
        measured("aggregate: figures", [found["read_s"]], unit="s", goal=60, note=note),
        measured("aggregate: memory", [found["peak_bytes"] / 1e9], unit="GB", goal=4),
        measured("aggregate: diagnosis", [found["diagnose_s"]], unit="s", note="one process"),
    ]
    return Result(rows=rows, facts={"aggregate": found})


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "cost": of_cost,
    "detection": of_detection,
    "real": of_real,
    "clock": of_clock,
    "bubble": of_bubble,
    "aggregate": of_aggregate,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer runs, within ten minutes")
    parser.add_argument("--json", type=Path, help="also write everything measured here")
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, help="of part cost: four steps each")
    parser.add_argument("--seed", type=int, default=9000, help="of the faults and the noise")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure and print; returns 1 where a goal is missed."""
    options = parse()
    busy = others_busy()
    processors = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {processors} processors, kernel {platform.release()}, "
        f"busy with other programs: {busy:.0%}\n",
        flush=True,
    )
    if busy > BUSY:
        print(
            f"warning: other programs use {busy:.0%} of the processors: do not trust the times",
            file=sys.stderr,
        )
    total = Result()
    for part in options.part:
        start = time.perf_counter()
        found = PARTS[part](options)
        total.add(found)
        print(
            f"### {part}, {time.perf_counter() - start:.0f} s\n\n{markdown(found.rows)}", flush=True
        )
    if options.json is not None:
        result = {"rows": [row.as_dict() for row in total.rows], **total.facts}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.met is False for row in total.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
