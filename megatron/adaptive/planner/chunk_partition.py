"""Chooses orders of work for pipelines, and divides layers among chunks and for these orders.

There is no proof here. With several stages on each rank the partition starts in proportion to the
speed of the ranks, then :func:`hand_over` hands layers over while that helps. Every hand-over is
timed in the true order of the schedule, that of a rule in the order of a static schedule on the
same placement. For what is chosen in the end they are handed over once more, each time predicted as
it runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.cost import as_run, predict
from megatron.adaptive.planner.layer_costs import in_flight
from megatron.adaptive.planner.order_timing import step_times, steps_of
from megatron.adaptive.planner.plan import Plan, PlanRow
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.stage_classes import StageClass
from megatron.adaptive.schedule import catalog

ONE_CHUNK = selectable_names(lambda spec: spec.planned != "no" and spec.least_chunks == 1)
"""Schedules that the trainer runs with one chunk for each rank."""


def hand_over(
    cuts: Any, seconds: float, seconds_of: Callable[[Any], float], most: int
) -> tuple[Any, float, int]:
    """Hands layers over, one at a time, between any two stages while a pipeline gets faster.

    Args:
        cuts: first layer of each stage and the number of layers, ``[stages + 1]``.
        seconds: of the pipeline.
        seconds_of: returns those of other cuts, infinite where memory is short.
        most: pipelines to time at most.

    Returns:
        The cuts, their seconds, and how many pipelines were timed.
    """
    pairs = list(itertools.permutations(range(len(cuts) - 1), 2))
    timed, since, turns = 0, 0, itertools.cycle(pairs)
    while since < len(pairs) and timed < most:
        source, target = next(turns)
        since += 1
        trial = cuts.copy()
        between = slice(min(source, target) + 1, max(source, target) + 1)
        trial[between] += -1 if source < target else 1
        if (trial[1:] == trial[:-1]).any():
            continue
        value = seconds_of(trial)
        timed += math.isfinite(value)
        if value < seconds:
            cuts, seconds, since = trial, value, 0
    return cuts, seconds, timed


class ChunkedPipeline:
    """A pipeline with several chunks for each rank, without its partition.

    Args:
        arrays: ``kernel.ShapeArrays`` of its shape.
        classes: the classes of its shape.
        ranks: class of each pipeline rank, by number.
        schedule: a static schedule.
        chunks: of each rank.
    """

    def __init__(
        self,
        arrays: Any,
        classes: Sequence[StageClass],
        ranks: tuple[int, ...],
        schedule: str,
        chunks: int,
    ) -> None:
        order = self._order = (schedule, len(ranks), chunks, arrays.microbatches)
        self._arrays, self._ranks, self._chunks = arrays, ranks, chunks
        place = catalog.placement_for(schedule, len(ranks), chunks)
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
        """Finds a partition; see :func:`hand_over`.

        Args:
            most: pipelines to time at most.
            hopeless_s: seconds from which on the first partition is not worth more.

        Returns:
            Where the stages begin, and the number of layers; empty where nothing fits.
        """
        cuts = self._first_cuts()
        best = self._seconds(cuts)
        if best >= hopeless_s:
            return ()
        cuts, best, _ = hand_over(cuts, best, self._seconds, most - 1)
        return tuple(cuts.tolist()) if math.isfinite(best) else ()

    def _first_cuts(self) -> Any:
        """Returns the first layer of each stage, work by the ranks' speed, ``[stages + 1]``."""
        arrays, stages = self._arrays, len(self._rank_of)
        n = arrays.forward.shape[1] - 1
        work = arrays.forward[:, 0, :] + arrays.backward[:, 0, :]
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
        base, kept = (one.swapaxes(0, 1) for one in (self._arrays.base, self._arrays.kept))
        fixed = base[:, self._ranks, 0, 0]
        own = base[:, classes, low, high] - fixed[:, self._rank_of]
        own += self._held * kept[:, classes, low, high]
        return bool((fixed + self._by_rank(own) <= 0).all())

    def _seconds(self, cuts: Any) -> float:
        """Returns the seconds without the embedding's; infinite where memory is short."""
        if not self._fits(cuts):
            return np.inf
        arrays, classes, low, high = self._arrays, self._classes, cuts[:-1], cuts[1:]
        stages = len(classes)
        messages = np.zeros((2, 2, stages))
        one, other = classes[:-1], classes[1:]
        block, sent = self._blocks[self._rank_of], np.diff(self._rank_of) != 0
        kinds = (block[:-1] == block[1:]).astype(np.int64)
        for row, table in enumerate((arrays.latency, arrays.occupancy)):
            messages[row, 0, :-1] = sent * table[0, kinds, one, other, high[:-1]]
            messages[row, 1, 1:] = sent * table[1, kinds, other, one, high[:-1]]
        forward, backward, weight = (
            table[classes, low, high] for table in (arrays.forward, arrays.backward, arrays.weight)
        )
        durations = np.stack([forward, backward - weight, weight])
        launch = np.zeros_like(durations)
        launch[:2] = arrays.launch[:, classes, low, high]
        end = step_times(steps_of(*self._order), durations, *messages, launch_s=launch).end_s
        after = self._by_rank(arrays.after[None, classes, low, high])[0]
        return float((end + after).max())


def handed_over(plan: Plan, seconds: float, inputs: PlanInputs, most: int) -> tuple[Plan, float]:
    """Hands layers over while that makes a plan's step faster in its own order of work.

    At most ``most`` plans are predicted.

    Returns:
        The plan and the seconds of its step.
    """

    def plan_of(cuts: Any) -> Plan:
        return replace(plan, partition=tuple(np.diff(cuts).tolist()))

    def seconds_of(cuts: Any) -> float:
        seen = predict(plan_of(cuts), inputs)
        return seen.seconds if seen.fits else math.inf

    cuts = np.concatenate([[0], np.cumsum(plan.partition)])
    found, seconds, _ = hand_over(cuts, seconds, seconds_of, most)
    return plan_of(found), seconds


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
