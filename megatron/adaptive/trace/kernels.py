"""Defines the files with the operators and kernels of single steps, for ``--trace-detail kernels``.

A rank that records kernels has a file ``kernels_rank_00000.jsonl`` beside its trace file, with a
line per step. A line has the number and total time of the kernels of each name, and the start and
length of the :data:`MOST_KEPT` longest kernels. Starts are on the rank's monotonic clock, as in its
trace file::

    {"iteration": 10, "device": "cpu", "names": ["aten::mm", ...],
     "totals": [[number, total_ns], ...], "kept": [[name, start_ns, length_ns], ...]}

A kernel belongs to the action in which it begins.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import RunTrace
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, Span

MOST_KEPT = 20_000
"""Maximum number of kernels of a step whose times are kept; they take less than a megabyte."""

MOST_NAMES = 1_000
"""Maximum number of kernel names of a step.

Kernels with other names are added up under the name :data:`OTHERS`.
"""

OTHERS = "others"
OUTSIDE = "outside"
"""Name in place of an action for kernels that begin in no action."""

_LONGEST_NAME = 200
_AROUND = (*DRAWN_ACTIONS, "reduce", "optimizer")


class TimedKernel(NamedTuple):
    """Describes a kernel of a GPU, or an operator on a CPU, with its times in ns."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class StepKernels:
    """Contains the kernels that a rank ran in one step.

    Attributes:
        iteration: Number of the iteration.
        device: Kind of device, ``cpu`` (operators) or ``cuda`` (kernels).
        totals: Number of kernels and their total time in ns, by name. Kernels that are not in
            ``kept`` are included.
        kept: Longest kernels of the step with their times, sorted by start.
    """

    iteration: int
    device: str
    totals: dict[str, tuple[int, int]]
    kept: tuple[TimedKernel, ...]


def summed(iteration: int, device: str, kernels: Iterable[TimedKernel]) -> StepKernels:
    """Adds up the kernels of a step by name, and keeps the times of the longest kernels."""
    listed = [kernel._replace(name=kernel.name[:_LONGEST_NAME]) for kernel in kernels]
    totals: dict[str, tuple[int, int]] = {}
    for name, start_ns, end_ns in listed:
        count, total_ns = totals.get(name, (0, 0))
        totals[name] = count + 1, total_ns + end_ns - start_ns
    by_time = sorted(totals, key=lambda name: -totals[name][1])
    if rest := by_time[MOST_NAMES:]:
        others = [totals.pop(name) for name in rest]
        totals[OTHERS] = sum(row[0] for row in others), sum(row[1] for row in others)
    listed.sort(key=lambda kernel: kernel.start_ns - kernel.end_ns)
    kept = (kernel for kernel in listed[:MOST_KEPT] if kernel.name in totals)
    return StepKernels(
        iteration=iteration,
        device=device,
        totals=totals,
        kept=tuple(sorted(kept, key=lambda kernel: kernel.start_ns)),
    )


def kernels_path(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's file in the folder of traces."""
    return folder / f"kernels_rank_{rank:05d}.jsonl"


def add_step(folder: Path, rank: int, step: StepKernels) -> None:
    """Appends the kernels of a step to the rank's file.

    Raises:
        OSError: The file cannot be written.
    """
    names = list(step.totals)
    number_of = {name: number for number, name in enumerate(names)}
    record = {
        "iteration": step.iteration,
        "device": step.device,
        "names": names,
        "totals": [step.totals[name] for name in names],
        "kept": [
            [number_of[kernel.name], kernel.start_ns, kernel.end_ns - kernel.start_ns]
            for kernel in step.kept
        ],
    }
    with kernels_path(folder, rank).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_steps(run: RunTrace, rank: int) -> list[StepKernels]:
    """Reads the kernels of a rank, step by step, with times on the run's common clock.

    The result is empty if the rank has no readable file of kernels. A line that was cut off at the
    end of the file is ignored.

    Raises:
        TraceError: A line does not have the form that :func:`add_step` writes.
    """
    trace = run.ranks[rank]
    path = kernels_path(trace.index.path.parent, rank)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return []
    steps = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            step = _step(json.loads(line))
        except (ValueError, TypeError, KeyError, IndexError):
            raise TraceError(
                f"{path}, line {number}, has no kernels of a step: the file is damaged; delete it,"
                " or record it again"
            ) from None
        times = [time for kernel in step.kept for time in kernel[1:]]
        on_clock = trace.on_clock(times)
        pairs = zip(on_clock[::2], on_clock[1::2], strict=True)
        kept = [
            TimedKernel(kernel.name, *pair) for kernel, pair in zip(step.kept, pairs, strict=True)
        ]
        steps.append(
            StepKernels(
                iteration=step.iteration, device=step.device, totals=step.totals, kept=tuple(kept)
            )
        )
    return steps


def _step(record: Any) -> StepKernels:
    names = [str(name) for name in record["names"]]
    return StepKernels(
        iteration=int(record["iteration"]),
        device=str(record["device"]),
        totals={
            name: (int(count), int(total_ns))
            for name, (count, total_ns) in zip(names, record["totals"], strict=True)
        },
        kept=tuple(
            TimedKernel(names[number], int(start_ns), int(start_ns) + int(length_ns))
            for number, start_ns, length_ns in record["kept"]
        ),
    )


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """Contains the total time of a rank's kernels with one name in one kind of action of a step.

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
    """Adds up the kept kernels of a step by rank, action and name; longest total time first.

    Args:
        run: Trace of the run.
        iteration: Number of the iteration.
    """
    figures = []
    for rank, trace in run.ranks.items():
        for step in read_steps(run, rank):
            if step.iteration != iteration:
                continue
            sums: dict[tuple[str, str], list[int]] = {}
            actions = actions_of(trace.spans(iteration), step.kept)
            for kernel, action in zip(step.kept, actions, strict=True):
                kind = OUTSIDE if action is None else action.action
                row = sums.setdefault((kind, kernel.name), [0, 0])
                row[0] += 1
                row[1] += kernel.end_ns - kernel.start_ns
            figures += [
                KernelFigures(rank=rank, action=kind, name=name, count=count, total_ms=ns / 1e6)
                for (kind, name), (count, ns) in sums.items()
            ]
    return sorted(figures, key=lambda figure: -figure.total_ms)


def actions_of(spans: Iterable[Span], kernels: Sequence[TimedKernel]) -> list[Span | None]:
    """Returns for each kernel the action in which it begins, ``None`` if it begins in no action.

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
