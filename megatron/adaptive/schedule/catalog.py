"""Looks up schedules and run-time rules by name, and chooses their settings.

This module checks the requirements that all schedules share. It chooses the settings of a schedule
for a pipeline: the placement of stages, the number of W actions per weight gradient, and the limit
on activations (cap). It also chooses the schedule that the ``hinted`` rule follows (its hint).
There are two kinds of schedule functions (see ``config.schedule_specs``):

- The function of a static schedule takes the placement of the stages and the number of
  microbatches. It returns the list of actions of each rank.
- The function of a built-in run-time rule takes the state of a rank as a list of numbers, so that
  numba can compile the function (see ``runtime_rules``). A user's rule takes a :class:`RankState`
  (see ``own_schedule``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megatron.adaptive.config.schedule import default_placement
from megatron.adaptive.config.schedule_specs import (
    ScheduleSpec,
    built_in_schedules,
    schedule_spec,
    selectable_names,
)
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind, SliceCounts
from megatron.adaptive.schedule.memory_caps import chunk_shares, default_cap, with_rounding
from megatron.adaptive.schedule.numba_kernels import saves_time
from megatron.adaptive.schedule.own_schedule import own_rule, own_schedule
from megatron.adaptive.schedule.policy import Follow, Policy, RulePolicy, codes_of, rule_of
from megatron.adaptive.schedule.schedule import (
    Order,
    Schedule,
    check_num_microbatches,
    check_num_slices,
)
from megatron.adaptive.schedule.simulate import SimResult, simulate
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.validate import peak_units
from megatron.adaptive.schedule.workload import Link, StageTimes, Workload, draw

ANNEALED = "annealed"
"""Name of the schedules that ``auto`` creates by simulated annealing (see ``anneal``).

Such a schedule is only valid for one pipeline and one number of microbatches. Steps with a
different number of microbatches run ``hinted`` instead. Users cannot select this name.
"""
Pace = tuple[float, float, float]
"""Durations of a message, a B (backward) and a W (weight gradients), relative to a forward pass."""
EQUAL: Pace = (0.0, 1.0, 1.0)
"""Value of ``Pace`` if messages take no time, and F, B and W take the same time."""
DEFAULT_PIECES = 4
"""Default number of W actions per weight gradient under a run-time rule.

