"""Rows of whole jobs: a step of 1F1B, and four ranks on fewer processors."""

from __future__ import annotations

import os
import statistics

from benchmarks import gpt_steps
from benchmarks.report import Result, measured, ratios

from .transfers import MIB, Bench, channel_options

ADDED_MS = 0.1
FOUR_RANKS = 0.97
SURVIVORS_S = 5.0
GROWTH_MIB = 2.0
ARENAS = 1.05
MICROBATCHES = 32
PRODUCTS = 6
STEPS = 5


def one_f_one_b(bench: Bench) -> Result:
    """What messages add to a microbatch."""
    names = ("shm", "gloo transport", "tcp")
    nbytes = MIB
    added: dict[str, list[float]] = {name: [] for name in names}
    ideal_ms = []
    shared = {"nbytes": nbytes, "products": PRODUCTS, "microbatches": MICROBATCHES}
    fixed = {**channel_options(nbytes), "fixed": True}
    for repetition in range(-1, bench.repetitions):
        # In turns: what else this machine does then comes to all of them.
        steps: dict[str | None, list[float]] = {name: [] for name in (None, *names)}
        for _ in range(STEPS if repetition >= 0 else 1):
            for name, taken in steps.items():
                options = {} if name is None else fixed
                answer = bench.pairs["torch"].call(
                    "pipeline_steps", "step", connector=name, options=options, **shared
                )
                taken.append(max(answer))
        if repetition < 0:
            continue  # first touches and connections
        ideal_s = statistics.median(steps[None]) * (MICROBATCHES + 1) / MICROBATCHES
        ideal_ms.append(1e3 * ideal_s / (MICROBATCHES + 1))
        for name in names:
            added[name].append(1e3 * (statistics.median(steps[name]) - ideal_s) / MICROBATCHES)
    note = f"{statistics.median(ideal_ms):.3g} ms of compute per microbatch"
    return Result(
        rows=[
            measured(
                f"{name}: added to a microbatch of 1F1B, 1 MiB each way",
                added[name],
                unit="ms",
                goal=ADDED_MS if name == "shm" else None,
                note=note if name == "shm" else "",
            )
            for name in names
        ]
    )


def four_ranks(rounds: int) -> Result:
    """More ranks than processors."""
    job = gpt_steps.OVER_TRANSPORTS
    count, cores = gpt_steps.ALL_JOBS[job].ranks, len(os.sched_getaffinity(0))
    what = f"{count} ranks of a small GPT: step time, shm over gloo"
    times = gpt_steps.measure(job, rounds, limit_s=600.0)["times"]
    gloo_ms = 1e3 * statistics.median(times["gloo"])
    return Result(
        rows=[
            measured(
                what,
                ratios(times["shm"], times["gloo"]),
                goal=FOUR_RANKS if cores < count else None,
                note=f"{cores} processors; gloo {gloo_ms:.4g} ms",
            ),
            measured("the same, tcp over gloo", ratios(times["tcp"], times["gloo"])),
        ]
    )
