"""Names of the schedules and policies that a user can ask for, and what each of them runs on.

Owns the lookup, the checks that every schedule shares, and the choice of a hint for ``hinted``. The
list of names is fixed: adding a schedule means a function and a line here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import rules
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.dualpipe_v import dualpipe_v
from megatron.adaptive.schedule.gpipe import forward_only, gpipe, varuna
from megatron.adaptive.schedule.memory import chunk_shares, with_rounding
from megatron.adaptive.schedule.one_f_one_b import interleaved, interleaved_zb, one_f_one_b, zb_h1
from megatron.adaptive.schedule.placement import Placement, PlacementKind
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy, codes_of
from megatron.adaptive.schedule.schedule import Order, Schedule, check_num_microbatches
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.v_half import v_half
from megatron.adaptive.schedule.validate import peak_units
from megatron.adaptive.schedule.workload import StageTimes
from megatron.adaptive.schedule.zb_v import zb_v


@dataclass(frozen=True)
class _Static:
    """A static schedule and what it runs on.

    Attributes:
        orders: makes the orders of all ranks from placement and microbatches.
        kind: how stages lie; of no matter to a schedule that runs with one chunk.
        least_chunks: per rank.
        most_chunks: per rank, ``None`` where the user chooses.
        splits_backward: whether it has W actions.
        instead: what runs on other placements.
    """

    orders: Callable[..., tuple[Order, ...]]
    kind: PlacementKind = "loop"
    least_chunks: int = 1
    most_chunks: int | None = None
    splits_backward: bool = False
    instead: str = "adaptive"

    def check_placement(self, name: str, placement: Placement) -> None:
        """Refuse a placement that the schedule does not run on."""
        chunks, least, most = placement.num_chunks, self.least_chunks, self.most_chunks
        if (
            chunks < least
            or chunks > (most or chunks)
            or (least > 1 and placement.kind != self.kind)
        ):
            count = f"{'' if most else 'at least '}{least}"
            raise ScheduleError(
                f"schedule {name} got a {placement.kind} placement with {chunks} chunk(s) per rank:"
                f" it needs a {self.kind} of {count}, choose {self.instead}"
            )


_SEVERAL = "interleaved or adaptive for several"
_STATIC: dict[str, _Static] = {
    "1f1b": _Static(one_f_one_b, most_chunks=1, instead=_SEVERAL),
    "breadth-first": _Static(gpipe, least_chunks=2, instead="gpipe for others"),
    "combined-1f1b": _Static(
        partial(interleaved, pairs=True), least_chunks=2, instead="1f1b for one chunk"
    ),
    "dualpipe-v": _Static(dualpipe_v, "v", 2, 2, splits_backward=True),
    "forward-only": _Static(forward_only),
    "gpipe": _Static(gpipe),
    "interleaved": _Static(interleaved, least_chunks=2, instead="1f1b for one chunk"),
    "interleaved-zb": _Static(
        interleaved_zb, least_chunks=2, splits_backward=True, instead="zb-h1 for one chunk"
    ),
    "v-half": _Static(v_half, "v", 2, 2, splits_backward=True),
    "varuna": _Static(varuna, most_chunks=1, instead=_SEVERAL),
    "zb-h1": _Static(zb_h1, most_chunks=1, splits_backward=True, instead="zb-v or v-half for two"),
    "zb-v": _Static(zb_v, "v", 2, 2, splits_backward=True),
}
_RULES = {
    "adaptive": rules.ready_first,
    "bfc": rules.breadth_first,
    "dfc": rules.depth_first,
    "hinted": rules.hinted,
}
_BEST_IN_A_V = ("adaptive", "hinted")
_HINTS = ("zb-v", "v-half", "zb-h1", "interleaved", "interleaved-zb", "dualpipe-v")
"""Schedules that may be hints, the usual one of each placement first."""
ANNEALED = "annealed"
"""Name of a list that ``auto`` makes for one pipeline (see ``anneal``); users cannot ask for it. In
steps of other numbers of microbatches it is ``hinted``."""
_COMPILED_FROM = 20_000
Pace = tuple[float, float, float]
"""Latency of a message, backward by inputs and weight gradients, in forwards of a stage."""
EQUAL: Pace = (0.0, 1.0, 1.0)


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
    return name == ANNEALED or _static(name) is None


def splits_backward(name: str) -> bool:
    """True if the schedule lists weight gradients; a rule takes them as the run has them: False.

    Raises:
        ScheduleError: unknown name.
    """
    static = _static(name)
    return static is not None and static.splits_backward


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
    static = _static(name)
    if static is None:
        kind: PlacementKind = "v" if name in _BEST_IN_A_V and num_chunks == 2 else "loop"
        return Placement(num_ranks=num_ranks, num_chunks=num_chunks, kind=kind)
    chunks = static.most_chunks or num_chunks
    return Placement(num_ranks=num_ranks, num_chunks=chunks, kind=static.kind)


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
    static = _STATIC.get(name)
    if static is None:
        raise ScheduleError(
            f"unknown schedule {name!r}: choose one of {', '.join(schedule_names())}"
        )
    check_num_microbatches(num_microbatches)
    static.check_placement(name, placement)
    options = {} if group_size is None else {"group_size": group_size}
    return Schedule(
        name=name,
        placement=placement,
        num_microbatches=num_microbatches,
        orders=static.orders(placement, num_microbatches, **options),
    )


def make_policies(
    name: str,
    placement: Placement,
    num_microbatches: int,
    *,
    cap: float | None = None,
    weight_pieces: int = 0,
    shares: bool = True,
    pace: Pace = EQUAL,
    hint: Schedule | None = None,
) -> tuple[Policy, ...]:
    """Make one policy per rank: followers of a static schedule, or the rule of that name.

    Args:
        name: of the schedule or rule.
        placement: which rank holds which stage.
        num_microbatches: microbatches per step.
        cap: of the run, for a rule that shares it or chooses a hint by it; None for no limit.
        weight_pieces: of the run, likewise.
        shares: whether chunks have shares of the cap under ``adaptive`` (see ``memory``).
        pace: of the stages, by which ``hinted`` chooses its hint.
        hint: of ``hinted``, and the list of ``annealed``, in steps of as many microbatches; in
            others both choose a hint.

    Raises:
        ScheduleError: unknown name, or the schedule refuses the placement or microbatches.
    """
    is_given = hint is not None and hint.num_microbatches == num_microbatches
    if name == ANNEALED:
        if hint is not None and is_given:
            return tuple(Follow(order, name) for order in hint.orders)
        name = "hinted"
    if _static(name) is not None:
        schedule = make_schedule(name, placement, num_microbatches)
        return tuple(Follow(order, name) for order in schedule.orders)
    ranks = range(placement.num_ranks)
    if name == "adaptive" and shares and cap is not None:
        return tuple(
            RulePolicy(name, _RULES[name], chunk_shares(placement, rank, cap)) for rank in ranks
        )
    if name != "hinted":
        return (RulePolicy(name, _RULES[name]),) * placement.num_ranks
    if hint is None or not is_given:
        hint = hint_for(placement, num_microbatches, cap, pace, weight_pieces)
    return _hinted(hint, weight_pieces)


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

    def run(policies: Sequence[Policy], pieces: int, pace: Pace = pace) -> SimResult:
        latency, backward, weight = pace
        return simulate(
            placement,
            num_microbatches,
            policies,
            StageTimes.equal(
                placement.num_stages, forward_s=1.0, backward_s=backward, weight_s=weight
            ),
            latency_s=latency,
            cap=cap,
            weight_pieces=pieces,
            compiled=3 * num_microbatches * placement.num_stages >= _COMPILED_FROM,
        )

    for shares in (True, False):
        rules_ = make_policies("adaptive", placement, num_microbatches, cap=cap, shares=shares)
        # An order made for equal kinds of work may also be the best one for others.
        for times in dict.fromkeys((pace, (pace[0], 1.0, 1.0))):
            found.append(run(rules_, 1, times).to_schedule("adaptive"))

    def hinted_s(hint: Schedule) -> float:
        return run(_hinted(hint, weight_pieces), weight_pieces).makespan_s

    return min(found, key=hinted_s)


def _hinted(hint: Schedule, weight_pieces: int) -> tuple[Policy, ...]:
    chunks = hint.placement.num_chunks
    return tuple(
        RulePolicy("hinted", rules.hinted, hint_codes(order, chunks, weight_pieces))
        for order in hint.orders
    )


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
    codes = codes_of(actions, num_chunks)
    assert codes is not None, "a valid schedule has ascending microbatches"
    counts: Counter[int] = Counter()
    packed = []
    for code in codes:
        packed.append(code + 3 * num_chunks * counts[code])
        counts[code] += 1
    return tuple(packed)


def _static(name: str) -> _Static | None:
    """The schedule of that name, ``None`` for a rule."""
    if name not in _STATIC and name not in _RULES:
        raise ScheduleError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")
    return _STATIC.get(name)
