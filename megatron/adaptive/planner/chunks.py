"""Interleaved pipelines: chunks on each rank, found by handing layers over while that helps.

There is no proof here: the partition starts in proportion to the speed of the ranks, and every
hand-over is timed in the true order of the schedule.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.planner import timing

__all__ = ["Chunked", "first_cuts", "improve_chunks"]


class Chunked(NamedTuple):
    """A pipeline whose ranks hold several chunks; stage ``s`` lies on rank ``s % ranks``.

    Attributes:
        forward: ``[classes, n + 1, n + 1]``, see ``kernel.Shape``; likewise the next six.
        backward: seconds of a backward.
        launch: parts of both that need no input.
        after: reduction and optimizer.
        base: bytes without microbatches.
        kept: bytes of one.
        latency: of messages.
        occupancy: of messages.
        rows: the schedule's actions, see ``timing.Steps``.
        classes: ``[ranks]``.
        kinds: ``[ranks]``, 1 where a rank and the next, or the last and the first, share a node.
        held: ``[ranks]``, microbatches in flight.
        microbatches: of a step.
    """

    forward: Any
    backward: Any
    launch: Any
    after: Any
    base: Any
    kept: Any
    latency: Any
    occupancy: Any
    rows: Any
    classes: Any
    kinds: Any
    held: Any
    microbatches: int


def first_cuts(pipeline: Chunked, chunks: int) -> Any:
    """Where the stages begin if every rank gets work by its speed, ``[stages + 1]``."""
    n, ranks = pipeline.forward.shape[1] - 1, len(pipeline.classes)
    work = pipeline.forward[:, 0, :] + pipeline.backward[:, 0, :]
    speed = 1 / np.maximum(work[pipeline.classes, n], 1e-30)
    share = np.cumsum(np.tile(speed / speed.sum() / chunks, chunks))
    done = work[0] / max(float(work[0, n]), 1e-30)
    cuts = np.concatenate([[0], np.searchsorted(done, share - 1e-9)]).astype(np.int64)
    cuts[-1] = n
    stages = ranks * chunks
    for stage in range(1, stages + 1):
        cuts[stage] = max(cuts[stage], cuts[stage - 1] + 1)
    for stage in range(stages, 0, -1):
        cuts[stage] = min(cuts[stage], n - (stages - stage))
    return cuts


def improve_chunks(pipeline: Chunked, cuts: Any, most: int) -> tuple[float, int]:
    """Hand layers over between any two stages while the step gets shorter.

    Args:
        pipeline: the arrays.
        cuts: ``[stages + 1]``, changed to those of the best.
        most: pipelines to time at most.

    Returns:
        Seconds of the best, infinite where none fits; pipelines timed.
    """
    climb = _compiled()
    stages = len(cuts) - 1
    room = (
        np.zeros((3, stages)),
        np.zeros((3, stages)),
        np.zeros((2, stages)),
        np.zeros((2, stages)),
        np.zeros((2, stages, pipeline.microbatches)),
        np.zeros((2, stages)),
    )
    seconds, timed = climb(pipeline, cuts, most, room)
    return float(seconds), int(timed)


@lru_cache
def _compiled() -> Any:
    """The climb as machine code; kept on disk."""
    from numba import njit  # half a second to import

    run: Any = njit(timing._run, cache=True)
    globals()["run"] = run
    globals()["fits"] = njit(_fits, cache=True)
    globals()["seconds_of"] = njit(_seconds, cache=True)
    climb: Any = njit(_climb, cache=True)
    return climb


def _fits(pipeline: Any, cuts: Any) -> bool:
    ranks = pipeline.classes.shape[0]
    stages = cuts.shape[0] - 1
    for rank in range(ranks):
        c = pipeline.classes[rank]
        for table in range(pipeline.base.shape[1]):
            fixed = pipeline.base[c, table, 0, 0]
            need = fixed
            for stage in range(rank, stages, ranks):
                low, high = cuts[stage], cuts[stage + 1]
                need += pipeline.base[c, table, low, high] - fixed
                need += pipeline.held[rank] * pipeline.kept[c, table, low, high]
            if need > 0.0:
                return False
    return True


run: Any = timing._run
fits: Any = _fits


def _seconds(pipeline: Any, cuts: Any, room: Any) -> float:
    durations, launch, latency, occupancy, arrival, link = room
    ranks = pipeline.classes.shape[0]
    stages = cuts.shape[0] - 1
    after = np.zeros(ranks)
    for stage in range(stages):
        rank = stage % ranks
        c, low, high = pipeline.classes[rank], cuts[stage], cuts[stage + 1]
        durations[0, stage] = pipeline.forward[c, low, high]
        durations[1, stage] = pipeline.backward[c, low, high]
        launch[0, stage] = pipeline.launch[0, c, low, high]
        launch[1, stage] = pipeline.launch[1, c, low, high]
        after[rank] += pipeline.after[c, low, high]
        if stage < stages - 1:
            d, kind = pipeline.classes[(rank + 1) % ranks], pipeline.kinds[rank]
            latency[0, stage] = pipeline.latency[0, kind, c, d, high]
            occupancy[0, stage] = pipeline.occupancy[0, kind, c, d, high]
            latency[1, stage + 1] = pipeline.latency[1, kind, d, c, high]
            occupancy[1, stage + 1] = pipeline.occupancy[1, kind, d, c, high]
    arrival[:] = 0.0
    link[:] = 0.0
    end, busy = np.zeros(ranks), np.zeros(ranks)
    run(pipeline.rows, durations, launch, latency, occupancy, arrival, link, end, busy)
    return float((end + after).max())


seconds_of: Any = _seconds


def _climb(pipeline: Any, cuts: Any, most: int, room: Any) -> tuple[float, int]:
    stages = cuts.shape[0] - 1
    best = seconds_of(pipeline, cuts, room) if fits(pipeline, cuts) else np.inf
    trial = cuts.copy()
    timed, since, at = 1, 0, 0
    while since < stages * stages and timed < most:
        source, target = at // stages, at % stages
        at = (at + 1) % (stages * stages)
        since += 1
        if source == target:
            continue
        step = -1 if source < target else 1
        for cut in range(min(source, target) + 1, max(source, target) + 1):
            trial[cut] += step
        if (trial[1:] > trial[:-1]).all() and fits(pipeline, trial):
            value = seconds_of(pipeline, trial, room)
            timed += 1
            if value < best:
                best, since = value, 0
                cuts[:] = trial
                continue
        trial[:] = cuts
    return best, timed
