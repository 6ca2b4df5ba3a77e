"""Simulates one step event by event, to compute when each action runs under given policies.

The simulator uses the same state and policies as the executor. A rank runs one action at a time and
sends the result when the action ends. The message waits until the link is free, occupies the link
for some time, and arrives after the latency. Passing a result between two stages of one rank takes
no time.

This module prepares the simulation and defines its result. The event loop is in ``simulator``, and
the durations are in ``workload``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rank_kernel, simulator
from megatron.adaptive.schedule.action import NUMBER, Action
from megatron.adaptive.schedule.numba_kernels import compiled_loop, plain_loop
from megatron.adaptive.schedule.policy import Policy, actions_of, rule_of
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.schedule import Order, Schedule
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import PS_PER_S, StageProfile, StageTimes, Workload, draw


@dataclass(frozen=True, slots=True)
class SimSpan:
    """An action with its start and end, in simulated seconds after the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SimResult:
    """The result of a simulated step.

    Attributes:
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches in the step. If microbatches are cut into
            ``workload.num_slices`` slices, the index of an action counts slices.
        weight_pieces: Number of W actions per weight gradient, or 0 if the backward pass computes
            weight gradients.
        workload: Durations of actions and messages in the simulated step.
        codes: Codes ``kind * chunks + chunk`` of each rank's actions in execution order,
            ``[actions] int64`` per rank.
        starts_ps: Start time of each action in ``codes``, in picoseconds, ``[actions] int64`` per
            rank.
        ends_ps: End time of each action in ``codes``, in picoseconds, ``[actions] int64`` per rank.
        peak_units: Maximum activation memory that each rank held. The unit is the activation memory
            of one microbatch in all chunks of the rank.
    """

    placement: Placement
    num_microbatches: int
    weight_pieces: int
    workload: Workload
    codes: tuple[Any, ...]
    starts_ps: tuple[Any, ...]
    ends_ps: tuple[Any, ...]
    peak_units: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """Returns the time from the start of the step to the end of its last action, in seconds."""
        return max(int(ends.max()) for ends in self.ends_ps) / PS_PER_S

    @property
    def num_actions(self) -> int:
        """Returns the number of actions on all ranks in the step."""
        return sum(len(codes) for codes in self.codes)

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """Returns each rank's idle time divided by the duration of the step."""
        makespan_s = self.makespan_s
        return tuple(1 - busy_s / makespan_s if makespan_s else 0.0 for busy_s in self.busy_s)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Returns the time in seconds that each rank spends in actions.

        Time in which two actions overlap is counted once.
        """
        return tuple(
            int((ends - np.maximum(starts, np.append(0, ends)[:-1])).clip(0).sum()) / PS_PER_S
            for starts, ends in zip(
                self.starts_ps, map(np.maximum.accumulate, self.ends_ps), strict=True
            )
        )

    @property
    def hidden_fraction(self) -> float:
        """Returns the fraction of communication within stages that overlaps with computation."""
        work = self.workload
        if work.exchanges_ps is None:
            return 0.0
        exchange_s = int(work.exchanges_ps.sum()) / PS_PER_S
        apart_s = int(work.durations_ps.sum()) / PS_PER_S
        return (apart_s - sum(self.busy_s)) / exchange_s

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Returns the actions of each rank in execution order.

        The microbatch of an action is its index among the microbatches that the rank processes.
        """
        chunks = self.placement.num_chunks
        pieces = self.weight_pieces
        slices = self.workload.num_slices
        return tuple(actions_of(codes.tolist(), chunks, pieces, slices) for codes in self.codes)

    @cached_property
    def spans(self) -> tuple[tuple[SimSpan, ...], ...]:
        """Returns the actions of each rank with their times, in execution order."""
        return tuple(
            tuple(
                SimSpan(action, start / PS_PER_S, end / PS_PER_S)
                for action, start, end in zip(order, starts.tolist(), ends.tolist(), strict=True)
            )
            for order, starts, ends in zip(self.orders, self.starts_ps, self.ends_ps, strict=True)
        )

    def to_schedule(self, name: str) -> Schedule:
        """Returns a schedule called ``name`` with the simulated order of actions."""
        slices = self.workload.num_slices
        # Callers only convert steps in which all microbatches have the same number of slices.
        assert isinstance(slices, int)
        return Schedule(
            name=name,
            placement=self.placement,
            num_microbatches=self.num_microbatches,
            num_slices=slices,
            orders=self.orders,
        )


