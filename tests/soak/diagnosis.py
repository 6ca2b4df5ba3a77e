"""Compares the diagnosis and the figures of traces with the ground truth.

    python -m tests.soak.diagnosis [--quick] [--part PART ...] [--json FILE]

The part ``detection`` computes the fraction of synthetic runs in which the diagnosis names the
right fault, and ``real`` does the same with processes that sleep instead of computing. The part
``clock`` gives processes wrong clocks, and measures the errors that remain after the clocks are
aligned. The part ``bubble`` compares the bubble in a trace with the true bubble. The part
``aggregate`` computes the statistics of ten million spans. The part ``repairs`` compares the
what-if analysis's predictions for twelve repairs with runs of sleeping processes after these
repairs. Exits with status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harness.report import Result, Row, measure, measured, parser_of  # noqa: E402
from tests.soak.tracing import aggregate, cases, clocks, repairs  # noqa: E402
from tests.soak.tracing import slept_runs as emulated  # noqa: E402
from tests.soak.tracing.cases import WEAK, Outcome  # noqa: E402

MILLION = 1_000_000


def of_detection(options: argparse.Namespace) -> Result:
    """Diagnoses synthetic runs, and returns the fraction of runs with a right diagnosis.

    ``options`` contains the seed, and whether to make fewer runs.
    """
    results = list(cases.outcomes(40 if options.quick else 200, options.seed))
    facts = {"detection": [vars(outcome) for outcome in results]}
    return Result(rows=_rates("made-up", results), facts=facts)


def of_real(options: argparse.Namespace) -> Result:
    """Diagnoses runs of processes that sleep instead of computing.

    Returns the fraction of runs with a right diagnosis. ``options`` contains the seed, and whether
    to make fewer runs.
    """
    results = emulated.measure(7 if options.quick else 30, options.seed, limit_s=1800)
    facts = {"real": [vars(outcome) for outcome in results]}
    return Result(rows=_rates("real", results), facts=facts)


def _rates(kind: str, outcomes: list[Outcome]) -> list[Row]:
    """Returns table rows with the fraction of right diagnoses in each group of ``outcomes``.

    ``kind`` describes the runs in the titles of the rows.
    """
    rows = []
    strong = {group for group, _ in cases.GROUPS} - {WEAK}
    right_cause = "right cause and culprit"
    for groups, text, goal in (
        (strong, f"x1.3 and above, links, spikes, data, {right_cause}", 0.95),
        ({WEAK}, f"x1.1, {right_cause}", 0.80),
        ({"quiet"}, "false alarms in quiet runs", 0.02),
    ):
        matching = [o for o in outcomes if o.group in groups]
        is_quiet = "quiet" in groups
        count = sum(o.right != is_quiet for o in matching)
        wrong = sorted({f"{o.group} {o.case.get('number', '')}" for o in matching if not o.right})
        rows.append(
            Row(
                what=f"detection, {kind}: {text}",
                value=count / len(matching) if matching else None,
                goal=goal,
                least=not is_quiet,
                note=f"{count} of {len(matching)} runs" + (f"; not {wrong[:6]}" if wrong else ""),
                optional=not matching,
            )
        )
    return rows


def of_clock(options: argparse.Namespace) -> Result:
    """Measures the errors that remain after wrong clocks have been aligned.

    With ``options.quick``, each wrong clock is measured once.
    """
    result = clocks.measure(4.0 if options.quick else 10.0, 1 if options.quick else 4)
    rows = [
        measured(
            "clock: median error, offsets of 5 s and drifts of 50 ppm",
            result["error_us"],
            unit="us",
            goal=50,
        ),
        measured("clock: error of the drift", result["drift_error_ppm"], unit="ppm"),
    ]
    return Result(rows=rows, facts={"clock": result})


def of_bubble(options: argparse.Namespace) -> Result:
    """Compares the bubble that a trace shows with the true bubble of sleeping processes.

    ``options`` contains the seed, and whether to make fewer runs.
    """
    rows, facts = [], {}
    for title, half_s in emulated.HALF_S.items():
        errors = emulated.bubble_errors(2 if options.quick else 6, options.seed, half_s)
        facts[title] = errors
        note = f"trace minus emulation: {', '.join(f'{error:+.2f}' for error in errors)}"
        rows.append(
            measured(
                f"bubble: difference between trace and emulation, {title}",
                [abs(error) for error in errors],
                unit="points",
                goal=0.5,
                note=note,
            )
        )
    return Result(rows=rows, facts={"bubble": facts})


def of_aggregate(options: argparse.Namespace) -> Result:
    """Measures the time and memory for reading a large trace.

    With ``options.quick``, the trace has fewer spans.
    """
    spans = MILLION if options.quick else 10 * MILLION
    result = aggregate.measure(spans)
    note = f"{result['spans']:.0f} spans of {aggregate.RANKS} ranks"
    rows = [
        measured("aggregate: figures", [result["read_s"]], unit="s", goal=60, note=note),
        measured("aggregate: memory", [result["peak_bytes"] / 1e9], unit="GB", goal=4),
        measured("aggregate: diagnosis", [result["diagnose_s"]], unit="s", note="one process"),
    ]
    return Result(rows=rows, facts={"aggregate": result})


def of_repairs(options: argparse.Namespace) -> Result:
    """Compares predicted with real step times of repaired jobs. Ignores ``options``."""
    done = list(repairs.measure())
    right, pairs = repairs.ordered_right(done)
    note = "; ".join(
        f"{run.repair.strip(': ')} ({run.job}): {1e3 * run.before_s:.0f} ms, predicted "
        f"{1e3 * run.predicted_s:.0f}, real {1e3 * run.real_s:.0f}"
        for run in done
    )
    rows = [
        measured(
            f"repairs: median error of the predicted step, {len(done)} real repairs",
            [repair.error for repair in done],
            goal=0.03,
            note=note,
        ),
        Row(
            what="repairs: share of pairs in a job with the correct order",
            value=right / pairs,
            goal=0.9,
            least=True,
            note=f"{right} of {pairs}",
        ),
    ]
    return Result(rows=rows, facts={"repairs": [vars(repair) for repair in done]})


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "detection": of_detection,
    "real": of_real,
    "clock": of_clock,
    "bubble": of_bubble,
    "aggregate": of_aggregate,
    "repairs": of_repairs,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses ``arguments``, or the arguments of this process if ``arguments`` is ``None``."""
    parser = parser_of(__doc__, PARTS, "fewer runs, within ten minutes")
    parser.add_argument("--seed", type=int, default=9000, help="seed of the faults and the noise")
    return parser.parse_args(arguments)


def main() -> int:
    """Measures the selected parts and prints the results. Returns 1 if a goal is missed."""
    options = parse()
    return measure({name: partial(part, options) for name, part in PARTS.items()}, options)


if __name__ == "__main__":
    sys.exit(main())
