"""Event simulation of one step: when does each action run if every rank follows its policy.

The simulator drives the same ``RankState`` and the same policies as the executor. A rank runs one
action at a time, sends its result when the action ends, and the result arrives after the link's
latency; a hand-over between two stages of one rank takes no time. Links do not fill up.

Owns time: durations, latencies and their random factors. Time is counted in whole picoseconds, so
that two events meant to coincide do, however their times were summed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.state import RankState

__all__ = ["Jitter", "SimResult", "SimSpan", "StageTimes", "simulate"]

_PS_PER_S = 10**12


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """How long one microbatch takes on each stage.

    Attributes:
        forward_s: seconds of a forward, per stage in pipeline order.
        backward_s: seconds of a whole backward, per stage.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @classmethod
    def equal(cls, num_stages: int, *, forward_s: float, backward_s: float) -> StageTimes:
        """The same times on every stage."""
        return cls(forward_s=(forward_s,) * num_stages, backward_s=(backward_s,) * num_stages)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Random factors on durations and latencies: lognormal with mean 1.

    They are drawn before the step in a fixed order (stage, microbatch, kind), so the same seed
    gives every policy the same durations.

    Attributes:
        rng: source of all draws; it advances.
        action_sigma: sigma of the logarithm of a duration's factor.
        latency_sigma: the same for the latency of each message.

    Raises:
        ScheduleError: a sigma is negative or not finite.
    """

    rng: random.Random
    action_sigma: float = 0.0
    latency_sigma: float = 0.0

    def __post_init__(self) -> None:
        for name in ("action_sigma", "latency_sigma"):
            sigma = getattr(self, name)
            if not (math.isfinite(sigma) and sigma >= 0):
                raise ScheduleError(f"{name} {sigma}: must be finite and not negative")


@dataclass(frozen=True, slots=True)
class SimSpan:
    """One action in simulated time, seconds since the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """What one simulated step did.

    Attributes:
        placement: the pipeline simulated.
        num_microbatches: microbatches of the step.
        makespan_s: seconds from start to the end of the last action.
        spans: per rank, its actions in the order they ran.
        bubble_fraction: per rank, idle time divided by the makespan.
        peak_units: per rank, the most activations held, in the unit of the activation sizes.
    """

    placement: Placement
    num_microbatches: int
    makespan_s: float
    spans: tuple[tuple[SimSpan, ...], ...]
    bubble_fraction: tuple[float, ...]
    peak_units: tuple[float, ...]

    def to_schedule(self, name: str) -> Schedule:
        """The orders that the policies chose, as a schedule that can be followed."""
        return Schedule(
            name=name,
            placement=self.placement,
            num_microbatches=self.num_microbatches,
            orders=tuple(tuple(span.action for span in spans) for spans in self.spans),
        )


def simulate(
    placement: Placement,
    num_microbatches: int,
    policies: Sequence[Policy],
    times: StageTimes,
    *,
    latency_s: float = 0.0,
    jitter: Jitter | None = None,
    cap: float | None = None,
    activation_units: Sequence[float] | None = None,
    forward_only: bool = False,
) -> SimResult:
    """Simulate one step.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step, at least 1.
        policies: one per rank; one object may serve several.
        times: durations per stage.
        latency_s: seconds from the end of an action to the arrival of its result on another rank.
        jitter: random factors; None for none.
        cap: activation cap of every rank, None for no limit.
        activation_units: size of one microbatch per local chunk; default ``1 / num_chunks`` each.
        forward_only: simulate an evaluation step.

    Returns:
        Times, idle fractions and peaks.

    Raises:
        ScheduleError: an argument is out of range, a policy picked an action that is not ready,
            or all ranks wait for ever (the message says for what).
    """
    _check(placement, policies, times, latency_s)
    states = [
        RankState(
            placement=placement,
            rank=rank,
            num_microbatches=num_microbatches,
            activation_units=activation_units,
            cap=cap,
            forward_only=forward_only,
        )
        for rank in range(placement.num_ranks)
    ]
    costs = _Costs(placement, num_microbatches, times, latency_s, jitter)
    spans = _Engine(placement, states, policies, costs).run()
    end_ps = max(rank_spans[-1][2] for rank_spans in spans)
    busy_ps = [sum(end - start for _, start, end in rank_spans) for rank_spans in spans]
    return SimResult(
        placement=placement,
        num_microbatches=num_microbatches,
        makespan_s=end_ps / _PS_PER_S,
        spans=tuple(
            tuple(SimSpan(a, start / _PS_PER_S, end / _PS_PER_S) for a, start, end in rank_spans)
            for rank_spans in spans
        ),
        bubble_fraction=tuple(1 - busy / end_ps if end_ps else 0.0 for busy in busy_ps),
        peak_units=tuple(state.peak_in_flight for state in states),
    )


