"""Implements ``--pipeline-schedule auto``: measures the first steps and chooses by simulation.

Steps 2 to 4 are measured, and step 1 is warm-up. Before step 5, all ranks of all data-parallel
replicas switch to the schedule with the shortest simulated step. Losses and gradients do not depend
on the order of actions, so the switch does not change them.

A rank may be slow only temporarily, for example because of another program. Therefore, if layers
would move before step 5, eight more steps are measured, and the schedule is chosen before step 13.

With two chunks per rank, a different placement (assignment of stages to ranks) may be chosen. If
layers can move, a different partition (number of layers per stage) may also be chosen. In these
cases, the training loop moves the stages before the switch (``move_stages.py``).

Rank 0 simulates while all other ranks wait, so there is a time limit. When the limit is reached,
rank 0 chooses the best schedule that it has simulated so far. If no schedule was simulated, it
keeps the current schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.config.sequence_slices import SLICE_CUTS, SliceCut
from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.engine.stages import ForwardBackward
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.planner.choose_partition import Decision, Loads, choose_together
from megatron.adaptive.profiling.free_memory import free_memory_bytes
from megatron.adaptive.profiling.links import measure_link
from megatron.adaptive.profiling.pipeline_times import Sample, most_of, profile_of
from megatron.adaptive.rebalance.judgement import trained_bytes
from megatron.adaptive.rebalance.time_limit import (
    LIMIT_S,
    SIMULATED_OF_LIMIT,
    limit_of_search,
    result_within,
)
from megatron.adaptive.schedule.choose_by_simulation import ScheduleChoice, choose, pace_of
from megatron.adaptive.schedule.choose_slices import (
    NextTrial,
    SliceChoice,
    SliceTrial,
    added_s,
    choose_number,
    memory_factor,
    ratio,
    without_slices,
)
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.workload import Link
from megatron.adaptive.transport.interface import Transport

FIRST, LAST = 2, 4
"""First and last measured step. The first step of this process is step 1."""
MORE = 8
"""Number of additional steps that are measured before layers move."""


@dataclass(kw_only=True)
class Tuner:
    """Measures the first steps of a pipeline and chooses its schedule. Every rank has a tuner.

    Attributes:
        job: Environment of this process: its ranks, device and process groups.
        pp_ranks: Global ranks of this pipeline, in the order of their pipeline ranks.
        chunks: Model chunks of this rank.
        forward_backward: Engine that runs the steps and switches to the chosen schedule.
        transport: Message channels to the neighbours, or ``None`` if this rank has no neighbours.
        payload_shape: Shape of the tensors that are sent between stages.
        payload_dtype: Dtype of the tensors that are sent between stages.
        loads: Function that takes the number of microbatches, and returns three sets of loads
            (times of ranks and stages): for all measured steps, for the first half of them, and for
            the second half. The function is collective over all ranks. The attribute is ``None`` if
            neither stages nor layers may move.
        gain: Minimum fraction of the step time that moving layers must save, or ``None`` if layers
            must not move.
        cap: User's limit on the number of microbatches whose activations a rank keeps, or ``None``
            for as many as fit into memory.
        can_turn: Whether a different placement of stages may be chosen.
        timeout_s: Maximum time in seconds to wait for a message from a neighbour.
        attention_share: Attention's fraction of the time of a forward pass, from 0 to 1. Used only
            if microbatches are divided into slices.
        slice_cut: Method of dividing microbatches into slices.
        numbers: Numbers of slices to choose from. Empty to keep the current number.
        trial: Earlier measurements with a different number of slices, or ``None``.
        only_pace: Whether to keep the schedule, and to update only its pace with measured values.
            The pace consists of the times of a message, a backward pass (B) and a weight-gradient
            pass (W), as multiples of the time of a forward pass. The schedule ``hinted`` uses the
            pace to choose its order of actions.
        say: Function that writes a line to the log. It is called on all ranks.
    """

    job: Job
    pp_ranks: Sequence[int]
    chunks: Sequence[torch.nn.Module]
    forward_backward: ForwardBackward
    transport: Transport | None
    payload_shape: Sequence[int]
    payload_dtype: torch.dtype
    loads: Callable[[int], Sequence[Loads]] | None
    gain: float | None
    cap: float | None
    can_turn: bool
    timeout_s: float
    attention_share: float = 0.0
    slice_cut: SliceCut = SLICE_CUTS[0]
    numbers: Sequence[int] = ()
    trial: SliceTrial | None = None
    only_pace: bool = False
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._steps = 0
        self._last_measured = LAST
        self._sample = Sample(pp_rank=self.pp_ranks.index(self.job.rank))
        self._limit_s = limit_of_search(LIMIT_S, self.job.timeout)

    def after_step(self, times: RankTimes, num_microbatches: int) -> Decision | NextTrial | None:
        """Adds the times of a training step, and chooses a schedule after the last measured step.

        The calls after steps 4 and 12 are collective. If the chosen schedule does not require
        moving stages or layers, the engine switches to it before this method returns.

        Args:
            times: Durations of this rank's actions in the step.
            num_microbatches: Number of microbatches per step.

        Returns:
            Decision after the last measured step, equal on all ranks, or ``None`` after other
            steps. If a number of slices must be chosen, the first decision is to measure another
            number of slices.

        Raises:
            TransportError: If a neighbour has exited or does not respond.
        """
        self._steps += 1
        if self._steps < FIRST:
            return None
        self._sample.add(times.actions, self.forward_backward.orders.num_slices)
        if self._steps < self._last_measured:
            return None
        sample, job = self._sample, self.job
        sample.free_bytes, sample.kept_bytes, sample.held_bytes = memory_of(
            job, self.forward_backward, self.chunks
        )
        sample.links = measure_neighbours(
            job,
            self.forward_backward.orders.placement,
            self.pp_ranks,
            self.transport,
            payload_shape=self.payload_shape,
            payload_dtype=self.payload_dtype,
            timeout_s=self.timeout_s,
        )
        samples = job.gather(sample)
        loads = None if self.loads is None else self.loads(num_microbatches)
        if self.only_pace:
            decision = job.on_first(lambda: self._with_pace(samples, num_microbatches))
            assert decision.stay is not None
            self.forward_backward.use(decision.stay)
            return decision
        if self.numbers and self.trial is None:
            return job.on_first(lambda: self._next_trial(samples, num_microbatches))
        self.say(
            f"auto simulates schedules for at most {self._limit_s:g} s; all ranks wait for rank 0"
        )
        decision = job.on_first(lambda: self._choose_in_time(samples, loads, num_microbatches))
        if decision.partition is not None and self._last_measured == LAST:
            self._last_measured += MORE
            self.say(
                f"auto measures {MORE} more steps before it moves layers, because a rank may be "
                "slow only temporarily"
            )
            return None
        if decision.stay is not None and decision.move is None:
            self.forward_backward.use(decision.stay)
        return decision

    def _with_pace(self, samples: Sequence[Sample], num_microbatches: int) -> Decision:
        orders = self.forward_backward.orders
        profile = profile_of(samples, orders.placement, num_microbatches)
        pace = pace_of(profile, orders.num_slices)
        present = orders.candidate(num_microbatches)
        message, backward, weight = pace
        return Decision(
            text=(
                f"{present.name} adapts its order to measured times: relative to a forward pass, a "
                f"message takes {message:g}, B {backward:g} and W {weight:g}"
            ),
            stay=replace(present, cap=self.cap, pace=pace),
        )

    def _next_trial(self, samples: Sequence[Sample], num_microbatches: int) -> NextTrial:
        orders = self.forward_backward.orders
        profile = profile_of(samples, orders.placement, num_microbatches)
        half = orders.num_slices // 2
        return NextTrial(
            text=(
                f"auto has measured {orders.num_slices} slices per sequence, and measures {half} "
                "next"
            ),
            trial=SliceTrial(num_slices=orders.num_slices, times=profile.times),
            num_slices=half,
        )

    def _choose_in_time(
        self, samples: list[Sample], loads: Sequence[Loads] | None, num_microbatches: int
    ) -> Decision:
        present = self.forward_backward.orders.candidate(num_microbatches)
        return result_within(
            self._limit_s,
            lambda: self._choose(samples, loads, num_microbatches),
            Decision(
                text=(
                    f"auto keeps {present}, because no schedule was simulated within "
                    f"{self._limit_s:g} s; the processors are busy"
                )
            ),
        )

    def _limit(
        self,
        samples: Sequence[Sample],
        partition: Sequence[int],
        number: int,
        kind: PlacementKind,
        others: Sequence[int],
    ) -> float:
        """Returns the number of microbatches whose activations a rank may keep in another layout.

        Args:
            samples: Measurements of all ranks.
            partition: Current number of layers of each stage. Empty if layers cannot move.
            number: Number of slices in the other layout.
            kind: Placement of the stages in the other layout.
            others: Number of layers of each stage in the other layout.
        """
        orders = self.forward_backward.orders
        present = orders.placement
        most = most_of(samples, present, replace(present, kind=kind), partition, others)
        most /= memory_factor(number, orders.num_slices)
        if (kind, others) == (present.kind, partition) and number >= orders.num_slices:
            # The current layout is running, so it fits into memory with at least one microbatch,
            # even if the estimate is lower.
            most = max(1.0, most)
        return most if self.cap is None else min(most, self.cap)

    def _choose(
        self, samples: list[Sample], loads: Sequence[Loads] | None, num_microbatches: int
    ) -> Decision:
        orders = self.forward_backward.orders
        present, num_slices = orders.placement, orders.num_slices
        profile = replace(
            profile_of(samples, present, num_microbatches),
            attention_share=self.attention_share,
            slice_cut=self.slice_cut,
        )
        partition = () if loads is None else loads[0].partition
        limit = partial(self._limit, samples, partition)
        until_s = time.monotonic() + SIMULATED_OF_LIMIT * self._limit_s
        settings: dict[str, Any] = {
            "num_microbatches": num_microbatches,
            "splittable": orders.weight_pieces > 0,
            "pieces": max(1, orders.weight_pieces),
            "also": orders.auto_candidates,
            "until_s": until_s,
        }

        def choose_for(number: int, *, quick: bool = True) -> ScheduleChoice:
            most = limit(number, present.kind, partition)
            return choose(
                profile, placement=present, most=most, num_slices=number, quick=quick, **settings
            )

        chosen: SliceChoice | None = None
        try:
            number, text, factor = num_slices, "", 1.0
            if self.trial is not None:
                measured = SliceTrial(num_slices=number, times=profile.times)
                profile = without_slices(profile, number, added_s(self.trial, measured))
                factor = ratio(profile.times, measured.times)
                middle_s = until_s - SIMULATED_OF_LIMIT * self._limit_s / 2
                numbers = [number, *(other for other in self.numbers if other != number)]
                chosen = choose_number(numbers, choose_for, middle_s)
                number, text = chosen.num_slices, f"; {chosen.text}"
            if loads is None:
                choice = choose_for(number, quick=False)
                decision = Decision(text=choice.reason, stay=choice.best)
            else:
                whole, *halves = [part.scaled(factor) for part in loads]
                decision = choose_together(
                    whole,
                    profile,
                    {kind: partial(limit, number, kind) for kind in self._kinds(present)},
                    halves=halves,
                    gain=self.gain,
                    num_slices=number,
                    **settings,
                )
            return _recut(replace(decision, text=decision.text + text), num_slices)
        except ScheduleError as error:
            return _recut(_without_more(chosen, error), num_slices)

    def _kinds(self, present: Placement) -> tuple[PlacementKind, ...]:
        """Returns the placements to compare, starting with ``present``, the current placement."""
        if self.can_turn and present.num_chunks == 2:
            return (present.kind, "loop" if present.kind == "v" else "v")
        return (present.kind,)


def measure_neighbours(
    job: Job,
    placement: Placement,
    pp_ranks: Sequence[int],
    transport: Transport | None,
    *,
    payload_shape: Sequence[int],
    payload_dtype: torch.dtype,
    timeout_s: float,
) -> dict[int, Link]:
    """Measures this rank's links to its neighbours, and returns them keyed by pipeline rank.

    One pair of neighbours is measured at a time, so that pairs do not disturb each other. All ranks
    must call this function together.

    Args:
        job: Environment of this process.
        placement: Assignment of stages to ranks.
        pp_ranks: Global ranks of this pipeline, in the order of their pipeline ranks.
        transport: Message channels to the neighbours, or ``None`` if this rank has no neighbours.
        payload_shape: Shape of the tensor to send.
        payload_dtype: Dtype of the tensor to send.
        timeout_s: Maximum time in seconds to wait for a message.
    """
    me = pp_ranks.index(job.rank)
    if transport is None:
        return {}
    group, device = job.control_group, job.accelerator.device
    payload = torch.zeros(*payload_shape, dtype=payload_dtype, device=device)
    links = {}
    for low, high in placement.neighbours():
        dist.barrier(group=group)
        if me in (low, high):
            other = high if me == low else low
            links[other] = measure_link(
                transport, pp_ranks[other], leads=me == low, payload=payload, timeout_s=timeout_s
            )
    dist.barrier(group=group)
    return links


def _without_more(chosen: SliceChoice | None, error: ScheduleError) -> Decision:
    """Returns the decision to make if ``error`` ended the search for a schedule.

    Args:
        chosen: Number of slices that was chosen before the error, and its fastest schedule so far;
            ``None`` if no number of slices was chosen.
        error: Reason why no more schedules could be simulated.
    """
    if chosen is None:
        return Decision(text=f"auto keeps adaptive: {error}")
    best = chosen.schedule
    text = f"{best.reason}; {chosen.text}; no other schedules were compared: {error}"
    return Decision(text=text, stay=best.best)


def _recut(decision: Decision, present: int) -> Decision:
    """Changes ``decision`` so that the run is rebuilt if the number of slices changes.

    Args:
        decision: Decision about schedule, placement and layers.
        present: Current number of slices.
    """
    if decision.move is None and decision.stay is not None and decision.stay.num_slices != present:
        return replace(decision, stay=None, move=decision.stay)
    if decision.move is not None and decision.move.num_slices != present:
        return replace(decision, stay=None)
    return decision


def memory_of(
    job: Job, forward_backward: ForwardBackward, chunks: Sequence[torch.nn.Module]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Measures the memory of this rank between two steps.

    Returns:
        Tuple of three sizes in bytes: free memory for activations; activations that a microbatch
        keeps, per chunk; weights, gradients and optimizer state, per chunk.
    """
    free = free_memory_bytes(job.accelerator, job.environment.local_world_size)
    held = tuple(map(held_bytes, chunks))
    return free, forward_backward.activation_bytes(), held


def held_bytes(module: torch.nn.Module) -> int:
    """Returns the size in bytes of the weights, gradients and optimizer state of ``module``."""
    return sum(map(trained_bytes, module.parameters()))
