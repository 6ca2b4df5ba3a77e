"""What the programs that read a trace share: the flags that choose one, and what they choose."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron.adaptive.config.command_parser import CommandParser
from megatron.adaptive.errors import ConfigError, SetupError, TraceError
from megatron.adaptive.trace.figures import RunFigures, run_figures
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.order import legacy_name
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.step import PipelineStep, pipeline_step
from megatron.adaptive.trace.summary import (
    NS_PER_MS,
    PARTS,
    format_parts,
    format_table,
    parts_ms,
    summarize,
)

__all__ = [
    "EVENT_ITERATIONS",
    "FORMATS",
    "Selection",
    "add_format_argument",
    "add_iteration_arguments",
    "add_run_arguments",
    "add_source_arguments",
    "chosen_formats",
    "chosen_iterations",
    "output_stem",
    "report_json",
    "report_lines",
    "report_warnings",
    "select",
    "source_parser",
    "write_views",
]


_ENDINGS = re.compile(r"\.(json|json\.gz|xlsx|html|png|txt)$")


@dataclass(frozen=True)
class Selection:
    """What of which run a user wants to see.

    Attributes:
        run: the run.
        step: the iteration to draw.
        iterations: those that figures cover, ascending; the drawn one is among them.
        dp_rank: the replica that was asked for, ``None`` where none was: then the first is drawn.
    """

    run: RunTrace
    step: PipelineStep
    iterations: tuple[int, ...]
    dp_rank: int | None

    @cached_property
    def figures(self) -> RunFigures:
        """Figures of the drawn replica; they are read when they are first asked for."""
        traces = self.run.replica(self.step.dp_rank)
        ranks = [trace.header.rank for trace in traces if trace is not None]
        return run_figures(self.run, self.iterations, ranks=ranks)

    def warnings(self) -> list[str]:
        """What the reader of a view must know about the trace behind it, a line each."""
        lines = self.run.notes()
        if self.step.clock_jumps:
            lines.append(
                f"the clock of pipeline ranks {describe_numbers(self.step.clock_jumps)} was set "
                f"back in iteration {self.step.iteration}; its times mean nothing"
            )
        return lines


def source_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose mistakes are :class:`ConfigError`."""
    return CommandParser(prog=prog, description=description, allow_abbrev=False)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--run-dir`` and the flags that say which shape the run must have."""
    parser.add_argument(
        "--pipeline_parallel",
        "--pipeline-parallel",
        type=_positive,
        metavar="P",
        help="pipeline ranks of the run (default: whatever the trace has)",
    )
    parser.add_argument(
        "--model_chunks",
        "--model-chunks",
        type=_positive,
        metavar="C",
        help="model chunks per rank (default: whatever the trace has)",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run, its traces folder, or a trace_pipeline_*.txt file "
        "(default: runs/latest, then a trace_pipeline_*.txt in the current directory)",
    )


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose iterations, a replica and the place of the results."""
    add_iteration_arguments(parser)
    parser.add_argument(
        "--dp-rank",
        type=int,
        metavar="D",
        help="data-parallel replica to look at (default: 0; in the page and for Perfetto all)",
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--output", type=Path, metavar="FILE", help="result file; its ending is replaced"
    )
    place.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder for trace_pipeline_<p>_model_chunks_<c>.* (default: current directory)",
    )


def add_iteration_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--iteration`` and ``--iterations``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--iteration",
        type=int,
        metavar="I",
        help="iteration to look at (default: the last complete one)",
    )
    which.add_argument(
        "--iterations",
        type=_range,
        metavar="A-B",
        help="iterations that figures and curves cover; the last complete one of them is drawn "
        "(default: all complete ones)",
    )


def chosen_iterations(run: RunTrace, arguments: argparse.Namespace) -> tuple[int, ...] | None:
    """The recorded iterations that the flags ask for, ``None`` where they ask for none.

    Raises:
        TraceError: there are none of them; says which exist.
    """
    if arguments.iteration is not None:
        run.require_iteration(arguments.iteration)
        return (arguments.iteration,)
    if arguments.iterations is None:
        return None
    first, last = arguments.iterations
    found = tuple(i for i in run.iterations if first <= i <= last)
    if not found:
        raise TraceError(
            f"iterations {first}-{last} are not in {run.origin}; it has "
            f"{describe_numbers(run.iterations)}"
        )
    return found


