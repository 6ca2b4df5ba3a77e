"""``python -m megatron.adaptive trace``: prints a run's figures and writes its views; diagnoses it.

python -m megatron.adaptive trace runs/latest --format html,xlsx --output-dir views
python -m megatron.adaptive trace diagnose runs/latest
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive.cli.trace_output import (
    add_format_argument,
    add_iteration_arguments,
    add_source_arguments,
    chosen_formats,
    chosen_iterations,
    output_stem,
    report_json,
    report_lines,
    report_warnings,
    select,
    source_parser,
    write_views,
)
from megatron.adaptive.trace.locate import load_run

__all__ = ["main"]

PROGRAM = "python -m megatron.adaptive trace"
DIAGNOSE = "diagnose"


def main(argv: Sequence[str]) -> int:
    """Run the subcommand.

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
    parser = source_parser(
        PROGRAM,
        "Print where the time of a step went on each pipeline rank, and write the views of the "
        f"run. 'trace {DIAGNOSE} DIR' says what slows the run.",
    )
    _add_folder(parser)
    add_source_arguments(parser)
    add_format_argument(parser, "all")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of a table"
    )
    arguments = parser.parse_args(argv)
    formats = chosen_formats(arguments.format)
    selection = select(arguments)
    for line in report_warnings(selection):
        print(f"warning: {line}", file=sys.stderr)
    views = write_views(selection, formats, output_stem(arguments, selection.run))
    if arguments.json:
        print(json.dumps({**report_json(selection), "views": list(views)}, indent=2))
        return 0
    for line in report_lines(selection):
        print(line)
    for line in views:
        print(line, flush=True)
    return 0


def _diagnose(argv: Sequence[str]) -> int:
    from megatron.adaptive.trace.diagnose import diagnose

    parser = source_parser(
        f"{PROGRAM} {DIAGNOSE}",
        "Name the rank, the link or the data that slows a run, and a remedy.",
    )
    _add_folder(parser)
    add_iteration_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON instead of text"
    )
    arguments = parser.parse_args(argv)
    run = load_run(arguments.run_dir)
    found = diagnose(run, chosen_iterations(run, arguments))
    for line in run.notes():
        print(f"warning: {line}", file=sys.stderr)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.format())
    return 0


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder of the run or its traces folder (default: runs/latest)",
    )
