"""Names of the schedules and policies that a user can ask for, and how each of them would run.

Owns the lookup, the checks that every schedule shares, the choice of what a name stands for on a
given pipeline (placement, pieces, cap), and that of a hint for ``hinted``. The list of names is
fixed: adding a schedule means a function and a line here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from megatron.adaptive.config.schedule import (
    ONE_CHUNK,
    SEVERAL_CHUNKS,
    SPLIT_SCHEDULES,
    TWO_CHUNKS,
    V_ONLY,
    default_placement,
)
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import runtime_rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.fixed_in_loop import (
    forward_only,
    gpipe,
    interleaved,
    interleaved_zb,
    one_f_one_b,
    varuna,
    zb_h1,
)
from megatron.adaptive.schedule.fixed_in_v import dualpipe_v, v_half, zb_v
from megatron.adaptive.schedule.memory_caps import chunk_shares, default_cap, with_rounding
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy, codes_of
from megatron.adaptive.schedule.schedule import Order, Schedule, check_num_microbatches
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.validate import peak_units
from megatron.adaptive.schedule.workload import Link, StageTimes, Workload, draw

_STATIC: dict[str, Callable[..., tuple[Order, ...]]] = {
    "1f1b": one_f_one_b,
    "breadth-first": gpipe,
    "combined-1f1b": partial(interleaved, pairs=True),
    "dualpipe-v": dualpipe_v,
    "forward-only": forward_only,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "interleaved-zb": interleaved_zb,
    "v-half": v_half,
    "varuna": varuna,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}
"""Generators of the orders of all ranks; what each runs on is in ``config.schedule``."""
_RULES = {
    "adaptive": runtime_rules.ready_first,
    "bfc": runtime_rules.breadth_first,
    "dfc": runtime_rules.depth_first,
    "hinted": runtime_rules.hinted,
}
_HINTS = ("zb-v", "v-half", "zb-h1", "interleaved", "interleaved-zb", "dualpipe-v")
"""Schedules that may be hints, the usual one of each placement first."""
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
        if name == "hinted":
            pieces = self.weight_pieces
            hint = hint or hint_for(placement, num_microbatches, self.cap, self.pace, pieces)
            codes = [hint_codes(order, placement.num_chunks, pieces) for order in hint.orders]
            return tuple(RulePolicy(name, _RULES[name], of_rank) for of_rank in codes)
        if name == "adaptive" and self.shares and self.cap is not None:
            ranks = range(placement.num_ranks)
            shares = [chunk_shares(placement, rank, self.cap) for rank in ranks]
            return tuple(RulePolicy(name, _RULES[name], of_rank) for of_rank in shares)
        return (RulePolicy(name, _RULES[name]),) * placement.num_ranks

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
    """The static schedules, sorted."""
    return tuple(sorted(_STATIC))


def policy_names() -> tuple[str, ...]:
    """Everything ``make_policies`` knows, sorted: static schedules and rules."""
    return tuple(sorted((*_STATIC, *_RULES)))


def is_rule(name: str) -> bool:
    """True for a rule that chooses at run time, False for a static schedule.

    Raises:
        ScheduleError: unknown name.
    """
    if name not in _STATIC and name not in _RULES and name != ANNEALED:
        raise ScheduleError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")
    return name not in _STATIC


def splits_backward(name: str) -> bool:
    """True if the schedule lists weight gradients; a rule takes them as the run has them: False.

    Raises:
        ScheduleError: unknown name.
    """
    return not is_rule(name) and name in SPLIT_SCHEDULES


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
    most = None if is_rule(name) else _chunks_of(name)[1]
    chunks = num_chunks if most is None else most
    kind = default_placement(name, chunks)
    return Placement(num_ranks=num_ranks, num_chunks=chunks, kind=kind)


def _chunks_of(name: str) -> tuple[int, int | None]:
    """Returns the least and the most chunks per rank of a static schedule."""
    if name in ONE_CHUNK or name in TWO_CHUNKS:
        count = 1 if name in ONE_CHUNK else 2
        return count, count
    return 2 if name in SEVERAL_CHUNKS else 1, None


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
    if name not in _STATIC:
        raise ScheduleError(
            f"unknown schedule {name!r}: choose one of {', '.join(schedule_names())}"
        )
    check_num_microbatches(num_microbatches)
    (least, most), chunks = _chunks_of(name), placement.num_chunks
    kind = "v" if name in V_ONLY else "loop"
    if not least <= chunks <= (most or chunks) or (least > 1 and placement.kind != kind):
        raise ScheduleError(
            f"schedule {name} got a {placement.kind} placement with {chunks} chunk(s) per rank:"
            f" it needs a {kind} of {'' if most else 'at least '}{least}, else choose adaptive"
        )
    options = {} if group_size is None else {"group_size": group_size}
    return Schedule(
        name=name,
        placement=placement,
        num_microbatches=num_microbatches,
        orders=_STATIC[name](placement, num_microbatches, **options),
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
    for name in _HINTS:
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
