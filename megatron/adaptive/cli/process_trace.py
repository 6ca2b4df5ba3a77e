"""``process_trace.py``: prints the figures of a run's pipeline and writes its events as JSON.

Takes the JSON lines in a run's ``traces/`` or, where there are none, the text form
``trace_pipeline_<p>_model_chunks_<c>.txt``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive.cli.trace_output import (
    EVENT_ITERATIONS,
    FORMATS,
    add_run_arguments,
    add_source_arguments,
    chosen_formats,
    output_stem,
    report_json,
    report_lines,
    report_warnings,
    select,
    source_parser,
    write_views,
)
from megatron.adaptive.trace.read import describe_numbers
from megatron.adaptive.trace.views.perfetto import write_perfetto

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the program.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status, 0.

    Raises:
        AdaptiveError: a flag is wrong, or the trace cannot be found, read or written.
    """
    parser = source_parser(
        "process_trace.py",
        "Print busy time, waits and bubble of each pipeline rank, and write the events of the "
        f"last {EVENT_ITERATIONS} iterations for chrome://tracing and Perfetto.",
    )
    add_run_arguments(parser)
    add_source_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of a table"
    )
    parser.add_argument(
        "--format",
        metavar="LIST",
        help=f"views to write as well: of {', '.join(FORMATS)}, joined by commas, or all",
    )
    arguments = parser.parse_args(argv)
    formats = () if arguments.format is None else chosen_formats(arguments.format)
    selection = select(arguments)
    stem = output_stem(arguments, selection.run)
    written = selection.iterations[-EVENT_ITERATIONS:]
    target = Path(f"{stem}.json")
    write_perfetto(selection.run, target, written, dp_rank=selection.step.dp_rank)
    for line in report_warnings(selection):
        print(f"warning: {line}", file=sys.stderr)
    views = list(write_views(selection, formats, stem))
    if arguments.json:
        print(json.dumps({**report_json(selection), "events": str(target)}, indent=2))
        return 0
    for line in report_lines(selection):
        print(line)
    print(f"events of iterations {describe_numbers(written)}: {target}")
    for line in views:
        print(line)
    return 0
