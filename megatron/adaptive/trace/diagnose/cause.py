"""Defines the interface of the causes of slow steps that a diagnosis searches for.

Each subclass of :class:`Cause` searches the measured times for one cause of slow steps. It
describes the cause, suggests remedies, and computes how long operations would take without the
cause. The causes of this package are the modules of the folder ``causes``, which are found without
registration. Users can define causes in any module, and pass them as ``trace diagnose --cause
package.module:Class``. A package can also publish causes as entry points of the group
``megatron_adaptive.causes``, whose names can be passed to ``--cause``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from megatron.adaptive.config.own_code import find_object, modules_in
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import built_in_schedules
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.trace.diagnose.finding import Finding
from megatron.adaptive.trace.diagnose.samples import Measured
from megatron.adaptive.trace.diagnose.stage_costs import StageCosts, best_partition
from megatron.adaptive.trace.whatif.advice import Advice, advice_for
from megatron.adaptive.trace.whatif.operations import WEIGHT, Operations

Floats64 = npt.NDArray[np.float64]

ENTRY_POINTS = "megatron_adaptive.causes"
"""Name of the group of entry points through which installed packages provide causes."""

WORTH_MOVING = 0.03
"""Minimum fraction of the slowest rank's time that a suggested partition must save."""

WORTH_REPORTING = 0.01
"""Minimum fraction of the step time that a cause other than a fault must cost to be reported.

Uneven stages and overloaded experts are not faults. A faulty rank is reported even if it costs
less.
"""


@dataclass(frozen=True)
class Remedy:
    """Contains the remedies for a finding.

    Attributes:
        advice: Remedies, one sentence each, with the best first.
        partition: Best number of layers per stage for the measured speeds. Empty if unknown or not
            better than the current partition.
    """

    advice: tuple[str, ...] = ()
    partition: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Evidence:
    """Contains the measured times in which a :class:`Cause` looks for its findings.

    Attributes:
        measured: Measured times of the run as arrays. Use ``measured.finding`` to create a finding.
        times: Time of a layer on each stage, or ``None`` if unknown.
    """

    measured: Measured
    times: StageCosts | None

    @property
    def is_ordered_at_run_time(self) -> bool:
        """Whether the measured run chose the order of its actions at run time."""
        spec = built_in_schedules().get(self.measured.headers[0].schedule)
        return spec is not None and spec.is_rule

    @property
    def settings(self) -> Advice:
        """Settings that remedies can recommend to users of the program that wrote the trace."""
        return advice_for(self.measured.headers[0])

    def move_layers(self, finding: Finding) -> Remedy:
        """Returns the advice to move layers away from the slow stages in ``finding``.

        The remedy is empty if the slowdown has already ended, or if even the best partition would
        save too little time.
        """
        m, times, settings = self.measured, self.times, self.settings
        if times is None:
            name = settings.partition.rstrip('= "')
            advice = f"assign fewer {settings.layers} to stage {finding.stages[0]} ({name})"
            return Remedy((advice,))
        if finding.period.kind == "passed":
            return Remedy()
        better = best_partition(times, sum(m.layers))
        gain = 1 - times.rank_ns(better).max() / max(1.0, times.rank_ns(m.layers).max())
        if gain < WORTH_MOVING:
            return Remedy()
        advice = (
            f"move {settings.layers} with {settings.of_partition(format_partition(better))} "
            f"instead of {format_partition(m.layers)}: the slowest rank takes {gain:.0%} less time"
        )
        return Remedy((advice,), better)


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """Contains the operations of recorded steps, with durations that a cause can change.

    To compute the cost of a cause, the steps are simulated again with the changed durations. In the
    simulation, a single worker represents all ranks of a tensor-parallel group. A finding about any
    rank of the group is therefore applied to this worker.

    Attributes:
        evidence: Measured times of the run.
        finding: Finding whose cause is removed.
        operations: Operations of the recorded steps.
        duration_s: Duration of each operation in seconds. The array is a copy, which may be
            modified.
    """

    evidence: Evidence
    finding: Finding
    operations: Operations
    duration_s: Floats64

    @property
    def delay_s(self) -> float:
        """Delay in seconds per message or action in the finding, or 0 if there is no delay."""
        return (self.finding.delay_ms or 0.0) / 1e3

    @cached_property
    def workers(self) -> list[int]:
        """Index of the simulated worker that represents each affected rank, or -1 if none does."""
        m = self.evidence.measured
        simulated = self._simulated
        worker_of = {(header.pp_rank, header.dp_rank): n for n, header in enumerate(simulated)}
        headers = [m.headers[m.column[rank]] for rank in self.finding.ranks]
        return [worker_of.get((header.pp_rank, header.dp_rank), -1) for header in headers]

    @cached_property
    def computes(self) -> npt.NDArray[np.bool_]:
        """Whether each operation is a computation (forward, backward or weight gradient)."""
        return np.asarray(self.operations.kind <= WEIGHT)

    @cached_property
    def affected(self) -> npt.NDArray[np.bool_]:
        """Whether each operation is a computation on an affected rank."""
        return self.computes & np.isin(self.operations.worker, self.workers)

    def workers_at(self, pp_rank: int) -> list[int]:
        """Returns the indices of the workers with pipeline rank ``pp_rank``, one per replica."""
        return [n for n, header in enumerate(self._simulated) if header.pp_rank == pp_rank]

    def with_partition(self, partition: tuple[int, ...]) -> Floats64:
        """Returns the duration in seconds that each operation would have with ``partition``.

        If ``partition`` is empty or the time of a layer is unknown, returns the durations
        unchanged.
        """
        m, times = self.evidence.measured, self.evidence.times
        if times is not None and partition:
            ratio = times.stage_ns(partition) / np.maximum(times.stage_ns(m.layers), 1)
            self.duration_s[self.computes] *= ratio[self.operations.stage[self.computes]]
        return self.duration_s

    @property
    def _simulated(self) -> list[Any]:
        m = self.evidence.measured
        return [m.headers[m.column[rank]] for rank in self.operations.where.ranks.tolist()]


