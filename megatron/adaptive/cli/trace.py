"""``trace``: prints a run's figures and writes its views; diagnoses it.

python -m megatron.adaptive trace runs/latest --format html,xlsx --output-dir views
python -m megatron.adaptive trace diagnose runs/latest

``process_trace.py`` and ``visualize_trace.py`` are the same by their older names and flags. They
take the JSON lines in a run's ``traces/`` or, where there are none, the text form
``trace_pipeline_<p>_model_chunks_<c>.txt``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.config.command_parser import CommandParser, count
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

__all__ = ["main", "process", "visualize"]

PROGRAM = "python -m megatron.adaptive trace"
DIAGNOSE = "diagnose"
EVENT_ITERATIONS = 20
"""Iterations that the events cover; more make a file that viewers open slowly."""
FORMATS = {
    "xlsx": "openpyxl",
    "html": "plotly",
    "perfetto": None,
    "png": "matplotlib",
    "tensorboard": "tensorboard",
}
"""The views, and the package that each needs."""
_ENDINGS = re.compile(r"\.(json|json\.gz|xlsx|html|png|txt)$")


def main(argv: Sequence[str]) -> int:
    """Run the subcommand ``trace``.

    Args:
        argv: the arguments behind ``trace``.

    Returns:
        The exit status, 0.

    Raises:
        AdaptiveError: a flag is wrong, the trace cannot be found or read, or a view cannot be
            written.
    """
    if argv and argv[0] == DIAGNOSE:
        return _diagnose(argv[1:])
    parser = _parser(
        PROGRAM,
        "Print where the time of a step went on each pipeline rank, and write the views of the "
        f"run. 'trace {DIAGNOSE} DIR' says what slows the run.",
    )
    _add_folder(parser)
    return _show(parser, argv, formats="all")


def process(argv: Sequence[str]) -> int:
    """Run ``process_trace.py``; arguments, result and errors are those of :func:`main`."""
    parser = _parser(
        "process_trace.py",
        "Print busy time, waits and bubble of each pipeline rank, and write the events of the "
        f"last {EVENT_ITERATIONS} iterations for chrome://tracing and Perfetto.",
    )
    _add_run_arguments(parser)
    return _show(parser, argv, events=True)


def visualize(argv: Sequence[str]) -> int:
    """Run ``visualize_trace.py``; arguments, result and errors are those of :func:`main`."""
    parser = _parser(
        "visualize_trace.py",
        "Draw the executed order of one iteration: a row per stage, forward blue, backward "
        "green, shaded by chunk, waits by cause, idle grey.",
    )
    _add_run_arguments(parser)
    return _show(parser, argv, formats="xlsx,png", report=False)


def _show(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    *,
    formats: str = "",
    report: bool = True,
    events: bool = False,
) -> int:
    """Write the views of a run and print its figures.

    Args:
        parser: has the flags that choose the run.
        argv: the arguments.
        formats: written without ``--format``.
        report: print the figures.
        events: write the events as ``.json`` too, before all else.
    """
    _add_iteration_arguments(parser)
    _add_source_arguments(parser)
    default = f" (default: {formats})" if formats else ""
    parser.add_argument(
        "--format",
        default=formats or None,
        metavar="LIST",
        help=f"what to write: of {', '.join(FORMATS)}, joined by commas, or all{default}",
    )
    if report:
        parser.add_argument(
            "--json", action="store_true", help="print the figures as JSON instead of a table"
        )
    arguments = parser.parse_args(argv)
    chosen = () if arguments.format is None else _chosen_formats(arguments.format)
    selection = _select(arguments)
    stem = _output_stem(arguments, selection.run)
    written = selection.iterations[-EVENT_ITERATIONS:]
    target = Path(f"{stem}.json")
    if events:
        from megatron.adaptive.trace.views.perfetto import write_perfetto

        write_perfetto(selection.run, target, written, dp_rank=selection.step.dp_rank)
    warnings = selection.warnings() + (selection.figures.notes() if report else [])
    for line in dict.fromkeys(warnings):
        print(f"warning: {line}", file=sys.stderr)
    views = (_write_view(name, selection, stem) for name in chosen)
    if report and arguments.json:
        files = list(views)
        more = {"events": str(target)} if events else {"views": files}
        print(json.dumps({**_report_json(selection), **more}, indent=2))
        return 0
    for line in _report_lines(selection) if report else ():
        print(line)
    if events:
        print(f"events of iterations {describe_numbers(written)}: {target}")
    for line in views:
        print(line, flush=True)
    return 0


def _diagnose(argv: Sequence[str]) -> int:
    from megatron.adaptive.trace.diagnose import diagnose

    parser = _parser(
        f"{PROGRAM} {DIAGNOSE}",
        "Name the rank, the link or the data that slows a run, and a remedy.",
    )
    _add_folder(parser)
    _add_iteration_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON instead of text"
    )
    arguments = parser.parse_args(argv)
    run = load_run(arguments.run_dir)
    found = diagnose(run, _chosen_iterations(run, arguments))
    for line in run.notes():
        print(f"warning: {line}", file=sys.stderr)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.format())
    return 0


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=prog, description=description, allow_abbrev=False)
    parser.set_defaults(pipeline_parallel=None, model_chunks=None)
    return parser


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder of the run or its traces folder (default: runs/latest)",
    )


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--run-dir`` and the flags that say which shape the run must have."""
    for name, metavar, what in (
        ("pipeline_parallel", "P", "pipeline ranks of the run"),
        ("model_chunks", "C", "model chunks per rank"),
    ):
        parser.add_argument(
            f"--{name}",
            f"--{name.replace('_', '-')}",
            type=count,
            metavar=metavar,
            help=f"{what} (default: whatever the trace has)",
        )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run, its traces folder, or a trace_pipeline_*.txt file "
        "(default: runs/latest, then a trace_pipeline_*.txt in the current directory)",
    )


