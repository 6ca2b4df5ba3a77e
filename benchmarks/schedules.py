"""Pipeline schedules against those of megatron-core and torch, in one run.

    python benchmarks/schedules.py [--quick] [--json FILE] [--chart FILE]

Part (a), ``emulated``: actions sleep as long as was drawn for them, in real processes that exchange
real messages; every competitor gets the same draws. Part (b), ``gpt``: two processes train a real
small GPT. Part (c), ``costs``: what deciding itself costs. Exits with status 1 where a goal is
missed, or where two schedules of part (b) compute different losses or gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import gpt_steps, schedule_costs  # noqa: E402
from benchmarks.emulated import competitors, goals, report  # noqa: E402
from benchmarks.emulated.measure import Case, run  # noqa: E402
from benchmarks.emulated.scenarios import SCENARIOS, Times  # noqa: E402

QUICK_CASES = (("jitter 0.3", 3), ("lengths", 3), ("quiet", 3), ("slow link", 2), ("straggler", 2))
"""Scenarios of the short form with their repetitions."""


def plan(options: argparse.Namespace) -> dict[int, list[Case]]:
    """What to measure, by number of ranks."""
    wanted = options.scenarios or list(SCENARIOS)
    if options.quick:
        cases = [
            Case(
                scenario=scenario,
                num_microbatches=32,
                repetitions=options.repetitions or repetitions,
            )
            for scenario, repetitions in QUICK_CASES
            if scenario in wanted
        ]
        return {8: cases}
    return {
        ranks: [
            Case(
                scenario=scenario,
                num_microbatches=microbatches,
                repetitions=options.repetitions or 3,
            )
            for microbatches in options.microbatches
            for scenario in wanted
        ]
        for ranks in options.ranks
    }


def emulated(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run part (a); returns what goes to the JSON file, and whether all goals are met."""
    mean_s = options.chunk_ms / 1e3
    times = Times(forward_s=mean_s, backward_s=mean_s, weight_s=mean_s)
    known = competitors.QUICK if options.quick else tuple(competitors.COMPETITORS)
    names = list(options.competitors or known)
    records: list[dict[str, Any]] = []
    for num_ranks, cases in plan(options).items():
        records += run(
            num_ranks=num_ranks,
            cases=cases,
            competitors=names,
            times=times,
            seed=options.seed,
        )
    rows = report.make_rows(records, times=times, seed=options.seed)
    print(
        f"F, B and W of half a rank take {options.chunk_ms:g} ms each on average;"
        f" {os.cpu_count()} cores. Memory: most activations that a rank held, in microbatches.\n"
    )
    print(report.markdown(rows))
    found = goals.goals(records, rows)
    print("| goal | measured | at least | |\n|---|---|---|---|")
    print("\n".join(goal.line for goal in found) + "\n")
    if options.chart is not None:
        report.chart(rows, options.chart)
    result = {
        "cores": os.cpu_count(),
        "times": asdict(times),
        "seed": options.seed,
        "rows": [asdict(row) for row in rows],
        "goals": [{**asdict(goal), "met": goal.met} for goal in found],
        "records": records,
    }
    return result, all(goal.met for goal in found)


def gpt(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run part (b); returns what goes to the JSON file, and whether all goals are met."""
    rounds = options.rounds or (16 if options.quick else 60)
    results = {job: gpt_steps.measure(job, rounds) for job in gpt_steps.JOBS}
    rows = gpt_steps.make_rows(results)
    print(gpt_steps.markdown(rows, results))
    met = all(row["met"] is not False for row in rows)
    return {"rows": rows, "jobs": results}, met and not gpt_steps.disagreements(results)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, within ten minutes")
    parser.add_argument("--json", type=Path, help="also write everything measured here")
    parser.add_argument("--chart", type=Path, help="draw the speed-ups of part (a) here, as PNG")
    parser.add_argument("--part", choices=("emulated", "gpt", "costs", "all"), default="all")
    parser.add_argument("--rounds", type=int, help="part (b): turns to take")
    group = parser.add_argument_group("part (a)")
    group.add_argument("--seed", type=int, default=1, help="of all draws")
    group.add_argument("--chunk-ms", type=float, help="mean of a half-rank's F, B and W each")
    group.add_argument("--repetitions", type=int, help="steps of each competitor in each case")
    group.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="pipeline sizes")
    group.add_argument("--microbatches", type=int, nargs="+", default=[16, 32])
    group.add_argument("--scenarios", nargs="+", choices=tuple(SCENARIOS))
    group.add_argument("--competitors", nargs="+", choices=tuple(competitors.COMPETITORS))
    options = parser.parse_args(arguments)
    if options.chunk_ms is None:
        options.chunk_ms = 8.0 if options.quick else 10.0
    return options


def main() -> int:
    """Measure and print; returns 1 where a goal is missed."""
    options = parse()
    result: dict[str, Any] = {}
    met = True
    if options.part in ("costs", "all"):
        rows = result["costs"] = schedule_costs.measure()
        print(schedule_costs.markdown(rows))
        met = all(row["met"] for row in rows)
    if options.part in ("emulated", "all"):
        result["emulated"], fast = emulated(options)
        met = met and fast
    if options.part in ("gpt", "all"):
        result["gpt"], fast = gpt(options)
        met = met and fast
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
