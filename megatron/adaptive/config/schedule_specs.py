"""Defines the properties of pipeline schedules, and finds schedules by name.

A schedule determines the order in which each rank runs its actions (forward pass, backward pass,
weight gradient). Each schedule of this package is a :class:`ScheduleSpec` in the module of its
function, where :func:`built_in_schedules` finds it. A user's schedule is a function decorated with
:func:`fixed_order` or :func:`run_time_rule`. It is selected on the command line with
``--pipeline-schedule package.module:name``. A package can also publish its schedules as entry
points of the group ``megatron_adaptive.schedules``. Such schedules are selected by name
(``examples/own_schedule``).

The modules of schedules import this module. To avoid a cycle, this module imports them only when
the names of schedules are first needed. ``schedule.catalog`` documents the arguments and the
results of the functions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.adaptive.config.own_code import find_object, modules_in
from megatron.adaptive.errors import ConfigError

PlacementKind = Literal["loop", "v"]
ScheduleKind = Literal["fixed", "rule", "auto", "file", "megatron"]
Chunks = Literal["any", "one", "two", "several"]
SplitBackward = Literal["never", "on request", "by default", "always"]
Planned = Literal["no", "on request", "by default"]

ENTRY_POINTS = "megatron_adaptive.schedules"
"""Name of the entry-point group in which installed packages list their schedules."""


def no_function(*arguments: Any) -> Any:
    """Serves as a placeholder for schedules without a function, such as ``auto``."""
    raise AssertionError("this schedule has no function")


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Properties of a schedule, which is a value of ``--pipeline-schedule``.

    Attributes:
        name: Name of the schedule on the command line.
        position: Position of the schedule in the list of this package's schedules. If several
            schedules are equally fast, the one with the lowest position is chosen. Positions are
            spaced by 10 to leave room for new schedules.
        function: Function that implements the schedule.
        kind: ``fixed`` if the order of actions is known before the step, or ``rule`` if each rank
            chooses its next action at run time. The schedules ``auto``, ``file`` and ``megatron``
            are separate kinds.
        chunks: Number of model chunks (virtual stages) that the schedule requires on each rank.
        placements: Supported assignments of stages to ranks: ``loop`` (round-robin) or ``v`` (from
            the first rank to the last and back). The default comes first.
        prefers_v: Whether the two chunks of each rank are placed in a V by default.
        splits_backward: Whether separate actions compute the weight gradients, instead of the
            backward pass. With ``by default``, there are such actions if the model's layers support
            them.
        overlaps_experts: Whether a rank may start an action while another action waits for the
            exchange of tokens between experts.
        keeps_all: Whether all or nearly all forward passes run before the first backward pass. If
            so, all their activations are held at the same time.
        allows_unequal_stages: Whether stages may have different numbers of ranks.
        groups_microbatches: Whether microbatches run in groups. If so, the number of microbatches
            must be a multiple of the group size.
        takes_group_size: Whether ``--microbatch-group-size-per-virtual-pipeline-stage`` sets the
            size of these groups.
        recomputes: Whether the schedule repeats forward passes. If so, full recomputation is
            required.
        microbatches_per_rank: Minimum number of microbatches per step divided by the number of
            pipeline ranks, or 0 for no minimum. For example, if this is 2, four ranks need 8
            microbatches.
        is_hint: Whether the ``hinted`` schedule may prefer the order of this schedule.
        is_auto_candidate: Whether the ``auto`` schedule tries this schedule.
        planned: When the planner considers the schedule: always (``by default``), only if the user
            lists it (``on request``), or never (``no``).
        orders_slices: Whether a fixed schedule also supports sequences cut into slices. Run-time
            rules always support slices.
        torch_name: Name of the same schedule in ``torch.distributed.pipelining``, or empty if there
            is none.
        reasons: Reasons that a trace records for F, B and W, if a run-time rule always chooses the
            same kind of action for the same reason. They are entries of ``REASONS`` in
            ``trace/trace_format.py``.
        is_selectable: Whether users can select the schedule. It is false only for the schedule that
            validation uses.
    """

    name: str
    position: int = 1000
    function: Callable[..., Any] = no_function
    kind: ScheduleKind = "fixed"
    chunks: Chunks = "any"
    placements: tuple[PlacementKind, ...] = ("loop",)
    prefers_v: bool = False
    splits_backward: SplitBackward = "never"
    overlaps_experts: bool = False
    keeps_all: bool = False
    allows_unequal_stages: bool = False
    groups_microbatches: bool = False
    takes_group_size: bool = False
    recomputes: bool = False
    microbatches_per_rank: int = 0
    is_hint: bool = False
    is_auto_candidate: bool = False
    planned: Planned = "no"
    orders_slices: bool = False
    torch_name: str = ""
    reasons: tuple[str, str, str] | None = None
    is_selectable: bool = True

    @property
    def is_rule(self) -> bool:
        """Whether each rank chooses its next action at run time. This includes ``auto``."""
        return self.kind in ("rule", "auto")

    @property
    def is_v_only(self) -> bool:
        """Whether the schedule requires a V-shaped placement of the stages."""
        return self.placements == ("v",)

    @property
    def default_placement(self) -> PlacementKind:
        """Default assignment of stages to ranks with two chunks per rank."""
        return "v" if self.prefers_v or self.is_v_only else "loop"

    @property
    def least_chunks(self) -> int:
        """Minimum number of model chunks per rank."""
        return 2 if self.chunks in ("two", "several") else 1

    @property
    def most_chunks(self) -> int | None:
        """Maximum number of model chunks per rank, or ``None`` if there is no limit."""
        return {"one": 1, "two": 2}.get(self.chunks)

    @property
    def is_own(self) -> bool:
        """Whether the user wrote the schedule. If not, it belongs to this package."""
        return self.name not in built_in_schedules()


