"""Improves the schedule and the number of layers per stage of the pipelines that the search finds.

The search finds 1F1B pipelines with one stage per rank. This module tries other schedules. For
schedules with several stages (chunks) per rank, it also changes the number of layers per stage. The
module improves an initial partition step by step, so its result may not be optimal. In this
example, 15 layers are divided into 4 interleaved stages on 2 ranks, with 4 microbatches. A layer
takes 1 s forward and 2 s backward on rank 0 (stages 0 and 2), and twice as long on rank 1 (stages 1
and 3)::

    initial partition        5 3 5 2   135 s   work in proportion to the speed of the ranks
    layer of stage 0 to 1    4 4 5 2   156 s   slower, undone
    layer of stage 0 to 2    4 3 6 2   132 s   faster, kept
    ...                                        until no move makes the step faster

The step time after each change is computed from the schedule's order of actions (``order_timing``).
A run-time scheduling rule has no fixed order, so the order of a static schedule with the same
placement is used as an approximation. :func:`handed_over` improves the chosen plans once more,
using predictions for each plan's actual schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.adaptive.config.schedule_specs import schedule_spec, selectable_names
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.cost import StageSums, as_run, predict, row_pipeline
from megatron.adaptive.planner.layer_costs import OURS, in_flight
from megatron.adaptive.planner.order_timing import step_times, steps_of
from megatron.adaptive.planner.plan import Plan, PlanRow
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.row_times import held_slices
from megatron.adaptive.planner.stage_classes import StageClass
from megatron.adaptive.schedule import catalog

ONE_CHUNK = selectable_names(lambda spec: spec.planned != "no" and spec.least_chunks == 1)
"""Names of the schedules that the trainer can run with one chunk per rank."""
_KNOWN = {
    "zb-v": ((2,), ("zb-v", "adaptive", "hinted")),
    "v-half": ((2,), ("v-half",)),
    "dualpipe-v": ((2,), ("dualpipe-v",)),
    "interleaved": ((2, 3, 4, 6, 8), ("interleaved", "combined-1f1b")),
    "breadth-first": ((2, 3, 4, 6, 8), ("breadth-first",)),
}
_OTHERS = selectable_names(
    lambda spec: (
        spec.kind == "fixed"
        and spec.planned != "no"
        and spec.least_chunks > 1
        and not any(spec.name in names for _, names in _KNOWN.values())
    )
)
CHUNKED = _KNOWN | {
    name: ((2,) if schedule_spec(name).most_chunks == 2 else (2, 3, 4, 6, 8), (name,))
    for name in _OTHERS
}
"""Static schedules with several chunks per rank, keyed by name. Each value contains the numbers of
chunks per rank to try, and the names of all schedules with the same stage placement."""
SEARCHED = tuple(dict.fromkeys((*ONE_CHUNK, *(n for _, names in CHUNKED.values() for n in names))))
"""Names of all schedules from which the search can choose."""
_NO_CAP = 1e6
"""Activation limit that never takes effect, because it exceeds the number of microbatches in a
step.
"""


def hand_over(
    cuts: Any, seconds: float, seconds_of: Callable[[Any], float], most: int
) -> tuple[Any, float, int]:
    """Moves one layer at a time from one stage to another, as long as the pipeline gets faster.

    All pairs of stages are tried repeatedly. The stages between the two stages of a pair keep their
    number of layers, but shift by one layer. The search ends when no pair yields an improvement.

    Args:
        cuts: Index of the first layer of each stage, followed by the number of layers of the model,
            ``[stages + 1]``.
        seconds: Step time with the initial ``cuts``, in seconds.
        seconds_of: Function that takes cuts and returns the step time in seconds, or infinity if
            the pipeline does not fit into memory.
        most: Maximum number of partitions to evaluate.

    Returns:
        Best cuts, their step time in seconds, and the number of evaluated partitions.
    """
    pairs = list(itertools.permutations(range(len(cuts) - 1), 2))
    timed = 0
    unchanged = 0
    turns = itertools.cycle(pairs)
    while unchanged < len(pairs) and timed < most:
        source, target = next(turns)
        unchanged += 1
        trial = cuts.copy()
        between = slice(min(source, target) + 1, max(source, target) + 1)
        trial[between] += -1 if source < target else 1
        if (trial[1:] == trial[:-1]).any():
            continue
        value = seconds_of(trial)
        timed += math.isfinite(value)
        if value < seconds:
            cuts = trial
            seconds = value
            unchanged = 0
    return cuts, seconds, timed


class ChunkedPipeline:
    """Finds a partition for a pipeline with several chunks per rank.

    Args:
        arrays: Costs of every possible stage, as ``search_kernel.ShapeArrays``.
        classes: Stage classes of the pipeline. The stages of a class are interchangeable.
        ranks: For each pipeline rank, the index of its class in ``classes``.
        schedule: Name of a static schedule.
        chunks: Number of chunks per rank.
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
        placement = catalog.placement_for(schedule, len(ranks), chunks)
        # The next three arrays contain, for each stage, its pipeline rank, its class, and its
        # number of microbatches in flight.
        stages = range(placement.num_stages)
        self._rank_of = np.array([placement.locate(stage)[0] for stage in stages])
        self._classes = np.array(ranks)[self._rank_of]
        self._held = np.array(in_flight(*order))[self._rank_of]
        # The ranks of a block share a node or a group of nodes, so messages between them use faster
        # links.
        blocks = list[int]()
        left = 0
        for rank in ranks:
            blocks.append(blocks[-1] if left else len(blocks))
            left = (left or classes[rank].block) - 1
        self._blocks = np.array(blocks)

    def best(self, most: int, hopeless_s: float) -> tuple[int, ...]:
        """Finds a partition by moving single layers between stages.

        Args:
            most: Maximum number of partitions to evaluate.
            hopeless_s: Step time in seconds at or above which the initial partition is considered
                too slow to be improved.

        Returns:
            Index of the first layer of each stage, followed by the number of layers of the model.
            The tuple is empty if the initial partition is too slow or no partition fits into
            memory.
        """
        cuts = self._first_cuts()
        best = self._seconds(cuts)
        if best >= hopeless_s:
            return ()
        cuts, best, _ = hand_over(cuts, best, self._seconds, most - 1)
        return tuple(cuts.tolist()) if math.isfinite(best) else ()

    def _first_cuts(self) -> Any:
        """Returns a partition in which each stage's work is proportional to its rank's speed.

        Returns:
            Index of the first layer of each stage, followed by the number of layers of the model,
            ``[stages + 1]``.
        """
        arrays = self._arrays
        stages = len(self._rank_of)
        n = arrays.forward.shape[1] - 1
        work = arrays.forward[:, 0, :] + arrays.backward[:, 0, :]
        speed = 1 / np.maximum(work[list(self._ranks), n], 1e-30)
        share = np.cumsum((speed / speed.sum() / self._chunks)[self._rank_of])
        done = work[0] / max(float(work[0, n]), 1e-30)
        cuts = np.concatenate([[0], np.searchsorted(done, share - 1e-9)]).astype(np.int64)
        cuts[-1] = n
        # Every stage needs at least one layer, so make the cuts strictly increasing, and leave one
        # layer for every later stage.
        numbers = np.arange(stages + 1)
        cuts = np.maximum.accumulate(cuts - numbers) + numbers
        return np.minimum(cuts, n - stages + numbers)

    def _by_rank(self, values: Any) -> Any:
        """Sums ``values`` of shape ``[tables, stages]`` over the stages of each rank.

        Returns an array of shape ``[tables, ranks]``, with one table per node type of a stage.
        """
        return values @ (self._rank_of[:, None] == np.arange(len(self._ranks)))

    def _fits(self, cuts: Any) -> bool:
        """Returns whether every rank has enough memory under the partition ``cuts``."""
        classes = self._classes
        low = cuts[:-1]
        high = cuts[1:]
        base = self._arrays.base.swapaxes(0, 1)
        kept = self._arrays.kept.swapaxes(0, 1)
        fixed = base[:, self._ranks, 0, 0]
        chunk_bytes = base[:, classes, low, high] - fixed[:, self._rank_of]
        chunk_bytes += self._held * kept[:, classes, low, high]
        return bool((fixed + self._by_rank(chunk_bytes) <= 0).all())

    def _seconds(self, cuts: Any) -> float:
        """Returns the step time in seconds for ``cuts``, or infinity if the memory is too small.

        The time of the all-reduce of tied embeddings is omitted, because it does not depend on the
        cuts.
        """
        if not self._fits(cuts):
            return np.inf
        arrays = self._arrays
        classes = self._classes
        low = cuts[:-1]
        high = cuts[1:]
        stages = len(classes)
        messages = np.zeros((2, 2, stages))
        front, back = classes[:-1], classes[1:]
        block = self._blocks[self._rank_of]
        is_sent = np.diff(self._rank_of) != 0
        kinds = (block[:-1] == block[1:]).astype(np.int64)
        for row, table in enumerate((arrays.latency, arrays.occupancy)):
            messages[row, 0, :-1] = is_sent * table[0, kinds, front, back, high[:-1]]
            messages[row, 1, 1:] = is_sent * table[1, kinds, back, front, high[:-1]]
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
    """Improves ``plan`` by moving layers between stages as long as the predicted step gets faster.

    Args:
        plan: Plan whose layers are moved between stages.
        seconds: Predicted step time of ``plan``, in seconds.
        inputs: Model, cluster and profile of layer times.
        most: Maximum number of plans to predict.

    Returns:
        Best plan, and its predicted step time in seconds.
    """

    def plan_of(cuts: Any) -> Plan:
        return replace(plan, partition=tuple(np.diff(cuts).tolist()))

    def seconds_of(cuts: Any) -> float:
        prediction = predict(plan_of(cuts), inputs)
        return prediction.seconds if prediction.fits else math.inf

    cuts = np.concatenate([[0], np.cumsum(plan.partition)])
    handed_cuts, seconds, _ = hand_over(cuts, seconds, seconds_of, most)
    return plan_of(handed_cuts), seconds


