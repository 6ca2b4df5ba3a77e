"""Generates synthetic runs with realistic noise and at most one fault, for the diagnosis."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
from megatron.adaptive.trace.read import read_run
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic

RANKS = 4
SCHEDULES = (("1f1b", 1), ("adaptive", 1), ("zb-h1", 1), ("interleaved", 2), ("adaptive", 2))
"""Schedules with their number of chunks per rank. One is drawn for each run."""

GROUPS: tuple[tuple[str, int], ...] = (
    ("rank x1.1", 40),
    ("rank x1.3", 40),
    ("rank x2", 40),
    ("link delay", 30),
    ("spikes", 25),
    ("slow data", 25),
)
"""Number of runs with each fault, in a set of 200 runs that have a fault."""

WEAK = "rank x1.1"
CAUSES = {"slow-rank": "slow rank", "slow-link": "slow link", "slow-data": "slow data"}


@dataclass(frozen=True)
class Outcome:
    """Diagnosis of a run, compared with the fault of the run.

    Attributes:
        group: Name of the fault, or ``quiet`` for a run without a fault.
        truth: Cause and ranks of the fault, or an empty string for a run without a fault.
        said: Headlines of the diagnosis.
        right: Whether the most expensive finding has the right cause and ranks. For a run without a
            fault, whether there are no findings.
        others: Number of findings that are not right.
        case: Settings of the run.
    """

    group: str
    truth: str
    said: tuple[str, ...]
    right: bool
    others: int
    case: dict[str, Any]


def draw_run(rng: random.Random, replicas: int) -> SyntheticRun:
    """Returns random settings of a run of ``replicas`` replicas without a fault, from ``rng``."""
    schedule, chunks = rng.choice(SCHEDULES)
    forward_s = rng.uniform(0.005, 0.02)
    head = rng.choice((0.0, 0.0, rng.uniform(0.3, 1.5)))
    return SyntheticRun(
        num_ranks=RANKS,
        replicas=replicas,
        num_chunks=chunks,
        num_microbatches=rng.choice((8, 12, 16)),
        iterations=rng.randint(16, 30),
        schedule=schedule,
        weight_pieces=rng.choice((0, 2)) if schedule == "adaptive" else 0,
        forward_s=forward_s,
        backward_s=forward_s * rng.uniform(0.8, 1.4),
        weight_s=forward_s * rng.uniform(0.6, 1.1),
        latency_s=10 ** rng.uniform(-4.3, -3),
        data_s=forward_s * rng.uniform(0.002, 0.03),
        action_sigma=rng.uniform(0.05, 0.12),
        microbatch_sigma=rng.choice((0.0, 0.0, 0.15, 0.3)),
        rank_sigma=0.015,
        iteration_sigma=0.02,
        stray_probability=rng.choice((0.0, 0.001, 0.003)),
        head=head,
        planned_head=head * rng.uniform(0.7, 1.3),
        hosts=rng.choice((1, 2, 4)),
        clock_offset_s=5.0,
        clock_drift_ppm=50.0,
        seed=rng.randrange(2**31),
    )


def draw_fault(group: str, run: SyntheticRun, rng: random.Random) -> Fault:
    """Returns a fault of the kind ``group`` for the run ``run``, drawn with ``rng``.

    The fault may begin in a later iteration.
    """
    replicas = run.replicas
    rank = rng.randrange(run.world_size)
    first = 1
    if rng.random() < 0.4:
        first = rng.randint(round(0.3 * run.iterations), round(0.7 * run.iterations))
    if group.startswith("rank x"):
        return Fault(kind="slow-rank", rank=rank, factor=float(group[6:]), first=first)
    if group == "link delay":
        position, replica = divmod(rank, replicas)
        to = rng.choice([p for p in (position - 1, position + 1) if 0 <= p < RANKS])
        delay_s = run.forward_s * rng.uniform(0.5, 2.0)
        return Fault(
            kind="slow-link", rank=rank, to=to * replicas + replica, seconds=delay_s, first=first
        )
    if group == "spikes":
        return Fault(
            kind="spikes",
            rank=rank,
            factor=rng.uniform(2.5, 6.0),
            probability=rng.uniform(0.02, 0.06),
            first=first,
        )
    rank = rng.randrange(replicas)
    delay_s = run.forward_s * rng.uniform(0.3, 1.0)
    return Fault(kind="slow-data", rank=rank, seconds=delay_s, first=first)


def judge(group: str, fault: Fault | None, said: Diagnosis, case: dict[str, Any]) -> Outcome:
    """Compares the diagnosis ``said`` with ``fault``, the fault of the run.

    If the last stage also computes a large output layer (the head), the stages really are uneven. A
    finding that says so is ignored. ``group`` and ``case`` are stored in the result.
    """
    headlines = tuple(finding.headline for finding in said.findings)
    uneven = case.get("head", 0.0) > 0
    counted = [f for f in said.findings if not (uneven and f.cause == "uneven stages")]
    if fault is None:
        return Outcome(group, "", headlines, not counted, len(counted), case)
    cause = CAUSES.get(fault.kind, fault.kind)
    ranks = (fault.rank, fault.to) if fault.kind == "slow-link" else (fault.rank,)
    hits = [f.cause == cause and f.ranks == ranks for f in counted]
    return Outcome(
        group, f"{cause} {ranks}", headlines, hits[:1] == [True], hits.count(False), case
    )


def outcomes(runs: int, seed: int, groups: Iterable[str] | None = None) -> Iterator[Outcome]:
    """Diagnoses synthetic runs with and without faults.

    Args:
        runs: Number of runs with a fault, and number of runs without a fault.
        seed: Seed of all random choices. Seeds below 1000 were used to choose the limits of the
            diagnosis.
        groups: Names of the faults, or ``None`` for all faults.

    Yields:
        Outcome of each run. Half of the runs have one replica, and half have two.
    """
    plan = [(group, max(2, math.ceil(share * runs / 200))) for group, share in GROUPS]
    plan.append(("quiet", runs))
    for group, count in plan:
        if groups is not None and group not in groups:
            continue
        for number in range(count):
            rng = random.Random(f"{seed}/{group}/{number}")
            run = draw_run(rng, 1 + number % 2)
            fault = None if group == "quiet" else draw_fault(group, run, rng)
            if fault is not None:
                run = SyntheticRun(**{**vars(run), "faults": (fault,)})
            with tempfile.TemporaryDirectory() as folder:
                write_synthetic(folder, run)
                said = diagnose(read_run(folder))
            yield judge(group, fault, said, {**asdict(run), "number": number})