_SCHEDULES = (
    ScheduleSpec(
        name="auto",
        position=180,
        kind="auto",
        placements=("loop", "v"),
        prefers_v=True,
        splits_backward="by default",
    ),
    ScheduleSpec(
        name="file",
        position=190,
        kind="file",
        placements=("loop", "v"),
        splits_backward="by default",
        overlaps_experts=True,
    ),
    ScheduleSpec(
        name="megatron",
        position=200,
        kind="megatron",
        groups_microbatches=True,
        takes_group_size=True,
    ),
)


@functools.cache
def built_in_schedules() -> Mapping[str, ScheduleSpec]:
    """Returns the schedules of this package, keyed by name and sorted by ``position``.

    They are the entries of ``SCHEDULES`` in ``schedule/runtime_rules.py`` and in each module of
    ``schedule`` whose name begins with ``fixed_``, together with the schedules that have no
    function.
    """
    package = importlib.import_module("megatron.adaptive.schedule")
    rules = importlib.import_module("megatron.adaptive.schedule.runtime_rules")
    specs = list(_SCHEDULES)
    for module in (rules, *modules_in(package, "fixed_*")):
        specs += module.SCHEDULES
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.position)}


def selectable_names(
    matches: Callable[[ScheduleSpec], object] = lambda spec: True, *, also: Iterable[str] = ()
) -> tuple[str, ...]:
    """Returns the names of the schedules that users can select, sorted by their ``position``.

    Args:
        matches: Function that takes the specification of a schedule, and returns whether to include
            its name.
        also: Names of additional schedules, from outside this package. These names come last.
    """
    specs = [spec for spec in built_in_schedules().values() if spec.is_selectable]
    specs += [schedule_spec(name) for name in also if name not in built_in_schedules()]
    return tuple(spec.name for spec in specs if matches(spec))


def schedule_spec(name: str) -> ScheduleSpec:
    """Returns the specification of the schedule called ``name``.

    Args:
        name: Name of a schedule of this package, name of an entry point, or path of a user's
            schedule in the form ``package.module:name``.

    Raises:
        ConfigError: The schedule does not exist, or its module cannot be imported.
    """
    return built_in_schedules().get(name) or _own_spec(name)


