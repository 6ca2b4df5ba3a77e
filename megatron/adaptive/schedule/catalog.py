"""Names of the schedules and policies that a user can ask for, and how each of them would run.

Owns the checks that every schedule shares, the choice of what a name stands for on a pipeline
(placement, pieces, cap), and the choice of a hint for ``hinted``. The names themselves, with the
function of each, are in ``config.schedule_specs``:

- The function of a fixed schedule takes the placement of the stages and the number of
  microbatches, and returns the order of each rank.
- The function of a rule of this package works on the numbers of a rank's state, so that numba can
  compile it (see ``runtime_rules``). A user's rule takes the :class:`RankState` itself (see
  ``own_schedule``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from megatron.adaptive.config.schedule import default_placement
from megatron.adaptive.config.schedule_specs import (
    BUILT_IN,
    ScheduleSpec,
    schedule_spec,
    selectable_names,
)
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.memory_caps import chunk_shares, default_cap, with_rounding
from megatron.adaptive.schedule.own_schedule import own_rule, own_schedule
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy, codes_of
from megatron.adaptive.schedule.schedule import Schedule, check_num_microbatches
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.validate import peak_units
from megatron.adaptive.schedule.workload import Link, StageTimes, Workload, draw

ANNEALED = "annealed"
"""Name of a list that ``auto`` makes for one pipeline (see ``anneal``); users cannot ask for it. In
steps of other numbers of microbatches it is ``hinted``."""
_COMPILED_FROM = 20_000
Pace = tuple[float, float, float]
"""Latency of a message, backward by inputs and weight gradients, in forwards of a stage."""
EQUAL: Pace = (0.0, 1.0, 1.0)
DEFAULT_PIECES = 4
"""Parts of a weight gradient under a run-time rule: small enough to fill waits for messages."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule or policy as it would run.

    Attributes:
        name: of the schedule or policy.
        placement: which rank holds which stage.
        weight_pieces: parts of each weight gradient, 0 for whole backwards.
        cap: of every rank in whole-rank microbatches, for a rule; ``None`` for no limit, and for a
            static schedule, whose memory is its own.
        shares: whether chunks have shares of the cap under ``adaptive`` (see ``memory``).
        pace: of the stages, by which ``hinted`` chooses its hint.
        hint: what ``hinted`` or ``annealed`` follows in steps of as many microbatches; ``None`` for
            a choice of its own, which both make in others.
    """

    name: str
    placement: Placement
    weight_pieces: int = 0
    cap: float | None = None
    shares: bool = True
    pace: Pace = EQUAL
    hint: Schedule | None = field(default=None, repr=False)

    def __str__(self) -> str:
        chunks = self.placement.num_chunks
        text = f"{self.name} ({self.placement.kind}, {chunks} chunk{'s' * (chunks > 1)}"
        if self.weight_pieces:
            text += f", W in {self.weight_pieces}"
        if not self.shares:
            text += ", no shares"
        if self.hint is not None and self.name != ANNEALED:
            text += ", annealed hint"
        return text + (f", cap {self.cap:g})" if self.cap is not None else ")")

    def policies(self, num_microbatches: int) -> tuple[Policy, ...]:
        """Makes one policy per rank: followers of a static schedule, or the rule of the name.

        Raises:
            ScheduleError: unknown name, or the schedule refuses the placement or microbatches.
        """
        name, placement, hint = self.name, self.placement, self.hint
        if hint is not None and hint.num_microbatches != num_microbatches:
            hint = None
        if name == ANNEALED:
            if hint is not None:
                return tuple(Follow(order, name) for order in hint.orders)
            name = "hinted"
        if not is_rule(name):
            schedule = make_schedule(name, placement, num_microbatches)
            return tuple(Follow(order, name) for order in schedule.orders)
        spec = schedule_spec(name)
        if spec.is_own:
            policy = own_rule(spec, placement, num_microbatches, self.cap, self.weight_pieces)
            return (policy,) * placement.num_ranks
        rule = spec.load()
        if name == "hinted":
            pieces = self.weight_pieces
            hint = hint or hint_for(placement, num_microbatches, self.cap, self.pace, pieces)
            codes = [hint_codes(order, placement.num_chunks, pieces) for order in hint.orders]
            return tuple(RulePolicy(name, rule, of_rank) for of_rank in codes)
        if name == "adaptive" and self.shares and self.cap is not None:
            ranks = range(placement.num_ranks)
            shares = [chunk_shares(placement, rank, self.cap) for rank in ranks]
            return tuple(RulePolicy(name, rule, of_rank) for of_rank in shares)
        return (RulePolicy(name, rule),) * placement.num_ranks

    def simulate(
        self, work: Workload, *, compiled: bool, policies: Sequence[Policy] | None = None
    ) -> SimResult:
        """Simulates a step of such work.

        Args:
            work: times of all its microbatches.
            compiled: see :func:`~megatron.adaptive.schedule.simulate.simulate`.
            policies: of a step of so many microbatches; made anew where ``None``.
        """
        count = work.durations_ps.shape[2]
        return simulate(
            self.placement,
            count,
            self.policies(count) if policies is None else policies,
            work,
            cap=self.cap,
            weight_pieces=self.weight_pieces,
            beside=work.cuts > 0,
            compiled=compiled,
        )


def make_candidate(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    placement_kind: PlacementKind | None = None,
    cap: float | None = None,
    weight_pieces: int | None = None,
) -> Candidate:
    """Say how a schedule or policy would run on a pipeline.

    Args:
        name: of the schedule or policy.
        num_ranks: ranks of the pipeline.
        num_chunks: chunks per rank, where the schedule leaves the choice.
        num_microbatches: microbatches per step.
        placement_kind: ``loop`` or ``v`` for a rule; default that of ``placement_for``.
        cap: of a rule; default that of ``memory.default_cap``.
        weight_pieces: of a rule, 0 for whole backwards; default 4.

    Raises:
        ScheduleError: unknown name, or the pipeline does not suit it.
    """
    placement = placement_for(name, num_ranks, num_chunks)
    if not is_rule(name):
        return Candidate(name=name, placement=placement, weight_pieces=int(splits_backward(name)))
    if placement_kind is not None:
        placement = Placement(num_ranks=num_ranks, num_chunks=num_chunks, kind=placement_kind)
    return Candidate(
        name=name,
        placement=placement,
        weight_pieces=DEFAULT_PIECES if weight_pieces is None else weight_pieces,
        cap=default_cap(placement, num_microbatches) if cap is None else cap,
    )


def schedule_names() -> tuple[str, ...]:
    """Returns names of this package's static schedules, sorted."""
    return tuple(sorted(name for name, spec in BUILT_IN.items() if spec.kind == "fixed"))


