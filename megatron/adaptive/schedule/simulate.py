"""Event simulation of one step: when does each action run if every rank follows its policy.

The simulator uses the state and the policies of the executor. A rank runs one action at a time,
sends its result when the action ends, and the result arrives after the link was free, the message's
time on it, and the latency; a hand-over between two stages of one rank takes no time.

Owns the set-up and the result. The loop is in ``engine``, the times in ``workload``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import engine, machine
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.compiled import Rule, compiled_loop, plain_loop
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Policy, rule_of
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.state import RankState
from megatron.adaptive.schedule.workload import PS_PER_S, Jitter, Link, StageTimes, Workload, draw

__all__ = ["Jitter", "Link", "SimResult", "SimSpan", "StageTimes", "Workload", "draw", "simulate"]

_KINDS = tuple(ActionKind)


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
        peak_units: per rank, the most activations held, in the unit of the activation sizes.
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
        return max(int(ends[-1]) for ends in self.ends_ps) / PS_PER_S

    @property
    def num_actions(self) -> int:
        """Actions of all ranks."""
        return sum(len(codes) for codes in self.codes)

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """Per rank, idle time divided by the makespan."""
        whole = self.makespan_s * PS_PER_S
        return tuple(
            1 - int((ends - starts).sum()) / whole if whole else 0.0
            for starts, ends in zip(self.starts_ps, self.ends_ps, strict=True)
        )

    @cached_property
    def spans(self) -> tuple[tuple[SimSpan, ...], ...]:
        """Per rank, its actions in the order they ran."""
        return tuple(
            tuple(
                SimSpan(action, start / PS_PER_S, end / PS_PER_S)
                for action, start, end in zip(
                    self._actions(rank),
                    self.starts_ps[rank].tolist(),
                    self.ends_ps[rank].tolist(),
                    strict=True,
                )
            )
            for rank in range(self.placement.num_ranks)
        )

    def to_schedule(self, name: str) -> Schedule:
        """The orders that the policies chose, as a schedule that can be followed."""
        return Schedule(
            name=name,
            placement=self.placement,
            num_microbatches=self.num_microbatches,
            orders=tuple(tuple(self._actions(rank)) for rank in range(self.placement.num_ranks)),
        )

    def _actions(self, rank: int) -> list[Action]:
        chunks, pieces = self.placement.num_chunks, max(1, self.weight_pieces)
        counts = [0] * (3 * chunks)
        actions = []
        for code in self.codes[rank].tolist():
            kind, chunk = divmod(code, chunks)
            index = counts[code]
            counts[code] = index + 1
            if kind == machine.W:
                actions.append(Action(ActionKind.W, chunk, index // pieces, index % pieces))
            else:
                actions.append(Action(_KINDS[kind], chunk, index))
        return actions


def simulate(
    placement: Placement,
    num_microbatches: int,
    policies: Sequence[Policy],
    times: StageTimes | Workload,
    *,
    latency_s: float = 0.0,
    jitter: Jitter | None = None,
    cap: float | None = None,
    activation_units: Sequence[float] | None = None,
    forward_only: bool = False,
    weight_pieces: int = 0,
    kept_fraction: float = 1.0,
    compiled: bool = False,
) -> SimResult:
    """Simulate one step.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step, at least 1.
        policies: one per rank; one object may serve several.
        times: mean durations per stage, or everything already drawn (``workload.draw``).
        latency_s: seconds of every message between two ranks; only with mean durations.
        jitter: random factors; only with mean durations.
        cap: activation cap of every rank, None for no limit.
        activation_units: size of one microbatch per local chunk; default ``1 / num_chunks`` each.
        forward_only: simulate an evaluation step.
        weight_pieces: parts of each weight gradient; 0 for whole backwards.
        kept_fraction: part of the activations that a split backward leaves for the weight gradient.
        compiled: use machine code, which numba makes at the first call; needs rules of ``rules``.
            Without it the same loop runs as Python, some fifty times slower.

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
    if isinstance(workload, StageTimes):
        workload = draw(
            placement, num_microbatches, workload, jitter=jitter, link=Link(latency_s=latency_s)
        )
    states = [
        RankState(
            placement=placement,
            rank=rank,
            num_microbatches=num_microbatches,
            activation_units=activation_units,
            cap=cap,
            forward_only=forward_only,
            weight_pieces=weight_pieces,
            kept_fraction=kept_fraction,
        )
        for rank in range(placement.num_ranks)
    ]
    rules = rule_of(policies, placement.num_chunks) if compiled else None
    world = None
    if rules is not None:
        world = _compiled_run(states, workload, *rules)
    if world is None:
        world = _plain_run(states, workload, policies)
    totals = [state.num_actions for state in states]
    return SimResult(
        placement=placement,
        num_microbatches=num_microbatches,
        weight_pieces=states[0].weight_pieces,
        workload=workload,
        codes=_cut(world.codes, totals),
        starts_ps=_cut(world.starts, totals),
        ends_ps=_cut(world.ends, totals),
        peak_units=tuple(
            int(numbers[machine.PEAK]) / machine.MEMORY_SCALE for numbers in world.states
        ),
    )


