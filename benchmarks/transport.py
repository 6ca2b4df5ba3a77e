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
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.channels import jobs, lab, report, transfers  # noqa: E402
from benchmarks.channels.copies import Copies, NoCompilerError, build  # noqa: E402
from benchmarks.channels.machine import Cores, others_busy, state_of  # noqa: E402
from benchmarks.channels.pair import PairError  # noqa: E402
from benchmarks.channels.transfers import KIB, MIB, Bench  # noqa: E402
from megatron.adaptive import extension  # noqa: E402

PARTS = ("bandwidth", "latency", "hand-over", "1f1b", "ranks", "soak", "kills", "rdma")
OF_PAIRS = frozenset(("bandwidth", "latency", "hand-over", "1f1b", "soak"))
BUSY = 0.1
"""Share of the processors in use by others from which on the numbers are not to be trusted."""


def run(options: argparse.Namespace, bench: Bench) -> report.Result:
    """Run the parts that were asked for, printing the table of each as soon as it is there."""
    quick: bool = options.quick
    sizes = transfers.SIZES
    parts: dict[str, Callable[[], report.Result]] = {
        "bandwidth": lambda: transfers.bandwidth(bench, sizes),
        "latency": lambda: transfers.latency(bench, 3000),
        "hand-over": lambda: transfers.hand_over(bench, 2000, (4 * KIB, MIB, 64 * MIB)),
        "1f1b": lambda: jobs.one_f_one_b(bench),
        "ranks": lambda: jobs.four_ranks(10 if quick else 30),
        "soak": lambda: jobs.long_run(bench, options.messages),
        "kills": lambda: kills(options.kills),
        "rdma": lambda: lab.measure(options.repetitions),
    }
    total = report.Result()
    for name in PARTS:
        if name not in options.part:
            continue
        start = time.monotonic()
        try:
            part = parts[name]()
        except PairError as error:
            print(f"error: {error}", file=sys.stderr)
            # What a process raised comes with its traceback, which stderr has.
            note = str(error).strip().splitlines()[-1][:200].replace("|", "/")
            part = report.Result(rows=[report.Row(what=name, value=None, goal=0, note=note)])
            bench.close()
            bench.start()
        total.add(part)
        total.facts[f"{name}, seconds"] = round(time.monotonic() - start, 1)
        print(f"### {name}\n\n{report.markdown(part.rows)}")
        if part.points:
            print(report.bandwidths(part.points))
        sys.stdout.flush()
    return total


def kills(count: int) -> report.Result:
    """Kill so many ranks over each transport of this machine, and over RDMA in its lab."""
    total = report.Result()
    for part in (jobs.kills(count, "shm"), jobs.kills(count, "tcp"), lab.kills(count)):
        total.add(part)
    return total


def machine(bench: Bench) -> report.Row:
    """The distance of the processors over the whole run."""
    what = "cache line from one processor to the other and back"
    if not bench.distances_ns:
        return report.missing(what, transfers.NO_COMPILER)
    row = report.measured(what, bench.distances_ns, unit="ns")
    states = {state_of(value) for value in bench.distances_ns}
    note = f"{state_of(row.value or 0.0)} (near < 110, far > 130)"
    if {"near", "far"} <= states:
        note += "; it changed during the run"
    return report.Row(**{**vars(row), "note": note})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="within ten minutes")
    parser.add_argument("--json", type=Path, help="also write everything measured here")
    parser.add_argument("--chart", type=Path, help="draw bandwidth over size here, as PNG")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, help="of everything, at least 5")
    parser.add_argument("--messages", type=int, help="of the soak")
    parser.add_argument("--kills", type=int, help="processes to kill")
    parser.add_argument("--pool-mib", type=int, default=128, help="memory that counts as cold")
    options = parser.parse_args(arguments)
    options.repetitions = max(5, options.repetitions or (5 if options.quick else 9))
    options.messages = options.messages or (200_000 if options.quick else 10_000_000)
    options.kills = options.kills or (20 if options.quick else 100)
    return options


def facts(busy: float) -> dict[str, Any]:
    """What the numbers depend on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "processor": model,
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "busy with other programs": round(busy, 3),
    }


def main() -> int:
    """Measure and print; returns 1 where a goal is missed, 2 where nothing can be measured."""
    options = parse()
    if extension.load() is None:
        print(f"error: no C++ extension: {extension.why_missing()}", file=sys.stderr)
        return 2
    busy = others_busy()
    known = facts(busy)
    print(", ".join(f"{name}: {value}" for name, value in known.items()) + "\n", flush=True)
    if busy > BUSY:
        print(
            f"warning: other programs use {busy:.0%} of the processors: do not trust the times",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory() as folder:
        library = None
        try:
            library = build(Path(folder))
        except NoCompilerError as error:
            print(f"warning: {error}", file=sys.stderr)
        bench = Bench(
            copies=None if library is None else Copies(library),
            library=library,
            cores=Cores.choose(),
            repetitions=options.repetitions,
            pool_bytes=options.pool_mib * MIB,
        )
        bench.distance()
        try:
            if OF_PAIRS & set(options.part):
                bench.start()
            total = run(options, bench)
        finally:
            bench.close()
    bench.distance()
    distance = machine(bench)
    print(f"### processors\n\n{report.markdown([distance])}")
    rows = [*total.rows, distance]
    if options.chart is not None and total.points:
        title = f"{known['processor']}, cores {state_of(distance.value or 0.0)}"
        report.chart(total.points, title, options.chart)
    if options.json is not None:
        result = {
            **known,
            **total.facts,
            "rows": [row.as_dict() for row in rows],
            "points": [
                {**vars(point), "gigabytes_per_s": point.gigabytes_per_s} for point in total.points
            ],
        }
        options.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    missed = [row.what for row in rows if row.met is False]
    print("all goals met" if not missed else "missed: " + "; ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
