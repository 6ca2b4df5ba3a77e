"""Reads and writes the operators and kernels of selected steps, for ``--trace-detail kernels``.

A rank that records kernels writes a file such as ``kernels_rank_00000.jsonl`` next to its trace,
with one line per step. Each line contains the total time of all kernels for each action and name,
and the start and duration of the :data:`MOST_KEPT` longest kernels. Times are readings of the
rank's monotonic clock, as in the trace. Each ``name`` in the lists is an index into ``names``::

    {"iteration": 10, "device": "cpu", "names": ["aten::mm", ...],
     "totals": [["F", name, number, total_ns], ...], "kept": [[name, start_ns, length_ns], ...]}

A kernel belongs to the action that is running when the kernel begins.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.trace.files import BestEffortFile
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, Span

MOST_KEPT = 20_000
"""Maximum number of kernels per step whose times are kept. These times need less than 1 MB."""

MOST_NAMES = 1_000
"""Maximum number of (action, kernel name) pairs per step whose times are stored separately.

The times of all other kernels are added up under the name :data:`OTHERS`.
"""

OTHERS = "others"
OUTSIDE = "outside"
"""Name used instead of an action for kernels that begin outside of all actions."""

_LONGEST_NAME = 200
_LIMIT = 1 << 62
"""Upper limit for numbers in a file. Larger times could not be converted to the run's clock."""
_AROUND = (*DRAWN_ACTIONS, "reduce", "optimizer")


class TimedKernel(NamedTuple):
    """Describes when a GPU kernel or a CPU operator ran."""

    name: str
    start_ns: int
    end_ns: int


class KernelTotal(NamedTuple):
    """Contains the count and total time of a step's kernels with the same name and action.

    Attributes:
        action: Kind of action (``F``, ``B``, ``W``, ``reduce``, ``optimizer``) or ``outside``.
        name: Name of the kernels.
        number: Number of kernels.
        total_ns: Total time of these kernels in ns.
    """

    action: str
    name: str
    number: int
    total_ns: int


@dataclass(frozen=True, kw_only=True)
class StepKernels:
    """Contains the kernels that a rank ran during one step.

    Attributes:
        iteration: Iteration number.
        device: Kind of device, ``cpu`` (operators) or ``cuda`` (kernels).
        totals: Count and total time for each action and kernel name, including kernels that are not
            in ``kept``.
        kept: Longest kernels with their times, sorted by start time.
    """

    iteration: int
    device: str
    totals: tuple[KernelTotal, ...]
    kept: tuple[TimedKernel, ...]


def summed(
    iteration: int, device: str, kernels: Iterable[TimedKernel], spans: Iterable[Span]
) -> StepKernels:
    """Adds up the times of a step's kernels by action and name, and selects the longest kernels.

    Args:
        iteration: Iteration number.
        device: Kind of device, ``cpu`` or ``cuda``.
        kernels: All kernels of the step.
        spans: Spans of the step, from the same rank and clock.
    """
    listed = [kernel._replace(name=kernel.name[:_LONGEST_NAME]) for kernel in kernels]
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for kernel, action in zip(listed, actions_of(spans, listed), strict=True):
        kind = OUTSIDE if action is None else action.action
        _add(sums, (kind, kernel.name), (1, kernel.end_ns - kernel.start_ns))
    for key in sorted(sums, key=lambda key: -sums[key][1])[MOST_NAMES:]:
        row = sums.pop(key)
        _add(sums, (key[0], OTHERS), row)
    names = {name for _, name in sums}
    listed.sort(key=lambda kernel: kernel.start_ns - kernel.end_ns)
    kept = (kernel for kernel in listed[:MOST_KEPT] if kernel.name in names)
    return StepKernels(
        iteration=iteration,
        device=device,
        totals=tuple(KernelTotal(*key, *row) for key, row in sums.items()),
        kept=tuple(sorted(kept, key=lambda kernel: kernel.start_ns)),
    )


def _add(
    sums: dict[tuple[str, str], tuple[int, int]], key: tuple[str, str], row: tuple[int, int]
) -> None:
    """Adds ``row`` to the entry of ``key`` in ``sums``.

    ``key`` is an action and the name of kernels, and ``row`` is the count of kernels and their
    total time in ns.
    """
    count, total_ns = sums.get(key, (0, 0))
    sums[key] = count + row[0], total_ns + row[1]


def kernels_path(folder: Path, rank: int) -> Path:
    """Returns the path of the kernel file of ``rank`` in the folder of traces."""
    return folder / f"kernels_rank_{rank:05d}.jsonl"


