"""Chooses orders of work for pipelines, and divides layers among chunks and for these orders.

There is no proof here: with several stages on each rank the partition starts in proportion to the
speed of the ranks, layers are handed over while that helps, and every hand-over is timed in the
true order of the schedule, that of a rule in the order of a static schedule on the same placement.
For what is chosen in the end they are handed over once more, each time predicted as it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.cost import as_run, predict
from megatron.adaptive.planner.layers import in_flight
from megatron.adaptive.planner.plan import Plan, PlanRow
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.shapes import ShapeChoice, StageClass, Tables
from megatron.adaptive.planner.timing import compiled_steps, steps_of
from megatron.adaptive.schedule import registry

ONE_CHUNK = ("1f1b", "zb-h1", "adaptive", "hinted", "gpipe", "bfc", "dfc")
"""Schedules that the trainer runs with one chunk for each rank."""


class ChunkedPipeline:
    """A pipeline with several chunks for each rank, without its partition.

    Args:
        classes: the classes of its shape.
        choice: what all stages share.
        tables: for the arrays.
        ranks: class of each pipeline rank, by number.
        schedule: a static schedule.
        chunks: of each rank.
    """

    def __init__(
        self,
        classes: tuple[StageClass, ...],
        choice: ShapeChoice,
        tables: Tables,
        ranks: tuple[int, ...],
        schedule: str,
        chunks: int,
    ) -> None:
        order = self._order = (schedule, len(ranks), chunks, choice.microbatches)
        self._ranks, self._chunks, self._microbatches = ranks, chunks, choice.microbatches
        self._arrays = tables.arrays(classes, choice)
        place = registry.placement_for(schedule, len(ranks), chunks)
        # Of each stage: its pipeline rank, class and microbatches in flight.
        self._rank_of = np.array([place.locate(stage)[0] for stage in range(place.num_stages)])
        self._classes = np.array(ranks)[self._rank_of]
        self._held = np.array(in_flight(*order))[self._rank_of]
        # Number of the node, or of the group of nodes, of each pipeline rank.
        blocks, left = list[int](), 0
        for rank in ranks:
            blocks.append(blocks[-1] if left else len(blocks))
            left = (left or classes[rank].block) - 1
        self._blocks = np.array(blocks)

    def best(self, most: int, hopeless_s: float) -> tuple[int, ...]:
        """Finds a partition: hands layers over between any two stages while it gets faster.

        Args:
            most: pipelines to time at most.
            hopeless_s: seconds from which on the first partition is not worth more.

        Returns:
            Where the stages begin, and the number of layers; empty where nothing fits.
        """
        cuts = self._first_cuts()
        stages = len(cuts) - 1
        best = self._seconds(cuts)
        if best >= hopeless_s:
            return ()
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
        return tuple(cuts.tolist()) if np.isfinite(best) else ()

    def _first_cuts(self) -> Any:
        """Returns the first layer of each stage, work by the ranks' speed, ``[stages + 1]``."""
        arrays, stages = self._arrays, len(self._rank_of)
        n = arrays["forward"].shape[1] - 1
        work = arrays["forward"][:, 0, :] + arrays["backward"][:, 0, :]
        speed = 1 / np.maximum(work[list(self._ranks), n], 1e-30)
        share = np.cumsum((speed / speed.sum() / self._chunks)[self._rank_of])
        done = work[0] / max(float(work[0, n]), 1e-30)
        cuts = np.concatenate([[0], np.searchsorted(done, share - 1e-9)]).astype(np.int64)
        cuts[-1] = n
        # Every stage has a layer: cuts ascend from the front, and leave room behind.
        at = np.arange(stages + 1)
        cuts = np.maximum.accumulate(cuts - at) + at
        return np.minimum(cuts, n - stages + at)

    def _by_rank(self, values: Any) -> Any:
        """Adds up the chunks of each rank; ``values``: ``[tables, stages]``."""
        return values @ (self._rank_of[:, None] == np.arange(len(self._ranks)))

    def _fits(self, cuts: Any) -> bool:
        """Returns whether every rank has the memory for its chunks."""
        classes, low, high = self._classes, cuts[:-1], cuts[1:]
        base, kept = (self._arrays[name].swapaxes(0, 1) for name in ("base", "kept"))
        fixed = base[:, self._ranks, 0, 0]
        own = base[:, classes, low, high] - fixed[:, self._rank_of]
        own += self._held * kept[:, classes, low, high]
        return bool((fixed + self._by_rank(own) <= 0).all())

    def _seconds(self, cuts: Any) -> float:
        """Returns the seconds without the embedding's; infinite where memory is short."""
        if not self._fits(cuts):
            return np.inf
        arrays, classes, low, high = self._arrays, self._classes, cuts[:-1], cuts[1:]
        stages, microbatches = len(classes), self._microbatches
        messages = np.zeros((2, 2, stages))
        one, other = classes[:-1], classes[1:]
        block, sent = self._blocks[self._rank_of], np.diff(self._rank_of) != 0
        kinds = (block[:-1] == block[1:]).astype(np.int64)
        for row, name in enumerate(("latency", "occupancy")):
            messages[row, 0, :-1] = sent * arrays[name][0, kinds, one, other, high[:-1]]
            messages[row, 1, 1:] = sent * arrays[name][1, kinds, other, one, high[:-1]]
        forward, backward, weight = (
            arrays[name][classes, low, high] for name in ("forward", "backward", "weight")
        )
        steps = steps_of(*self._order)
        durations = steps.table(np.stack([forward, backward - weight, weight]))
        launch = np.zeros_like(durations)
        launch[:2] = arrays["launch"][:, classes, low, high]
        end, busy = np.zeros((2, len(self._ranks)))
        compiled_steps()(
            steps.rows,
            durations,
            launch,
            *messages,
            np.zeros((2, stages, microbatches)),
            np.zeros((2, stages)),
            end,
            busy,
        )
        after = self._by_rank(arrays["after"][None, classes, low, high])[0]
        return float((end + after).max())


