"""Rows of benchmarks with their goals, and what all of their programs do around the measuring."""

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

ROOT = Path(__file__).resolve().parents[1]
BUSY = 0.1
"""Share of the processors in use by others from which on the numbers are not to be trusted."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured.
        value: the median, ``None`` where it was not measured.
        unit: of the value; empty for a ratio.
        goal: what the value has to be, ``None`` where it is only reported.
        least: whether the goal is a lower limit, else an upper one.
        samples: all repetitions.
        note: what else a reader should know; why there is no value.
        optional: a missing value is no failure (a peer that is not installed).
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
        """Whether the goal is met; ``None`` where there is none, or nothing to compare."""
        if self.goal is None or (self.value is None and self.optional):
            return None
        if self.value is None:
            return False
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def line(self) -> str:
        """The row in Markdown."""
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
        """For a JSON file."""
        return {**vars(self), "samples": list(self.samples), "met": self.met}


@dataclass
class Result:
    """Holds what a part of a benchmark hands back.

    Attributes:
        rows: of the table.
        points: of a chart.
        facts: further figures by name, for the JSON file.
    """

    rows: list[Row] = field(default_factory=list)
    points: list[Any] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Result) -> None:
        """Adds the rows of another part."""
        self.rows += other.rows
        self.points += other.points
        self.facts.update(other.facts)


def measured(what: str, samples: Sequence[float], **others: Any) -> Row:
    """The row of the median of ``samples``; other arguments are :class:`Row`'s."""
    value = statistics.median(samples) if samples else None
    return Row(what=what, value=value, samples=tuple(samples), **others)


def missing(what: str, reason: str, **others: Any) -> Row:
    """A row without a value, which is no failure."""
    return Row(what=what, value=None, note=reason, optional=True, **others)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Quotients of two series, repetition by repetition."""
    return [a / b for a, b in zip(above, below, strict=True)]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The lower and upper quartile."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def markdown(rows: Iterable[Row]) -> str:
    """The table."""
    head = ["| what | median (quartiles) | goal | | note |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(row.line for row in rows)]) + "\n"


def one_line(error: object) -> str:
    """A text for the note of a row."""
    return " ".join(str(error).split()).replace("|", "/")[:300]


def parser_of(
    doc: str | None, parts: Sequence[str], quick: str = "within ten minutes"
) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has.

    Args:
        doc: docstring of the program; its first line describes it.
        parts: names of what can be measured by itself.
        quick: what ``--quick`` does.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="also write everything measured here")
    text = "append the table to this page, with date, machine, command and commit"
    parser.add_argument("--results", type=Path, metavar="FILE.md", help=text)
    if parts:
        parser.add_argument(
            "--part", nargs="+", action="extend", choices=tuple(parts), help="all by default"
        )
    return parser


def describe_machine() -> dict[str, Any]:
    """Prints what the figures depend on, and warns if others use the processors."""
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
            f"warning: other programs use {busy:.0%} of the processors: do not trust the times",
            file=sys.stderr,
        )
    return facts


def others_busy(seconds: float = 1.0) -> float:
    """Share of the processors that is in use while this process sleeps, 0 to 1."""
    import psutil  # a machine without the packages is named first

    return psutil.cpu_percent(seconds) / 100


def attempt(name: str, part: Callable[[], Result]) -> Result:
    """Runs a part; one that fails is a goal missed, with its error as the note."""
    try:
        return part()
    except Exception as error:
        traceback.print_exc()
        note = f"{type(error).__name__}: {one_line(error)}"
        return Result(rows=[Row(what=f"{name}: failed", value=None, goal=0, note=note)])


def measure(
    parts: Mapping[str, Callable[[], Result]],
    options: argparse.Namespace,
    then: Callable[[Result], None] = lambda total: None,
    **facts: Any,
) -> int:
    """Runs the parts that a command line asks for, all where it names none, one after the other.

    Prints the table of each as soon as it is there, and writes the JSON file anew: a later part may
    never end. Names the goals that were missed.

    Args:
        parts: by name; see :func:`attempt`.
        options: what a parser of :func:`parser_of` has read.
        then: called at the end with all that was measured, to add to it.
        facts: for the JSON file.

    Returns:
        Exit status: 1 where a goal is missed.
    """
    total = Result(facts={**describe_machine(), **facts})
    for name, part in parts.items():
        if options.part and name not in options.part:
            continue
        busy, start_s = others_busy(), time.perf_counter()
        found = attempt(name, part)
        took_s = time.perf_counter() - start_s
        total.add(found)
        if busy > BUSY:
            total.facts[f"{name}, busy with other programs"] = round(busy, 3)
            print(f"as {name} began, other programs used {busy:.0%} of the processors\n")
        total.facts[f"{name}, seconds"] = round(took_s, 1)
        print(f"### {name}, {took_s:.0f} s\n\n{markdown(found.rows)}", flush=True)
        _write(total, options.json)
    then(total)
    _write(total, options.json)
    if options.results is not None:
        append_results(options.results, total, sys.argv)
    missed = [row.what for row in total.rows if row.met is False]
    print("all goals met" if not missed else "missed: " + "; ".join(missed))
    return 1 if missed else 0


def append_results(page: Path, total: Result, words: Sequence[str]) -> None:
    """Appends the table of a run to a page of results, which is created if it is missing.

    Args:
        page: Path of the page, as ``docs/results/2026-11-cpu-2-cores.md``.
        total: Rows of all parts, and the facts about the machine.
        words: Command line of the run, from the path of the program on.
    """
    date = datetime.date.today().isoformat()
    program = Path(words[0]).resolve()
    name = program.relative_to(ROOT) if program.is_relative_to(ROOT) else Path(program.name)
    command = shlex.join(["python", str(name), *words[1:]])
    machine = ", ".join(f"{fact}: {value}" for fact, value in total.facts.items())
    title = "" if page.exists() else f"# {page.stem}\n"
    text = (
        f"\n## {name.stem}, {date}\n\nCommand: `{command}`. Commit: {commit_of()}. {machine}.\n\n"
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    with page.open("a", encoding="utf-8") as file:
        file.write(title + text + markdown(total.rows))


def commit_of(folder: Path = ROOT) -> str:
    """Returns the commit of a checkout, and whether its files differ; "unknown" outside of one."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changes else commit


def _write(total: Result, path: Path | None) -> None:
    if path is not None:
        result = {**total.facts, "rows": [row.as_dict() for row in total.rows]}
        path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
