"""Tries interleaved pipelines beside what the search proves for 1F1B.

There is no proof here: the partition starts in proportion to the speed of the ranks, layers are
handed over while that helps, and every hand-over is timed in the true order of the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.layers import in_flight
from megatron.adaptive.planner.shapes import ShapeChoice, StageClass, Tables
from megatron.adaptive.planner.timing import run_steps, steps_of

_MOST_CHUNKS = 8


def candidates(
    classes: tuple[StageClass, ...], choice: ShapeChoice, tables: Tables
) -> Iterator[InterleavedPipeline]:
    """Yields interleaved pipelines on all nodes, equal ones side by side, in all type orders."""
    if tables.model.splits:
        return
    speeds = []
    for one in classes:
        work = []
        for node in tables.types(one):
            table = tables.layers(node, one, choice)
            work.append(float((table.forward_s + table.backward_s + table.weight_s).sum()))
        speeds.append(1 / max(*work, 1e-30))
    for ranks in _orders(classes, tables.cluster):
        pp = len(ranks)
        if pp < 2 or choice.microbatches % pp:
            continue
        share = 1 / sum(speeds[c] for c in ranks)
        for chunks in range(2, min(_MOST_CHUNKS, tables.model.num_layers // pp) + 1):
            guess = (choice.microbatches + (pp - 1) / chunks) * share
            yield InterleavedPipeline(classes, choice, tables, ranks, chunks, guess)


def _orders(classes: Sequence[StageClass], cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yields the classes of the ranks of pipelines on all nodes."""
    runs = []
    for index, group in enumerate(cluster.groups):
        own = [c for c, one in enumerate(classes) if 0 < one.nodes[index] == sum(one.nodes)]
        if not own or group.count % classes[own[0]].nodes[index]:
            return
        one = classes[own[0]]
        runs.append([own[0]] * (group.count // one.nodes[index] * one.block))
    for order in itertools.permutations(runs) if len(runs) <= 4 else [runs]:
        yield tuple(itertools.chain(*order))


@dataclass(frozen=True)
class InterleavedPipeline:
    """An interleaved pipeline without its partition; stage ``s`` lies on rank ``s % ranks``.

    Attributes:
        classes: the classes of its shape.
        choice: what all stages share.
        tables: for the arrays.
        ranks: class of each pipeline rank, by number.
        chunks: of each rank.
        guess_s: seconds if work were divided evenly.
    """

    classes: tuple[StageClass, ...]
    choice: ShapeChoice
    tables: Tables
    ranks: tuple[int, ...]
    chunks: int
    guess_s: float

    def best(self, most: int) -> tuple[float, tuple[int, ...], int]:
        """Finds a partition: hands layers over between any two stages while it gets faster.

        Args:
            most: pipelines to time at most.

        Returns:
            Seconds of a step, infinite where nothing fits; where the stages begin; pipelines timed.
        """
        cuts = self._first_cuts()
        stages = len(cuts) - 1
        best = self._seconds(cuts)
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
            if (trial[1:] > trial[:-1]).all() and self._fits(trial):
                value = self._seconds(trial)
                timed += 1
                if value < best:
                    cuts, best, since = trial, value, 0
        inside = 1 if self._kinds[:-1].all() else 0
        tied_s = float(self._arrays["tied"][inside, self.ranks[0], self.ranks[-1]])
        return best + tied_s, tuple(cuts.tolist()), timed

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        return self.tables.arrays(self.classes, self.choice)

    @cached_property
    def _stage_classes(self) -> Any:
        return np.tile(self.ranks, self.chunks)

    @cached_property
    def _kinds(self) -> Any:
        """Whether a rank and the next, or the last and the first, share a node."""
        kinds, left = [], 0
        for rank in self.ranks:
            left = (left or self.classes[rank].block) - 1
            kinds.append(1 if left else 0)
        if len(kinds) == self.classes[self.ranks[0]].block:
            kinds[-1] = 1
        return np.array(kinds)

    @cached_property
    def _held(self) -> Any:
        """Microbatches in flight, ``[stages]``."""
        held = in_flight("interleaved", len(self.ranks), self.chunks, self.choice.microbatches)
        return np.tile(held, self.chunks)

    def _first_cuts(self) -> Any:
        """Returns the first layer of each stage, work by the ranks' speed, ``[stages + 1]``."""
        arrays, stages = self._arrays, len(self.ranks) * self.chunks
        n = arrays["forward"].shape[1] - 1
        work = arrays["forward"][:, 0, :] + arrays["backward"][:, 0, :]
        speed = 1 / np.maximum(work[list(self.ranks), n], 1e-30)
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

    def _fits(self, cuts: Any) -> bool:
        """Returns whether every rank has the memory for its chunks."""
        classes, low, high = self._stage_classes, cuts[:-1], cuts[1:]
        base, kept = (self._arrays[name].swapaxes(0, 1) for name in ("base", "kept"))
        fixed = base[:, self.ranks, 0, 0]
        own = base[:, classes, low, high] - np.tile(fixed, self.chunks)
        own += self._held * kept[:, classes, low, high]
        return bool((fixed + self._by_rank(own) <= 0).all())

    def _seconds(self, cuts: Any) -> float:
        """Returns the seconds without the embedding's; infinite where memory is short."""
        if not self._fits(cuts):
            return np.inf
        arrays, classes, low, high = self._arrays, self._stage_classes, cuts[:-1], cuts[1:]
        stages, microbatches = len(classes), self.choice.microbatches
        messages = np.zeros((2, 2, stages))
        one, other = classes[:-1], classes[1:]
        kinds = np.tile(self._kinds, self.chunks)[:-1]
        for row, name in enumerate(("latency", "occupancy")):
            messages[row, 0, :-1] = arrays[name][0, kinds, one, other, high[:-1]]
            messages[row, 1, 1:] = arrays[name][1, kinds, other, one, high[:-1]]
        end, busy = np.zeros((2, len(self.ranks)))
        _compiled_steps()(
            steps_of("interleaved", len(self.ranks), self.chunks, microbatches).rows,
            np.stack([arrays[name][classes, low, high] for name in ("forward", "backward")]),
            arrays["launch"][:, classes, low, high],
            *messages,
            np.zeros((2, stages, microbatches)),
            np.zeros((2, stages)),
            end,
            busy,
        )
        return float((end + self._by_rank(arrays["after"][classes, low, high])).max())


@lru_cache
def _compiled_steps() -> Any:
    from numba import njit  # half a second to import

    return njit(run_steps, cache=True)
