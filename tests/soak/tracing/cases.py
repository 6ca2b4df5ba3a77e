"""Made-up runs for the diagnosis: drawn from a seed, noisy as real ones, with one fault or none."""

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
"""Schedules and chunks."""

GROUPS: tuple[tuple[str, int], ...] = (
    ("rank x1.1", 40),
    ("rank x1.3", 40),
    ("rank x2", 40),
    ("link delay", 30),
    ("spikes", 25),
    ("slow data", 25),
)
"""Faults and how many runs of 200 have them."""

WEAK = "rank x1.1"
CAUSES = {"slow-rank": "slow rank", "slow-link": "slow link", "slow-data": "slow data"}


@dataclass(frozen=True)
class Outcome:
    """Compares the diagnosis of a run with its fault.

    Attributes:
        group: name of the fault, ``quiet`` for none.
        truth: cause and ranks, empty for none.
        said: headlines.
        right: the dearest finding has the right cause and culprit; of a quiet run: there is none.
        others: findings besides the right one.
        case: what the run was.
    """

    group: str
    truth: str
    said: tuple[str, ...]
    right: bool
    others: int
    case: dict[str, Any]


def draw_run(rng: random.Random, replicas: int) -> SyntheticRun:
    """A run without fault: schedule, times, noise, clocks and the last stage's head drawn."""
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
    """A fault of a group, in all iterations of the run or from some iteration on."""
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
    """Compares a diagnosis with the truth.

    A last stage with a head is uneven indeed: there, that finding is neither right nor wrong.
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
    """Makes up runs and diagnoses them.

    Args:
        runs: with faults, and as many quiet ones.
        seed: of all draws; those below 1000 were used for choosing the limits.
        groups: only these.

    Yields:
        One outcome per run; half of the runs have one replica, half two.
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
