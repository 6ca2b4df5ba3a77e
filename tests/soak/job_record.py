"""Steps that a job has recorded, and their comparison with those of an undisturbed job."""

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
    """One recorded step.

    Attributes:
        iteration: Number of the step.
        samples: Number of samples of the training so far, with those of this step.
        loss: Loss of the step.
        unix_ns: Time of its end; 0 if only the log has the step.
    """

    iteration: int
    samples: int
    loss: float
    unix_ns: int = 0


@dataclass(kw_only=True)
class Epoch:
    """Steps of the ranks of one shape.

    Attributes:
        name: Name of the folder.
        start: Iteration from which it continued, ``None`` while it has not begun.
        begun_ns: Time of its begin.
        steps: Steps in their order.
        saved: Iterations of complete checkpoints, with their times.
    """

    name: str
    start: int | None = None
    begun_ns: int = 0
    steps: list[Step]
    saved: list[tuple[int, int]]

    @property
    def last_ns(self) -> int:
        """Time of the end of its last step."""
        return self.steps[-1].unix_ns if self.steps else self.begun_ns


class Record:
    """Reads the files of all epochs of a job while it runs.

    Args:
        folder: Folder of the job's state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epochs: dict[str, tuple[Epoch, ProgressTail]] = {}

    @property
    def epochs(self) -> list[Epoch]:
        """Epochs that have begun, in the order of time."""
        begun = [one for one, _ in self._epochs.values() if one.start is not None]
        return sorted(begun, key=lambda one: one.begun_ns)

    def refresh(self) -> None:
        """Reads new lines."""
        for path in self._folder.glob("epoch-*/progress.jsonl"):
            name = path.parent.name
            if name not in self._epochs:
                tail = ProgressTail(path, kept=None)
                self._epochs[name] = Epoch(name=name, steps=[], saved=[]), tail
            epoch, tail = self._epochs[name]
            for line in tail.refresh():
                _take(epoch, line)

    def steps_since(self, unix_ns: int) -> list[Step]:
        """Returns the steps that ended after a moment."""
        return [
            step
            for one, _ in self._epochs.values()
            for step in one.steps[-9:]
            if step.unix_ns > unix_ns
        ]

    @property
    def last(self) -> int:
        """Largest iteration that ended."""
        done = (one.steps[-1].iteration for one, _ in self._epochs.values() if one.steps)
        return max(done, default=0)


def _take(epoch: Epoch, told: Mapping[str, Any]) -> None:
    at = told["unix_ns"]
    if "start_iteration" in told:
        epoch.start, epoch.begun_ns = told["start_iteration"], at
    elif "iteration" in told:
        epoch.steps.append(
            Step(
                iteration=told["iteration"],
                samples=told["consumed_samples"],
                loss=told["loss"],
                unix_ns=at,
            )
        )
    elif "saved" in told:
        epoch.saved.append((told["saved"], at))


def steps_of_logs(texts: Iterable[str]) -> list[Step]:
    """Returns the steps that trainers printed, without lines that another line cut in two."""
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
    """Returns the differences of a job from one without faults.

    Args:
        epochs: Epochs of the job, in the order of time.
        printed: Steps in its logs.
        expected: Loss of each iteration of the undisturbed run.
        first: First iteration of the job.
        batch: Number of samples of a step.
        tolerance: Largest relative difference of losses that is allowed.
        damaged: Iterations whose checkpoint was damaged, with the times in nanoseconds.

    Returns:
        Lines about the faults, and the largest difference of a loss.
    """
    found: list[str] = []
    told = [step for one in epochs for step in one.steps]
    everything = [*told, *printed]
    if not everything:
        return ["no step was done"], 0.0
    worst = 0.0
    for step in everything:
        if step.samples != step.iteration * batch:
            found.append(f"iteration {step.iteration} says {step.samples} samples of {batch} each")
        off = abs(step.loss / expected[step.iteration] - 1)
        if not off <= tolerance:
            found.append(
                f"iteration {step.iteration}: loss {step.loss!r} and undisturbed"
                f" {expected[step.iteration]!r} differ by {off:.1e}"
            )
        worst = max(worst, off)
    done = {step.iteration for step in everything}
    missing = sorted(set(range(first, max(done) + 1)) - done)
    if missing:
        found.append(f"{len(missing)} iterations were never done: {missing[:10]}")
    return found + _order(epochs, done, damaged), worst


def _order(
    epochs: Sequence[Epoch], done: set[int], damaged: Sequence[tuple[int, int]]
) -> list[str]:
    """Returns the faults in the order of steps, within epochs and from one to the next."""
    found: list[str] = []
    for one in epochs:
        at = one.start
        assert at is not None
        for step in one.steps:
            # Steps that a full disk did not record are in the log.
            if step.iteration <= at or not done.issuperset(range(at + 1, step.iteration)):
                found.append(f"{one.name}: iteration {step.iteration} came after {at}")
            at = step.iteration
    for before, after in itertools.pairwise(epochs):
        if before.last_ns > after.begun_ns:
            found.append(f"{before.name} was not over when {after.name} began")
    saved: list[tuple[int, int, str]] = sorted(
        (at, iteration, one.name) for one in epochs for iteration, at in one.saved
    )
    for one in epochs:
        known = [
            entry
            for entry in saved
            if entry[0] < one.begun_ns - 10**9
            and entry[2] != one.name
            and not any(
                iteration == entry[1] and entry[0] < at < one.begun_ns for iteration, at in damaged
            )
        ]
        assert one.start is not None
        if known and one.start < max(iteration for _, iteration, _ in known[-1:]):
            found.append(
                f"{one.name} went on from {one.start}, and {known[-1][1]} was saved before"
            )
    return found
