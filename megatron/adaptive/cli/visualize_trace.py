"""``visualize_trace.py``: draws one iteration of a run's pipeline as ``.xlsx`` and ``.png``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.adaptive.cli.process_trace import output_stem, source_parser, warnings_of
from megatron.adaptive.errors import SetupError
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.step import PipelineStep, pipeline_step

__all__ = ["main"]

FORMATS = ("xlsx", "png")


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
        "green, shaded by chunk, idle grey.",
    )
    parser.add_argument(
        "--format",
        choices=(*FORMATS, "all"),
        default="all",
        help="what to write (default: both)",
    )
    arguments = parser.parse_args(argv)
    run = load_run(arguments.run_dir, arguments.pipeline_parallel, arguments.model_chunks)
    step = pipeline_step(run, arguments.iteration, dp_rank=arguments.dp_rank)
    for line in warnings_of(run, step):
        print(f"warning: {line}", file=sys.stderr)
    chosen = FORMATS if arguments.format == "all" else (arguments.format,)
    writers = [(kind, _writer(kind)) for kind in chosen]
    for kind, write in writers:
        target = Path(f"{output_stem(arguments, run)}.{kind}")
        write(step, target)
        print(f"iteration {step.iteration} drawn: {target.resolve()}")
    return 0


def _writer(kind: str) -> Callable[[PipelineStep, Path], None]:
    """The function that writes a kind of chart; its packages load only when they are needed."""
    try:
        if kind == "xlsx":
            from megatron.adaptive.trace.workbook import write_workbook

            return write_workbook
        from megatron.adaptive.trace.picture import write_picture

        return write_picture
    except ImportError as error:
        raise SetupError(
            f"cannot write .{kind}: package {error.name!r} is missing; "
            "run pip install -r requirements.txt"
        ) from error