def simulate(
    placement: Placement,
    num_microbatches: int,
    policies: Sequence[Policy],
    times: StageTimes | StageProfile | Workload,
    *,
    seed: int = 0,
    compiled: bool = False,
    cap: float | None = None,
    sizes: Sequence[float] | None = None,
    forward_only: bool = False,
    weight_pieces: int = 0,
    beside: bool = False,
    num_slices: int = 1,
    frozen_stages: int = 0,
) -> SimResult:
    """Simulates one step of a pipeline, and returns the times of all actions.

    Args:
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step, at least 1.
        policies: Policy of each rank. Several ranks may share a policy object.
        times: Durations per stage, or durations of all actions in the step, as returned by
            ``workload.draw``.
        seed: Random seed for drawing durations, if ``times`` contains durations per stage.
        compiled: Whether to run the loop as machine code, which numba compiles in the first call.
            This requires a rule of ``runtime_rules``. In plain Python, the loop is about 50 times
            slower.
        cap: Maximum activation memory of each rank under a run-time rule, or ``None`` for no limit.
            The unit is the activation memory of one microbatch in all chunks of the rank.
        sizes: Activation memory of each microbatch or slice relative to the mean. If ``None``, the
            sizes in ``times`` are used, or equal sizes if ``times`` contains no sizes.
        forward_only: Whether the step is an evaluation, which has no backward passes and keeps no
            activations.
        weight_pieces: Number of W actions into which a microbatch's weight gradients are split, or
            0 if the backward pass computes weight gradients.
        beside: Whether an action may start while an action of another kind communicates.
        num_slices: Number of slices of each microbatch if ``times`` contains durations per stage. A
            ``Workload`` in ``times`` already contains its number of slices.
        frozen_stages: Number of leading pipeline stages through which no gradient flows. They have
            no backward passes, and run at most ``cap`` microbatches ahead of the next stage.

    Returns:
        Times, idle fractions and peak memory of all ranks.

    Raises:
        ScheduleError: An argument is out of range, a policy chose an action that is not ready, or
            the ranks deadlock. The message about a deadlock lists the missing inputs.
    """
    if len(policies) != placement.num_ranks:
        raise ScheduleError(
            f"the number of policies must be {placement.num_ranks}, one per rank, got "
            f"{len(policies)}"
        )
    workload = times
    if not isinstance(workload, Workload):
        workload = draw(placement, num_microbatches, workload, seed=seed, num_slices=num_slices)
    states = [
        RankState(
            placement=placement,
            rank=rank,
            num_microbatches=num_microbatches,
            cap=cap,
            sizes=sizes if sizes is not None or not workload.sizes else workload.sizes,
            forward_only=forward_only,
            weight_pieces=weight_pieces,
            beside=beside,
            num_slices=workload.num_slices,
            frozen_stages=frozen_stages,
        )
        for rank in range(placement.num_ranks)
    ]
    return run_states(states, policies, workload, compiled=compiled)


def run_states(
    states: Sequence[RankState],
    policies: Sequence[Policy],
    workload: Workload,
    *,
    widths: Sequence[int] | None = None,
    compiled: bool = False,
) -> SimResult:
    """Simulates one step, starting from the given states of all ranks.

    The simulation may modify the states.

    Args:
        states: State of each rank at the start of the step.
        policies: Policy of each rank.
        workload: Durations of all actions and messages in the step.
        widths: Number of ranks of each stage if stages have several ranks (see ``unequal_widths``).
            In that case, ``state.rank`` is the index of the stage.
        compiled: Whether to run the loop as machine code (see ``simulate``).
    """
    placement = states[0].placement
    compiled_rule = rule_of(policies) if compiled else None
    world = _world(states, workload, widths)
    if compiled_rule is None:
        world = _run_plain(world, states, policies)
    else:
        rule, hints = compiled_rule
        loop = compiled_loop(rule)
        if loop(world._replace(hints=_padded(hints))) != simulator.DONE_ALL:
            # The compiled loop failed. Run the step again in plain Python, which raises an error
            # with the reason.
            world = _run_plain(_world(states, workload, widths), states, policies)
    totals = [state.num_actions for state in states]
    return SimResult(
        placement=placement,
        num_microbatches=workload.num_microbatches,
        weight_pieces=states[0].weight_pieces,
        workload=workload,
        codes=_cut(world.codes, totals),
        starts_ps=_cut(world.starts, totals),
        ends_ps=_cut(world.ends, totals),
        peak_units=tuple(
            int(numbers[rank_kernel.PEAK]) / rank_kernel.MEMORY_SCALE for numbers in world.states
        ),
    )