def select(arguments: argparse.Namespace) -> Selection:
    """Read what the flags choose.

    Raises:
        TraceError: the trace cannot be found or read, or has no such iteration or replica.
    """
    run = load_run(
        arguments.run_dir,
        getattr(arguments, "pipeline_parallel", None),
        getattr(arguments, "model_chunks", None),
    )
    dp_rank = arguments.dp_rank or 0
    asked = chosen_iterations(run, arguments)
    complete = run.complete_iterations(dp_rank)
    covered = complete if asked is None else (*(i for i in asked if i in complete),) or asked
    step = pipeline_step(run, covered[-1] if covered else None, dp_rank=dp_rank)
    return Selection(run, step, covered or (step.iteration,), arguments.dp_rank)


def output_stem(arguments: argparse.Namespace, run: RunTrace) -> Path:
    """Path of the results without their ending."""
    if arguments.output is not None:
        output: Path = arguments.output
        return output.with_name(_ENDINGS.sub("", output.name))
    return Path(arguments.output_dir or "") / legacy_name(run.num_ranks, run.num_chunks)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of iterations: give A-B")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins: give A-B")
    return first, last


def report_lines(selection: Selection) -> list[str]:
    """The report for people."""
    run, step = selection.run, selection.step
    summary = summarize(step)
    row, ranks = _drawn(selection)
    replica = f", replica {step.dp_rank} of {step.num_replicas}" if step.num_replicas > 1 else ""
    labels = [step.label(int(selection.figures.pp_rank[rank])) for rank in ranks]
    lines = [
        f"{run.origin}: run {run.run}, schedule {summary.schedule}, {run.num_ranks} ranks x "
        f"{run.num_chunks} chunks, {step.num_microbatches} microbatches{replica}",
        f"iteration {summary.iteration}: step {summary.step_ms:.2f} ms, "
        f"bubble {summary.bubble_fraction:.1%} (idle / step time)",
        format_table(summary),
        format_parts(labels, parts_ms(selection.figures)[row, ranks]),
    ]
    if len(selection.iterations) > 1:
        lines.append(_over_iterations(selection))
    lines.append(f"clocks: {run.alignment.describe()}")
    return lines


def report_json(selection: Selection) -> dict[str, Any]:
    """The report for programs."""
    row, ranks = _drawn(selection)
    parts = parts_ms(selection.figures)[row]
    report = summarize(selection.step).to_json()
    for rank, place in zip(report["ranks"], ranks, strict=True):
        rank["parts_ms"] = dict(zip(PARTS, parts[place].tolist(), strict=True))
    return {
        **report,
        "run": selection.run.run,
        "clocks": {
            "count": max(1, len(selection.run.alignment.clocks)),
            "residual_us": selection.run.alignment.residual_ns / 1e3,
        },
    }


def report_warnings(selection: Selection) -> list[str]:
    """What is wrong with the trace, or with the times of the iterations that are covered."""
    return list(dict.fromkeys(selection.warnings() + selection.figures.notes()))


def _drawn(selection: Selection) -> tuple[int, list[int]]:
    """Where the drawn iteration and the ranks that recorded it are in the figures."""
    figures = selection.figures
    row = int(np.searchsorted(figures.iterations, selection.step.iteration))
    known = np.flatnonzero(figures.num_actions[row])
    return row, sorted(known.tolist(), key=lambda rank: int(figures.pp_rank[rank]))


def _over_iterations(selection: Selection) -> str:
    figures = selection.figures
    known = (figures.num_actions > 0).any(axis=1)
    steps = (figures.step_ns[known].max(axis=1) / NS_PER_MS).tolist()
    bubbles = np.nanmean(figures.bubble_fraction[known], axis=1).tolist()
    return (
        f"over {len(selection.iterations)} complete iterations "
        f"({describe_numbers(selection.iterations)}): "
        f"step median {statistics.median(steps):.2f} ms ({min(steps):.2f} to {max(steps):.2f}), "
        f"bubble median {statistics.median(bubbles):.1%} "
        f"({min(bubbles):.1%} to {max(bubbles):.1%})"
    )


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
