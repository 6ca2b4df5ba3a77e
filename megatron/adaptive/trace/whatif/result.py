"""Defines the results of a what-if analysis, and their text and JSON formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.config.number_text import number_text
from megatron.adaptive.trace.read import describe_numbers
from megatron.adaptive.trace.span_columns import Ints
from megatron.adaptive.trace.whatif.operations import Floats, Pipelines

SHOWN = 5
"""Maximum number of ranks, and of links, whose slowdown is computed. The slowest are chosen."""
SLOW = 1.05
"""Minimum slowdown for which the report names causes and the share of each."""


@dataclass(frozen=True)
class Repair:
    """Describes a change that would make the run faster, and the time that it would save.

    Attributes:
        description: Short text that describes the change.
        flag: Command-line flags for the change, or advice if there are no flags.
        step_s: Mean step time with the change in seconds.
        gain: Fraction of the simulated step time that the change saves.
    """

    description: str
    flag: str
    step_s: float
    gain: float


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Contains the results of the what-if analysis of a run.

    Attributes:
        where: Maps each recorded rank to its pipeline rank, replica and stages.
        iterations: ``[steps]``, number of each analyzed step (iteration).
        recorded_s: ``[steps]``, recorded time of each step in seconds, from the start of its first
            operation to the end of its last operation.
        simulated_s: ``[steps]``, time of each step in seconds, simulated with the recorded
            durations but without host delays between operations.
        ideal_s: ``[steps]``, time of each step in seconds, simulated with the ideal durations.
        slowdowns: Slowdown caused by each group, keyed by type and name of the group. Types are
            ``stage``, ``replica``, ``rank``, ``kind`` of work, ``link``, and ``length`` of
            microbatches.
        by_step: ``[steps]``, slowdown in each step, keyed by type and name of the group. Types are
            ``stage``, ``replica`` and ``kind``.
        worker_share: Fraction of the slowdown that would vanish if the slowest ranks were as fast
            as the other ranks (Mw in arXiv 2505.05713).
        last_stage_share: Fraction of the slowdown that would vanish if the last stage were as fast
            as the other stages (Ms in arXiv 2505.05713).
        length_share: Fraction of the slowdown that would vanish if all microbatches took the same
            time.
        slowest: Indices into ``where.ranks`` of the slowest ranks, on which ``worker_share`` is
            based.
        cause: Main cause of the slowdown, one of :data:`CAUSES`. It is ``none`` if little time is
            lost, or ``mixed`` if no single cause explains enough of the slowdown.
        repairs: Changes that would make the run faster, in descending order of the time saved.
        notes: Caveats about the result, one line each.
    """

    where: Pipelines
    iterations: Ints
    recorded_s: Floats
    simulated_s: Floats
    ideal_s: Floats
    slowdowns: Mapping[str, Mapping[str, float]]
    by_step: Mapping[str, Mapping[str, Floats]]
    worker_share: float
    last_stage_share: float
    length_share: float
    slowest: tuple[int, ...]
    cause: str
    repairs: tuple[Repair, ...]
    notes: tuple[str, ...] = ()

    @property
    def slowdown(self) -> float:
        """Ratio of the mean simulated to the mean ideal step time (S in arXiv 2505.05713)."""
        return float(self.simulated_s.mean() / self.ideal_s.mean())

    @property
    def launch_slowdown(self) -> float:
        """Ratio of the mean recorded step time to the mean simulated step time.

        The deviation from 1 is the error of the simulation. It is mainly caused by host delays,
        which are not simulated.
        """
        return float(self.recorded_s.mean() / self.simulated_s.mean())

    def to_json(self) -> dict[str, Any]:
        """Returns the analysis as a dict for ``json.dumps``."""
        steps = self.iterations.tolist()
        return {
            "slowdown": self.slowdown,
            "launch_slowdown": self.launch_slowdown,
            "cause": self.cause,
            "Mw": self.worker_share,
            "Ms": self.last_stage_share,
            "length_share": self.length_share,
            "slowest_ranks": self.where.ranks[list(self.slowest)].tolist(),
            **{f"by_{group}": dict(values) for group, values in self.slowdowns.items()},
            **{
                f"by_{group}_per_step": {
                    str(step): {name: float(values[index]) for name, values in by_name.items()}
                    for index, step in enumerate(steps)
                }
                for group, by_name in self.by_step.items()
            },
            **{
                f"{name}_s": dict(zip(map(str, steps), values.tolist(), strict=True))
                for name, values in (
                    ("recorded", self.recorded_s),
                    ("simulated", self.simulated_s),
                    ("ideal", self.ideal_s),
                )
            },
            "repairs": [
                {
                    "what": repair.description,
                    "flag": repair.flag,
                    "step_s": repair.step_s,
                    "gain": repair.gain,
                }
                for repair in self.repairs
            ],
            "notes": list(self.notes),
        }

    def format(self) -> str:
        """Returns the analysis as lines of text to print."""
        lines = [
            f"steps {describe_numbers(self.iterations.tolist())} of {len(self.where.ranks)} ranks "
            f"take {number_text(self.recorded_s.mean(), 4)} s; simulated "
            f"{number_text(self.simulated_s.mean(), 4)} s "
            f"({self.launch_slowdown - 1:+.1%}: gaps between operations are not simulated); "
            f"{number_text(self.ideal_s.mean(), 4)} s if no rank, stage or microbatch were slower "
            "than others",
            f"slowdown {self.slowdown:.3f}: "
            + {
                "none": "no rank, stage or microbatch is clearly slower than others",
                "mixed": "no single cause",
                "worker": f"slow {', '.join(map(self.where.name, self.slowest[:3]))}",
                "last stage": f"the last stage, {self.where.num_stages - 1}, has more work",
                "sequence lengths": "microbatches of unequal lengths",
            }[self.cause],
            self._format_shares(),
        ]
        for group, values in self.slowdowns.items():
            worst = sorted(values.items(), key=lambda pair: -pair[1])[: SHOWN + 1]
            named = ", ".join(f"{name} {value:.3f}" for name, value in worst)
            lines.append(f"  slowdown by {group}: {named}")
        lines.append("repairs and the time they save:" if self.repairs else "no repair would help")
        lines += [
            f"  {repair.gain:6.1%}  {repair.description} ({number_text(repair.step_s, 4)} s): "
            f"{repair.flag}"
            for repair in self.repairs
        ]
        return "\n".join(lines)

    def _format_shares(self) -> str:
        """Returns a line with the fraction of the slowdown that each cause explains."""
        if self.slowdown < SLOW and self.cause != "none":
            return "  no slowdown compared with the mean; see the repairs below"
        if self.slowdown < SLOW:
            return f"  the slowdown is too small to attribute to causes (less than {SLOW})"
        return (
            f"  speeding up the slowest ranks would remove {_format_share(self.worker_share)} of "
            f"the slowdown; speeding up the last stage, {_format_share(self.last_stage_share)}; "
            f"equal lengths of microbatches, {_format_share(self.length_share)}"
        )


def _format_share(share: float) -> str:
    """Returns a fraction as a percentage, or ``none`` if it is at most 0, or ``all`` if at least 1.

    A fraction may be below 0 or above 1. A change replaces durations with the mean of the whole
    run, so the step may become slower than the recorded step, or faster than the ideal step.
    """
    if round(share, 2) <= 0:
        return "none"
    return "all" if round(share, 2) >= 1 else f"{share:.0%}"