@functools.lru_cache(maxsize=64)
def _own_spec(name: str) -> ScheduleSpec:
    loaded = find_object(name, group=ENTRY_POINTS, subject="schedule")
    if loaded is None:
        raise ConfigError(
            f"{name!r} is neither one of {', '.join(sorted(selectable_names()))} nor "
            "package.module:name of your own schedule"
        )
    if not isinstance(loaded, ScheduleSpec):
        raise ConfigError(
            f"schedule {name} is {type(loaded).__name__} {loaded!r:.60}, which is not a "
            "schedule; decorate a function with fixed_order or run_time_rule of "
            "megatron.adaptive.schedule"
        )
    return replace(loaded, name=name)


def why_whole_backward(*, recompute: str | None, overlaps: bool, replicas: int) -> str | None:
    """Returns why schedules should not split backward passes by default, or ``None`` if they may.

    Usually, a backward pass for inputs (B) frees more memory than it keeps for the later backward
    pass for weights (W), so the limit on activations still holds. In the cases that this function
    detects, B keeps more memory than it frees, or gradients are no longer reduced while backward
    passes run. In these cases, schedules whose ``splits_backward`` is ``by default`` do not
    split the backward pass.

    Args:
        recompute: Granularity of recomputation (``--recompute-granularity``), or ``None`` if
            nothing is recomputed.
        overlaps: Whether gradients are reduced while backward passes run.
        replicas: Number of data-parallel replicas.
    """
    if recompute == "full":
        return "with full recomputation, separate weight gradients need additional memory"
    if overlaps and replicas > 1:
        return "gradients are reduced while the last backward pass is still running"
    return None


def fixed_order(
    *,
    chunks: Chunks = "any",
    placements: tuple[PlacementKind, ...] = ("loop",),
    splits_backward: bool = False,
) -> Callable[[Callable[..., Any]], ScheduleSpec]:
    """Creates a schedule from a function that lists the actions of all ranks in advance.

    The function takes the :class:`~megatron.adaptive.schedule.Placement` of the stages and the
    number of microbatches. It returns a tuple of :class:`~megatron.adaptive.schedule.Action` for
    each rank, in the order of the ranks. The result is checked before training: each action must
    occur exactly once, and the schedule must not deadlock.

    Args:
        chunks: Number of model chunks that the schedule requires on each rank: ``any``, ``one``,
            ``two`` or ``several``.
        placements: Supported assignments of stages to ranks: ``loop``, ``v``, or both.
        splits_backward: Whether the function lists separate actions for weight gradients.
    """
    return lambda function: ScheduleSpec(
        name=f"{function.__module__}:{function.__name__}",
        function=function,
        chunks=chunks,
        placements=placements,
        splits_backward="always" if splits_backward else "never",
    )


def run_time_rule(
    *,
    chunks: Chunks = "any",
    placements: tuple[PlacementKind, ...] = ("loop", "v"),
    splits_backward: bool = False,
) -> Callable[[Callable[..., Any]], ScheduleSpec]:
    """Creates a schedule from a function that chooses a rank's next action at run time.

    The function takes the :class:`~megatron.adaptive.schedule.RankState` of the rank. It returns an
    action that is ready, or ``None`` to wait until more input arrives. The function must return
    quickly, and must not modify the state. It is tested in a simulation before training.

    Args:
        chunks: Number of model chunks that the schedule requires on each rank: ``any``, ``one``,
            ``two`` or ``several``.
        placements: Supported assignments of stages to ranks, with the default first.
        splits_backward: Whether weight gradients are computed by separate actions by default.
    """
    return lambda function: ScheduleSpec(
        name=f"{function.__module__}:{function.__name__}",
        function=function,
        kind="rule",
        chunks=chunks,
        placements=placements,
        prefers_v=placements[0] == "v",
        splits_backward="by default" if splits_backward else "on request",
    )