def _check(
    placement: Placement, policies: Sequence[Policy], times: StageTimes, latency_s: float
) -> None:
    if len(policies) != placement.num_ranks:
        raise ScheduleError(
            f"{len(policies)} policies for {placement.num_ranks} ranks: give one per rank"
        )
    for what, values in (("forward", times.forward_s), ("backward", times.backward_s)):
        if len(values) != placement.num_stages:
            raise ScheduleError(
                f"{len(values)} {what} times for {placement.num_stages} stages: give one per stage"
            )
        for stage, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise ScheduleError(
                    f"{what} time {value} s of stage {stage}: must be finite and not negative"
                )
    if not (math.isfinite(latency_s) and latency_s >= 0):
        raise ScheduleError(f"latency {latency_s} s: must be finite and not negative")


class _Costs:
    """All durations and latencies of a step in picoseconds, drawn once, ``[stage][microbatch]``."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        times: StageTimes,
        latency_s: float,
        jitter: Jitter | None,
    ) -> None:
        def draw(mean_s: float, sigma: float) -> int:
            if jitter is not None and sigma > 0:
                mean_s *= jitter.rng.lognormvariate(-sigma * sigma / 2, sigma)
            return round(mean_s * _PS_PER_S)

        action_sigma = jitter.action_sigma if jitter else 0.0
        latency_sigma = jitter.latency_sigma if jitter else 0.0
        self.duration: dict[ActionKind, list[list[int]]] = {ActionKind.F: [], ActionKind.B: []}
        self.latency: dict[ActionKind, list[list[int]]] = {ActionKind.F: [], ActionKind.B: []}
        means = {ActionKind.F: times.forward_s, ActionKind.B: times.backward_s}
        for stage in range(placement.num_stages):
            for kind in (ActionKind.F, ActionKind.B):
                self.duration[kind].append([])
                self.latency[kind].append([])
            for _ in range(num_microbatches):
                for kind in (ActionKind.F, ActionKind.B):
                    self.duration[kind][stage].append(draw(means[kind][stage], action_sigma))
                    self.latency[kind][stage].append(draw(latency_s, latency_sigma))


class _Engine:
    """The event loop. An event is the end of an action, or the arrival of an action's input."""

    def __init__(
        self,
        placement: Placement,
        states: Sequence[RankState],
        policies: Sequence[Policy],
        costs: _Costs,
    ) -> None:
        self._placement = placement
        self._states = states
        self._policies = policies
        self._costs = costs
        self._spans: list[list[tuple[Action, int, int]]] = [[] for _ in states]
        self._busy = [False] * len(states)
        # (time in ps, running number, rank, action, is this its end); numbers keep ties in order.
        self._events: list[tuple[int, int, int, Action, bool]] = []
        self._num_events = 0

    def run(self) -> list[list[tuple[Action, int, int]]]:
        """Run to the end; returns per rank (action, start, end) in picoseconds."""
        for rank in range(len(self._states)):
            self._decide(rank, 0)
        while self._events:
            now = self._events[0][0]
            touched = set()
            # All that happens at one moment is known before anyone decides.
            while self._events and self._events[0][0] == now:
                _, _, rank, action, is_end = heappop(self._events)
                touched.add(rank)
                if is_end:
                    self._end(rank, action, now)
                else:
                    self._states[rank].arrive(action.kind, action.chunk, action.microbatch)
            for rank in sorted(touched):
                if not self._busy[rank]:
                    self._decide(rank, now)
        stuck = [state for state in self._states if not state.done]
        if stuck:
            waits = "; ".join(f"rank {state.rank} waits for {state.missing()}" for state in stuck)
            raise ScheduleError(f"deadlock: no rank can go on: {waits}")
        return self._spans

    def _push(self, time_ps: int, rank: int, action: Action, is_end: bool) -> None:
        self._num_events += 1
        heappush(self._events, (time_ps, self._num_events, rank, action, is_end))

    def _decide(self, rank: int, now: int) -> None:
        policy = self._policies[rank]
        action = policy.pick(self._states[rank])
        if action is None:
            return
        try:
            self._states[rank].start(action)
        except ScheduleError as error:
            raise ScheduleError(f"policy {policy.name} broke the rules: {error}") from error
        stage = self._placement.stage_of(rank, action.chunk)
        end = now + self._costs.duration[action.kind][stage][action.microbatch]
        self._busy[rank] = True
        self._spans[rank].append((action, now, end))
        self._push(end, rank, action, True)

    def _end(self, rank: int, action: Action, now: int) -> None:
        self._busy[rank] = False
        self._states[rank].finish(action)
        consumer = self._placement.enabled_by(rank, action)
        if consumer is None or (self._states[rank].forward_only and action.kind is ActionKind.B):
            return
        to_rank, to_action = consumer
        stage = self._placement.stage_of(rank, action.chunk)
        latency = self._costs.latency[action.kind][stage][action.microbatch]
        self._push(now if to_rank == rank else now + latency, to_rank, to_action, False)
