"""Pipeline schedules against those of megatron-core and torch, in one run.

    python benchmarks/schedules.py [--quick] [--json FILE] [--chart FILE]
    python benchmarks/schedules.py --part traces DIR

Part (a), ``emulated``: actions sleep as long as was drawn for them, in real processes that exchange
real messages; every competitor gets the same draws. Part (b), ``gpt``: two processes train a real
small GPT. Part (c), ``costs``: what deciding itself costs. Part (d), ``traces``, of a folder with
recorded jobs (tables or traces): their microbatches' times under other schedules, and dealt over
replicas, against 1F1B. Part (e), ``experts``: actions beside others that trade tokens, and
decisions of groups. Part (g), ``lengths``: the trainer with documents of different lengths and with
a slow replica, microbatches dealt or in turns. Part (f), ``study``, only where asked for: simulated
orders over many pipelines. Exits with status 1 where a goal is missed, or where two schedules of
part (b) compute different losses or gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import gpt_steps, schedule_costs  # noqa: E402
from benchmarks.emulated import competitors, goals, report  # noqa: E402
from benchmarks.emulated.scenarios import SCENARIOS, Times  # noqa: E402
from benchmarks.ranks import fork_ranks  # noqa: E402
from benchmarks.report import Result, Row, measure, measured, missing, parser_of, ratios  # noqa: E402
from megatron.adaptive.schedule.catalog import DEFAULT_PIECES  # noqa: E402
from megatron.adaptive.trace.imports.published import ENDINGS  # noqa: E402
from megatron.adaptive.trace.locate import load_run  # noqa: E402
from megatron.adaptive.trace.whatif.operations import pipelines_of, read_operations  # noqa: E402
from megatron.adaptive.trace.whatif.replay import recorded_times  # noqa: E402
from studies import experts, schedule_study  # noqa: E402
from studies.dealing import dealing  # noqa: E402

QUICK_CASES = {"jitter 0.3": 3, "lengths": 3, "quiet": 3, "slow link": 1, "straggler": 2}
"""Scenarios of the short form with their repetitions."""
LIMIT_S = 3600.0


def cases(options: argparse.Namespace) -> Iterator[tuple[int, list[tuple[str, int, int]]]]:
    """Ranks, and what to measure with them: scenario, microbatches and repetitions."""
    given, wanted = options.repetitions, options.scenarios or SCENARIOS
    if options.quick:
        yield 8, [(name, 32, given or n) for name, n in QUICK_CASES.items() if name in wanted]
        return
    for ranks in options.ranks:
        yield ranks, [(name, m, given or 3) for m in options.microbatches for name in wanted]


def emulated(options: argparse.Namespace) -> Result:
    """Part (a)."""
    mean_s = options.chunk_ms / 1e3
    times = Times(forward_s=mean_s, backward_s=mean_s, weight_s=mean_s)
    known = competitors.QUICK if options.quick else tuple(competitors.COMPETITORS)
    plan = {
        "competitors": list(options.competitors or known),
        "times": asdict(times),
        "seed": options.seed,
    }
    records: list[dict[str, Any]] = []
    for ranks, of_ranks in cases(options):
        asked = {**plan, "num_ranks": ranks, "cases": of_ranks}
        records += fork_ranks("benchmarks.emulated.worker", ranks, LIMIT_S, asked)
    speeds = report.make_rows(records, times=times, seed=options.seed)
    print(
        f"F, B and W of half a rank take {options.chunk_ms:g} ms each on average;"
        f" {os.cpu_count()} cores. Memory: most activations that a rank held, in microbatches.\n"
    )
    print(report.markdown(speeds))
    if options.chart is not None:
        report.chart(speeds, options.chart)
    facts = {**plan, "speeds": [asdict(speed) for speed in speeds], "records": records}
    return Result(rows=goals.goals(records, speeds), facts={"emulated": facts})


def gpt(options: argparse.Namespace) -> Result:
    """Part (b)."""
    rounds = options.rounds or (16 if options.quick else 60)
    results = {job: gpt_steps.measure(job, rounds) for job in gpt_steps.JOBS}
    return Result(rows=gpt_steps.make_rows(results), facts={"gpt": results})


def costs(_: argparse.Namespace) -> Result:
    """Part (c)."""
    return Result(rows=schedule_costs.measure())


def trading(options: argparse.Namespace) -> Result:
    """Part (e)."""
    # Parts between exchanges are short: sleeps must not be late by much of them.
    chunk_ms = max(40.0, options.chunk_ms)
    return Result(rows=experts.measure(quick=options.quick, chunk_ms=chunk_ms))


def traces(options: argparse.Namespace) -> Result:
    """Part (d)."""
    if options.folder is None:
        return Result(rows=[missing("recorded jobs", "no folder given")])
    return Result(rows=[row for path in jobs_in(options.folder) for row in replayed(path)])


def jobs_in(folder: Path) -> list[Path]:
    """Tables of operations in a folder, and folders of traces there; itself where there is none."""
    tables = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS)
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    return [*tables, *runs] or [folder]


def replayed(path: Path) -> list[Row]:
    """Speed-ups over 1F1B of a job's steps, each with the times of its own microbatches."""
    run_read = load_run(path)
    where = pipelines_of(run_read)
    times = recorded_times([read_operations(run_read, where, run_read.iterations)])
    if times is None:
        return [missing(path.stem, "its ranks hold several stages, or no step is complete")]
    steps = list(times.steps)
    base = [times.step_s(step, "1f1b", dealt=False) for step in steps]
    speeds = {}
    for name, schedule, dealt in (
        ("adaptive V", "adaptive", False),
        ("microbatches dealt over replicas, 1F1B", "1f1b", True),
        ("both", "adaptive", True),
    ):
        ours = [times.step_s(step, schedule, dealt=dealt, pieces=DEFAULT_PIECES) for step in steps]
        speeds[name] = ratios(base, ours)
    best = max(speeds, key=lambda name: statistics.median(speeds[name]))
    goal = next((goal for ending, goal in TRACE_GOALS.items() if path.stem.endswith(ending)), None)
    return [
        *(measured(f"{path.stem}: {name}", values) for name, values in speeds.items()),
        measured(f"{path.stem}: best of ours", speeds[best], goal=goal, least=True, note=best),
    ]


