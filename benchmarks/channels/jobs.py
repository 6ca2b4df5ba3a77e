"""Rows of whole jobs: a 1F1B step, four ranks, a soak, kills."""

from __future__ import annotations

import os
import statistics
import tempfile
from typing import Any

from benchmarks import gpt_steps
from benchmarks.ranks import run_module
from benchmarks.report import Result, Row, measured, one_line, ratios
from tests.soak import message_stream as soak

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


def long_run(bench: Bench, messages: int) -> Result:
    """The soak."""
    what = f"soak, {messages:,} messages over shm: memory gained"
    options = {"slot_bytes": soak.SLOT_BYTES, "slots": soak.SLOTS}
    answers = bench.pairs["torch"].call(
        "tests.soak.message_stream",
        "run",
        connector="shm",
        messages=messages,
        options=options,
        limit_s=60.0 + messages / 5e3,
    )
    asked_bytes = 2 * soak.SLOTS * soak.SLOT_BYTES
    gains = [soak.growth(answer["looks"]) for answer in answers]
    rate = messages / max(answer["seconds"] for answer in answers)
    return Result(
        rows=[
            Row(
                what=what,
                value=max(gain[0] for gain in gains) / MIB,
                unit="MiB",
                goal=GROWTH_MIB,
                note=f"after the first fifth; {rate:,.0f} a second, all checked",
            ),
            Row(what="the same: descriptors gained", value=max(g[1] for g in gains), goal=0),
            Row(
                what="the same: memory of the channels, both ways, over what was asked for",
                value=max(answer["mapped_bytes"] for answer in answers) / asked_bytes,
                goal=ARENAS,
            ),
        ],
        facts={"soak": [answer["looks"] for answer in answers]},
    )


def kills(count: int, kind: str = "shm") -> Result:
    """Ranks that are killed."""
    what = f"{count} kills at random moments, {kind}"
    words = ("--kind", kind, "--count", count)
    with tempfile.TemporaryDirectory() as private:
        found = run_module(
            "tests.soak.killed_ranks", *words, limit_s=120.0 + 60.0 * count, TMPDIR=private
        )
    return Result(rows=kill_rows(found, what), facts={f"kills, {kind}": found})


def kill_rows(found: dict[str, Any], what: str) -> list[Row]:
    """Sum up what ``kills.py`` wrote."""
    trials = found["trials"]
    failed = [trial["failed"] for trial in trials if "failed" in trial]
    whole = [trial for trial in trials if "failed" not in trial]
    neighbours = [
        outcome
        for trial in whole
        for outcome in trial["outcomes"].values()
        if outcome["seconds"] is not None
    ]
    strange = [one for one in neighbours if one["raised"] != "PeerLostError"]
    left = found["litter"] + [name for trial in whole for name in trial["left"]]
    seconds = [one["seconds"] for one in neighbours]
    notes = [*failed[:1], *(f"{one['raised']}: {one['text']}" for one in strange[:1])]
    return [
        Row(
            what=f"{what}: neighbours without PeerLostError",
            value=len(failed) + len(strange),
            goal=0,
            note=one_line("; ".join(notes)) if notes else f"of {len(neighbours)}",
        ),
        Row(
            what="the same: slowest to raise",
            value=max(seconds, default=None),
            unit="s",
            goal=SURVIVORS_S,
            note=f"median {statistics.median(seconds):.3g} s" if seconds else "",
        ),
        Row(
            what="the same: segments, files, sockets and processes left",
            value=len(left),
            goal=0,
            note=one_line(", ".join(left)),
        ),
    ]
