"""Defines findings of a diagnosis, each with its evidence, its cost and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.adaptive.trace.read import describe_numbers

CAUSES_FOUND = (
    *("slow rank", "slow link", "slow data", "spikes", "uneven stages", "overloaded experts"),
)
"""Causes of findings."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """When something was so.

    Attributes:
        first: first iteration that has it.
        last: last one.
        kind: ``lasting`` (in all that were looked at), ``begun`` (from ``first`` on), ``passed``
            (from ``first`` to ``last``) or ``spikes`` (now and then).
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
class Finding:
    """One thing that slows a run.

    Attributes:
        cause: one of :data:`CAUSES_FOUND`.
        ranks: global ranks; of a link its sender and its receiver.
        stages: pipeline stages on these ranks.
        hosts: their machines, by rank.
        factor: how many times as long the work takes, of experts how many times the mean number of
            tokens they have; ``None`` where ``delay_ms`` says it.
        delay_ms: how much later a message, a microbatch or an action is; of experts, how much
            longer others stand in exchanges for each microbatch.
        period: when.
        against: what it was compared with: ``peers``, ``plan``, ``history`` or ``others``.
        confidence: 0.5 to 0.99, how sure it is that this is so and no chance.
        counts: the spans it rests on: iterations, and actions, messages or reads.
        detail: figures that show it, one line.
        cost_ms: what a step would take less without it, milliseconds, by simulation.
        cost_fraction: the same as a part of the step: the gain of mending it.
        advice: what to do, a sentence each, the best first.
        partition: layers per stage that make the best of it, empty where unknown or no better.
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
    advice: tuple[str, ...] = ()
    partition: tuple[int, ...] = ()

    @property
    def headline(self) -> str:
        """One line: cause, culprit, size, when."""
        return f"{self.cause}: {self._culprit()} {self._size()} {self.period}"

    def format(self) -> str:
        """A few lines for people."""
        counted = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        lines = [
            self.headline,
            f"  without it a step takes {self.cost_ms:.3g} ms less ({self.cost_fraction:.1%}); "
            f"confidence {self.confidence:.0%}, against {self.against}",
            f"  rests on {counted}{': ' if self.detail else ''}{self.detail}",
        ]
        lines += [f"  {'do' if not n else 'or'}: {text}" for n, text in enumerate(self.advice)]
        return "\n".join(lines)

    def _culprit(self) -> str:
        stages = f"stage{'s' * (len(self.stages) != 1)} {describe_numbers(self.stages)}"
        if self.cause == "uneven stages":
            return stages
        hosts = " to ".join(dict.fromkeys(self.hosts))
        if self.cause == "slow link":
            return f"rank {self.ranks[0]} to rank {self.ranks[1]} ({hosts})"
        return f"rank {self.ranks[0]} ({stages}, {hosts})"

    def _size(self) -> str:
        if self.cause == "overloaded experts":
            return f"has {self.factor:.2f} times the mean of tokens"
        if self.factor is not None:
            verb = "take" if self.cause == "uneven stages" and len(self.stages) > 1 else "takes"
            return f"{verb} {self.factor:.2f} times as long"
        what, more = {
            "slow link": ("messages are", "late"),
            "slow data": ("reading takes each microbatch", "more"),
            "spikes": ("has actions that take", "more"),
        }[self.cause]
        return f"{what} {self.delay_ms:.3g} ms {more}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Holds the findings of a run.

    Attributes:
        findings: the dearest first; empty where nothing stands out.
        iterations: the iterations looked at.
        num_ranks: how many ranks have traces.
        counts: what there was to look at: actions and messages.
        step_ms: median length of a step.
        notes: what who reads this must know about the trace; not part of :meth:`format`.
        pace_ns: what each rank takes for a microbatch, by the layers that it holds; empty where the
            trace does not say how many these are.
    """

    findings: tuple[Finding, ...]
    iterations: tuple[int, ...]
    num_ranks: int
    counts: Mapping[str, int]
    step_ms: float
    notes: tuple[str, ...] = ()
    pace_ns: tuple[float, ...] = ()

    def format(self) -> str:
        """Some lines for people."""
        counted = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        head = (
            f"{len(self.findings) or 'no'} finding{'s' * (len(self.findings) != 1)} in iterations "
            f"{describe_numbers(self.iterations)} of {self.num_ranks} ranks "
            f"({counted}; a step takes {self.step_ms:.4g} ms)"
        )
        return "\n".join([head, *(f.format() for f in self.findings)])

    def to_json(self) -> dict[str, Any]:
        """The same as numbers and words that ``json.dumps`` takes."""
        found = asdict(self)
        for one, finding in zip(found["findings"], self.findings, strict=True):
            one["period"]["text"] = str(finding.period)
            one |= {"headline": finding.headline, "text": finding.format()}
        return found