def policy_names() -> tuple[str, ...]:
    """Returns names of this package's static schedules and rules, sorted."""
    return tuple(sorted(name for name, spec in BUILT_IN.items() if spec.kind in ("fixed", "rule")))


def is_rule(name: str) -> bool:
    """Returns whether a name is that of a rule, which chooses at run time.

    Raises:
        ScheduleError: There is no static schedule or rule of this name.
    """
    return name == ANNEALED or _spec_of(name).kind == "rule"


def _spec_of(name: str) -> ScheduleSpec:
    """Returns the description of a static schedule or a rule."""
    spec = _find_spec(name)
    if spec is None or spec.kind not in ("fixed", "rule"):
        raise ScheduleError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")
    return spec


def _find_spec(name: str) -> ScheduleSpec | None:
    """Returns the description of a name, ``None`` if nothing has this name.

    Raises:
        ScheduleError: A user's schedule of this name cannot be imported.
    """
    try:
        return schedule_spec(name)
    except ConfigError as error:
        if ":" in name:
            raise ScheduleError(str(error)) from error
        return None


def splits_backward(name: str) -> bool:
    """True if the schedule lists weight gradients; a rule takes them as the run has them: False.

    Raises:
        ScheduleError: unknown name.
    """
    return not is_rule(name) and _spec_of(name).splits_backward == "always"


def placement_for(name: str, num_ranks: int, num_chunks: int) -> Placement:
    """The placement that a schedule or rule runs on.

    Args:
        name: of the schedule or rule.
        num_ranks: ranks of the pipeline.
        num_chunks: chunks per rank, for a schedule that leaves the choice and for rules; others
            have their own number, whatever is given.

    Raises:
        ScheduleError: unknown name, or a number below 1.
    """
    most = None if is_rule(name) else _spec_of(name).most_chunks
    chunks = num_chunks if most is None else most
    kind = default_placement(name, chunks)
    return Placement(num_ranks=num_ranks, num_chunks=chunks, kind=kind)