def _cut(rows: Any, totals: list[int]) -> tuple[Any, ...]:
    return tuple(
        np.asarray(row[:total], dtype=np.int64) for row, total in zip(rows, totals, strict=True)
    )


def _padded(rows: Sequence[Sequence[int]]) -> Any:
    """Converts ``rows`` of different lengths to an array that is padded with -1."""
    padded = np.full((len(rows), max(1, *map(len, rows))), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _run_plain(world: Any, states: Sequence[RankState], policies: Sequence[Policy]) -> Any:
    def rule(s: rank_kernel.State, hint: Sequence[int]) -> int:
        rank = s[rank_kernel.RANK]
        state = states[rank]
        policy = policies[rank]
        action = policy.pick(state)
        if action is None:
            return -1
        if not state.is_ready(action):
            raise ScheduleError(
                f"policy {policy.name} chose an action that is not ready: rank {rank}:"
                f" {action.label(state.num_slices)} cannot start:"
                f" {state.why_not(action)}; {state.describe()}"
            )
        code = NUMBER[action.kind] * state.placement.num_chunks + action.chunk
        return code + rank_kernel.lanes(s) * (action.paired and state.beside)

    lists = simulator.World(*(field.tolist() for field in world))
    lists = lists._replace(states=[state.numbers for state in states])
    if plain_loop(rule)(lists) != simulator.DONE_ALL:
        waits = "; ".join(
            f"rank {state.rank} waits for {state.missing()}" for state in states if not state.done
        )
        raise ScheduleError(f"deadlock: no rank can continue: {waits}")
    return lists


_PER_SLOT = ("works", "exchanged", "counts", "steps", "due", "indices")
"""Fields of ``World`` with one number per running action. Each rank can run two actions."""


def _world(states: Sequence[RankState], workload: Workload, widths: Sequence[int] | None) -> Any:
    """Returns the state of a simulation at the start of a step, with an empty hint for each rank.

    See :func:`run_states` for the arguments.
    """
    placement = states[0].placement
    longest = max(state.num_actions for state in states)
    ranks = len(states)
    chunks = placement.num_chunks
    first = [placement.locate(stage)[0] for stage in range(placement.num_stages)]
    if widths is not None:
        first = [sum(widths[:stage]) for stage in range(len(widths))]
    events = ranks + 2 * workload.delays_ps.size + 1

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, dtype=np.int64)

    def array(values: Sequence[Any]) -> Any:
        return np.array(values, dtype=np.int64)

    exchanges = workload.exchanges_ps
    if exchanges is None:
        exchanges = zeros(*workload.delays_ps.shape)
    return simulator.World(
        states=_padded([state.numbers for state in states]),
        hints=zeros(ranks, 1),
        stages=array([placement.stage_of(s.rank, c) for s in states for c in range(chunks)]),
        first_ranks=array(first),
        widths=array([1] * len(first) if widths is None else widths),
        total=array([workload.durations_ps.shape[2]]),
        durations=workload.durations_ps.reshape(-1),
        exchanges=exchanges.reshape(-1),
        cuts=zeros(placement.num_stages) + workload.cuts,
        delays=workload.delays_ps.reshape(-1),
        occupancy=workload.occupancy_ps.reshape(-1),
        free=zeros(ranks * ranks),
        heap=zeros(2 * events),
        heap_size=zeros(1),
        turn=zeros(ranks) - 1,
        last=array(range(ranks)),
        was_filler=zeros(ranks),
        waking=zeros(ranks),
        wakes=zeros(ranks),
        num_woken=zeros(1),
        link=zeros(ranks),
        running=zeros(2 * ranks) - 1,
        **{name: zeros(2 * ranks) for name in _PER_SLOT},
        codes=zeros(ranks, longest),
        starts=zeros(ranks, longest),
        ends=zeros(ranks, longest),
    )
