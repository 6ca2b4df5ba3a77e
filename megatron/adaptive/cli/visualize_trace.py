"""``visualize_trace.py``: draws one iteration of a run's pipeline as ``.xlsx`` and ``.png``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.adaptive.cli.trace_output import (
    add_format_argument,
    add_run_arguments,
    add_source_arguments,
    chosen_formats,
    output_stem,
    select,
    source_parser,
    write_views,
)

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the program.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status, 0.

    Raises:
        AdaptiveError: a flag is wrong, the trace cannot be found or read, or a chart cannot be
            written.
    """
    parser = source_parser(
        "visualize_trace.py",
        "Draw the executed order of one iteration: a row per stage, forward blue, backward "
        "green, shaded by chunk, waits by cause, idle grey.",
    )
    add_run_arguments(parser)
    add_source_arguments(parser)
    add_format_argument(parser, "xlsx,png")
    arguments = parser.parse_args(argv)
    formats = chosen_formats(arguments.format)
    selection = select(arguments)
    for line in selection.warnings():
        print(f"warning: {line}", file=sys.stderr)
    for line in write_views(selection, formats, output_stem(arguments, selection.run)):
        print(line)
    return 0