With this number, each W is short enough to run while the rank waits for a message.
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule or run-time rule, together with its settings.

    Attributes:
        name: Name of the static schedule or run-time rule.
        placement: Assignment of pipeline stages to ranks.
        weight_pieces: Number of W actions per weight gradient, or 0 if the backward pass computes
            weight gradients.
        cap: Limit on the activations that each rank holds under a run-time rule. The unit is the
            activation memory of one microbatch in all chunks of the rank. ``None`` means no limit,
            and is also used for static schedules, whose order determines the memory.
        shares: Whether ``adaptive`` also limits each chunk to its share of the cap (see
            ``memory_caps``).
        pace: Relative durations of messages, B and W (see ``Pace``), used by ``hinted`` to choose
            the schedule that it follows (its hint).
        hint: Schedule that ``hinted`` or ``annealed`` follows in steps with the same number of
            microbatches. In other steps, or if ``hint`` is ``None``, ``hint_for`` chooses a
            schedule.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.
        frozen_stages: Number of leading pipeline stages through which no gradient flows. Built-in
            run-time rules run no backward passes on these stages. Static schedules still run these
            backward passes. They compute nothing, but limit the number of outputs that wait for the
            next stage.
    """

    name: str
    placement: Placement
    weight_pieces: int = 0
    cap: float | None = None
    shares: bool = True
    pace: Pace = EQUAL
    hint: Schedule | None = field(default=None, repr=False)
    num_slices: int = 1
    frozen_stages: int = 0

    def __str__(self) -> str:
        chunks = self.placement.num_chunks
        text = f"{self.name} ({self.placement.kind}, {chunks} chunk{'s' * (chunks > 1)}"
        if self.num_slices > 1:
            text += f", {self.num_slices} slices"
        if self.weight_pieces:
            text += f", W in {self.weight_pieces}"
        if not self.shares:
            text += ", no shares"
        if self.hint is not None and self.name != ANNEALED:
            text += ", annealed hint"
        return text + (f", cap {self.cap:g})" if self.cap is not None else ")")

    @property
    def skipped_stages(self) -> int:
        """Returns the number of leading stages that run no backward passes."""
        has_rule = self.name != ANNEALED and is_rule(self.name)
        return self.frozen_stages if has_rule and not schedule_spec(self.name).is_own else 0

    def policies(
        self, num_microbatches: int, num_slices: SliceCounts | None = None
    ) -> tuple[Policy, ...]:
        """Returns one policy per rank. Each follows a static schedule or applies a run-time rule.

        Args:
            num_microbatches: Number of microbatches per step.
            num_slices: Number of slices of each microbatch, or ``None`` for ``self.num_slices``.

        Raises:
            ScheduleError: The name is unknown, or the schedule does not support the placement or
                the number of microbatches.
        """
        name = self.name
        placement = self.placement
        hint = self.hint
        slices = self.num_slices if num_slices is None else num_slices
        if hint is not None and (hint.num_microbatches, hint.num_slices) != (
            num_microbatches,
            slices,
        ):
            hint = None
        if name == ANNEALED:
            if hint is not None:
                return tuple(Follow(order, name, slices) for order in hint.orders)
            name = "hinted"
        if not is_rule(name):
            if isinstance(slices, int):
                schedule = make_schedule(name, placement, num_microbatches, num_slices=slices)
                orders = schedule.orders
            else:
                orders = _orders_of_unequal(name, placement, slices)
            return tuple(Follow(order, name, slices) for order in orders)
        spec = schedule_spec(name)
        if spec.is_own:
            if not isinstance(slices, int):
                raise ScheduleError(_unequal(name))
            pieces = self.weight_pieces
            policy = own_rule(spec, placement, num_microbatches, self.cap, pieces, slices)
            return (policy,) * placement.num_ranks
        rule = spec.function
        if name == "hinted" and not self.skipped_stages:
            if not isinstance(slices, int):
                raise ScheduleError(_unequal(name))
            pieces = self.weight_pieces
            if hint is None:
                hint = hint_for(placement, num_microbatches, self.cap, self.pace, pieces, slices)
            chunks = placement.num_chunks
            codes = [hint_codes(order, chunks, pieces, slices) for order in hint.orders]
            return tuple(RulePolicy(name, rule, of_rank) for of_rank in codes)
        if name == "hinted":
            # Frozen stages run no backward passes, but the schedules that ``hinted`` can follow
            # contain backward passes of all stages. So ``adaptive`` chooses the actions instead.
            rule = schedule_spec("adaptive").function
        if name in ("adaptive", "hinted") and self.shares and self.cap is not None:
            frozen = self.skipped_stages
            ranks = range(placement.num_ranks)
            shares = [chunk_shares(placement, rank, self.cap, slices, frozen) for rank in ranks]
            return tuple(RulePolicy(name, rule, of_rank) for of_rank in shares)
        return (RulePolicy(name, rule),) * placement.num_ranks

    def simulate(
        self, work: Workload, *, compiled: bool, policies: Sequence[Policy] | None = None
    ) -> SimResult:
        """Simulates a step under this schedule or rule, given durations of actions and messages.

        Args:
            work: Durations of all actions and messages in the step.
            compiled: Whether to compile the simulation with numba (see
                :func:`~megatron.adaptive.schedule.simulate.simulate`).
            policies: Result of :meth:`policies` if the caller already has it, otherwise ``None``.
        """
        count = work.num_microbatches
        return simulate(
            self.placement,
            count,
            self.policies(count) if policies is None else policies,
            work,
            cap=self.cap,
            weight_pieces=self.weight_pieces,
            beside=work.cuts > 0,
            compiled=compiled,
            frozen_stages=self.skipped_stages,
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
    num_slices: int = 1,
) -> Candidate:
    """Returns a schedule or run-time rule with its settings for a pipeline.

    Arguments that are ``None`` are replaced by their defaults.

    Args:
        name: Name of the static schedule or run-time rule.
        num_ranks: Number of ranks of the pipeline.
        num_chunks: Number of chunks per rank, ignored if the schedule has a fixed number of chunks.
        num_microbatches: Number of microbatches per step.
        placement_kind: ``loop`` or ``v``, or ``None`` for the default of ``placement_for``. Ignored
            by static schedules that do not support this placement.
        cap: Limit on activations under a run-time rule, or ``None`` for
            ``memory_caps.default_cap``. The unit is the activation memory of one microbatch in all
            chunks of the rank.
        weight_pieces: Number of W actions per weight gradient under a run-time rule, 0 if the
            backward pass computes weight gradients, or ``None`` for ``DEFAULT_PIECES``.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.

    Raises:
        ScheduleError: The name is unknown, or the schedule does not support the pipeline.
    """
    placement = placement_for(name, num_ranks, num_chunks)
    supports_kind = is_rule(name) or placement_kind in _spec_of(name).placements
    if placement_kind is not None and supports_kind:
        placement = replace(placement, kind=placement_kind)
    if not is_rule(name):
        splits = int(splits_backward(name))
        return Candidate(
            name=name, placement=placement, weight_pieces=splits, num_slices=num_slices
        )
    return Candidate(
        name=name,
        placement=placement,
        weight_pieces=DEFAULT_PIECES if weight_pieces is None else weight_pieces,
        cap=default_cap(placement, num_microbatches, num_slices) if cap is None else cap,
        num_slices=num_slices,
    )


def schedule_names() -> tuple[str, ...]:
    """Returns the sorted names of the built-in static schedules."""
    return tuple(
        sorted(name for name, spec in built_in_schedules().items() if spec.kind == "fixed")
    )


def policy_names() -> tuple[str, ...]:
    """Returns the sorted names of the built-in static schedules and run-time rules.

    Names that users cannot select are omitted, such as ``forward-only``, which runs validation.
    """
    return tuple(sorted(selectable_names(lambda spec: spec.kind in ("fixed", "rule"))))


def is_rule(name: str) -> bool:
    """Returns whether ``name`` is a run-time rule, which chooses actions during the step.

    Raises:
        ScheduleError: There is no static schedule or run-time rule with this name.
    """
    return name == ANNEALED or _spec_of(name).kind == "rule"


def _spec_of(name: str) -> ScheduleSpec:
    """Returns the specification of the static schedule or run-time rule called ``name``."""
    spec = _find_spec(name)
    choices = f"choose one of {', '.join(policy_names())}"
    if spec is None:
        raise ScheduleError(f"unknown schedule {name!r}: {choices}")
    if spec.kind not in ("fixed", "rule"):
        raise ScheduleError(
            f"schedule {name!r} works only in the trainer and in the plug-in: {choices}"
        )
    return spec


def _find_spec(name: str) -> ScheduleSpec | None:
    """Returns the specification called ``name``, or ``None`` if it does not exist.

    Raises:
        ScheduleError: A user's schedule with this name cannot be imported.
    """
    try:
        return schedule_spec(name)
    except ConfigError as error:
        if ":" in name:
            raise ScheduleError(str(error)) from error
        return None


def splits_backward(name: str) -> bool:
    """Returns whether the static schedule ``name`` has separate weight-gradient actions (W).

    Returns False for run-time rules, because the settings of the run decide whether they use W.

    Raises:
        ScheduleError: The name is unknown.
    """
    return not is_rule(name) and _spec_of(name).splits_backward == "always"


def placement_for(name: str, num_ranks: int, num_chunks: int) -> Placement:
    """Returns the default assignment of stages to ranks for a schedule or rule.

    Args:
        name: Name of the static schedule or run-time rule.
        num_ranks: Number of ranks of the pipeline.
        num_chunks: Number of chunks per rank, ignored if the schedule has a fixed number of chunks.

    Raises:
        ScheduleError: The name is unknown, or a number is less than 1.
    """
    most = None if is_rule(name) else _spec_of(name).most_chunks
    chunks = num_chunks if most is None else most
    kind = default_placement(name, chunks)
    return Placement(num_ranks=num_ranks, num_chunks=chunks, kind=kind)


def make_schedule(
    name: str,
    placement: Placement,
    num_microbatches: int,
    *,
    group_size: int | None = None,
    num_slices: int = 1,
) -> Schedule:
    """Returns the actions of all ranks under a static schedule.

    Args:
        name: Name of the schedule.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step, at least 1.
        group_size: Number of consecutive microbatches that a chunk runs under ``interleaved``, or
            ``None`` for the number of ranks.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.

    Raises:
        ScheduleError: The name is unknown, or the schedule does not support the placement or the
            number of microbatches.
    """
    spec = _find_spec(name)
    if spec is None or spec.kind != "fixed":
        fixed = sorted(selectable_names(lambda spec: spec.kind == "fixed"))
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(fixed)}")
    check_num_microbatches(num_microbatches)
    check_num_slices(num_slices)
    if num_slices > 1 and not spec.orders_slices:
        sliced = ", ".join(selectable_names(lambda spec: spec.kind == "rule" or spec.orders_slices))
        raise ScheduleError(
            f"schedule {name} does not support slices, got {num_slices} slices per microbatch; "
            f"use one of {sliced}"
        )
    least = spec.least_chunks
    most = spec.most_chunks
    chunks = placement.num_chunks
    kind = "v" if spec.is_v_only else "loop"
    if not least <= chunks <= (most or chunks) or (least > 1 and placement.kind != kind):
        raise ScheduleError(
            f"schedule {name} requires a {kind} placement with "
            f"{'' if most else 'at least '}{least} chunk(s) per rank, got a {placement.kind} "
            f"placement with {chunks}; use adaptive instead"
        )
    if spec.is_own:
        return own_schedule(spec, placement, num_microbatches)
    options = {} if group_size is None else {"group_size": group_size}
    if spec.orders_slices:
        options["num_slices"] = num_slices
    return Schedule(
        name=name,
        placement=placement,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        orders=tuple(map(tuple, spec.function(placement, num_microbatches, **options))),
    )


def make_policies(
    name: str,
    placement: Placement,
    num_microbatches: int,
    *,
    weight_pieces: int = 0,
    cap: float | None = None,
    shares: bool = True,
    pace: Pace = EQUAL,
    hint: Schedule | None = None,
    num_slices: int = 1,
    frozen_stages: int = 0,
) -> tuple[Policy, ...]:
    """Returns one policy per rank. Each follows a static schedule or applies a run-time rule.

    Args:
        name: Name of the static schedule or run-time rule.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step, at least 1.
        weight_pieces: Number of W actions per weight gradient, or 0 if the backward pass computes
            weight gradients.
        cap: Limit on the activations that each rank holds under a run-time rule. The unit is the
            activation memory of one microbatch in all chunks of the rank. ``None`` means no limit,
            and is also used for static schedules, whose order determines the memory.
        shares: Whether ``adaptive`` also limits each chunk to its share of the cap (see
            ``memory_caps``).
        pace: Relative durations of messages, B and W (see ``Pace``), used by ``hinted`` to choose
            the schedule that it follows (its hint).
        hint: Schedule that ``hinted`` or ``annealed`` follows in steps with the same number of
            microbatches. In other steps, or if ``hint`` is ``None``, ``hint_for`` chooses a
            schedule.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.
        frozen_stages: Number of leading pipeline stages through which no gradient flows. Built-in
            run-time rules run no backward passes on these stages. Static schedules still run these
            backward passes. They compute nothing, but limit the number of outputs that wait for the
            next stage.

    Raises:
        ScheduleError: The name is unknown, or the schedule does not support the placement or the
            number of microbatches.
    """
    candidate = Candidate(
        name=name,
        placement=placement,
        weight_pieces=weight_pieces,
        cap=cap,
        shares=shares,
        pace=pace,
        hint=hint,
        num_slices=num_slices,
        frozen_stages=frozen_stages,
    )
    return candidate.policies(num_microbatches)


def _unequal(name: str) -> str:
    """Returns the error message for a schedule ``name`` that requires equal numbers of slices."""
    return (
        f"schedule {name} requires the same number of slices for all microbatches; use adaptive, "
        "dfc or bfc"
    )


def _orders_of_unequal(
    name: str, placement: Placement, num_slices: tuple[int, ...]
) -> tuple[Order, ...]:
    """Returns each rank's actions for microbatches that have different numbers of slices.

    ``name`` is the name of the schedule, ``placement`` assigns stages to ranks, and ``num_slices``
    is the number of slices of each microbatch.

    Raises:
        ScheduleError: ``name`` is not the schedule for evaluations, which is the only schedule that
            supports different numbers of slices.
    """
    spec = _spec_of(name)
    if spec.is_selectable:
        raise ScheduleError(_unequal(name))
    orders: tuple[Order, ...] = spec.function(placement, len(num_slices), num_slices=num_slices)
    return orders


@lru_cache(maxsize=64)
def hint_for(
    placement: Placement,
    num_microbatches: int,
    cap: float | None,
    pace: Pace = EQUAL,
    weight_pieces: int = 1,
    num_slices: int = 1,
) -> Schedule:
    """Returns the schedule that ``hinted`` follows on a pipeline, within a memory limit (cap).

    This function returns the first static schedule in the catalog that stays within the cap, if
    that schedule is known to be the best. With whole microbatches and one chunk per rank, it always
    is. With several chunks, it is known to be the best only if there are enough microbatches and,
    in the loop placement, if the cap is not tight. With slices, no schedule is known to be the
    best.

    Otherwise, this function simulates steps under ``hinted`` with different schedules to follow,
    which are called hints. It returns the hint with the shortest step. The simulated stages are
    equal and have the durations in ``pace``. The hints are all static schedules within the cap, and
    the orders that ``adaptive`` produces with and without limits for individual chunks. All slices
    are assumed to have the same duration.

    Args:
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.
        cap: Limit on the activations that a rank holds, or ``None`` for no limit. The unit is the
            activation memory of one microbatch in all chunks of the rank.
        pace: Relative durations of messages, B and W.
        weight_pieces: Number of W actions per weight gradient, or 0 if the backward pass computes
            weight gradients.
        num_slices: Number of slices per microbatch, or 1 for whole microbatches.

    Raises:
        ScheduleError: There are no microbatches, or the cap is too small for any order of actions.
    """
    orders = []
    is_whole = num_slices == 1
    for name in selectable_names(lambda spec: spec.is_hint if is_whole else spec.orders_slices):
        # Skip schedules that do not support this placement or this number of microbatches.
        with contextlib.suppress(ScheduleError):
            schedule = make_schedule(name, placement, num_microbatches, num_slices=num_slices)
            if cap is None or max(peak_units(schedule)) <= with_rounding(cap):
                orders.append(schedule)
    ranks = placement.num_ranks
    is_tight = placement.kind == "loop" and cap is not None and cap <= with_rounding(ranks)
    if (
        orders
        and is_whole
        and (placement.num_chunks == 1 or (num_microbatches >= 2 * ranks - 1 and not is_tight))
    ):
        return orders[0]

    def run(candidate: Candidate, pace: Pace = pace) -> SimResult:
        latency, backward, weight = pace
        times = StageTimes.equal(
            placement.num_stages, forward_s=1.0, backward_s=backward, weight_s=weight
        )
        link = Link(latency_s=latency)
        work = draw(placement, num_microbatches, times, link=link, num_slices=num_slices)
        num_actions = 3 * num_microbatches * num_slices * placement.num_stages
        policies = candidate.policies(num_microbatches)
        shared = rule_of(policies)
        compiled = shared is not None and saves_time(shared[0], num_actions)
        return candidate.simulate(work, compiled=compiled, policies=policies)

    rule = Candidate(
        name="adaptive", placement=placement, weight_pieces=1, cap=cap, num_slices=num_slices
    )
    for shares in (True, False):
        # Also try an order for equal durations of F, B and W, which may be the best order even if
        # the durations differ.
        for times in dict.fromkeys((pace, (pace[0], 1.0, 1.0))):
            orders.append(run(replace(rule, shares=shares), times).to_schedule("adaptive"))
    hinted = replace(rule, name="hinted", weight_pieces=weight_pieces)
    return min(orders, key=lambda hint: run(replace(hinted, hint=hint)).makespan_s)


def hint_codes(
    order: Sequence[Action], num_chunks: int, weight_pieces: int, num_slices: int = 1
) -> tuple[int, ...]:
    """Encodes the actions of a rank as the integers that the ``hinted`` rule reads.

    The rank has ``num_chunks`` chunks, and its actions are given in ``order``. Each W is replaced
    by ``weight_pieces`` W actions. If ``order`` has no W but ``weight_pieces`` is not 0, the W
    actions follow directly after each B.
    """
    splits = any(action.kind is ActionKind.W for action in order)
    actions: list[Action] = []
    for action in order:
        if action.kind is not ActionKind.W:
            actions.append(replace(action, paired=False) if action.paired else action)
        if action.piece == 0 and action.kind is (ActionKind.W if splits else ActionKind.B):
            actions += [
                Action(ActionKind.W, action.chunk, action.microbatch, piece)
                for piece in range(weight_pieces)
            ]
    counts: Counter[int] = Counter()
    packed = []
    for code in codes_of(actions, num_chunks, num_slices):
        packed.append(code + 3 * num_chunks * counts[code])
        counts[code] += 1
    return tuple(packed)
