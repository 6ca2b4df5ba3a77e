"""Results of soaks and studies: rows with limits, and the loop that runs the parts of a program."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table.

    Attributes:
        what: Name of the figure.
        value: The figure, the median of several samples; ``None`` if it could not be taken.
        unit: Unit of the value; empty for counts and ratios.
        goal: Limit of the value; ``None`` if the value is only reported.
        least: Whether the limit is a lower one.
        samples: All repetitions.
        note: Further facts; the reason if there is no value.
        optional: Whether a missing value is no failure.
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
        """Whether the value keeps its limit; ``None`` if there is nothing to compare."""
        if self.goal is None or (self.value is None and self.optional):
            return None
        if self.value is None:
            return False
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def line(self) -> str:
        """The row in Markdown."""
        value = "not measured" if self.value is None else f"{self.value:.3g} {self.unit}".strip()
        limit = "" if self.goal is None else f"{'>=' if self.least else '<='} {self.goal:g}"
        state = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"| {self.what} | {value} | {limit} | {state} | {self.note} |"


@dataclass
class Result:
    """Rows of a part, and further figures by name for the JSON file."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Result) -> None:
        """Appends the rows and figures of another part."""
        self.rows += other.rows
        self.facts.update(other.facts)


def measured(what: str, samples: Sequence[float], **fields: Any) -> Row:
    """Returns the row of the median of samples; further fields are those of :class:`Row`."""
    value = statistics.median(samples) if samples else None
    return Row(what=what, value=value, samples=tuple(samples), **fields)


def missing(what: str, reason: str, **fields: Any) -> Row:
    """Returns a row without a value that is no failure."""
    return Row(what=what, value=None, note=reason, optional=True, **fields)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Returns the quotients of two series, repetition by repetition."""
    return [a / b for a, b in zip(above, below, strict=True)]


def one_line(error: object) -> str:
    """Returns a text as it fits into the note of a row."""
    return " ".join(str(error).split()).replace("|", "/")[:300]


def parser_of(
    doc: str | None, parts: Sequence[str], quick: str = "take a short form of each part"
) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all programs share.

    Args:
        doc: Docstring of the program, whose first line describes it.
        parts: Names of the parts that can be run alone.
        quick: Help of ``--quick``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument(
        "--part", nargs="+", action="extend", choices=tuple(parts), help="run these parts alone"
    )
    return parser


def attempt(name: str, part: Callable[[], Result]) -> Result:
    """Runs a part; one that raises has a failed row with the error."""
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
    """Runs the parts of a command line one after the other, and prints the table of each.

    The JSON file is written after every part, because a later one may never end.

    Args:
        parts: Functions by the name of their part.
        options: Parsed command line of :func:`parser_of`.
        then: Function that is called at the end, to add rows to the result.
        facts: Further figures for the JSON file.

    Returns:
        Exit status: 1 if a limit was missed.
    """
    total = Result(facts=dict(facts))
    for name, part in parts.items():
        if options.part and name not in options.part:
            continue
        start_s = time.monotonic()
        result = attempt(name, part)
        seconds = time.monotonic() - start_s
        total.add(result)
        total.facts[f"{name}, seconds"] = round(seconds, 1)
        table = "\n".join(row.line for row in result.rows)
        print(f"### {name}, {seconds:.0f} s\n\n{table}\n", flush=True)
        _write(total, options.json)
    then(total)
    _write(total, options.json)
    missed = [row.what for row in total.rows if row.met is False]
    print("all goals met" if not missed else "missed: " + "; ".join(missed))
    return 1 if missed else 0


def _write(total: Result, path: Path | None) -> None:
    if path is not None:
        rows = [{**vars(row), "samples": list(row.samples), "met": row.met} for row in total.rows]
        text = json.dumps({**total.facts, "rows": rows}, indent=1, default=str)
        path.write_text(text + "\n", encoding="utf-8")
