"""``process_trace.py``: prints the figures of a run's pipeline and writes its events as JSON.

Takes the JSON lines in a run's ``traces/`` or, where there are none, the text form
``trace_pipeline_<p>_model_chunks_<c>.txt``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.trace.chrome import write_chrome
from megatron.adaptive.trace.figures import run_figures
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.order import legacy_name
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.step import PipelineStep, pipeline_step
from megatron.adaptive.trace.summary import NS_PER_MS, StepSummary, format_table, summarize

__all__ = ["add_source_arguments", "main", "output_stem", "source_parser", "warnings_of"]

EVENT_ITERATIONS = 20
"""How many iterations the events cover; more make a file that viewers open slowly."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def source_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose mistakes are :class:`ConfigError`, with the flags that choose a trace."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    add_source_arguments(parser)
    return parser


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags shared by the programs that read a trace."""
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
    parser.add_argument(
        "--iteration",
        type=int,
        metavar="I",
        help="iteration to look at (default: the last complete one)",
    )
    parser.add_argument(
        "--dp-rank",
        type=int,
        default=0,
        metavar="D",
        help="data-parallel replica to look at (default: 0)",
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


def output_stem(arguments: argparse.Namespace, run: RunTrace) -> Path:
    """Path of the result without its ending."""
    if arguments.output is not None:
        output: Path = arguments.output
        return output.with_suffix("") if output.suffix else output
    return Path(arguments.output_dir or "") / legacy_name(run.num_ranks, run.num_chunks)


def warnings_of(run: RunTrace, step: PipelineStep) -> list[str]:
    """What the reader of a chart must know about the trace behind it, a line each."""
    lines = run.notes()
    if step.clock_jumps:
        lines.append(
            f"the clock of pipeline ranks {describe_numbers(step.clock_jumps)} was set back in "
            f"iteration {step.iteration}; its times mean nothing"
        )
    return lines


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
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of a table"
    )
    arguments = parser.parse_args(argv)
    run = load_run(arguments.run_dir, arguments.pipeline_parallel, arguments.model_chunks)
    step = pipeline_step(run, arguments.iteration, dp_rank=arguments.dp_rank)
    summary = summarize(step)
    complete = run.complete_iterations(arguments.dp_rank)
    if arguments.iteration is not None:
        written: tuple[int, ...] = (step.iteration,)
    else:
        written = complete[-EVENT_ITERATIONS:] or (step.iteration,)
    target = Path(f"{output_stem(arguments, run)}.json")
    write_chrome(run, target, written, dp_rank=arguments.dp_rank)
    for line in warnings_of(run, step):
        print(f"warning: {line}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({**summary.to_json(), "run": run.run, "events": str(target)}, indent=2))
        return 0
    print(_heading(run, summary, step.num_microbatches))
    print(format_table(summary))
    if len(complete) > 1:
        print(_over_iterations(run, complete, arguments.dp_rank))
    print(f"events of iterations {describe_numbers(written)}: {target}")
    return 0


def _heading(run: RunTrace, summary: StepSummary, num_microbatches: int) -> str:
    return (
        f"{run.origin}: run {run.run}, schedule {summary.schedule}, {run.num_ranks} ranks x "
        f"{run.num_chunks} chunks, {num_microbatches} microbatches\n"
        f"iteration {summary.iteration}: step {summary.step_ms:.2f} ms, "
        f"bubble {summary.bubble_fraction:.1%} (idle / step time)"
    )


def _over_iterations(run: RunTrace, complete: Sequence[int], dp_rank: int) -> str:
    ranks = [trace.header.rank for trace in run.replica(dp_rank) if trace is not None]
    figures = run_figures(run, complete, ranks=ranks)
    steps = (figures.step_ns[:, 0] / NS_PER_MS).tolist()
    bubbles = figures.bubble_fraction.mean(axis=1).tolist()
    return (
        f"over {len(complete)} complete iterations ({describe_numbers(complete)}): "
        f"step median {statistics.median(steps):.2f} ms ({min(steps):.2f} to {max(steps):.2f}), "
        f"bubble median {statistics.median(bubbles):.1%} "
        f"({min(bubbles):.1%} to {max(bubbles):.1%})"
    )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number