class KernelFile:
    """Writes the kernels of a rank to a file, which is created when the first step is added.

    If a step cannot be written completely, the step is dropped and a warning is printed.

    Args:
        folder: Folder of the traces.
        rank: Global rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = kernels_path(folder, rank)
        self._file: BestEffortFile | None = None

    def add(self, step: StepKernels) -> None:
        """Appends the kernels of ``step`` to the file.

        Raises:
            OSError: The file cannot be opened for a reason other than a full or failing disk.
        """
        names = list(dict.fromkeys(total.name for total in step.totals))
        number_of = {name: number for number, name in enumerate(names)}
        record = {
            "iteration": step.iteration,
            "device": step.device,
            "names": names,
            "totals": [
                [total.action, number_of[total.name], total.number, total.total_ns]
                for total in step.totals
            ],
            "kept": [
                [number_of[kernel.name], kernel.start_ns, kernel.end_ns - kernel.start_ns]
                for kernel in step.kept
            ],
        }
        if self._file is None:
            self._file = BestEffortFile(self._path, "iterations", self._line_end)
        self._file.append((json.dumps(record, separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        """Closes the file. This method can be called more than once."""
        if self._file is not None:
            self._file.close()

    def _line_end(self) -> bytes:
        """Returns a newline if the file ends with an incomplete line, and empty bytes otherwise.

        A process that was killed may have left an incomplete line.
        """
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return b"" if file.read(1) in (b"", b"\n") else b"\n"


def read_steps(run: RunTrace, rank: int) -> list[StepKernels]:
    """Reads the kernels of ``rank`` in each step, with times on the run's common clock.

    Damaged lines are skipped, and reported by :func:`kernel_notes`. If a step was recorded twice,
    the later record is used.
    """
    trace = run.ranks[rank]
    steps, _ = _read(kernels_path(trace.index.path.parent, rank))
    on_clock = {}
    for step in steps:
        times = trace.on_clock([time for kernel in step.kept for time in kernel[1:]])
        pairs = zip(times[::2], times[1::2], strict=True)
        kept = (
            TimedKernel(kernel.name, *pair) for kernel, pair in zip(step.kept, pairs, strict=True)
        )
        on_clock[step.iteration] = replace(step, kept=tuple(kept))
    return list(on_clock.values())


def kernel_notes(run: RunTrace) -> list[str]:
    """Returns one note for each unreadable or damaged kernel file of the run."""
    notes = []
    for rank, trace in run.ranks.items():
        _, note = _read(kernels_path(trace.index.path.parent, rank))
        notes += [note] if note else []
    return notes


def _read(path: Path) -> tuple[list[StepKernels], str]:
    """Returns the steps in the file at ``path``, and a note about damaged lines or an empty string.

    A truncated last line is skipped without a note.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{path} cannot be read: {error.strerror or error}; its kernels are omitted"
    steps = []
    damaged = []
    for number, line in enumerate(lines, 1):
        try:
            steps.append(_step(json.loads(line.decode())))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            damaged.append(number)
    if not damaged:
        return steps, ""
    where = (
        f"line {damaged[0]} is" if len(damaged) == 1 else f"lines {describe_numbers(damaged)} are"
    )
    return steps, (
        f"{path}: {where} damaged, so the kernels of these steps are omitted; delete the damaged "
        "lines, or record the run again"
    )


def _step(record: Any) -> StepKernels:
    """Converts a parsed line of the file to the kernels of a step.

    Raises:
        ValueError: A value has the wrong type or is out of range. Records with a different
            structure may raise other errors.
    """
    names = [_text(name) for name in record["names"]]
    return StepKernels(
        iteration=_whole(record["iteration"]),
        device=_text(record["device"]),
        totals=tuple(
            KernelTotal(_text(action), names[_whole(name)], _whole(count), _whole(total_ns))
            for action, name, count, total_ns in record["totals"]
        ),
        kept=tuple(
            TimedKernel(
                names[_whole(name)], _whole(start_ns), _whole(_whole(start_ns) + _whole(length_ns))
            )
            for name, start_ns, length_ns in record["kept"]
        ),
    )


def _whole(value: Any) -> int:
    """Returns ``value``, or raises ``ValueError`` if it is not an integer from 0 to ``_LIMIT``."""
    if type(value) is int and 0 <= value < _LIMIT:
        return value
    raise ValueError("the value is not an integer, or is out of range")


def _text(value: Any) -> str:
    """Returns ``value``, or raises ``ValueError`` if it is not a string."""
    if isinstance(value, str):
        return value
    raise ValueError("the value is not a string")


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """Contains the count and total time of kernels with the same rank, action and name in a step.

    Attributes:
        rank: Global rank.
        action: Kind of action (``F``, ``B``, ``W``, ``reduce``, ``optimizer``) or ``outside``.
        name: Name of the kernels.
        count: Number of these kernels.
        total_ms: Total time of these kernels in ms.
    """

    rank: int
    action: str
    name: str
    count: int
    total_ms: float


def kernel_figures(run: RunTrace, iteration: int) -> list[KernelFigures]:
    """Returns the totals of a step's kernels for each rank, action and name, longest first.

    Args:
        run: Trace of the run.
        iteration: Iteration number.
    """
    figures = [
        KernelFigures(
            rank=rank,
            action=total.action,
            name=total.name,
            count=total.number,
            total_ms=total.total_ns / 1e6,
        )
        for rank in run.ranks
        for step in read_steps(run, rank)
        if step.iteration == iteration
        for total in step.totals
    ]
    return sorted(figures, key=lambda figure: -figure.total_ms)


def actions_of(spans: Iterable[Span], kernels: Sequence[TimedKernel]) -> list[Span | None]:
    """Returns the action during which each kernel begins, or ``None`` outside of all actions.

    Args:
        spans: Spans of the step on the same rank.
        kernels: Kernels of the step.
    """
    around = sorted((span for span in spans if span.action in _AROUND), key=_start_ns)
    starts = [span.start_ns for span in around]
    actions: list[Span | None] = []
    for kernel in kernels:
        before = bisect_right(starts, kernel.start_ns) - 1
        action = around[before] if before >= 0 else None
        inside = action is not None and kernel.start_ns < action.end_ns
        actions.append(action if inside else None)
    return actions


def _start_ns(span: Span) -> int:
    return span.start_ns
