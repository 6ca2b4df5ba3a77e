"""Reads the steps that a job has recorded, and compares them with those of an undisturbed job."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.trace.status_files import ProgressTail

_STEP = re.compile(
    r" iteration +(\d+)/ *\d+ \| consumed samples: +(\d+) \|.*? lm loss: ([-+.\dEenaif]+) \|"
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Training step that a job has recorded.

    Attributes:
        iteration: Index of the step.
        samples: Number of samples trained so far, including this step.
        loss: Loss of the step.
        unix_ns: Unix time in ns at which the step ended, or 0 if only the log contains the step.
    """

    iteration: int
    samples: int
    loss: float
    unix_ns: int = 0


@dataclass(kw_only=True)
class Epoch:
    """Steps of one incarnation of a job, which begins when the job starts or changes its shape.

    Attributes:
        name: Name of the incarnation's folder.
        start: Iteration from which the incarnation continued, or ``None`` if the incarnation has
            not begun.
        begun_ns: Unix time in nanoseconds at which the incarnation began.
        steps: Steps in order.
        saved: Pairs of the iteration of a complete checkpoint and the Unix time in nanoseconds at
            which it was saved.
    """

    name: str
    start: int | None = None
    begun_ns: int = 0
    steps: list[Step]
    saved: list[tuple[int, int]]

    @property
    def last_ns(self) -> int:
        """Returns the Unix time in nanoseconds at which the last step ended."""
        return self.steps[-1].unix_ns if self.steps else self.begun_ns


class Record:
    """Reads the progress files of a running job.

    There is a file for each incarnation, which begins when the job starts or changes its shape.

    Args:
        folder: Folder of the job's state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epochs: dict[str, tuple[Epoch, ProgressTail]] = {}

    @property
    def epochs(self) -> list[Epoch]:
        """Returns the incarnations that have begun, ordered by their start times."""
        begun = [epoch for epoch, _ in self._epochs.values() if epoch.start is not None]
        return sorted(begun, key=lambda epoch: epoch.begun_ns)

    def refresh(self) -> None:
        """Reads the lines that the job has written since the last call."""
        for path in self._folder.glob("epoch-*/progress.jsonl"):
            name = path.parent.name
            if name not in self._epochs:
                tail = ProgressTail(path, kept=None)
                self._epochs[name] = Epoch(name=name, steps=[], saved=[]), tail
            epoch, tail = self._epochs[name]
            for line in tail.refresh():
                _take(epoch, line)

    def steps_since(self, unix_ns: int) -> list[Step]:
        """Returns the steps that ended after ``unix_ns``.

        Searches only the last nine steps of each incarnation.
        """
        return [
            step
            for epoch, _ in self._epochs.values()
            for step in epoch.steps[-9:]
            if step.unix_ns > unix_ns
        ]

    @property
    def last(self) -> int:
        """Returns the index of the last completed iteration."""
        done = (epoch.steps[-1].iteration for epoch, _ in self._epochs.values() if epoch.steps)
        return max(done, default=0)


def _take(epoch: Epoch, entry: Mapping[str, Any]) -> None:
    unix_ns = entry["unix_ns"]
    if "start_iteration" in entry:
        epoch.start, epoch.begun_ns = entry["start_iteration"], unix_ns
    elif "iteration" in entry:
        epoch.steps.append(
            Step(
                iteration=entry["iteration"],
                samples=entry["consumed_samples"],
                loss=entry["loss"],
                unix_ns=unix_ns,
            )
        )
    elif "saved" in entry:
        epoch.saved.append((entry["saved"], unix_ns))


def steps_of_logs(texts: Iterable[str]) -> list[Step]:
    """Returns the steps in the logs ``texts``. Skips lines that other output interrupted."""
    return [
        Step(iteration=int(match[1]), samples=int(match[2]), loss=float(match[3]))
        for text in texts
        for match in _STEP.finditer(text)
    ]


def faults(
    epochs: Sequence[Epoch],
    printed: Sequence[Step],
    expected: Mapping[int, float],
    *,
    first: int,
    batch: int,
    tolerance: float,
    damaged: Sequence[tuple[int, int]] = (),
) -> tuple[list[str], float]:
    """Compares a job with an undisturbed job, and returns descriptions of the differences.

    Args:
        epochs: Incarnations of the job, ordered by time.
        printed: Steps in the job's logs.
        expected: Loss of each iteration of the undisturbed run.
        first: First iteration of the job.
        batch: Number of samples per step.
        tolerance: Maximum relative difference between a loss and the expected loss.
        damaged: Pairs of an iteration whose checkpoint was corrupted and the Unix time of the
            corruption in nanoseconds.

    Returns:
        Descriptions of the faults, and the largest relative difference between a loss and the
        expected loss.
    """
    lines: list[str] = []
    recorded = [step for epoch in epochs for step in epoch.steps]
    everything = [*recorded, *printed]
    if not everything:
        return ["no step was completed"], 0.0
    worst = 0.0
    for step in everything:
        if step.samples != step.iteration * batch:
            lines.append(
                f"iteration {step.iteration} reports {step.samples} samples of {batch} each"
            )
        off = abs(step.loss / expected[step.iteration] - 1)
        if not off <= tolerance:
            lines.append(
                f"iteration {step.iteration}: loss {step.loss!r} and undisturbed"
                f" {expected[step.iteration]!r} differ by {off:.1e}"
            )
        worst = max(worst, off)
    done = {step.iteration for step in everything}
    missing = sorted(set(range(first, max(done) + 1)) - done)
    if missing:
        lines.append(f"{len(missing)} iterations were never completed: {missing[:10]}")
    return lines + _order(epochs, done, damaged), worst


def _order(
    epochs: Sequence[Epoch], done: set[int], damaged: Sequence[tuple[int, int]]
) -> list[str]:
    """Returns descriptions of steps and incarnations that are missing, repeated or out of order.

    ``epochs`` lists the incarnations, and ``done`` contains all completed iterations. An
    incarnation need not continue from a checkpoint in ``damaged``.
    """
    lines: list[str] = []
    for epoch in epochs:
        last = epoch.start
        assert last is not None
        for step in epoch.steps:
            # If the disk was full, a step may be in the log but not in the progress file.
            if step.iteration <= last or not done.issuperset(range(last + 1, step.iteration)):
                lines.append(f"{epoch.name}: iteration {step.iteration} came after {last}")
            last = step.iteration
    for before, after in itertools.pairwise(epochs):
        if before.last_ns > after.begun_ns:
            lines.append(f"{before.name} had not ended when {after.name} began")
    saved: list[tuple[int, int, str]] = sorted(
        (unix_ns, iteration, epoch.name) for epoch in epochs for iteration, unix_ns in epoch.saved
    )
    for epoch in epochs:
        older = [
            entry
            for entry in saved
            if entry[0] < epoch.begun_ns - 10**9
            and entry[2] != epoch.name
            and not any(
                iteration == entry[1] and entry[0] < unix_ns < epoch.begun_ns
                for iteration, unix_ns in damaged
            )
        ]
        assert epoch.start is not None
        if older and epoch.start < max(iteration for _, iteration, _ in older[-1:]):
            lines.append(
                f"{epoch.name} continued from {epoch.start}, although {older[-1][1]} had been saved"
            )
    return lines