def scheduled(plan: Plan, inputs: PlanInputs, schedules: Sequence[str]) -> PlanRow | None:
    """Chooses the fastest schedule for ``plan`` that fits into memory, and predicts the result.

    Args:
        plan: Plan from the search. If its stages have unequal parallel sizes, the plan is first
            converted to microbatches of equal size (``cost.as_run``).
        inputs: Model, cluster and profile of layer times.
        schedules: Names of the schedules to choose from. Schedules that need several chunks per
            rank are skipped if the plan has only one.

    Returns:
        Plan with the chosen schedule, and its prediction, or ``None`` if the plan supports none of
        the schedules. If no schedule fits into memory, the fastest schedule is chosen.
    """
    run = as_run(plan)
    rows = []
    if plan.pp == 1 or (run == plan and not plan.uniform):
        schedules = schedules[:1] and ("1f1b",)
    for name in schedules:
        if run.chunks == 1 and name not in ONE_CHUNK:
            continue
        candidate = replace(run, schedule=name)
        try:
            rows.append(_with_cap(candidate, inputs))
        except ScheduleError:
            continue  # Skip schedules that do not support this number of stages or microbatches.
    # If several schedules are equally good, ``min`` returns the first of them in ``rows``.
    return min(
        rows, default=None, key=lambda row: (not row.prediction.fits, row.prediction.seconds)
    )


