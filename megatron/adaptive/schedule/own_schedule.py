"""Creates policies from users' schedules, and checks them before the first step.

If the user's function returns a static schedule, the schedule is validated. A run-time rule is
tested in a simulated step. Every error message contains the name of the schedule, the file and line
of its function, the rank and the action.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megatron.adaptive.config.own_code import source_of
from megatron.adaptive.config.schedule_specs import ScheduleSpec
from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.rank_state import RankState
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import validate
from megatron.adaptive.schedule.workload import StageTimes

_MOST_TRIED_ACTIONS = 50_000
"""Maximum number of actions in the simulated step that tests a user's rule.

Each action takes about 10 us, because the user's function is plain Python.
"""


class OwnRule:
    """Chooses actions by calling a user's function, and checks each chosen action.

    Args:
        spec: Specification of the user's schedule, which contains the function.
    """

    def __init__(self, spec: ScheduleSpec) -> None:
        self.name = spec.name
        self._where = f"schedule {spec.name} ({source_of(spec.function)})"
        self._function: Callable[[RankState], Action | None] = spec.function

    def pick(self, state: RankState) -> Action | None:
        """Returns the action that the user's function chooses in ``state``, or ``None`` to wait.

        Raises:
            ScheduleError: The function raised an exception, or returned an action that cannot
                start.
        """
        where = f"{self._where}, rank {state.rank}"
        try:
            action = self._function(state)
        except Exception as error:  # A user's function may raise any exception.
            raise ScheduleError(
                f"{where}: the function raised {type(error).__name__}: {error}; {state.describe()}"
            ) from error
        if action is None:
            return None
        if not isinstance(action, Action):
            raise ScheduleError(
                f"{where}: the function must return one of the actions in state.ready(), or None "
                f"to wait, got {action!r:.60}"
            )
        name = action.label(state.num_slices)
        if not state.is_ready(action):
            raise ScheduleError(
                f"{where}: {name} cannot start: {state.why_not(action)}; {state.describe()}"
            )
        if not state.fits(action):
            raise ScheduleError(
                f"{where}: {name} exceeds the activation cap of {state.cap:g} microbatches; "
                f"return it only if state.fits(action); {state.describe()}"
            )
        return action


@lru_cache(maxsize=64)
def own_schedule(spec: ScheduleSpec, placement: Placement, num_microbatches: int) -> Schedule:
    """Calls a user's function that returns a static schedule, and validates the schedule.

    Args:
        spec: Specification of the user's schedule, which contains the function.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step.

    Raises:
        ScheduleError: The function raised an exception, or the returned schedule is not valid.
    """
    where = f"schedule {spec.name} ({source_of(spec.function)})"
    size = f"{placement.num_ranks} ranks and {num_microbatches} microbatches"
    try:
        orders = tuple(tuple(order) for order in spec.function(placement, num_microbatches))
    except Exception as error:  # A user's function may raise any exception.
        raise ScheduleError(
            f"{where}: the function raised {type(error).__name__} for {size}: {error}"
        ) from error
    for rank, order in enumerate(orders):
        for position, action in enumerate(order):
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"{where}, rank {rank}, position {position}: the function must return "
                    f"one tuple of Actions for each rank, got {action!r:.60}"
                )
    schedule = Schedule(
        name=spec.name, placement=placement, num_microbatches=num_microbatches, orders=orders
    )
    try:
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{source_of(spec.function)}: {error}") from None
    splits = spec.splits_backward == "always"
    if schedule.weight_pieces != int(splits):
        rank, action = next(
            (rank, action)
            for rank, order in enumerate(orders)
            for action in order
            if action.kind is (ActionKind.B if splits else ActionKind.W) or action.piece
        )
        expected = "one W for each B" if splits else "no W"
        raise ScheduleError(
            f"{where}, rank {rank}: with splits_backward={splits}, an order must contain "
            f"{expected}, got {action}"
        )
    return schedule


@lru_cache(maxsize=64)
def own_rule(
    spec: ScheduleSpec,
    placement: Placement,
    num_microbatches: int,
    cap: float | None,
    weight_pieces: int,
    num_slices: int = 1,
) -> Policy:
    """Tests a user's run-time rule in a simulated step, and returns its policy.

    Args:
        spec: Specification of the user's rule, which contains the function.
        placement: Assignment of pipeline stages to ranks.
        num_microbatches: Number of microbatches per step. The test uses fewer microbatches if the
            step is very long.
        cap: Limit on the activations that a rank holds, or ``None`` for no limit. The unit is the
            activation memory of one microbatch in all chunks of the rank.
        weight_pieces: Number of W actions per weight gradient, or 0 if the backward pass computes
            weight gradients.
        num_slices: Number of slices of each microbatch, or 1 for whole microbatches.

    Raises:
        ScheduleError: The rule raised an exception, chose an action that cannot start, or caused a
            deadlock.
    """
    rule = OwnRule(spec)
    per_microbatch = placement.num_stages * (2 + weight_pieces) * num_slices
    count = max(1, min(num_microbatches, _MOST_TRIED_ACTIONS // per_microbatch))
    times = StageTimes.equal(placement.num_stages, forward_s=1.0, backward_s=1.0, weight_s=1.0)
    try:
        simulate(
            placement,
            count,
            [rule] * placement.num_ranks,
            times,
            cap=cap,
            weight_pieces=weight_pieces,
            num_slices=num_slices,
        )
    except ScheduleError as error:
        if spec.name in str(error):
            raise
        raise ScheduleError(f"schedule {spec.name} ({source_of(spec.function)}): {error}") from None
    return rule
