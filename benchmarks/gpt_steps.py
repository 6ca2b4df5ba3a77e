"""Compares step times of a small GPT under schedules of this project, megatron-core and torch.

Two processes train the model, and the competitors alternate on the same chunks. Each row divides a
competitor's step time by its rival's in the same round, and shows the median over all rounds.
Losses and gradients of all competitors must agree. This is a part of ``benchmarks/schedules.py``
and of ``benchmarks/transport.py``. In the latter, the competitors are transports, and there are
more ranks than CPUs, so waiting ranks must not slow down computing ranks. Run as a script, this
module acts as one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import gpt_ranks
from harness.gpt_competitors import (
    TWO_CHUNKS,
    CompetingRank,
    Function,
    Job,
    difference_row,
    rotated,
)
from harness.gpt_ranks import GPT, MICROBATCHES, rank_main
from harness.report import Row, measured

MOST_DIFFERENCE = {"loss": 1e-5, "gradient": 1e-5}
JOBS = {
    "1 chunk": Job(
        "--pipeline-schedule megatron",
        ("1f1b", "adaptive", "megatron", "torch 1f1b", "plug-in 1f1b", "plug-in adaptive"),
    ),
    "2 chunks": Job(
        f"--pipeline-schedule megatron {TWO_CHUNKS}",
        ("interleaved", "adaptive", "megatron", "torch interleaved"),
    ),
    "V": Job(
        f"--pipeline-schedule zb-v {TWO_CHUNKS}",
        ("zb-v", "adaptive", "torch zb-v", "torch zb-v, our W"),
    ),
}
TRANSPORTS = ("shm", "gloo", "tcp")
OVER_TRANSPORTS = "transports"
ALL_JOBS = {**JOBS, OVER_TRANSPORTS: Job("--pipeline-schedule megatron", TRANSPORTS, ranks=4)}


@dataclass(frozen=True)
class Duel:
    """Comparison of two competitors in one row of the table.

    Attributes:
        job: Name of the job that runs both competitors.
        name: Name of the competitor of this project.
        rival: Name of the competitor with which ``name`` is compared.
        goal: Maximum ratio of the step time of ``name`` to that of ``rival``, or ``None`` if there
            is no goal.
    """

    job: str
    name: str
    rival: str
    goal: float | None = None


DUELS = (
    Duel("1 chunk", "1f1b", "megatron", 1.02),
    Duel("1 chunk", "adaptive", "megatron", 1.02),
    Duel("2 chunks", "interleaved", "megatron", 1.02),
    Duel("2 chunks", "adaptive", "megatron", 1.02),
    Duel("1 chunk", "plug-in 1f1b", "megatron", 1.00),
    Duel("1 chunk", "plug-in adaptive", "megatron", 1.00),
    Duel("1 chunk", "plug-in adaptive", "adaptive", 1.01),
    Duel("1 chunk", "1f1b", "torch 1f1b"),
    Duel("2 chunks", "interleaved", "torch interleaved"),
    Duel("V", "zb-v", "torch zb-v"),
    Duel("V", "zb-v", "torch zb-v, our W"),
    Duel("V", "adaptive", "torch zb-v"),
    Duel("V", "adaptive", "torch zb-v, our W"),
)


def takes_part(job: str, name: str, index: int) -> bool:
    """Returns whether the competitor ``name`` of ``job`` runs in round ``index``.

    In rounds with an odd index, only competitors with a goal run, except in the job that compares
    transports.
    """
    if index % 2 == 0 or job == OVER_TRANSPORTS:
        return True
    return any(
        duel.job == job and name in (duel.name, duel.rival) and duel.goal is not None
        for duel in DUELS
    )


class Rank(CompetingRank):
    """Runs one rank of a job. The competitors are schedules of this project, ``megatron``, and:

    * ``torch NAME``: a schedule of ``torch.distributed.pipelining``. With ``, our W``, the layers
      of this project split the backward passes.
    * ``plug-in NAME``: a schedule of this project that runs through ``install()``.
    * The name of a transport, in the job that compares transports. The schedule is 1F1B.

    Args:
        _: Folder for files, which is ignored.
        job: Name of the job in ``ALL_JOBS``.
        width: Hidden size of the model.
    """

    def __init__(self, _: Path, job: str, width: str = "256") -> None:
        self._name = job
        super().__init__(ALL_JOBS[job], [*GPT, "--hidden-size", width])

    def order_of(self, index: int) -> list[str]:
        names = [n for n in self._functions if index < 0 or takes_part(self._name, n, index)]
        return rotated(names, index // 2)

    def function_of(self, name: str) -> Function:
        if name.startswith("torch "):
            from benchmarks.torch_schedules import GptTorchRunner

            schedule, _, by_stores = name.removeprefix("torch ").partition(", ")
            stores = self._stores if by_stores else None
            return GptTorchRunner(self._run, schedule, MICROBATCHES, stores or ())
        if name.startswith("plug-in "):
            return self.fed(self._plugged_in(name.removeprefix("plug-in ")))
        if self._name == OVER_TRANSPORTS:
            return self.fed(self.engine_of("1f1b", transport=name))
        return super().function_of(name)

    def _plugged_in(self, schedule: str) -> Callable[..., list[Any]]:
        from megatron.adaptive.plugin.engines import Engines
        from megatron.adaptive.plugin.placement_patch import Placed
        from megatron.adaptive.plugin.settings import Settings

        settings = Settings(schedule=schedule)
        engines = Engines(Placed(lambda: "loop"))
        self._wirings.append(engines)
        return lambda **step: engines.engine_of(step["model"], settings, None).run(step)


def measure(job: str, rounds: int, limit_s: float = 900.0, width: int = 256) -> dict[str, Any]:
    """Runs the ranks of the job ``job``, and returns the measurements of :meth:`Rank.measure`.

    Args:
        job: Name of the job in ``ALL_JOBS``.
        rounds: Number of rounds. Competitors with a goal run in every round.
        limit_s: Time in seconds after which all processes are killed.
        width: Hidden size of the model.

    Raises:
        RuntimeError: A rank failed, or the timeout passed.
    """
    ranks = ALL_JOBS[job].ranks
    return gpt_ranks.measure(__file__, ranks, rounds, job, str(width), limit_s=limit_s)


def make_rows(results: Mapping[str, dict[str, Any]]) -> list[Row]:
    """Returns the rows of the table. ``results`` are results of :func:`measure`, keyed by job."""
    rows = []
    for duel in DUELS:
        times = results[duel.job]["times"]
        rounds = [
            pair
            for pair in zip(times[duel.name], times[duel.rival], strict=True)
            if None not in pair
        ]
        step_ms, rival_ms = (
            1e3 * statistics.median(series) for series in zip(*rounds, strict=True)
        )
        title = f"small GPT, {duel.job}: step of {duel.name} over {duel.rival}"
        note = f"{step_ms:.1f} ms against {rival_ms:.1f}"
        rows.append(measured(title, [a / b for a, b in rounds], goal=duel.goal, note=note))
    wrong = disagreements(results)
    for quantity, limit in MOST_DIFFERENCE.items():
        values = [
            difference[quantity]
            for result in results.values()
            for difference in result["differences"].values()
        ]
        note = "; ".join(text for text in wrong if f"the {quantity} of" in text)
        rows.append(difference_row("small GPT", quantity, values, limit, note))
    return rows


def disagreements(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Describes each competitor whose losses or gradients differ from the first competitor's.

    ``results`` contains the results of :func:`measure`, keyed by job. The result has a line per
    difference.
    """
    return [
        f"{job}: the {quantity} of {name} differs from that of {JOBS[job].competitors[0]} by "
        f"{difference[quantity]:.1e}, allowed is {limit}"
        for job, result in results.items()
        for name, difference in result["differences"].items()
        for quantity, limit in MOST_DIFFERENCE.items()
        # The negation makes this condition true for NaN, too.
        if not difference[quantity] <= limit
    ]


if __name__ == "__main__":
    rank_main(Rank)