def handed_over(plan: Plan, seconds: float, inputs: PlanInputs, most: int) -> tuple[Plan, float]:
    """Hands layers over while that makes a plan's step faster in its own order of work.

    At most ``most`` plans are predicted.

    Returns:
        The plan and the seconds of its step.
    """
    pairs = sorted(
        itertools.permutations(range(len(plan.partition)), 2),
        key=lambda pair: abs(pair[0] - pair[1]),
    )
    since, turns = 0, itertools.cycle(pairs)
    while since < len(pairs) and most > 0:
        source, target = next(turns)
        since += 1
        layers = list(plan.partition)
        layers[source] -= 1
        layers[target] += 1
        if not layers[source]:
            continue
        most -= 1
        other = replace(plan, partition=tuple(layers))
        seen = predict(other, inputs)
        if seen.fits and seen.seconds < seconds:
            plan, seconds, since = other, seen.seconds, 0
    return plan, seconds


def scheduled(plan: Plan, inputs: PlanInputs, schedules: Sequence[str]) -> PlanRow | None:
    """Gives a pipeline the order of work that is fastest for it and fits.

    Args:
        plan: as the search found it; stages of unequal widths get microbatches of one size.
        inputs: what is trained where, and how long it takes.
        schedules: orders to choose from; with one chunk for each rank, those that need several do
            not count.

    Returns:
        The plan and its prediction; None where no order is possible, and one that does not fit
        where none does.
    """
    run, rows = as_run(plan), []
    if plan.pp == 1 or (run == plan and not plan.uniform):
        schedules = schedules[:1] and ("1f1b",)
    for name in schedules:
        if run.chunks == 1 and name not in ONE_CHUNK:
            continue
        candidate = replace(run, schedule=name)
        try:
            seen = predict(candidate, inputs)
        except ScheduleError:
            continue  # not with these stages or so few microbatches
        rows.append(PlanRow(plan=candidate, prediction=seen))
    # The first of equal ones: what was asked for first.
    return min(
        rows, default=None, key=lambda row: (not row.prediction.fits, row.prediction.seconds)
    )