TRACE_GOALS = {"AR": 1.85, "ST": 1.57, "SE": 1.60}
"""Least speed-ups over 1F1B as recorded, by the end of a published trace's name."""


def study(_: argparse.Namespace) -> Result:
    """Part (f)."""
    return Result(rows=schedule_study.measure())


PARTS = {
    "costs": costs,
    "emulated": emulated,
    "experts": trading,
    "gpt": gpt,
    "lengths": lambda options: dealing(quick=options.quick),
    "traces": traces,
}
"""Parts that run unless one is named."""
ALL_PARTS = {**PARTS, "study": study}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, (), "fewer cases, within ten minutes")
    parser.add_argument("--chart", type=Path, help="draw the speed-ups of part (a) here, as PNG")
    known = (*ALL_PARTS, "all")
    parser.add_argument("--part", nargs="+", action="extend", help=f"of {', '.join(known)}")
    parser.add_argument("folder", nargs="?", type=Path, help="part (d): recorded jobs")
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
    for word in [word for word in options.part or () if word not in known]:
        if options.folder is not None or not Path(word).is_dir():
            parser.error(f"--part {word}: neither of {', '.join(known)} nor a folder")
        options.folder = Path(word)
        options.part.remove(word)
    if "all" in (options.part or ("all",)):
        options.part = [*(options.part or ()), *PARTS]
    if options.chunk_ms is None:
        options.chunk_ms = 8.0 if options.quick else 10.0
    return options


def main() -> int:
    """Measure and print; returns 1 where a goal is missed."""
    options = parse()
    return measure({name: partial(part, options) for name, part in ALL_PARTS.items()}, options)


if __name__ == "__main__":
    sys.exit(main())
