"""``--pipeline-schedule auto``: measures the first steps and takes what is fastest in simulation.

Steps 2 to 4 are measured (the first one warms up); before step 5 all ranks switch together, all
data-parallel replicas to the same choice. Losses and gradients do not depend on the order of work,
so that the switch is not seen in them. With two chunks per rank the choice may lie in another
placement: then the loop moves the stages first (``move_layers.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive.engine.executor import RankTimes
from megatron.adaptive.engine.forward_backward import ForwardBackward
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.gpt.setup import Run, payload_shape
from megatron.adaptive.profiling.links import measure_link
from megatron.adaptive.profiling.memory import free_memory_bytes
from megatron.adaptive.profiling.pipeline import Sample, most_of, profile_of
from megatron.adaptive.schedule.auto import choose
from megatron.adaptive.schedule.compare import Candidate
from megatron.adaptive.schedule.placement import Placement, PlacementKind
from megatron.adaptive.schedule.workload import Link

FIRST, LAST = 2, 4
"""Steps that are measured, counted from 1 in this process."""
_OPTIMIZER_BYTES = 4 + 12  # of each parameter beside itself: gradient, main weight, two moments


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Holds the schedule that all ranks run from here on.

    Attributes:
        text: what was chosen and why, for the log.
        stay: what to run under the present placement, ``None`` to leave it as it is.
        move: what to run after moving the stages, ``None`` to stay.
    """

    text: str
    stay: Candidate | None = None
    move: Candidate | None = None


class Tuner:
    """Measures the first steps of a run and makes the choice; every rank has one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = 0
        self._sample = Sample(pp_rank=parallel_state.get_pipeline_model_parallel_rank())

    def after_step(self, times: RankTimes, num_microbatches: int) -> Decision | None:
        """Adds a training step; after the last measured one, decides. Collective then.

        What needs no move is in use when this returns.

        Returns:
            The decision, on all ranks, after that step; ``None`` after others.

        Raises:
            TransportError: a neighbour is gone or silent.
        """
        self._steps += 1
        if not FIRST <= self._steps <= LAST:
            return None
        self._sample.add(times.actions)
        if self._steps < LAST:
            return None
        sample = self._sample
        sample.free_bytes, sample.kept_bytes, sample.held_bytes = memory_of(self._run)
        sample.links = self._links()
        samples = self._run.job.gather(sample)
        decision = self._run.job.on_first(lambda: self._choose(samples, num_microbatches))
        if decision.stay is not None and decision.move is None:
            use(self._run, decision.stay)
        return decision

    def _choose(self, samples: list[Sample], num_microbatches: int) -> Decision:
        run, config = self._run, self._run.job.config
        cap = config.schedule.activation_cap
        most = self._limits(samples)
        try:
            choice = choose(
                profile_of(samples, run.placement, config.layers_per_stage),
                present=run.placement,
                num_microbatches=num_microbatches,
                most=most if cap is None else {kind: min(most[kind], cap) for kind in most},
                splittable=config.splits_backward,
                pieces=config.schedule.weight_pieces,
            )
        except ScheduleError as error:
            return Decision(text=f"auto keeps adaptive: {error}")
        if choice.best.placement.kind == run.placement.kind:
            return Decision(text=choice.reason, stay=choice.best)
        stay = None if choice.stay is None else choice.stay.best
        return Decision(text=choice.reason, stay=stay, move=choice.best)

    def _limits(self, samples: list[Sample]) -> dict[PlacementKind, float]:
        """Returns the activations that memory allows, by the ways in which stages may lie."""
        present = self._run.placement
        # What runs now fits, whatever the estimate.
        found = {present.kind: max(1.0, most_of(samples, present, present))}
        if self._run.job.config.schedule.pipeline_placement is None and present.num_chunks == 2:
            kind: PlacementKind = "loop" if present.kind == "v" else "v"
            other = Placement(num_ranks=present.num_ranks, num_chunks=2, kind=kind)
            limit = most_of(samples, present, other)
            if limit >= 1:
                found[kind] = limit
        return found

    def _links(self) -> dict[int, Link]:
        """Measures the links to the neighbours, one pair of the pipeline after the other."""
        run = self._run
        transport = None if run.wiring is None else run.wiring.transport
        if transport is None:
            return {}
        pp_ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        me = self._sample.pp_rank
        config = run.job.config
        shape = payload_shape(config) or (1,)
        payload = torch.zeros(
            shape, dtype=run.core.pipeline_dtype, device=run.job.accelerator.device
        )
        found = {}
        for low, high in run.placement.neighbours():
            dist.barrier(group=run.job.control_group)
            if me in (low, high):
                other = high if me == low else low
                found[other] = measure_link(
                    transport,
                    pp_ranks[other],
                    leads=me == low,
                    payload=payload,
                    timeout_s=config.schedule.pipeline_timeout_s,
                )
        dist.barrier(group=run.job.control_group)
        return found


def memory_of(run: Run) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns the memory of this rank between two steps.

    Returns:
        Bytes that activations may take; by chunk, bytes that one microbatch keeps and bytes of
        weights, gradients and optimizer state.
    """
    assert isinstance(run.forward_backward, ForwardBackward)
    free = free_memory_bytes(run.job.accelerator, run.job.environment.local_world_size)
    held = tuple(
        sum(p.numel() * (p.element_size() + _OPTIMIZER_BYTES) for p in chunk.parameters())
        for chunk in run.chunks
    )
    return free, run.forward_backward.activation_bytes(), held


def use(run: Run, candidate: Candidate) -> None:
    """Takes a schedule or rule from the next step on; all ranks do so alike."""
    assert isinstance(run.forward_backward, ForwardBackward)
    run.forward_backward.use(candidate)
