"""Event simulation of one step: when does each action run if every rank follows its policy.

The simulator uses the state and the policies of the executor. A rank runs one action at a time,
sends its result when the action ends, and the result arrives after the link was free, the message's
time on it, and the latency; a hand-over between two stages of one rank takes no time.

Owns the set-up and the result. The loop is in ``engine``, the times in ``workload``.
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
    """One action in simulated time, seconds since the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SimResult:
    """Records one simulated step.

    Attributes:
        placement: the pipeline simulated.
        num_microbatches: microbatches of the step.
        weight_pieces: parts of each weight gradient, 0 for whole backwards.
        workload: the times it was simulated with.
        codes: per rank, ``[actions] int64``: ``kind * chunks + chunk`` in the order they ran.
        starts_ps: per rank, ``[actions] int64``.
        ends_ps: per rank, ``[actions] int64``.
        peak_units: per rank, the most activations held, in whole-rank microbatches.
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
        """Seconds from start to the end of the last action."""
        return max(int(ends.max()) for ends in self.ends_ps) / PS_PER_S

    @property
    def num_actions(self) -> int:
        """Actions of all ranks."""
        return sum(len(codes) for codes in self.codes)

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """Per rank, idle time divided by the makespan."""
        whole = self.makespan_s
        return tuple(1 - busy / whole if whole else 0.0 for busy in self.busy_s)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Per rank, seconds within actions; those of a pair count once."""
        return tuple(
            int((ends - np.maximum(starts, np.append(0, ends)[:-1])).clip(0).sum()) / PS_PER_S
            for starts, ends in zip(
                self.starts_ps, map(np.maximum.accumulate, self.ends_ps), strict=True
            )
        )

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication within stages during which their ranks compute."""
        work = self.workload
        if work.exchanges_ps is None:
            return 0.0
        exchange_s = int(work.exchanges_ps.sum()) / PS_PER_S
        apart_s = int(work.durations_ps.sum()) / PS_PER_S
        return (apart_s - sum(self.busy_s)) / exchange_s

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Per rank, its actions in the order they ran, in its own microbatches."""
        chunks = self.placement.num_chunks
        return tuple(actions_of(codes.tolist(), chunks, self.weight_pieces) for codes in self.codes)

    @cached_property
    def spans(self) -> tuple[tuple[SimSpan, ...], ...]:
        """Per rank, its actions in the order they ran."""
        return tuple(
            tuple(
                SimSpan(action, start / PS_PER_S, end / PS_PER_S)
                for action, start, end in zip(order, starts.tolist(), ends.tolist(), strict=True)
            )
            for order, starts, ends in zip(self.orders, self.starts_ps, self.ends_ps, strict=True)
        )

    def to_schedule(self, name: str) -> Schedule:
        """The orders that the policies chose, as a schedule that can be followed."""
        return Schedule(
            name=name,
            placement=self.placement,
            num_microbatches=self.num_microbatches,
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
    **more: Any,
) -> SimResult:
    """Simulate one step.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step, at least 1.
        policies: one per rank; one object may serve several.
        times: per stage, or everything already drawn (``workload.draw``).
        seed: of what is drawn here.
        compiled: use machine code, which numba makes at the first call; needs rules of ``rules``.
            Without it the same loop runs as Python, some fifty times slower.
        **more: of the state of every rank, see :class:`RankState`.

    Returns:
        Times, idle fractions and peaks.

    Raises:
        ScheduleError: an argument is out of range, a policy picked an action that is not ready,
            or all ranks wait for ever (the message says for what).
    """
    if len(policies) != placement.num_ranks:
        raise ScheduleError(
            f"{len(policies)} policies for {placement.num_ranks} ranks: give one per rank"
        )
    workload = times
    if not isinstance(workload, Workload):
        workload = draw(placement, num_microbatches, workload, seed=seed)
    states = [
        RankState(placement=placement, rank=rank, num_microbatches=num_microbatches, **more)
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
    """Simulate one step of ranks in their fresh states, which are used up.

    Args:
        states: one per rank of the job's pipeline.
        policies: likewise.
        workload: times of the whole step.
        widths: ranks of each stage, stage by stage; where given, ``states`` are those of pipelines
            of one rank each.
        compiled: see ``simulate``.
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
            world = _run_plain(_world(states, workload, widths), states, policies)  # says why
    totals = [state.num_actions for state in states]
    return SimResult(
        placement=placement,
        num_microbatches=workload.durations_ps.shape[2],
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
    """Rows as one array, with -1 behind the shorter ones."""
    padded = np.full((len(rows), max(1, *map(len, rows))), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _run_plain(world: Any, states: Sequence[RankState], policies: Sequence[Policy]) -> Any:
    def rule(s: rank_kernel.State, hint: Sequence[int]) -> int:
        rank = s[rank_kernel.RANK]
        state, policy = states[rank], policies[rank]
        action = policy.pick(state)
        if action is None:
            return -1
        if not state.is_ready(action):
            raise ScheduleError(
                f"policy {policy.name} broke the rules: rank {rank}: {action} cannot start:"
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
        raise ScheduleError(f"deadlock: no rank can go on: {waits}")
    return lists


_PLACES = ("works", "exchanged", "counts", "steps", "due", "at")


def _world(states: Sequence[RankState], workload: Workload, widths: Sequence[int] | None) -> Any:
    """Lay everything out as arrays, without hints."""
    placement, longest = states[0].placement, max(state.num_actions for state in states)
    ranks, chunks = len(states), placement.num_chunks
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
        where=array(first),
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
        **{name: zeros(2 * ranks) for name in _PLACES},
        codes=zeros(ranks, longest),
        starts=zeros(ranks, longest),
        ends=zeros(ranks, longest),
    )
