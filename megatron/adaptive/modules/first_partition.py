"""Chooses the initial partition of a pipeline from the costs of segments.

If all segments have a backward pass, a good partition is one that minimizes the time of the slowest
stage. A frozen encoder, however, has no backward pass, so its forward pass can run while its rank
would otherwise be idle. If there are frozen segments, this module therefore simulates the
pipeline's schedule with partitions near the balanced one, and uses the fastest partition.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.modules.cutting import balanced
from megatron.adaptive.modules.recording import SampledModel
from megatron.adaptive.modules.recordings import Example, frozen_segments_of, work_by_action
from megatron.adaptive.modules.segments import measure_segments
from megatron.adaptive.modules.tape import Tape
from megatron.adaptive.planner.choose_partition import (
    Loads,
    Times,
    charged_wholly,
    improved,
    simulated_step,
)
from megatron.adaptive.rebalance.time_limit import LIMIT_S, result_within
from megatron.adaptive.schedule.stage_placement import Placement

_REPEATS = 3

SegmentTimes = tuple[Times, ...]
"""Times of each segment in seconds: forward pass, backward pass and separate weight gradients."""


class FirstPartition:
    """Measures segments, and divides them among the pipeline's stages.

    Args:
        orders: Object that determines the order of the ranks' actions.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    @property
    def placement(self) -> Placement:
        """Returns the assignment of stages to ranks."""
        return self._orders.placement

    def measure(self, model: SampledModel, examples: Sequence[Example]) -> SegmentTimes:
        """Measures the times of each segment, averaged over the microbatches of the sample batch.

        If the schedule computes weight gradients in separate actions, their time is estimated from
        the measured time of the whole backward pass, in proportion to their operation count.

        Args:
            model: Model with all its parameters.
            examples: Recordings of the sample batch.
        """
        totals = [(0.0, 0.0, 0.0)] * examples[0].forwards.training.num_segments
        count = sum(example.count for example in examples)
        for example in examples:
            tape = example.forwards.training
            samples = measure_segments(
                model, tape, example.microbatch, model.device, split=False, repeats=_REPEATS
            )
            share = example.count / count
            works = work_by_action(tape)
            for segment, (sample, work) in enumerate(zip(samples, works, strict=True)):
                backward = work.backward + work.weight
                is_split = self._orders.weight_pieces > 0 and backward > 0
                weight_s = sample.backward_s * work.weight / backward if is_split else 0.0
                forward, inputs, weights = totals[segment]
                totals[segment] = (
                    forward + sample.forward_s * share,
                    inputs + (sample.backward_s - weight_s) * share,
                    weights + weight_s * share,
                )
        return tuple(totals)

    def choose(
        self,
        examples: Sequence[Example],
        costs: Sequence[float],
        times: SegmentTimes,
        *,
        num_microbatches: int,
        limit_s: float = LIMIT_S,
    ) -> tuple[int, ...]:
        """Returns the number of segments in each stage.

        Returns the balanced partition if the simulations take too long.

        Args:
            examples: Recordings of the sample batch.
            costs: Cost of each segment, in any unit.
            times: Times of each segment for a microbatch; empty if they were not measured.
            num_microbatches: Number of microbatches per step and replica.
            limit_s: Maximum duration of the simulations in seconds, during which all other ranks
                wait.

        Raises:
            ConfigError: If a cost is negative or not finite, or there are too few segments.
        """
        tapes = [tape for example in examples for tape in example.forwards.tapes.values()]
        together = segments_with_one_buffer(tapes)
        start = balanced_together(costs, self.placement.num_stages, together)
        frozen = frozen_segments_of(example.forwards for example in examples)
        if not times or not frozen:
            return start
        simulate = functools.partial(
            quickest_partition,
            start,
            times,
            self._orders,
            num_microbatches=num_microbatches,
            frozen_segments=frozen,
            together=together,
        )
        nothing: tuple[int, ...] = ()
        partition = result_within(limit_s, simulate, nothing)
        if not partition:
            print(
                f"using the balanced partition {format_partition(start)}: the model has frozen "
                "segments, so other partitions may be faster, but simulating them took longer than "
                f"the limit of {limit_s:g} s",
                flush=True,
            )
        return partition or start


