"""Tries interleaved pipelines beside what the search proves for 1F1B.

There is no proof here: the partition starts in proportion to the speed of the ranks, layers are
handed over while that helps, and every hand-over is timed in the true order of the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.layers import in_flight
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.search_space import StageClass
from megatron.adaptive.planner.shapes import ShapeChoice, Tables
from megatron.adaptive.planner.timing import run_steps, steps_of

__all__ = [
    "InterleavedPipeline",
    "Chunked",
    "candidates",
    "first_cuts",
    "improve_chunks",
    "interleave",
]


_MOST_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class InterleavedPipeline:
    """An interleaved pipeline without its partition.

    Attributes:
        classes: the classes of its shape.
        choice: what all stages share.
        ranks: class of each pipeline rank, by number.
        chunks: of each rank.
        guess_s: seconds if work were divided evenly.
    """

    classes: tuple[StageClass, ...]
    choice: ShapeChoice
    ranks: tuple[int, ...]
    chunks: int
    guess_s: float


def candidates(
    classes: tuple[StageClass, ...],
    choice: ShapeChoice,
    tables: Tables,
    model: Model,
    cluster: Cluster,
) -> Iterator[InterleavedPipeline]:
    """Yields interleaved pipelines on all nodes, equal ones side by side, in all type orders."""
    if model.splits:
        return
    speeds = []
    for one in classes:
        work = []
        for node in tables.types(one):
            table = tables.layers(node, one, choice)
            work.append(float((table.forward_s + table.backward_s + table.weight_s).sum()))
        speeds.append(1 / max(*work, 1e-30))
    for ranks in _orders(classes, cluster):
        pp = len(ranks)
        if pp < 2 or choice.microbatches % pp:
            continue
        share = 1 / sum(speeds[c] for c in ranks)
        for chunks in range(2, min(_MOST_CHUNKS, model.num_layers // pp) + 1):
            guess = (choice.microbatches + (pp - 1) / chunks) * share
            yield InterleavedPipeline(
                classes=classes, choice=choice, ranks=ranks, chunks=chunks, guess_s=guess
            )


def _orders(classes: Sequence[StageClass], cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yields the classes of the ranks of pipelines on all nodes."""
    runs = []
    for index, group in enumerate(cluster.groups):
        own = [
            c
            for c, one in enumerate(classes)
            if one.nodes[index] and sum(one.nodes) == one.nodes[index]
        ]
        if not own or group.count % classes[own[0]].nodes[index]:
            return
        one = classes[own[0]]
        runs.append([own[0]] * (group.count // one.nodes[index] * one.block))
    if len(runs) > 4:
        yield tuple(itertools.chain(*runs))
        return
    for order in itertools.permutations(runs):
        yield tuple(itertools.chain(*order))


def interleave(
    one: InterleavedPipeline, tables: Tables, most: int
) -> tuple[float, tuple[int, ...], int]:
    """Finds a partition for an interleaved pipeline.

    Args:
        one: the pipeline.
        tables: for the arrays.
        most: pipelines to time at most.

    Returns:
        Seconds of a step, infinite where nothing fits; where the stages begin; pipelines timed.
    """
    arrays: dict[str, Any] = tables.arrays(one.classes, one.choice)
    pp, m = len(one.ranks), one.choice.microbatches
    kinds, left = [], 0
    for rank in range(pp):
        left = (left or one.classes[one.ranks[rank]].block) - 1
        kinds.append(1 if left else 0)
    if pp == one.classes[one.ranks[0]].block:
        kinds[-1] = 1
    names = ("forward", "backward", "launch", "after", "base", "kept", "latency", "occupancy")
    pipeline = Chunked(
        **{name: arrays[name] for name in names},
        rows=steps_of("interleaved", pp, one.chunks, m).rows,
        classes=np.array(one.ranks, dtype=np.int64),
        kinds=np.array(kinds, dtype=np.int64),
        held=np.array(in_flight("interleaved", pp, one.chunks, m), dtype=np.float64),
        microbatches=m,
    )
    cuts = first_cuts(pipeline, one.chunks)
    seconds, timed = improve_chunks(pipeline, cuts, most)
    inside = 1 if all(kinds[:-1]) else 0
    return (
        seconds + float(arrays["tied"][inside, one.ranks[0], one.ranks[-1]]),
        tuple(cuts.tolist()),
        timed,
    )


class Chunked(NamedTuple):
    """A pipeline whose ranks hold several chunks; stage ``s`` lies on rank ``s % ranks``.

    Attributes:
        forward: ``[classes, n + 1, n + 1]``, see ``kernel.ShapeArrays``; likewise the next six.
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
    """Returns the first layer of each stage with work by the ranks' speed, ``[stages + 1]``."""
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
    """Hands layers over between any two stages while the step gets shorter.

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
    """Compiles the climb; the code is kept on disk."""
    from numba import njit  # half a second to import

    run: Any = njit(run_steps, cache=True)
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


run: Any = run_steps
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
