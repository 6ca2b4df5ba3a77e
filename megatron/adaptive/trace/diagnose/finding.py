"""Defines the results of a diagnosis: findings with evidence, cost and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.read import describe_numbers


@dataclass(frozen=True, kw_only=True)
class Period:
    """Describes the iterations that a finding affects.

    Attributes:
        first: Number of the first affected iteration.
        last: Number of the last affected iteration.
        kind: ``lasting`` (all examined iterations), ``begun`` (from ``first`` to the end),
            ``passed`` (only from ``first`` to ``last``) or ``spikes`` (occasionally).
    """

    first: int
    last: int
    kind: str = "lasting"

    def __str__(self) -> str:
        return {
            "lasting": "in all iterations",
            "begun": f"from iteration {self.first} on",
            "passed": f"in iterations {self.first}-{self.last}",
            "spikes": "now and then",
        }[self.kind]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Describes why ranks did not compute, according to a counter of the machine they run on.

    Attributes:
        counter: Name of the counter in ``machine_counters``.
        text: Sentence about the ranks or the machine, with the measured values.
        remedy: Instruction for the user to remove the cause.
    """

    counter: str
    text: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Describes a detected cause of slow steps, with its evidence and cost.

    Attributes:
        cause: Name of the cause (``Cause.name``); filled in by the diagnosis.
        ranks: Affected global ranks. For a slow link, these are the sender and the receiver.
        stages: Pipeline stages on the affected ranks.
        hosts: Name of the machine of each affected rank.
        factor: Ratio of the ranks' computing time to the expected time or, for overloaded experts,
            of their tokens to the mean. ``None`` if only ``delay_ms`` is known.
        delay_ms: Delay in ms of each message, microbatch or action. For overloaded experts, the
            time per microbatch that other ranks wait before they can exchange tokens. ``None`` if
            unknown.
        period: Affected iterations.
        against: Reference of the comparison: ``peers`` (ranks with the same work), ``plan``
            (expected times), ``history`` (other iterations) or ``others`` (other ranks or links).
        confidence: Probability that the finding is not caused by chance, between 0.5 and 0.99.
        counts: Number of iterations, actions, messages or reads that were compared, keyed by name.
        detail: Additional numbers, as a line of text.
        cost_ms: Time in ms that a step would save without the cause, according to a simulation.
        cost_fraction: ``cost_ms`` as a fraction of the step time.
        description: Middle part of the headline, which names the affected rank and the effect.
            Filled in by the diagnosis.
        advice: Remedies, one sentence each, with the best first.
        partition: Best number of layers per stage for the measured speeds. Empty if unknown or not
            better than the current partition.
        reason: Reason for the slowdown according to the machine's counters, or ``None`` if unknown.
        more_reasons: Other reasons, which each explain less of the lost time than ``reason``.
    """

    cause: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    hosts: tuple[str, ...]
    period: Period
    against: str
    confidence: float
    factor: float | None = None
    delay_ms: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    detail: str = ""
    cost_ms: float = 0.0
    cost_fraction: float = 0.0
    description: str = ""
    advice: tuple[str, ...] = ()
    partition: tuple[int, ...] = ()
    reason: Reason | None = None
    more_reasons: tuple[Reason, ...] = ()

    @property
    def headline(self) -> str:
        """Line of text that names the cause, the affected ranks, the effect and the iterations."""
        return f"{self.cause}: {self.description or self.culprit} {self.period}"

    @property
    def stages_text(self) -> str:
        """Text that lists the affected stages."""
        return f"stage{'s' * (len(self.stages) != 1)} {describe_numbers(self.stages)}"

    @property
    def culprit(self) -> str:
        """Text that names the first affected rank, and the affected stages and machines."""
        hosts = " to ".join(dict.fromkeys(self.hosts))
        return f"rank {self.ranks[0]} ({self.stages_text}, {hosts})"

    @property
    def delay_text(self) -> str:
        """Text of ``delay_ms`` with its unit; ``0 ms`` if the delay is unknown."""
        return f"{number_text(self.delay_ms or 0.0)} ms"

    def format(self) -> str:
        """Returns the finding as text: the headline, and lines with cost, evidence and remedies."""
        counted = ", ".join(f"{count} {unit}" for unit, count in self.counts.items())
        lines = [
            self.headline,
            f"  without it, a step would take {number_text(self.cost_ms)} ms less "
            f"({self.cost_fraction:.1%}); confidence {self.confidence:.0%}, compared with "
            f"{self.against}",
            f"  from {counted}{': ' if self.detail else ''}{self.detail}",
        ]
        if self.reason:
            lines.append(f"  because {self.reason.text}")
        lines += [f"  and {reason.text}" for reason in self.more_reasons]
        lines += [f"  {'do' if not n else 'or'}: {text}" for n, text in enumerate(self.advice)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Holds the result of diagnosing a run.

    Attributes:
        findings: Detected causes of slow steps, most costly first.
        iterations: Numbers of the examined iterations.
        num_ranks: Number of ranks with a trace.
        counts: Number of examined actions and messages, keyed by name.
        step_ms: Median step time in ms.
        notes: Caveats about the trace, which :meth:`format` does not include.
        pace_ns: Each rank's time in ns per microbatch, divided by its planned work in layers. Empty
            if the planned work of any rank is unknown.
    """

    findings: tuple[Finding, ...]
    iterations: tuple[int, ...]
    num_ranks: int
    counts: Mapping[str, int]
    step_ms: float
    notes: tuple[str, ...] = ()
    pace_ns: tuple[float, ...] = ()

    def format(self) -> str:
        """Returns the diagnosis as text, with a summary line and several lines per finding."""
        counted = ", ".join(f"{count} {unit}" for unit, count in self.counts.items())
        head = (
            f"{len(self.findings) or 'no'} finding{'s' * (len(self.findings) != 1)} in iterations "
            f"{describe_numbers(self.iterations)} of {self.num_ranks} ranks "
            f"({counted}; a step takes {number_text(self.step_ms, 4)} ms)"
        )
        return "\n".join([head, *(f.format() for f in self.findings)])

    def to_json(self) -> dict[str, Any]:
        """Returns the diagnosis as a dict for ``json.dumps``."""
        result = asdict(self)
        for fields, finding in zip(result["findings"], self.findings, strict=True):
            fields["period"]["text"] = str(finding.period)
            del fields["description"]  # Omit the description, because the headline contains it.
            fields |= {"headline": finding.headline, "text": finding.format()}
        return result