def _with_cap(plan: Plan, inputs: PlanInputs) -> PlanRow:
    """Predicts the step time of ``plan``, with a suitable activation limit if sequences are sliced.

    The default limit is kept if the plan fits into memory with this limit, or if sequences are not
    sliced. Otherwise, two lower limits are tried, the larger first. If the plan fits with neither
    of them, the default limit is kept. If documents are packed, the fastest of several limits is
    chosen.
    """
    if plan.slice_tokens is not None:
        plan = with_row_cap(plan, inputs)
    row = PlanRow(plan=plan, prediction=predict(plan, inputs))
    if plan.slices == 1 or row.prediction.fits:
        return row
    # Number of microbatches whose activations the first rank holds if slices run in the static
    # order.
    fixed = min(float(plan.num_microbatches), (plan.pp - 1 + plan.slices) / plan.slices)
    for cap in dict.fromkeys((round(fixed, 2), 1.0)):
        capped = replace(plan, cap=max(1.0, cap))
        tried = PlanRow(plan=capped, prediction=predict(capped, inputs))
        if tried.prediction.fits:
            return tried
    return row


def with_row_cap(plan: Plan, inputs: PlanInputs) -> Plan:
    """Returns a copy of ``plan`` with the best activation limit, chosen by simulation.

    ``plan`` must pack documents.
    """
    ends = [replace(plan, cap=cap) for cap in (1.0, _NO_CAP)]
    lowest, highest = (StageSums.of(end, inputs, OURS) for end in ends)
    pipeline = row_pipeline(plan, lowest)
    assert pipeline is not None
    least, most = (held_slices(end, pipeline.costs) for end in ends)
    room = math.inf
    for low, high in zip(lowest.memory, highest.memory, strict=True):
        # Memory grows linearly with the number of slices whose activations a rank holds.
        slice_bytes = (high.total_bytes - low.total_bytes) / max(most - least, 1e-9)
        left = low.limit_bytes - low.total_bytes
        if slice_bytes > 0 or left < 0:
            room = min(room, least + left / max(slice_bytes, 1e-9))
    return replace(plan, cap=pipeline.best_cap(room * pipeline.costs.tokens))
