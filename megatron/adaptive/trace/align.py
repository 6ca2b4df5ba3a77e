"""Puts the ranks of a run on one clock.

Every start of a process has a monotonic clock, named in its header; ranks of one machine share it.
One of them is the reference: that of the rank the samples were taken against, else of the first
rank. Of each other clock is known, from best to worst:

- what samples say (``clock.fit_clock``), corrected by the run's messages,
- what messages between it and a known clock allow,
- what both machines believed the time of day to be.

Where a run has several clocks its times are moved onto the reference's time of day, so that they
mean something to a reader; with one clock they stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.adaptive.trace.clock import ClockFit, fit_clock, settle, shift
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.index import FileIndex
from megatron.adaptive.trace.messages import Messages

__all__ = ["Alignment", "ClockState", "align", "refine"]


@dataclass(frozen=True, kw_only=True)
class ClockState:
    """What is known of a clock.

    Attributes:
        name: as the headers have it.
        ranks: global ranks that have it.
        how: ``reference``, ``samples``, ``messages`` or ``time of day``.
        fit: turns its readings into the common time.
        moved_ns: how much of that the run's messages added.
    """

    name: str
    ranks: tuple[int, ...]
    how: str
    fit: ClockFit
    moved_ns: int = 0


@dataclass(frozen=True)
class Alignment:
    """The clocks of a run.

    Attributes:
        clocks: the reference first.
        contradiction_ns: by how much the worst message still seems to arrive before it was sent.
    """

    clocks: tuple[ClockState, ...]
    contradiction_ns: int = 0

    def fit_of(self, name: str) -> ClockFit:
        """What turns readings of a clock into the common time."""
        return next(clock.fit for clock in self.clocks if clock.name == name)

    @property
    def residual_ns(self) -> float:
        """The largest median residual of a clock that was measured, 0 where none was."""
        return max((clock.fit.residual_ns for clock in self.clocks), default=0.0)

    def describe(self) -> str:
        """Some words: how many clocks there are and how well they agree."""
        measured = [clock.fit for clock in self.clocks[1:] if clock.fit.num_samples]
        if len(self.clocks) <= 1:
            return "one for all ranks"
        if not measured:
            return f"{len(self.clocks)} clocks, none measured"
        drift = max((fit.drift_ppm for fit in measured), key=abs)
        return (
            f"{len(self.clocks)} clocks, {len(measured)} measured: residual "
            f"{self.residual_ns / 1e3:.1f} us, error below "
            f"{max(fit.delay_ns for fit in measured) / 2e3:.1f} us, drift up to {drift:+.1f} ppm"
        )

    def warnings(self) -> list[str]:
        """What is wrong with the clocks, a line each."""
        lines = []
        for how, advice in (
            ("messages", "were not measured: messages place them, to within their travel time"),
            ("time of day", "were not measured: the machines' time of day places them"),
        ):
            ranks = [rank for clock in self.clocks if clock.how == how for rank in clock.ranks]
            if ranks:
                lines.append(f"the clocks of ranks {_ranks(ranks)} {advice}")
        if self.contradiction_ns:
            lines.append(
                f"the clocks contradict the messages: one arrives {self.contradiction_ns / 1e3:.1f}"
                " us before it is sent"
            )
        return lines


def align(files: Mapping[int, FileIndex], names: Mapping[tuple[int, int], str]) -> Alignment:
    """Align clocks by samples, else by the time of day.

    Args:
        files: by global rank.
        names: of clocks, by global rank and number of the header.
    """
    headers: dict[str, TraceHeader] = {}
    ranks: dict[str, list[int]] = {}
    for (rank, number), name in sorted(names.items()):
        headers.setdefault(name, files[rank].headers[number])
        if rank not in ranks.setdefault(name, []):
            ranks[name].append(rank)
    judge, samples = _samples(files, names)
    measured = {name: fit_clock(found) for name, found in samples.items()}
    if judge is None or judge in files:
        first = min(files) if judge is None else judge
        reference = names[first, len(files[first].headers) - 1]
        lead = headers[reference].unix_ns - headers[reference].monotonic_ns
    else:
        reference = f"that of rank {judge}"
        name, fit = next(iter(measured.items()))
        lead = headers[name].unix_ns - int(fit.apply(np.array([headers[name].monotonic_ns]))[0])
    home = ranks.get(reference, ())
    several = set(headers) != {reference}
    clocks = [
        ClockState(
            name=reference,
            ranks=tuple(home),
            how="reference",
            fit=shift(lead if several else 0),
        )
    ]
    for name, header in headers.items():
        if name == reference:
            continue
        how, fit = "time of day", shift(header.unix_ns - header.monotonic_ns)
        if name in measured:
            how, fit = "samples", measured[name].plus(lead)
        clocks.append(ClockState(name=name, ranks=tuple(ranks[name]), how=how, fit=fit))
    return Alignment(tuple(clocks))


def refine(alignment: Alignment, names: Mapping[int, str], messages: Messages) -> Alignment:
    """Correct clocks by messages of the run.

    Args:
        alignment: what :func:`align` found.
        names: of the clock that each rank has in these messages.
        messages: with times as ``alignment`` has them.
    """
    numbers = {clock.name: number for number, clock in enumerate(alignment.clocks)}
    slack: dict[tuple[int, int], int] = {}
    for source, target, sent, arrived in zip(
        messages.source.tolist(),
        messages.target.tolist(),
        messages.sent_ns.tolist(),
        messages.arrived_ns.tolist(),
        strict=True,
    ):
        pair = (numbers[names[source]], numbers[names[target]])
        if pair[0] != pair[1]:
            slack[pair] = min(slack.get(pair, arrived - sent), arrived - sent)
    unsure = [n for n, clock in enumerate(alignment.clocks) if clock.how == "time of day"]
    moves, left = settle(slack, len(alignment.clocks), unsure)
    clocks = []
    for number, clock in enumerate(alignment.clocks):
        met = any(number in pair for pair in slack)
        clocks.append(
            replace(
                clock,
                fit=clock.fit.plus(moves[number]),
                moved_ns=moves[number],
                how="messages" if number in unsure and met else clock.how,
            )
        )
    return Alignment(tuple(clocks), left)


def _samples(
    files: Mapping[int, FileIndex], names: Mapping[tuple[int, int], str]
) -> tuple[int | None, dict[str, list[tuple[int, int, int, int]]]]:
    """The rank that all clocks were measured against, and the samples of each clock."""
    judge: int | None = None
    samples: dict[str, list[tuple[int, int, int, int]]] = {}
    for rank, file in sorted(files.items()):
        for number, record in file.samples:
            judge = record.reference if judge is None else judge
            if record.reference == judge:
                samples.setdefault(names[rank, number], []).extend(record.samples)
    return judge, samples


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
