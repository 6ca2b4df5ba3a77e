"""Implements the setting ``repartition="auto"``, which moves segments to make steps faster.

Every rank measures its steps. At the end of each interval, the first rank decides whether to move
segments, by the same rules as the trainer (see ``rebalance/judgement.py``)::

    times of the stages        ──┐
    operation counts of segments ├──> loads of ranks and segments ──> fastest simulated partition
     of the trained microbatches─┘

Segments with equal operation counts and parameter sizes, such as the blocks of an encoder, are of
the same kind. The times of a stage's forward and backward passes are divided among its segments in
proportion to their operation counts in these passes, summed over the trained microbatches. For
example, the segments of an image encoder are expensive if microbatches contain many images. A
segment through which no gradient flows gets no share of the backward time.

The steps before and after a move may differ in size. The gain of a move is therefore computed from
the time of a step divided by the step's operation count.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import operator
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.assembly import Assembly, PipelineSettings
from megatron.adaptive.modules.content import ContentBalance
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.modules.moving import SegmentMover
from megatron.adaptive.modules.step_work import StepWork
from megatron.adaptive.modules.tape import SegmentWork
from megatron.adaptive.planner.choose_partition import Times, travelling
from megatron.adaptive.profiling.free_memory import free_memory_bytes
from megatron.adaptive.rebalance.judgement import (
    MOST_STEPS,
    Lanes,
    Move,
    StepMeasurements,
    compare,
    judge,
    trained_bytes,
)
from megatron.adaptive.rebalance.time_limit import LIMIT_S, limit_of_search

_WARM_UP = 1
_SIMILAR_WORK = 0.1
"""Maximum relative change of the operation count of a step since a move. If the change is larger,
the effect of the move is not measured.
"""


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """Contains the time per operation and the operation count of the steps in an interval.

    Attributes:
        work_s: Median of the time of a step on the slowest rank, divided by the step's operation
            count, in seconds.
        work: Median operation count of a step in the replica with the most operations.
    """

    work_s: float
    work: float


def _pace_of(measured: Sequence[StepMeasurements], works: Sequence[Sequence[float]]) -> _Pace:
    """Returns the time per operation, and the operation count, of steps since the last decision.

    Args:
        measured: Measurements of each rank of the job.
        works: Operation counts of the steps, one list per rank. The counts differ between replicas.
    """
    count = min(len(of_rank) for of_rank in works)
    largest = [max(1.0, *(of_rank[step] for of_rank in works)) for step in range(count)]
    spans_s = [max(of_rank.spans_s[step] for of_rank in measured) for step in range(count)]
    return _Pace(
        work_s=statistics.median(map(operator.truediv, spans_s, largest)),
        work=statistics.median(largest),
    )


def check_repartition(request: PipelineSettings, *, is_elastic: bool) -> None:
    """Checks that the job supports moving segments if ``request`` enables ``repartition``.

    Raises:
        ConfigError: If the job is elastic.
    """
    if request.repartition == "off":
        return
    if is_elastic:
        raise ConfigError(
            "repartition 'auto' cannot be used in an elastic job, because its launcher chooses "
            "the partition; remove repartition"
        )


def make_balancer(
    request: PipelineSettings,
    assembly: Assembly,
    mesh: Mesh,
    orders: Orders,
    balance: ContentBalance,
) -> SegmentBalancer | None:
    """Creates a :class:`SegmentBalancer` if segments can move. All ranks must call this.

    Returns ``None`` if ``repartition`` is off or the pipeline has only one rank.
    :class:`SegmentBalancer` describes the arguments.
    """
    if request.repartition == "off" or mesh.pipeline_size == 1:
        return None
    return SegmentBalancer(request, assembly, mesh, orders, balance)


class SegmentBalancer:
    """Measures the steps of a pipeline, and decides when to move segments.

    All ranks must call each method.

    Args:
        request: Settings of the pipeline.
        assembly: This rank's part of the model.
        mesh: Replica and pipeline position of this process, and its process groups.
        orders: Object that determines the order of the rank's actions.
        balance: Object that predicts the costs of microbatches from their sizes.
    """

    def __init__(
        self,
        request: PipelineSettings,
        assembly: Assembly,
        mesh: Mesh,
        orders: Orders,
        balance: ContentBalance,
    ) -> None:
        self._assembly = assembly
        self._mesh = mesh
        self._orders = orders
        self._balance = balance
        self._mover = SegmentMover(request.model, request.order, assembly, mesh)
        self._interval = request.repartition_interval
        self._gain = self._least_gain = request.repartition_gain
        timeout = datetime.timedelta(seconds=request.timeout_s)
        self._limit_s = limit_of_search(LIMIT_S, timeout)
        self._sizes = _segment_sizes(request, assembly)
        self._kinds = _segment_kinds(assembly, self._sizes)
        self._steps: deque[tuple[Lanes, float]] = deque(maxlen=MOST_STEPS)
        self._works: deque[float] = deque(maxlen=MOST_STEPS)
        self._pace = _Pace(work_s=0.0, work=0.0)
        self._promise: tuple[Move, _Pace] | None = None
        self._told: set[str] = set()
        self._work: list[SegmentWork] = []
        self._begin()

    @property
    def partition(self) -> tuple[int, ...]:
        """Returns the current number of segments in each stage."""
        return self._assembly.recordings.part.partition

    @property
    def shared_weights(self) -> tuple[tuple[str, ...], ...]:
        """Returns the names of each parameter that several processes currently use.

        Each tuple contains all names of one parameter.
        """
        return self._mover.shared_weights(self.partition)

    def after_step(self, work: StepWork, times: RankTimes) -> Move | None:
        """Records the times of a step, and decides after each interval whether to move segments.

        Args:
            work: Microbatches of the step.
            times: Durations of the step and of this rank's actions in it.

        Returns:
            Move to carry out before the next step, or ``None``; the same on all ranks.
        """
        if self._skip:
            self._skip -= 1
            return None
        count = len(work.programs)
        totals: Lanes = {}
        for action, nanoseconds in times.actions:
            lane = action.kind, action.chunk
            totals[lane] = totals.get(lane, 0.0) + nanoseconds / count
        self._steps.append((totals, times.span_s))
        self._works.append(sum(programs.work for programs in work.programs))
        for programs in work.programs:
            self._work = [
                SegmentWork(*map(operator.add, total, each))
                for total, each in zip(self._work, programs.segment_work, strict=True)
            ]
        self._since += 1
        if self._since < self._interval:
            return None
        gathered = self._mesh.gather((self._measurements(work), tuple(self._works)))
        measured = [of_rank for of_rank, _ in gathered]
        self._pace = _pace_of(measured, [works for _, works in gathered])
        candidate = self._orders.candidate(count)
        decide = functools.partial(
            judge,
            measured,
            candidate,
            self.partition,
            count,
            self._gain,
            least_layers=1,
            frozen_layers=self._assembly.frozen_segments,
            limit_s=self._limit_s,
        )
        move, _, is_late = self._mesh.on_first(decide)
        if is_late:
            self._say(
                f"partition unchanged: no other partition was simulated within {self._limit_s:g} s"
            )
        way_back = self._compare(self._pace)
        self._forget()
        return way_back if move is None or move.gain < self._gain else move

    def carry_out(self, move: Move) -> bool:
        """Moves segments, and starts measuring the new partition.

        Returns:
            Whether the segments moved. If they did not, the method prints the reason.
        """
        begin_s = time.perf_counter()
        before = self.partition
        refusal = self._mover.move(move.partition)
        if refusal is not None:
            if refusal not in self._told:
                self._told.add(refusal)
                self._say(f"partition {format_partition(before)} unchanged: {refusal}")
            return False
        self._balance.use(self.partition)
        self._promise = None if move.is_return else (move, self._pace)
        self._begin()
        segments = travelling(before, self.partition, self._orders.placement)
        self._say(
            f"{format_partition(before)} -> {format_partition(self.partition)}: {move.why}; "
            f"{move.prediction}{segments} segment{'s' * (segments != 1)} moved in "
            f"{time.perf_counter() - begin_s:.3f} s"
        )
        return True

    def _begin(self) -> None:
        self._skip = _WARM_UP
        self._forget()

    def _forget(self) -> None:
        self._steps.clear()
        self._works.clear()
        self._since = 0
        self._work = [SegmentWork()] * len(self._sizes)

    def _compare(self, pace: _Pace) -> Move | None:
        """Prints the measured gain of the last move if it has not been printed yet.

        ``pace`` is the speed of the steps after the move. Returns a move back to the previous
        partition if the steps did not become faster, otherwise ``None``.
        """
        if self._promise is None:
            return None
        (move, before), self._promise = self._promise, None
        change = pace.work / before.work - 1
        if abs(change) > _SIMILAR_WORK:
            self._say(
                "the effect of the last move cannot be measured, because the operation count of a "
                f"step has changed by {change:+.1%} since the move"
            )
            return None
        outcome = compare(
            dataclasses.replace(move, before_s=before.work_s * before.work),
            pace.work_s * before.work,
            self._gain,
            self._least_gain,
            self._print,
            step="a step" if pace.work == before.work else "a step of the earlier size",
        )
        self._gain = outcome.gain
        return outcome.way_back

    def _measurements(self, work: StepWork) -> StepMeasurements:
        placement = self._orders.placement
        chunks = range(placement.num_chunks)
        kept_bytes = [
            max(programs.meter.bytes_of(chunk) for programs in work.programs) for chunk in chunks
        ]
        grown = list(map(sum, zip(*(each.segment_bytes for each in work.programs), strict=True)))
        parts, sizes, held, kept = [], [], [], []
        for chunk in chunks:
            stage = placement.stage_of(self._mesh.pp_rank, chunk)
            begin = sum(self.partition[:stage])
            segments = slice(begin, begin + self.partition[stage])
            parts.append(_parts_of(self._work[segments], splits=self._orders.weight_pieces > 0))
            total = max(1, sum(grown[segments]))
            kept.append(tuple(kept_bytes[chunk] * each / total for each in grown[segments]))
            sizes.append(tuple(self._kinds[segments]))
            held.append(sum(self._sizes[segments]))
        accelerator = self._mesh.accelerator
        ranks_here = self._mesh.environment.local_world_size
        return StepMeasurements(
            pp_rank=self._mesh.pp_rank,
            steps=tuple(lanes for lanes, _ in self._steps),
            spans_s=tuple(span_s for _, span_s in self._steps),
            shares=(1.0,) * placement.num_chunks,
            free_bytes=free_memory_bytes(accelerator, ranks_here),
            kept_bytes=tuple(kept_bytes),
            held_bytes=tuple(held),
            layer_bytes=tuple(sizes),
            parts=tuple(parts),
            layer_kept=tuple(kept),
        )

    def _say(self, text: str) -> None:
        self._print(f"  repartition: {text}")

    def _print(self, line: str) -> None:
        if self._mesh.rank == 0:
            print(printable(line), flush=True)


def _parts_of(works: Sequence[SegmentWork], *, splits: bool) -> tuple[Times, ...]:
    """Returns each segment's fractions of its stage's forward, backward and weight-gradient times.

    If a segment has no backward pass, for example in a frozen encoder, but other segments of the
    stage have one, its fractions of the backward and weight-gradient times are 0.

    Args:
        works: Operation counts of the segments.
        splits: Whether weight gradients are computed in separate actions (W).
    """
    if not splits:
        works = [SegmentWork(work.forward, work.backward + work.weight) for work in works]
    whole = sum(work.total for work in works)
    totals = [sum(column) for column in zip(*works, strict=True)]
    parts: list[Times] = []
    for work in works:
        share = work.total / whole if whole else 1 / len(works)
        forward, backward, weight = (
            each / total if total else share for each, total in zip(work, totals, strict=True)
        )
        parts.append((forward, backward, weight))
    return tuple(parts)


def _segment_sizes(request: PipelineSettings, assembly: Assembly) -> list[int]:
    """Returns the size in bytes of each segment's parameters, gradients and optimizer state.

    ``request`` contains the model, and ``assembly`` contains its recordings. A parameter that
    several segments share is counted only in the first of them.
    """
    part = assembly.recordings.part
    sizes = [0] * (len(part.cuts) + 1)
    for name, parameter in request.model.named_parameters():
        if name in part.homes:
            sizes[part.homes[name][0]] += trained_bytes(parameter)
    return sizes


def _segment_kinds(assembly: Assembly, sizes: Sequence[int]) -> list[int]:
    """Returns a number for each segment, which is equal for segments of the same kind.

    The number is the sum of the segment's size in bytes, from ``sizes``, and the index of its kind.
    """
    works = zip(*assembly.sample_work.values(), strict=True)
    kinds = list(zip(sizes, works, strict=True))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    # Segments of equal size may differ in work. Add a small index to the size, so that segments
    # with different work have different sizes.
    return [kind[0] + numbers[kind] for kind in kinds]
