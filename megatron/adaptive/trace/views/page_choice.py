"""What of a run a page holds: which iterations, which replicas, and what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.figures import RunFigures
from megatron.adaptive.trace.read import RunTrace, describe_numbers

__all__ = ["MAX_ITERATIONS", "Choice", "choose"]

MAX_ITERATIONS = 20
SLOWEST = 4
"""How many of the iterations are there because they took longest."""
MAX_REPLICAS = 4
"""Up to so many replicas all are drawn; of more, the first and the slowest."""


@dataclass(frozen=True)
class Choice:
    """What a page holds.

    Attributes:
        iterations: numbers, ascending.
        replicas: data-parallel ranks drawn one by one.
        mean_of: data-parallel ranks whose mean is drawn, empty for none.
        tp_rank: of every tensor-parallel group.
        notes: what is left out, a line each.
    """

    iterations: tuple[int, ...]
    replicas: tuple[int, ...]
    mean_of: tuple[int, ...]
    tp_rank: int
    notes: tuple[str, ...]


def choose(
    run: RunTrace, figures: RunFigures, iterations: Sequence[int], dp_rank: int | None
) -> Choice:
    """Choose what a page holds.

    Args:
        run: the run.
        figures: of it.
        iterations: those that may be shown.
        dp_rank: the only replica, ``None`` for any.

    Raises:
        TraceError: nothing was recorded in these iterations.
    """
    recorded = set(figures.iterations[figures.num_actions.any(axis=1)].tolist())
    asked = sorted(set(iterations) & recorded)
    if not asked:
        raise TraceError(
            f"iterations {describe_numbers(iterations)} in {run.origin} hold no F, B or W; "
            "there is nothing to draw"
        )
    notes = []
    shown = _iterations(figures, asked)
    if len(shown) < len(asked):
        notes.append(
            f"{len(shown)} of {len(asked)} iterations: first, last, the {SLOWEST} slowest and "
            "evenly spaced ones"
        )
    present = sorted({trace.header.dp_rank for trace in run.ranks.values()})
    tensor = sorted({trace.header.tp_rank for trace in run.ranks.values()})
    mean_of: tuple[int, ...] = ()
    if dp_rank is not None:
        run.replica(dp_rank, tensor[0])  # refuses one that is not there
        replicas: tuple[int, ...] = (dp_rank,)
    else:
        replicas = _replicas(figures, present)
        mean_of = tuple(present) if len(present) > 1 else ()
    if len(replicas) < len(present) and dp_rank is None:
        notes.append(
            f"{len(replicas)} of {len(present)} replicas one by one (the first and the slowest), "
            "the others in the mean"
        )
    if len(tensor) > 1:
        notes.append(
            f"of every tensor-parallel group rank {tensor[0]}, not {describe_numbers(tensor[1:])}"
        )
    return Choice(tuple(shown), replicas, mean_of, tensor[0], tuple(notes))


def _iterations(figures: RunFigures, asked: Sequence[int]) -> list[int]:
    if len(asked) <= MAX_ITERATIONS:
        return list(asked)
    step_ns = figures.step_ns.max(axis=1)[np.searchsorted(figures.iterations, asked)]
    places = {0, len(asked) - 1, *np.argsort(-step_ns, kind="stable")[:SLOWEST].tolist()}
    spaced = np.linspace(0, len(asked) - 1, MAX_ITERATIONS).round().astype(int).tolist()
    rest = [place for place in spaced if place not in places]
    free = MAX_ITERATIONS - len(places)
    picked = np.linspace(0, len(rest) - 1, min(free, len(rest))).round().astype(int)
    places |= {rest[place] for place in picked.tolist()}
    return [asked[place] for place in sorted(places)]


def _replicas(figures: RunFigures, present: Sequence[int]) -> tuple[int, ...]:
    if len(present) <= MAX_REPLICAS:
        return tuple(present)
    steps = [figures.step_ns[:, figures.dp_rank == d].max(axis=1).mean() for d in present]
    return tuple(sorted({present[0], present[int(np.argmax(steps))]}))
