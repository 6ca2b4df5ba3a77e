"""Compares pipeline schedules of this project with schedules of megatron-core and torch.

    python benchmarks/schedules.py [--quick] [--part PART ...] [--json FILE] [--chart FILE]

Parts: ``emulated`` runs eight processes that exchange real messages and sleep for a random time in
each action; the times are the same for all schedules. ``gpt`` runs two processes that train a small
GPT. ``costs`` measures the cost of decisions. Exits with status 1 if a goal is missed, or if two
schedules of part ``gpt`` compute different losses or gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpt_steps, schedule_costs  # noqa: E402
from benchmarks.emulated import competitors, table  # noqa: E402
from benchmarks.emulated.scenarios import SCENARIOS, Times  # noqa: E402
from harness.processes import fork_ranks  # noqa: E402
from harness.report import Result, measure, parser_of  # noqa: E402

REPETITIONS = {"jitter 0.3": 3, "lengths": 3, "quiet": 3, "slow link": 1, "straggler": 2}
QUICK_REPETITIONS = {"jitter 0.3": 2, "lengths": 1, "quiet": 1}
"""Number of steps of each competitor, keyed by scenario. Each step has new random durations."""
LIMIT_S = 3600.0


def emulated(options: argparse.Namespace) -> Result:
    """Measures processes that sleep instead of computing, for the part ``emulated``."""
    mean_s = options.chunk_ms / 1e3
    times = Times(forward_s=mean_s, backward_s=mean_s, weight_s=mean_s)
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    names = options.competitors or (competitors.QUICK if options.quick else competitors.USUAL)
    cases = [
        (scenario, options.microbatches, options.repetitions or repetitions.get(scenario, 3))
        for scenario in options.scenarios or repetitions
    ]
    plan = {"competitors": list(names), "times": asdict(times), "seed": options.seed}
    worker_plan = {**plan, "num_ranks": options.ranks, "cases": cases}
    records = fork_ranks("benchmarks.emulated.worker", options.ranks, LIMIT_S, worker_plan)
    shape = {"ranks": options.ranks, "microbatches": options.microbatches}
    steps = table.make_table(records, times=times, seed=options.seed, **shape)
    title = f"{options.ranks} ranks, {options.microbatches} microbatches"
    print(f"### {title}: speed-up over {competitors.BASELINE}\n\n{table.markdown(steps)}")
    print(
        f"F, B and W for half of a rank's layers: {options.chunk_ms:g} ms each; "
        f"{os.cpu_count()} processors\n"
    )
    if options.chart is not None:
        table.chart(steps, f"{title}, emulated compute (outlined: rules)", options.chart)
    return Result(rows=table.goals(steps, **shape), facts={"emulated": {**plan, "steps": records}})


def gpt(options: argparse.Namespace) -> Result:
    """Measures steps of a small GPT, for the part ``gpt``."""
    rounds = options.rounds or (6 if options.quick else 60)
    results = {job: gpt_steps.measure(job, rounds) for job in gpt_steps.JOBS}
    return Result(rows=gpt_steps.make_rows(results), facts={"gpt": results})


def costs(_: argparse.Namespace) -> Result:
    """Measures the cost of scheduling decisions, for the part ``costs``."""
    return Result(rows=schedule_costs.measure())


PARTS = {"costs": costs, "emulated": emulated, "gpt": gpt}


def main() -> int:
    """Measures the parts and prints the results. Returns 1 if a goal is missed, otherwise 0."""
    parser = parser_of(
        __doc__, tuple(PARTS), ("run fewer cases and competitors, within three minutes")
    )
    parser.add_argument("--chart", type=Path, help="PNG file for a chart of the speed-ups")
    parser.add_argument("--rounds", type=int, help="number of rounds of part gpt")
    group = parser.add_argument_group("part emulated")
    group.add_argument("--seed", type=int, default=1, help="seed of the random durations (1)")
    group.add_argument(
        "--chunk-ms",
        type=float,
        default=8.0,
        help="mean duration in ms of F, B and W for half of a rank's layers (8)",
    )
    group.add_argument("--repetitions", type=int, help="number of steps per competitor and case")
    group.add_argument("--ranks", type=int, default=8, help="number of ranks (8)")
    group.add_argument(
        "--microbatches", type=int, default=32, help="number of microbatches of a step (32)"
    )
    group.add_argument("--scenarios", nargs="+", choices=tuple(SCENARIOS))
    group.add_argument("--competitors", nargs="+", choices=tuple(competitors.COMPETITORS))
    options = parser.parse_args()
    return measure({name: partial(part, options) for name, part in PARTS.items()}, options)


if __name__ == "__main__":
    sys.exit(main())