class Cause:
    """Finds one cause of slow steps. Subclasses must at least set ``name`` and define :meth:`find`.

    Attributes:
        name: Name of the cause in the diagnosis.
        order: Number by which the causes are sorted in the search. Findings with equal costs are
            listed in the same order.
        is_rare: Whether the cause affects only a few steps. If True, the cost of a finding is the
            mean over all simulated steps.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 1000
    is_rare: ClassVar[bool] = False

    def find(self, evidence: Evidence, earlier: Sequence[Finding]) -> Iterable[Finding]:
        """Returns the findings of this cause, created with ``evidence.measured.finding``.

        Return only findings that are statistically significant and large enough to matter.

        Args:
            evidence: Measured times of the run.
            earlier: Findings of the causes that precede this one in the search, in the same order.
        """
        raise NotImplementedError

    def describe(self, finding: Finding) -> str:
        """Returns the part of the headline that names the affected rank and the effect."""
        if finding.factor is not None:
            return f"{finding.culprit} takes {finding.factor:.2f} times as long"
        return f"{finding.culprit} takes {finding.delay_text} more"

    def advise(self, finding: Finding, evidence: Evidence) -> Remedy:
        """Returns the remedy for ``finding``, which is empty if there is no advice."""
        return Remedy()

    def without(self, finding: Finding, steps: RecordedSteps) -> Floats64:
        """Returns the duration in seconds that each operation would have without the cause.

        To compute the cost of ``finding``, the steps are simulated with the recorded durations and
        with the durations that this method returns. The cost is the difference between the step
        times.
        """
        return steps.duration_s

    def keeps(self, finding: Finding, *, is_simulated: bool) -> bool:
        """Returns whether to keep ``finding`` in the diagnosis, after its cost has been computed.

        Args:
            finding: Finding with its cost.
            is_simulated: Whether the cost was simulated. If False, the cost is 0.
        """
        return True


def built_in_causes() -> tuple[Cause, ...]:
    """Returns an instance of each cause in the folder ``causes``, in the order of the search."""
    from megatron.adaptive.trace.diagnose import causes

    classes = {
        value
        for module in modules_in(causes)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Cause) and value is not Cause
    }
    return tuple(sorted((cls() for cls in classes), key=lambda cause: (cause.order, cause.name)))


def find_cause(name: str) -> Cause:
    """Returns an instance of the user-defined subclass of :class:`Cause` called ``name``.

    Args:
        name: ``package.module:Class``, or the name of an entry point.

    Raises:
        ConfigError: The class does not exist, cannot be imported, or is not a cause.
    """
    loaded = find_object(name, group=ENTRY_POINTS, subject="cause")
    if loaded is None:
        raise ConfigError(
            "argument --cause: expected package.module:Class of a cause, or an entry point of the "
            f"group {ENTRY_POINTS}, got {name!r}"
        )
    if not (isinstance(loaded, type) and issubclass(loaded, Cause) and hasattr(loaded, "name")):
        raise ConfigError(
            f"cause {name} must be a subclass of megatron.adaptive.trace.diagnose.Cause that sets "
            f"the attribute name, got {type(loaded).__name__} {loaded!r:.60}"
        )
    return loaded()