def make_schedule(
    name: str, placement: Placement, num_microbatches: int, *, group_size: int | None = None
) -> Schedule:
    """Make the static schedule of that name.

    Args:
        name: of the schedule.
        placement: which rank holds which stage.
        num_microbatches: microbatches per step, at least 1.
        group_size: of ``interleaved``, see there.

    Raises:
        ScheduleError: unknown name, or the schedule refuses the placement or microbatches.
    """
    spec = _find_spec(name)
    if spec is None or spec.kind != "fixed":
        raise ScheduleError(
            f"unknown schedule {name!r}: choose one of {', '.join(schedule_names())}"
        )
    check_num_microbatches(num_microbatches)
    least, most, chunks = spec.least_chunks, spec.most_chunks, placement.num_chunks
    kind = "v" if spec.is_v_only else "loop"
    if not least <= chunks <= (most or chunks) or (least > 1 and placement.kind != kind):
        raise ScheduleError(
            f"schedule {name} got a {placement.kind} placement with {chunks} chunk(s) per rank:"
            f" it needs a {kind} of {'' if most else 'at least '}{least}, else choose adaptive"
        )
    if spec.is_own:
        return own_schedule(spec, placement, num_microbatches)
    options = {} if group_size is None else {"group_size": group_size}
    return Schedule(
        name=name,
        placement=placement,
        num_microbatches=num_microbatches,
        orders=spec.load()(placement, num_microbatches, **options),
    )


def make_policies(
    name: str, placement: Placement, num_microbatches: int, **settings: Any
) -> tuple[Policy, ...]:
    """Makes the policies of a :class:`Candidate` with these settings."""
    return Candidate(name=name, placement=placement, **settings).policies(num_microbatches)


@lru_cache(maxsize=64)
def hint_for(
    placement: Placement,
    num_microbatches: int,
    cap: float | None,
    pace: Pace = EQUAL,
    weight_pieces: int = 1,
) -> Schedule:
    """Returns the best order for a pipeline that the cap allows.

    It is the usual fixed one where that fits and is known to be best. With few microbatches, in a
    loop without memory to spare, and where nothing fits, it is the one with which ``hinted`` is
    fastest on equal stages of that pace, of those that fit and of those that ``adaptive`` makes
    under the cap, with shares and without.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step.
        cap: most activations, in whole-rank microbatches.
        pace: of the stages.
        weight_pieces: parts of each weight gradient, 0 for whole backwards.

    Raises:
        ScheduleError: no microbatch, or the cap is below the least cap.
    """
    found = []
    for name in selectable_names(lambda spec: spec.is_hint):
        # Another placement, or microbatches that do not suit it.
        with contextlib.suppress(ScheduleError):
            schedule = make_schedule(name, placement, num_microbatches)
            if cap is None or max(peak_units(schedule)) <= with_rounding(cap):
                found.append(schedule)
    ranks = placement.num_ranks
    is_tight = placement.kind == "loop" and cap is not None and cap <= with_rounding(ranks)
    if found and (
        placement.num_chunks == 1 or (num_microbatches >= 2 * ranks - 1 and not is_tight)
    ):
        return found[0]

    def run(candidate: Candidate, pace: Pace = pace) -> SimResult:
        latency, backward, weight = pace
        times = StageTimes.equal(
            placement.num_stages, forward_s=1.0, backward_s=backward, weight_s=weight
        )
        work = draw(placement, num_microbatches, times, link=Link(latency_s=latency))
        return candidate.simulate(
            work, compiled=3 * num_microbatches * placement.num_stages >= _COMPILED_FROM
        )

    rule = Candidate(name="adaptive", placement=placement, weight_pieces=1, cap=cap)
    for shares in (True, False):
        # An order made for equal kinds of work may also be the best one for others.
        for times in dict.fromkeys((pace, (pace[0], 1.0, 1.0))):
            found.append(run(replace(rule, shares=shares), times).to_schedule("adaptive"))
    hinted = replace(rule, name="hinted", weight_pieces=weight_pieces)
    return min(found, key=lambda hint: run(replace(hinted, hint=hint)).makespan_s)


def hint_codes(order: Sequence[Action], num_chunks: int, weight_pieces: int) -> tuple[int, ...]:
    """One rank's order as ``rules.hinted`` reads it.

    Each W of the hint stands for as many pieces as the run has, and for 0 they are left out. An
    order without W, for a run with split backwards, gets each W right after its B.
    """
    splits = any(action.kind is ActionKind.W for action in order)
    actions: list[Action] = []
    for action in order:
        if action.kind is not ActionKind.W:
            actions.append(replace(action, paired=False))
        if action.piece == 0 and action.kind is (ActionKind.W if splits else ActionKind.B):
            actions += [
                Action(ActionKind.W, action.chunk, action.microbatch, piece)
                for piece in range(weight_pieces)
            ]
    counts: Counter[int] = Counter()
    packed = []
    for code in codes_of(actions, num_chunks):
        packed.append(code + 3 * num_chunks * counts[code])
        counts[code] += 1
    return tuple(packed)