def _add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a replica and the place of the results."""
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


def _add_iteration_arguments(parser: argparse.ArgumentParser) -> None:
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


def _chosen_iterations(run: RunTrace, arguments: argparse.Namespace) -> tuple[int, ...] | None:
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


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of iterations: give A-B")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins: give A-B")
    return first, last


@dataclass(frozen=True)
class _Selection:
    """Holds the user's choice of run, iterations and ranks.

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
        """Returns caveats about the trace behind a view, a line each."""
        lines = self.run.notes()
        if self.step.clock_jumps:
            lines.append(
                f"the clock of pipeline ranks {describe_numbers(self.step.clock_jumps)} was set "
                f"back in iteration {self.step.iteration}; its times mean nothing"
            )
        return lines


def _select(arguments: argparse.Namespace) -> _Selection:
    """Read what the flags choose.

    Raises:
        TraceError: the trace cannot be found or read, or has no such iteration or replica.
    """
    run = load_run(arguments.run_dir, arguments.pipeline_parallel, arguments.model_chunks)
    dp_rank = arguments.dp_rank or 0
    asked = _chosen_iterations(run, arguments)
    complete = run.complete_iterations(dp_rank)
    covered = complete if asked is None else (*(i for i in asked if i in complete),) or asked
    step = pipeline_step(run, covered[-1] if covered else None, dp_rank=dp_rank)
    return _Selection(run, step, covered or (step.iteration,), arguments.dp_rank)


def _output_stem(arguments: argparse.Namespace, run: RunTrace) -> Path:
    """Path of the results without their ending."""
    if arguments.output is not None:
        output: Path = arguments.output
        return output.with_name(_ENDINGS.sub("", output.name))
    return Path(arguments.output_dir or "") / legacy_name(run.num_ranks, run.num_chunks)


def _chosen_formats(text: str) -> tuple[str, ...]:
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


def _write_view(name: str, selection: _Selection, stem: Path) -> str:
    """Write a view; returns a line about it.

    Args:
        name: one of :data:`FORMATS`.
        selection: what to show.
        stem: path of the result without its ending.

    Raises:
        TraceError: the file cannot be written, or a trace is damaged.
    """
    run, step, iterations = selection.run, selection.step, selection.iterations
    # Each takes long to import, and few are asked for at a time.
    if name == "tensorboard":
        from megatron.adaptive.trace.views.scalars import time_of_day_lead_ns, write_scalars

        target = Path(f"{stem}_tensorboard")
        write_scalars(selection.figures, target, lead_ns=time_of_day_lead_ns(run))
        return f"curves of {len(iterations)} iterations: tensorboard --logdir {target}"
    target = Path(f"{stem}.{'json.gz' if name == 'perfetto' else name}")
    what, notes = f"iteration {step.iteration} drawn", []
    if name == "xlsx":
        from megatron.adaptive.trace.views.workbook import write_workbook

        write_workbook(run, step, selection.figures, target)
    elif name == "png":
        from megatron.adaptive.trace.views.picture import write_picture

        write_picture(step, target)
    elif name == "html":
        from megatron.adaptive.trace.views.page import write_page

        what = "page to zoom in"
        notes = write_page(run, target, iterations, dp_rank=selection.dp_rank)
    else:
        from megatron.adaptive.trace.views.perfetto import write_perfetto

        covered = iterations[-EVENT_ITERATIONS:]
        what = f"events of iterations {describe_numbers(covered)}"
        notes = write_perfetto(run, target, covered, dp_rank=selection.dp_rank)
    return "\n  ".join([f"{what}: {target.resolve()}", *notes])


def _report_lines(selection: _Selection) -> list[str]:
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


def _report_json(selection: _Selection) -> dict[str, Any]:
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


def _drawn(selection: _Selection) -> tuple[int, list[int]]:
    """Locates the drawn iteration and the ranks that recorded it in the figures."""
    figures = selection.figures
    row = int(np.searchsorted(figures.iterations, selection.step.iteration))
    known = np.flatnonzero(figures.num_actions[row])
    return row, sorted(known.tolist(), key=lambda rank: int(figures.pp_rank[rank]))


def _over_iterations(selection: _Selection) -> str:
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