def _cut(rows: Any, totals: list[int]) -> tuple[Any, ...]:
    return tuple(
        np.asarray(row[:total], dtype=np.int64) for row, total in zip(rows, totals, strict=True)
    )


def _compiled_run(
    states: Sequence[RankState],
    workload: Workload,
    rule: Rule,
    hints: Sequence[Sequence[int]],
) -> engine.World | None:
    """Run the compiled loop; None where it could not end, so that plain Python says why."""
    width = max(1, *(len(hint) for hint in hints))
    padded = np.full((len(hints), width), -1, dtype=np.int64)
    for rank, hint in enumerate(hints):
        padded[rank, : len(hint)] = hint
    world = _world(
        states[0].placement,
        np.array([state.numbers for state in states], dtype=np.int64),
        padded,
        workload,
        lambda values: np.asarray(values, dtype=np.int64).reshape(-1),
        lambda count: np.zeros((len(states), count), dtype=np.int64),
        max(state.num_actions for state in states),
    )
    return world if compiled_loop(rule)(world) == engine.DONE_ALL else None


def _plain_run(
    states: Sequence[RankState], workload: Workload, policies: Sequence[Policy]
) -> engine.World:
    def rule(s: machine.State, hint: Sequence[int]) -> int:
        rank = s[machine.RANK]
        state, policy = states[rank], policies[rank]
        action = policy.pick(state)
        if action is None:
            return -1
        if not state.is_ready(action):
            raise ScheduleError(
                f"policy {policy.name} broke the rules: rank {rank}: {action} cannot start:"
                f" {state.why_not(action)}; {state.describe()}"
            )
        return _KINDS.index(action.kind) * state.placement.num_chunks + action.chunk

    world = _world(
        states[0].placement,
        [state.numbers for state in states],
        [()] * len(states),
        workload,
        lambda values: np.asarray(values, dtype=np.int64).reshape(-1).tolist(),
        lambda count: [[0] * count for _ in states],
        max(state.num_actions for state in states),
    )
    if plain_loop(rule)(world) != engine.DONE_ALL:
        waits = "; ".join(
            f"rank {state.rank} waits for {state.missing()}" for state in states if not state.done
        )
        raise ScheduleError(f"deadlock: no rank can go on: {waits}")
    return world


def _world(
    placement: Placement,
    states: Any,
    hints: Any,
    workload: Workload,
    flat: Callable[[Any], Any],
    rows: Callable[[int], Any],
    longest: int,
) -> engine.World:
    """Lay everything out; ``flat`` and ``rows`` make the sequences of the loop that will run."""
    ranks, chunks = placement.num_ranks, placement.num_chunks
    events = ranks + 2 * int(workload.delays_ps.size) + 1
    return engine.World(
        states=states,
        hints=hints,
        stages=flat([placement.stage_of(r, c) for r in range(ranks) for c in range(chunks)]),
        where=flat([placement.locate(stage)[0] for stage in range(placement.num_stages)]),
        durations=flat(workload.durations_ps),
        delays=flat(workload.delays_ps),
        occupancy=flat(workload.occupancy_ps),
        free=flat([0] * ranks * ranks),
        window=flat(workload.window_ps),
        heap_times=flat([0] * events),
        heap_codes=flat([0] * events),
        heap_size=flat([0]),
        running=flat([-1] * ranks),
        codes=rows(longest),
        starts=rows(longest),
        ends=rows(longest),
    )
