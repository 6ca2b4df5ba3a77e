"""Writes the views of a trace that a user asks for; each loads its packages only when it is due."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from megatron.adaptive.cli.trace_source import Selection
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.trace.read import describe_numbers

__all__ = ["EVENT_ITERATIONS", "FORMATS", "add_format_argument", "chosen_formats", "write_views"]

EVENT_ITERATIONS = 20
"""How many iterations the events cover; more make a file that viewers open slowly."""

FORMATS = {
    "xlsx": "openpyxl",
    "html": "plotly",
    "perfetto": None,
    "png": "matplotlib",
    "tensorboard": "tensorboard",
}
"""The views, and the package that each needs."""

_Writer: TypeAlias = Callable[[Selection, Path], str]


def add_format_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--format``."""
    parser.add_argument(
        "--format",
        default=default,
        metavar="LIST",
        help=f"what to write: of {', '.join(FORMATS)}, joined by commas, or all "
        f"(default: {default})",
    )


def chosen_formats(text: str) -> tuple[str, ...]:
    """The views that ``--format`` names, each once, those that can be written.

    ``all`` leaves out what lacks its package, with a warning.

    Raises:
        ConfigError: there is no such view.
        SetupError: the package of a view that was named is missing.
    """
    names = tuple(dict.fromkeys(FORMATS if text == "all" else text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise ConfigError(
                f"argument --format: invalid choice {name!r}: choose from "
                f"{', '.join(FORMATS)}, or all"
            )
    missing = {
        name: package
        for name in names
        if (package := FORMATS[name]) is not None and find_spec(package) is None
    }
    for name, package in missing.items():
        line = f"cannot write {name}: package {package!r} is missing; run pip install {package}"
        if text != "all":
            raise SetupError(line)
        print(f"warning: {line}", file=sys.stderr)
    return tuple(name for name in names if name not in missing)


def write_views(selection: Selection, formats: Sequence[str], stem: Path) -> Iterator[str]:
    """Write views beside each other.

    Args:
        selection: what to show.
        formats: keys of :data:`FORMATS`.
        stem: path of the results without their ending.

    Yields:
        A line about each result, once it is there.

    Raises:
        TraceError: a file cannot be written, or a trace is damaged.
    """
    for name in formats:
        yield _WRITERS[name](selection, stem)


def _workbook(selection: Selection, stem: Path) -> str:
    from megatron.adaptive.trace.views.workbook import write_workbook

    target = Path(f"{stem}.xlsx")
    write_workbook(selection.run, selection.step, selection.figures, target)
    return f"iteration {selection.step.iteration} drawn: {target.resolve()}"


def _picture(selection: Selection, stem: Path) -> str:
    from megatron.adaptive.trace.views.picture import write_picture

    target = Path(f"{stem}.png")
    write_picture(selection.step, target)
    return f"iteration {selection.step.iteration} drawn: {target.resolve()}"


def _page(selection: Selection, stem: Path) -> str:
    from megatron.adaptive.trace.views.page import write_page

    target = Path(f"{stem}.html")
    notes = write_page(selection.run, target, selection.iterations, dp_rank=selection.dp_rank)
    return "\n  ".join([f"page to zoom in: {target.resolve()}", *notes])


def _events(selection: Selection, stem: Path) -> str:
    from megatron.adaptive.trace.views.perfetto import write_perfetto

    target = Path(f"{stem}.json.gz")
    covered = selection.iterations[-EVENT_ITERATIONS:]
    notes = write_perfetto(selection.run, target, covered, dp_rank=selection.dp_rank)
    line = f"events of iterations {describe_numbers(covered)}: {target.resolve()}"
    return "\n  ".join([line, *notes])


def _scalars(selection: Selection, stem: Path) -> str:
    from megatron.adaptive.trace.views.scalars import time_of_day_lead_ns, write_scalars

    target = Path(f"{stem}_tensorboard")
    write_scalars(selection.figures, target, lead_ns=time_of_day_lead_ns(selection.run))
    return f"curves of {len(selection.iterations)} iterations: tensorboard --logdir {target}"


_WRITERS: dict[str, _Writer] = {
    "xlsx": _workbook,
    "html": _page,
    "perfetto": _events,
    "png": _picture,
    "tensorboard": _scalars,
}
