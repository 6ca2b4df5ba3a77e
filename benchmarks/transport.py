"""Transports between two processes: against memory itself, gloo, MPI, UCX and perftest, in one run.

    python benchmarks/transport.py [--quick] [--json FILE] [--chart FILE]

Every number is the median of at least five repetitions in which all competitors take turns; goals
are ratios within the run, or times. Exits with status 1 where a goal is missed. MPI and UCX take
part where they are installed (``bash prerequisite.sh --benchmarks``), RDMA where its lab can run
(``bash prerequisite.sh --lab``).

Parts: ``bandwidth`` streams tensors between two processes, ``latency`` sends small ones to and
fro, ``hand-over`` passes reserved memory on, ``1f1b`` measures what messages add to a pipeline that
computes, ``ranks`` trains with more ranks than processors, ``soak`` looks for memory that grows,
``kills`` for what killed processes leave behind, ``rdma`` compares with perftest between two small
virtual machines.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.channels import chart, jobs, transfers  # noqa: E402
from benchmarks.channels.copies import NoCompilerError, build  # noqa: E402
from benchmarks.channels.transfers import KIB, MIB, Bench, state_of  # noqa: E402
from benchmarks.report import Result, Row, measure, measured, missing, parser_of  # noqa: E402
from megatron.adaptive import extension  # noqa: E402

PARTS = ("bandwidth", "latency", "hand-over", "1f1b", "ranks")


def distances(bench: Bench) -> Row:
    """The distance of the processors over the whole run."""
    what = "cache line from one processor to the other and back"
    if not bench.distances_ns:
        return missing(what, transfers.NO_COMPILER)
    row = measured(what, bench.distances_ns, unit="ns")
    states = {state_of(value) for value in bench.distances_ns}
    note = f"{state_of(row.value or 0.0)} (near < 110, far > 130)"
    if {"near", "far"} <= states:
        note += "; it changed during the run"
    return Row(**{**vars(row), "note": note})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--chart", type=Path, help="draw bandwidth over size here, as PNG")
    parser.add_argument("--repetitions", type=int, help="of everything, at least 5")
    parser.add_argument("--pool-mib", type=int, default=128, help="memory that counts as cold")
    options = parser.parse_args(arguments)
    options.repetitions = max(5, options.repetitions or (5 if options.quick else 9))
    return options


def main() -> int:
    """Measure and print; returns 1 where a goal is missed, 2 where nothing can be measured."""
    options = parse()
    if extension.load() is None:
        print(f"error: no C++ extension: {extension.why_missing()}", file=sys.stderr)
        return 2
    allowed = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        library = None
        try:
            library = build(Path(folder))
        except NoCompilerError as error:
            print(f"warning: {error}", file=sys.stderr)
        bench = Bench(
            library=library,
            cores=(allowed[0], allowed[min(1, len(allowed) - 1)]),
            repetitions=options.repetitions,
            pool_bytes=options.pool_mib * MIB,
        )
        parts: dict[str, Callable[[], Result]] = {
            "bandwidth": lambda: transfers.bandwidth(bench, transfers.SIZES),
            "latency": lambda: transfers.latency(bench, 3000),
            "hand-over": lambda: transfers.hand_over(bench, 2000, (4 * KIB, MIB, 64 * MIB)),
            "1f1b": lambda: jobs.one_f_one_b(bench),
            "ranks": lambda: jobs.four_ranks(10 if options.quick else 30),
        }

        def then(total: Result) -> None:
            bench.distance()
            distance = distances(bench)
            print(f"{distance.line}\n")
            total.rows.append(distance)
            if options.chart is not None and total.points:
                title = f"{total.facts['processor']}, cores {state_of(distance.value or 0.0)}"
                chart.chart(total.points, title, options.chart)
            total.facts["points"] = [
                {**vars(point), "gigabytes_per_s": point.gigabytes_per_s} for point in total.points
            ]

        bench.distance()
        try:
            return measure(parts, options, then)
        finally:
            bench.close()


if __name__ == "__main__":
    sys.exit(main())
