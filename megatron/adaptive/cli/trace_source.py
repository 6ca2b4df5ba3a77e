"""What the programs that read a trace share: the flags that choose one, and what they choose."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron.adaptive.config.command_parser import CommandParser
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.figures import RunFigures, run_figures
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.order import legacy_name
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.step import PipelineStep, pipeline_step

__all__ = [
    "Selection",
    "add_iteration_arguments",
    "add_run_arguments",
    "add_source_arguments",
    "chosen_iterations",
    "output_stem",
    "select",
    "source_parser",
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