def quickest_partition(
    start: tuple[int, ...],
    times: Sequence[Times],
    orders: Orders,
    *,
    num_microbatches: int,
    frozen_segments: int,
    together: Sequence[range] = (),
) -> tuple[int, ...]:
    """Returns the partition near ``start`` with the shortest simulated step.

    Args:
        start: Number of segments in each stage at the start of the search.
        times: Times of each segment for a microbatch, in seconds.
        orders: Object that determines the order of the ranks' actions.
        num_microbatches: Number of microbatches per step and replica.
        frozen_segments: Number of frozen segments at the start of the model.
        together: Ranges of segments. All segments of a range must be in the same stage.
    """
    placement = orders.placement
    loads = Loads(
        placement=placement,
        partition=start,
        layer_s=(tuple(times),) * placement.num_ranks,
        beside_s=((0.0, 0.0, 0.0),) * placement.num_stages,
        most_layers=(math.inf,) * placement.num_ranks,
        kinds=tuple(range(len(times))),
        frozen_layers=frozen_segments,
    )
    costs = charged_wholly([sum(each) for each in times], frozen_segments)
    wholly = balanced_together(costs, placement.num_stages, together)
    step_s = simulated_step(loads, orders.candidate(num_microbatches), num_microbatches)

    def allowed_s(partition: tuple[int, ...]) -> float:
        borders = itertools.accumulate(partition[:-1])
        splits = any(
            segments.start < border < segments.stop for border in borders for segments in together
        )
        return math.inf if splits or min(partition) < 1 else step_s(partition)

    try:
        return improved((start, wholly), allowed_s)[0]
    except ScheduleError:
        # Keep ``start`` if the schedule does not support this number of microbatches.
        return start


def balanced_together(
    weights: Sequence[float], num_stages: int, together: Sequence[range]
) -> tuple[int, ...]:
    """Balances the costs of the stages, and keeps the segments of each range in one stage.

    The ranges are ignored if they make it impossible to give each stage a segment.

    Args:
        weights: Non-negative cost of each segment, in any unit.
        num_stages: Number of stages. Each stage gets at least one segment.
        together: Disjoint ascending ranges of segments. All segments of a range must be in the same
            stage.

    Returns:
        Number of segments in each stage.
    """
    begins = {segments.start: segments for segments in together}
    pieces: list[range] = []
    segment = 0
    while segment < len(weights):
        pieces.append(begins.get(segment, range(segment, segment + 1)))
        segment = pieces[-1].stop
    if len(pieces) < num_stages or len(pieces) == len(weights):
        return balanced(weights, num_stages)
    costs = [sum(weights[segment] for segment in piece) for piece in pieces]
    sizes = iter(map(len, pieces))
    return tuple(sum(next(sizes) for _ in range(count)) for count in balanced(costs, num_stages))


def segments_with_one_buffer(tapes: Iterable[Tape]) -> list[range]:
    """Returns ranges of segments that must be in the same stage, because they share a buffer.

    A shared buffer matters only if the forward pass changes it.

    Args:
        tapes: Recordings of the model with the same cut points.

    Returns:
        Disjoint ascending ranges of at least two segments.
    """
    # Consider all recordings together, because a buffer that evaluation only reads may change in
    # training.
    users: dict[str, set[int]] = {}
    changed: set[str] = set()
    for tape in tapes:
        # Buffers that share memory count as one buffer.
        names: dict[int, str] = {}
        for value in tape.values:
            if value.source == "buffer" and value.storage:
                names[value.storage] = min(value.name, names.get(value.storage, value.name))
        for call in tape.calls:
            read = {
                names.get(value.storage, value.name)
                for value in (tape.values[number] for number in call.reads)
                if value.source == "buffer"
            }
            written = {tape.values[old].storage for old, _ in call.changes} & names.keys()
            changed.update(names[storage] for storage in written)
            for name in read.union(names[storage] for storage in written):
                users.setdefault(name, set()).add(call.segment)
    spans = [
        range(min(used), max(used) + 1)
        for name, used in users.items()
        if name in changed and len(used) > 1
    ]
    merged: list[range] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start < merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged
