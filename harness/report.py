"""Provides tables of measurements with goals, and the command line of programs that measure."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.families import ending_all

ROOT = Path(__file__).resolve().parents[1]
BUSY = 0.1
"""Fraction of the CPU time. If other programs use more than this fraction, times are unreliable.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table of measurements.

    Attributes:
        what: Name of the measured value.
        value: Median of the samples, or ``None`` if nothing was measured.
        unit: Unit of the value, or an empty string for counts and ratios.
        goal: Limit for the value, or ``None`` if there is no limit.
        least: Whether the goal is a lower limit. Otherwise the goal is an upper limit.
        samples: Values of all repetitions.
        note: Additional information, or the reason why there is no value.
        optional: Whether the value may be missing, for example because a library is not installed.
    """

    what: str
    value: float | None
    unit: str = ""
    goal: float | None = None
    least: bool = False
    samples: Sequence[float] = ()
    note: str = ""
    optional: bool = False

    @property
    def met(self) -> bool | None:
        """Returns whether the value meets its goal.

        Returns ``None`` if there is no goal, or if an optional value is missing.
        """
        if self.goal is None or (self.value is None and self.optional):
            return None
        if self.value is None:
            return False
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def line(self) -> str:
        """Returns the row as a line of a Markdown table."""
        value = "not measured" if self.value is None else f"{self.value:.3g} {self.unit}".strip()
        if len(self.samples) > 1:
            low, high = quartiles(self.samples)
            value += f" ({low:.3g}-{high:.3g})"
        goal = ""
        if self.goal is not None:
            goal = f"{'>=' if self.least else '<='} {self.goal:g}"
        state = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"| {self.what} | {value} | {goal} | {state} | {self.note} |"

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as a dictionary, in the form in which the JSON file contains it."""
        return {**vars(self), "samples": list(self.samples), "met": self.met}


@dataclass
class Result:
    """Measurements of one part of a program.

    Attributes:
        rows: Rows of the table.
        facts: Additional values for the JSON file, keyed by name.
    """

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Result) -> None:
        """Appends the rows and the additional values of ``other`` to this result."""
        self.rows += other.rows
        self.facts.update(other.facts)


def measured(what: str, samples: Sequence[float], **fields: Any) -> Row:
    """Returns a row named ``what`` whose value is the median of ``samples``.

    ``fields`` are further fields of :class:`Row`. If there are no samples, the row has no value.
    """
    value = statistics.median(samples) if samples else None
    return Row(what=what, value=value, samples=tuple(samples), **fields)


def missing(what: str, reason: str, **fields: Any) -> Row:
    """Returns a row named ``what`` that has the note ``reason`` instead of a value.

    ``fields`` are further fields of :class:`Row`.
    """
    return Row(what=what, value=None, note=reason, optional=True, **fields)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divides each element of ``numerators`` by the same element of ``denominators``."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the lower and the upper quartile of ``samples``."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def markdown(rows: Iterable[Row]) -> str:
    """Returns ``rows`` as a Markdown table."""
    head = ["| what | median (quartiles) | goal | | note |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(row.line for row in rows)]) + "\n"


def one_line(error: object) -> str:
    """Returns the message of ``error`` as one line that fits into a cell of a table."""
    return " ".join(str(error).split()).replace("|", "/")[:300]


def parser_of(
    doc: str | None, parts: Sequence[str], quick: str = "run a short form of each part"
) -> argparse.ArgumentParser:
    """Returns a parser with the options that all measuring programs share.

    Args:
        doc: Docstring of the program, whose first line becomes the description.
        parts: Names of the parts that the user can select. If empty, there is no option ``--part``.
        quick: Help text of ``--quick``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write results to this file")
    text = "append the table to this page, with date, machine, command and commit"
    parser.add_argument("--results", type=Path, metavar="FILE.md", help=text)
    if parts:
        parser.add_argument(
            "--part",
            nargs="+",
            action="extend",
            choices=tuple(parts),
            help="run only these parts (default: all)",
        )
    return parser


def describe_machine() -> dict[str, Any]:
    """Prints and returns properties of this machine. Warns if other programs keep it busy."""
    busy = others_busy()
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    facts = {
        "processor": models[0] if models else platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "busy with other programs": round(busy, 3),
    }
    print(", ".join(f"{name}: {value}" for name, value in facts.items()) + "\n", flush=True)
    if busy > BUSY:
        print(
            f"warning: other programs use {busy:.0%} of the processors; the times are not reliable",
            file=sys.stderr,
        )
    return facts


def others_busy(seconds: float = 1.0) -> float:
    """Sleeps for ``seconds``, and returns the machine's CPU usage (0 to 1) during this time."""
    # Import psutil only here, because the GPU check also runs on machines without psutil.
    import psutil

    return psutil.cpu_percent(seconds) / 100


def attempt(name: str, part: Callable[[], Result]) -> Result:
    """Runs ``part``, which is named ``name``, and returns its result.

    If the part raises an error, the result has one row with the error, which misses its goal.
    """
    try:
        return part()
    except Exception as error:
        traceback.print_exc()
        note = f"{type(error).__name__}: {one_line(error)}"
        return Result(rows=[Row(what=f"{name}: failed", value=None, goal=0, note=note)])


def measure(
    parts: Mapping[str, Callable[[], Result]],
    options: argparse.Namespace,
    finish: Callable[[Result], None] = lambda total: None,
    **facts: Any,
) -> int:
    """Runs the parts that are selected on the command line, or all parts, one after another.

    Prints the table of each part as soon as the part is done, and the missed goals at the end. The
    JSON file is written after every part, because a later part may hang. If SIGTERM or SIGHUP stops
    a part, all processes that the part has started are killed.

    Args:
        parts: Functions that run the parts, keyed by the name of the part.
        options: Options that a parser from :func:`parser_of` has parsed.
        finish: Function that is called with the total result after the last part, and that may add
            rows.
        facts: Additional values for the JSON file.

    Returns:
        Exit status: 1 if a goal is missed, otherwise 0.
    """
    total = Result(facts={**describe_machine(), **facts})
    for name, part in parts.items():
        if options.part and name not in options.part:
            continue
        busy, start_s = others_busy(), time.perf_counter()
        with ending_all():
            result = attempt(name, part)
        elapsed_s = time.perf_counter() - start_s
        total.add(result)
        if busy > BUSY:
            total.facts[f"{name}, busy with other programs"] = round(busy, 3)
            print(f"when {name} began, other programs used {busy:.0%} of the processors\n")
        total.facts[f"{name}, seconds"] = round(elapsed_s, 1)
        print(f"### {name}, {elapsed_s:.0f} s\n\n{markdown(result.rows)}", flush=True)
        _write_json(total, options.json)
    finish(total)
    _write_json(total, options.json)
    if options.results is not None:
        append_results(options.results, total, sys.argv)
    missed = [row.what for row in total.rows if row.met is False]
    print("all goals met" if not missed else "missed: " + "; ".join(missed))
    return 1 if missed else 0


def append_results(page: Path, total: Result, command: Sequence[str]) -> None:
    """Appends the rows of ``total`` as a table to the Markdown page ``page``.

    Args:
        page: Path of the page, such as ``docs/results/2026-11-cpu-2-cores.md``.
        total: Rows of all parts, and properties of the machine.
        command: Command line of the run, starting with the program's path.
    """
    date = datetime.date.today().isoformat()
    program = Path(command[0]).resolve()
    name = program.relative_to(ROOT) if program.is_relative_to(ROOT) else Path(program.name)
    line = shlex.join(["python", str(name), *command[1:]])
    machine = ", ".join(f"{fact}: {value}" for fact, value in total.facts.items())
    title = "" if page.exists() else f"# {page.stem}\n"
    text = f"\n## {name.stem}, {date}\n\nCommand: `{line}`. Commit: {commit_of()}. {machine}.\n\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    with page.open("a", encoding="utf-8") as file:
        file.write(title + text + markdown(total.rows))


def commit_of(folder: Path = ROOT) -> str:
    """Returns the commit ID of the checkout ``folder``, with a note if files have been changed.

    Returns "unknown" if ``folder`` is not a checkout.
    """
    git = ["git", "-C", str(folder)]
    try:
        commit, changes = (
            subprocess.run(
                [*git, *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changes else commit


def _write_json(total: Result, path: Path | None) -> None:
    if path is not None:
        result = {**total.facts, "rows": [row.as_dict() for row in total.rows]}
        path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
