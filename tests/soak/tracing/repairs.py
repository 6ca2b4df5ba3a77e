"""Compares the step times that the what-if analysis predicts for repairs with real step times.

Processes that sleep instead of computing (``slept_rank``) run with a fault, the what-if analysis
reads their traces, and they run again with each repair. A predicted step is the recorded step minus
the gain. The transport delays messages. The engine determines the order of actions and the
distribution of microbatches. With a repair that uses two chunks per rank, other microbatch lengths
are drawn, which increases the error.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.whatif.answers import what_if
from megatron.adaptive.trace.whatif.result import Repair
from tests.soak.tracing.slept_rank import LAYERS
from tests.soak.tracing.slept_runs import execute, real_run
from tests.support.synthetic_trace import Fault, SyntheticRun

HALF_S, ITERATIONS = 0.008, 12
LIMIT_S = 120.0
_ORDER, _DEAL, _RANK = "adaptive order", "microbatches dealt over replicas", "as fast as others"
_BOTH, _LINK, _STAGES = "both: ", "links without jitter", "stages of equal work"


@dataclass(frozen=True)
class Done:
    """Repair of a fault, with the predicted and the actual step time.

    Attributes:
        job: Name of the fault.
        repair: Name of the repair in the what-if analysis.
        before_s: Step time before the repair, in seconds.
        predicted_s: Step time predicted by the what-if analysis, in seconds.
        real_s: Step time after the repair, in seconds.
    """

    job: str
    repair: str
    before_s: float
    predicted_s: float
    real_s: float

    @property
    def error(self) -> float:
        """Returns the relative error of the predicted step time."""
        return abs(self.predicted_s / self.real_s - 1)


Mend = Callable[[SyntheticRun, Repair], SyntheticRun]


def _without(kind: str) -> Mend:
    return lambda run, _: replace(run, faults=tuple(f for f in run.faults if f.kind != kind))


def _rule(run: SyntheticRun, _: Repair) -> SyntheticRun:
    return replace(run, schedule="adaptive", num_chunks=2, weight_pieces=1)


def _dealt(run: SyntheticRun, _: Repair) -> SyntheticRun:
    return replace(run, is_dealt=True)


def _moved(run: SyntheticRun, repair: Repair) -> SyntheticRun:
    """Returns ``run`` with the layers per stage that ``repair`` suggests."""
    match = re.search(r"--partition ([\d-]+)", repair.flag)
    assert match is not None, repair.flag
    work = np.array([float(layers) for layers in match[1].split("-")])
    work[-1] += run.head
    return replace(run, head=0.0, stage_factors=tuple((work / LAYERS).tolist()))


_MENDS: dict[str, Mend] = {
    _RANK: _without("slow-rank"),
    _LINK: _without("slow-link"),
    _ORDER: _rule,
    _DEAL: _dealt,
    _BOTH: lambda run, repair: _dealt(_rule(run, repair), repair),
    _STAGES: _moved,
}


def _jobs() -> dict[str, tuple[SyntheticRun, tuple[str, ...]]]:
    """Returns the jobs with a fault by name, each with its run and the repairs to try."""

    def make(**options: Any) -> SyntheticRun:
        return real_run(HALF_S, iterations=ITERATIONS, **options)

    def rank(number: int, factor: float) -> Fault:
        return Fault(kind="slow-rank", rank=number, factor=factor)

    def link(rank: int, to: int) -> Fault:
        return Fault(kind="slow-link", rank=rank, to=to, seconds=2.5 * HALF_S)

    return {
        "1f1b, a slow rank": (make(faults=(rank(1, 1.5),)), (_RANK, _ORDER)),
        "adaptive, uneven stages, a slow link": (
            make(schedule="adaptive", head=2.0, faults=(link(0, 1),)),
            (_STAGES, _LINK),
        ),
        "1f1b, two replicas, unequal lengths, a slow rank": (
            make(replicas=2, microbatch_sigma=0.35, faults=(rank(2, 1.4),)),
            (_RANK, _DEAL, _ORDER, _BOTH),
        ),
        "adaptive, two replicas, a slow rank": (
            make(schedule="adaptive", replicas=2, faults=(rank(4, 1.8),)),
            (_RANK, _DEAL),
        ),
        "1f1b, uneven stages, a slow link": (
            make(head=2.0, faults=(link(2, 1),)),
            (_STAGES, _LINK),
        ),
    }


def measure() -> Iterator[Done]:
    """Runs all jobs with each of their repairs, and yields predicted and actual step times.

    Raises:
        RuntimeError: A rank failed, the timeout passed, or the what-if analysis does not suggest
            one of the repairs.
    """
    for job, (broken, repairs) in _jobs().items():
        before_s, answers = _run(broken)
        for name in repairs:
            named = [r for r in answers.repairs if name in r.description]
            if not named:
                raise RuntimeError(f"{job}: no repair {name!r} among {answers.repairs}")
            real_s, _ = _run(_MENDS[name](broken, named[0]))
            yield Done(job, name, before_s, before_s * (1 - named[0].gain), real_s)


def _run(run: SyntheticRun) -> tuple[float, Any]:
    """Runs ``run``, and returns its mean step time in seconds and the what-if analysis.

    The first step is ignored.
    """
    with tempfile.TemporaryDirectory() as folder:
        execute(Path(folder), run, LIMIT_S)
        trace = read_run(folder)
        answers = what_if(trace, [i for i in trace.iterations if i > 1])
    return float(answers.recorded_s.mean()), answers


def ordered_right(done: list[Done]) -> tuple[int, int]:
    """Counts the pairs of repairs of the same job that the prediction orders correctly.

    Returns this number, and the number of all pairs. ``done`` contains the repairs of all jobs.
    """
    pairs = [
        (first, other) for first, other in itertools.combinations(done, 2) if first.job == other.job
    ]
    right = [(a.predicted_s < b.predicted_s) == (a.real_s < b.real_s) for a, b in pairs]
    return sum(right), len(right)
