"""Tries interleaved pipelines beside what the search proves for 1F1B.

There is no proof here: the partition starts in proportion to the speed of the ranks, layers are
handed over while that helps, and every hand-over is timed in the true order of the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.layers import in_flight
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.shapes import ShapeChoice, StageClass, Tables
from megatron.adaptive.planner.timing import run_steps, steps_of

__all__ = ["InterleavedPipeline", "candidates", "interleave"]


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
    inputs: PlanInputs,
) -> Iterator[InterleavedPipeline]:
    """Yields interleaved pipelines on all nodes, equal ones side by side, in all type orders."""
    if inputs.model.splits:
        return
    speeds = []
    for one in classes:
        work = []
        for node in tables.types(one):
            table = tables.layers(node, one, choice)
            work.append(float((table.forward_s + table.backward_s + table.weight_s).sum()))
        speeds.append(1 / max(*work, 1e-30))
    for ranks in _orders(classes, inputs.cluster):
        pp = len(ranks)
        if pp < 2 or choice.microbatches % pp:
            continue
        share = 1 / sum(speeds[c] for c in ranks)
        for chunks in range(2, min(_MOST_CHUNKS, inputs.model.num_layers // pp) + 1):
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
    """Finds a partition: hands layers over between any two stages while the step gets shorter.

    Args:
        one: the pipeline.
        tables: for the arrays.
        most: pipelines to time at most.

    Returns:
        Seconds of a step, infinite where nothing fits; where the stages begin; pipelines timed.
    """
    pipeline = _Pipeline(one, tables)
    cuts = pipeline.first_cuts()
    stages = len(cuts) - 1
    best = pipeline.seconds(cuts)
    timed, since = 1, 0
    pairs = itertools.cycle(itertools.product(range(stages), repeat=2))
    while since < stages * stages and timed < most:
        source, target = next(pairs)
        since += 1
        if source == target:
            continue
        trial = cuts.copy()
        between = slice(min(source, target) + 1, max(source, target) + 1)
        trial[between] += -1 if source < target else 1
        if (trial[1:] > trial[:-1]).all() and pipeline.fits(trial):
            value = pipeline.seconds(trial)
            timed += 1
            if value < best:
                cuts, best, since = trial, value, 0
    return best + pipeline.tied_s, tuple(cuts.tolist()), timed


class _Pipeline:
    """Times partitions of a pipeline; stage ``s`` lies on rank ``s % ranks``."""

    def __init__(self, one: InterleavedPipeline, tables: Tables) -> None:
        self.arrays: dict[str, Any] = tables.arrays(one.classes, one.choice)
        self.chunks, self.ranks = one.chunks, np.array(one.ranks)
        pp, m = len(one.ranks), one.choice.microbatches
        # Whether a rank and the next, or the last and the first, share a node.
        kinds, left = [], 0
        for rank in range(pp):
            left = (left or one.classes[one.ranks[rank]].block) - 1
            kinds.append(1 if left else 0)
        if pp == one.classes[one.ranks[0]].block:
            kinds[-1] = 1
        self.kinds, self.microbatches = np.array(kinds), m
        self.held = np.array(in_flight("interleaved", pp, one.chunks, m))
        self.rows = steps_of("interleaved", pp, one.chunks, m).rows
        inside = 1 if all(kinds[:-1]) else 0
        self.tied_s = float(self.arrays["tied"][inside, one.ranks[0], one.ranks[-1]])

    def first_cuts(self) -> Any:
        """Returns the first layer of each stage, work by the ranks' speed, ``[stages + 1]``."""
        n, stages = self.arrays["forward"].shape[1] - 1, len(self.ranks) * self.chunks
        work = self.arrays["forward"][:, 0, :] + self.arrays["backward"][:, 0, :]
        speed = 1 / np.maximum(work[self.ranks, n], 1e-30)
        share = np.cumsum(np.tile(speed / speed.sum() / self.chunks, self.chunks))
        done = work[0] / max(float(work[0, n]), 1e-30)
        cuts = np.concatenate([[0], np.searchsorted(done, share - 1e-9)]).astype(np.int64)
        cuts[-1] = n
        # Every stage has a layer: cuts ascend from the front, and leave room behind.
        at = np.arange(stages + 1)
        cuts = np.maximum.accumulate(cuts - at) + at
        return np.minimum(cuts, n - stages + at)

    def _by_rank(self, values: Any) -> Any:
        """Adds up the chunks of each rank; ``values``: ``[..., stages]``."""
        return values.reshape(*values.shape[:-1], self.chunks, len(self.ranks)).sum(axis=-2)

    def fits(self, cuts: Any) -> bool:
        """Returns whether every rank has the memory for its chunks."""
        classes, low, high = np.tile(self.ranks, self.chunks), cuts[:-1], cuts[1:]
        base, kept = (self.arrays[name].swapaxes(0, 1) for name in ("base", "kept"))
        fixed = base[:, self.ranks, 0, 0]
        own = base[:, classes, low, high] - np.tile(fixed, self.chunks)
        own += np.tile(self.held, self.chunks) * kept[:, classes, low, high]
        return bool((fixed + self._by_rank(own) <= 0).all())

    def seconds(self, cuts: Any) -> float:
        """Returns the seconds without the embedding's; infinite where memory is short."""
        if not self.fits(cuts):
            return np.inf
        arrays, low, high = self.arrays, cuts[:-1], cuts[1:]
        classes = np.tile(self.ranks, self.chunks)
        durations = np.stack([arrays[name][classes, low, high] for name in ("forward", "backward")])
        stages = len(classes)
        messages = np.zeros((2, 2, stages))
        one, other = classes[:-1], classes[1:]
        kinds = np.tile(self.kinds, self.chunks)[:-1]
        for row, name in enumerate(("latency", "occupancy")):
            messages[row, 0, :-1] = arrays[name][0, kinds, one, other, high[:-1]]
            messages[row, 1, 1:] = arrays[name][1, kinds, other, one, high[:-1]]
        end, busy = np.zeros((2, len(self.ranks)))
        _compiled_steps()(
            self.rows,
            durations,
            arrays["launch"][:, classes, low, high],
            *messages,
            np.zeros((2, stages, self.microbatches)),
            np.zeros((2, stages)),
            end,
            busy,
        )
        return float((end + self._by_rank(arrays["after"][classes, low, high])).max())


@lru_cache
def _compiled_steps() -> Any:
    from numba import njit  # half a second to import

    return njit(run_steps, cache=True)
