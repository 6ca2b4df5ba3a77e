"""Implements ``trace``, which prints run statistics, writes views, and diagnoses and imports runs.

python -m megatron.adaptive trace runs/latest --format html,xlsx --output-dir views
python -m megatron.adaptive trace diagnose runs/latest
python -m megatron.adaptive trace whatif runs/latest
python -m megatron.adaptive trace diff runs/before runs/after
python -m megatron.adaptive trace import trace.parquet --output traces

The scripts ``process_trace.py`` and ``visualize_trace.py`` offer parts of this command with older
flags. Both scripts read the JSON lines in a run's folder ``traces`` or, if there is no such folder,
a text trace named ``trace_pipeline_<p>_model_chunks_<c>.txt``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.adaptive.cli.common import show
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, count, number
from megatron.adaptive.config.input_files import aligned
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.collectives import CollectiveFigures, collective_figures
from megatron.adaptive.trace.kernels import kernel_figures, kernel_notes, read_steps
from megatron.adaptive.trace.legacy_text import legacy_name
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.metrics import NS_PER_MS, PARTS, LayerFigures, layer_figures
from megatron.adaptive.trace.read import RunTrace, describe_numbers
from megatron.adaptive.trace.step_view import pipeline_step
from megatron.adaptive.trace.trace_format import DRAWN_ACTIONS, Lengths, Span
from megatron.adaptive.trace.views.view import (
    ALL,
    View,
    ViewInput,
    built_in_views,
    find_views,
    refuse_shared_files,
)

_TRACE = f"{PROGRAM} trace"
_Iterations = tuple[int, ...] | None
_COLLECTIVE_COLUMNS = (
    "collective",
    "ranks",
    "number",
    "size",
    "wait",
    "transfer",
    "of a step",
    "waited for",
)
_LAYER_COLUMNS = ("layer", "pipeline rank", "forward", "backward", "of a step", "slowest rank")
_MOST_KERNELS = 100
_KERNELS_SHOWN = 15
_KERNEL_WIDTH = 60
MOST_LAYERS = 4
"""Maximum number of layers in the report about experts.

The layers with the most uneven load are shown.
"""


def main(argv: Sequence[str]) -> int:
    """Prints how a run spent its time, writes its views, and returns the exit status."""
    parser = _parser(
        _TRACE, "Print how each pipeline rank spent the time of a step, and write views of the run."
    )
    return _show(parser, argv, formats="all")


def process(argv: Sequence[str]) -> int:
    """Prints how a run spent its time, writes its events as JSON, and returns 0.

    The script ``process_trace.py`` also uses this function. Expected errors are raised as
    ``AdaptiveError``.
    """
    (events,) = find_views(["perfetto"])
    parser = _parser(
        f"{_TRACE} process",
        f"Print busy time, waits and bubble of each pipeline rank, and write the {events.summary}.",
        by_shape=True,
    )
    return _show(parser, argv, events=replace(events, name="json", ending=".json"))


def visualize(argv: Sequence[str]) -> int:
    """Draws the actions that ran in one iteration, writes them to a table, and returns 0.

    The script ``visualize_trace.py`` also uses this function. Expected errors are raised as
    ``AdaptiveError``.
    """
    parser = _parser(
        f"{_TRACE} draw",
        "Draw the order in which one iteration was executed: one row per stage, forward passes "
        "blue, backward passes green, shaded by chunk, waits by cause, idle time grey.",
        by_shape=True,
    )
    return _show(parser, argv, formats="xlsx,png", report=False)


def diagnose_run(argv: Sequence[str]) -> int:
    """Prints why a run is slow, or in which calls the run hangs, and returns the exit status.

    If the folder contains dumps of torch's flight recorder, the run is assumed to hang.
    """
    from megatron.adaptive.trace.diagnose import Diagnosis, diagnose
    from megatron.adaptive.trace.diagnose.cause import built_in_causes, find_cause
    from megatron.adaptive.trace.flight_recorder import dump_files, find_stuck, read_dumps

    def find(run: RunTrace, iterations: _Iterations, arguments: argparse.Namespace) -> Diagnosis:
        return diagnose(run, iterations, arguments.cause)

    def find_hang(folder: Path | None) -> Any:
        return find_stuck(read_dumps(folder)) if folder and dump_files(folder) else None

    names = ", ".join(cause.name for cause in built_in_causes())
    parser = _parser(
        f"{_TRACE} diagnose",
        "Find the rank, link or data that slows down a run, and suggest a fix. Searches for: "
        f"{names}. For a folder with dumps of torch's flight recorder (names end with "
        "trace_rank_N or _dump_N), find the collective that hangs and the late ranks.",
    )
    help_text = "class of another cause to search for, as package.module:Class; may be repeated"
    add = parser.add_argument
    add("--cause", type=find_cause, action="append", default=[], metavar="CAUSE", help=help_text)
    return _answer(parser, argv, find, find_hang)


def what_if_run(argv: Sequence[str]) -> int:
    """Predicts how fast a run would be if some of its actions took less time.

    Prints the prediction, and returns the exit status.
    """
    from megatron.adaptive.trace.whatif.answers import what_if

    parser = _parser(
        f"{_TRACE} whatif",
        "Simulate the recorded steps with changed times, and print how much time the run loses, on "
        "which ranks, and how much time each fix would save.",
    )
    help_text = "draw where time is lost, and write the image to this PNG file"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=help_text)
    return _answer(parser, argv, lambda run, iterations, arguments: what_if(run, iterations))


def _answer(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    find: Callable[..., Any],
    find_other: Callable[[Path | None], Any] | None = None,
) -> int:
    """Analyzes a run, prints the result, draws an image if requested, and returns the exit status.

    Args:
        parser: Parser with the flags that choose the run and its iterations.
        argv: Arguments of the command line.
        find: Function that analyzes a run. It takes the run, its iterations and the parsed flags.
        find_other: Function that analyzes folders with files other than traces. It returns ``None``
            for a folder of traces. If ``find_other`` is ``None``, only traces are supported.
    """
    help_text = "print the result as JSON instead of text"
    parser.add_argument("--json", action="store_true", help=help_text)
    parser.set_defaults(picture=None)
    arguments = parser.parse_args(argv)
    if find_other is not None and (other := find_other(arguments.run_dir)) is not None:
        _print_result(other, as_json=arguments.json)
        return 0
    run = load_run(arguments.run_dir)
    result = find(run, _chosen_iterations(run, arguments, None), arguments)
    if arguments.picture is not None:
        from megatron.adaptive.trace.views.picture import write_heat

        write_heat(run, result, arguments.picture)
    _print_result(result, as_json=arguments.json)
    return 0


def _print_result(result: Any, *, as_json: bool) -> None:
    """Prints the notes of ``result`` as warnings, and then ``result`` as text or JSON."""
    for line in result.notes:
        show(f"warning: {line}", file=sys.stderr)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        show(result.format())


def compare(argv: Sequence[str]) -> int:
    """Prints what became slower or faster between two runs, and returns the exit status."""
    from megatron.adaptive.trace.compare_runs import compare_runs

    parser = CommandParser(
        prog=f"{_TRACE} diff",
        description=(
            "Compare two runs with the same pipeline layout, and print which rank, stage, type of "
            "action, link or data reader became slower or faster. The exit status is 1 if a step "
            "is slower than --fail-above allows."
        ),
    )
    add = parser.add_argument
    add("before", type=Path, metavar="A", help="folder of the first run or its traces folder")
    add("after", type=Path, metavar="B", help="folder of the second run or its traces folder")
    limit = "maximum slowdown of a step of B, such as 3%% or 0.03 (default: no limit)"
    add("--fail-above", type=_share, metavar="SHARE", help=limit)
    add("--json", action="store_true", help="print the result as JSON instead of text")
    arguments = parser.parse_args(argv)
    result = compare_runs(load_run(arguments.before), load_run(arguments.after))
    _print_result(result, as_json=arguments.json)
    limit_share = arguments.fail_above
    if limit_share is None or not result.is_slower_by(limit_share):
        return 0
    show(
        f"error: steps of {arguments.after} are {result.relative:.1%} slower, but --fail-above "
        f"allows only {limit_share:.1%}",
        file=sys.stderr,
    )
    return 1


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction such as 3% or 0.03")
    return value


def import_run(argv: Sequence[str]) -> int:
    """Converts the trace of another program to this project's format. Returns the exit status."""
    parser = CommandParser(
        prog=f"{_TRACE} import",
        description="Read the trace of another program, and write it in this project's format.",
    )
    source = (
        "table of operations (.parquet or .csv), folder with JSON files of torch.profiler (one "
        "per rank), or spans of Megatron-LM; see docs/reference/traces.md"
    )
    ranks = (
        "number of pipeline ranks, if profiles do not contain it; the ranks of a stage must be "
        "consecutive"
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help=source)
    add("--pipeline", type=count, metavar="P", help=ranks)
    add("--output", type=Path, required=True, metavar="DIR", help="new folder for the traces")
    arguments = parser.parse_args(argv)
    from megatron.adaptive.trace.imports.profiles import read_profiles
    from megatron.adaptive.trace.imports.published import write_run

    source = arguments.source
    pipeline = arguments.pipeline
    run = (pipeline and source.exists() and read_profiles(source, pipeline)) or load_run(source)
    write_run(run, arguments.output)
    for line in run.notes():
        show(f"warning: {line}", file=sys.stderr)
    replicas = len({trace.header.dp_rank for trace in run.ranks.values()})
    spans = sum(sum(trace.num_spans.values()) for trace in run.ranks.values())
    show(
        f"{run.run}: {len(run.ranks)} ranks ({run.num_ranks} pipeline ranks x {replicas} replicas),"
        f" iterations {describe_numbers(run.iterations)}, {spans:,} spans: {arguments.output}"
    )
    return 0


def _show(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    *,
    formats: str = "",
    report: bool = True,
    events: View | None = None,
) -> int:
    """Writes the requested files about a run, prints how the run spent its time, and returns 0.

    Args:
        parser: Parser with the flags that choose the run and its iterations.
        argv: Arguments of the command line.
        formats: Default of ``--format``: comma-separated names of file formats, or ``all``.
        report: Whether to print a report on how the run spent its time.
        events: View that also writes the events of the replica in the report, or ``None``.
    """
    _add_output_arguments(parser, formats, report)
    arguments = parser.parse_args(argv)
    chosen = () if arguments.format is None else find_views(arguments.format.split(","))
    refuse_shared_files([*chosen] if events is None else [events, *chosen])
    selection = _select(arguments)
    run = selection.run
    stem = arguments.output_dir / legacy_name(run.num_ranks, run.num_chunks)
    if (output := arguments.output) is not None:
        stem = output.with_name(_without_ending(output.name, chosen))
    for line in (*run.notes(), *kernel_notes(run)):
        show(f"warning: {line}", file=sys.stderr)
    views = [(view, selection) for view in chosen]
    if events is not None:
        views.insert(0, (events, replace(selection, dp_rank=selection.step.dp_rank)))
    if report and arguments.json:
        files = [view.show(content, stem) for view, content in views]
        paths = {"views": files} if events is None else {"events": f"{stem}{events.ending}"}
        print(json.dumps({**_report(selection), **paths}, indent=2))
        return 0
    for line in _report_lines(selection) if report else ():
        show(line)
    for view, content in views:
        show(view.show(content, stem))
    return 0


def _without_ending(name: str, views: Sequence[View]) -> str:
    """Returns ``name`` without the extension of a view. Also removes ``.json`` and ``.txt``."""
    endings = {".txt", ".json", *(v.ending for v in (*built_in_views().values(), *views))}
    present = [end for end in endings if name.endswith(end) and len(end) < len(name)]
    return name.removesuffix(max(present, key=len, default=""))


def _parser(prog: str, description: str, *, by_shape: bool = False) -> argparse.ArgumentParser:
    """Creates a parser with the flags that choose a run and its iterations.

    Args:
        prog: Name of the program in the help text.
        description: Description of the program in the help text.
        by_shape: Whether to add the older flags: ``--run-dir`` instead of a positional argument,
            and flags for the expected numbers of pipeline ranks and model chunks.
    """
    parser = CommandParser(prog=prog, description=description)
    parser.set_defaults(pipeline_parallel=None, model_chunks=None)
    if by_shape:
        for name, metavar, text in (
            ("pipeline_parallel", "P", "number of pipeline ranks of the run"),
            ("model_chunks", "C", "number of model chunks per rank"),
        ):
            names = (f"--{name}", f"--{name.replace('_', '-')}")
            text += " (default: as in the trace)"
            parser.add_argument(*names, type=count, metavar=metavar, help=text)
        help_text = (
            "folder of the run, its traces folder, or a trace_pipeline_*.txt file (default: the "
            "newest run)"
        )
        parser.add_argument("--run-dir", type=Path, metavar="DIR", help=help_text)
    else:
        help_text = "folder of the run or its traces folder (default: the newest run)"
        parser.add_argument("run_dir", nargs="?", type=Path, metavar="DIR", help=help_text)
    several = (
        "range of iterations for figures and curves, or a single iteration; a view of one "
        "iteration shows the last complete one (default: all complete iterations)"
    )
    parser.add_argument("--iterations", "--iteration", type=_range, metavar="A-B", help=several)
    return parser


def _add_output_arguments(parser: argparse.ArgumentParser, formats: str, report: bool) -> None:
    """Adds the flags that choose a replica, the file formats and the paths of the results."""
    add = parser.add_argument
    replica = (
        "data-parallel replica to show (default: all replicas in the page and for Perfetto, "
        "replica 0 elsewhere)"
    )
    add("--dp-rank", type=number(int, 0, 1_000_000), metavar="D", help=replica)
    folder = "folder for trace_pipeline_<p>_model_chunks_<c>.* (default: current directory)"
    add_target = parser.add_mutually_exclusive_group().add_argument
    add_target("--output-dir", type=Path, default=Path(), metavar="DIR", help=folder)
    text = "result file; its extension is replaced by that of each view"
    add_target("--output", type=Path, metavar="FILE", help=text)
    default = f" (default: {formats})" if formats else ""
    summaries = ", ".join(f"{view.name} ({view.summary})" for view in built_in_views().values())
    text = (
        f"views, separated by commas: {summaries}; {ALL} for all of these; package.module:name "
        f"for your own view{default}"
    )
    add("--format", default=formats or None, metavar="LIST", help=text)
    if report:
        add("--json", action="store_true", help="print the report as JSON instead of a table")


def _chosen_iterations(
    run: RunTrace, arguments: argparse.Namespace, dp_rank: int | None
) -> tuple[int, ...] | None:
    """Returns the iterations that the user chose with flags, or ``None`` without these flags.

    Omits incomplete iterations, unless all chosen iterations are incomplete.

    Args:
        run: Traced run.
        arguments: Parsed flags.
        dp_rank: Replica that must have completed an iteration, or ``None`` for all replicas.
    """
    if arguments.iterations is None:
        return None
    first, last = arguments.iterations
    chosen = tuple(i for i in run.iterations if first <= i <= last)
    if not chosen:
        iterations = f"iteration {first} is" if first == last else f"iterations {first}-{last} are"
        raise TraceError(
            f"{iterations} not in {run.origin}, which has iterations "
            f"{describe_numbers(run.iterations)}"
        )
    complete = set(run.complete_iterations(dp_rank))
    return tuple(i for i in chosen if i in complete) or chosen


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of iterations; use A-B or A")
    first = int(match[1])
    last = int(match[2] or match[1])
    if last < first:
        raise argparse.ArgumentTypeError(
            f"the range {text!r} ends before it begins; use A-B with A <= B"
        )
    return first, last


def _select(arguments: argparse.Namespace) -> ViewInput:
    """Reads the run that the user chose. Raises ``TraceError`` if the run is missing or damaged."""
    run = load_run(arguments.run_dir, arguments.pipeline_parallel, arguments.model_chunks)
    dp_rank = arguments.dp_rank or 0
    covered = _chosen_iterations(run, arguments, dp_rank)
    covered = run.complete_iterations(dp_rank) if covered is None else covered
    step = pipeline_step(run, covered[-1] if covered else None, dp_rank=dp_rank)
    return ViewInput(
        run=run, step=step, iterations=covered or (step.iteration,), dp_rank=arguments.dp_rank
    )


def _report(selection: ViewInput) -> dict[str, Any]:
    """Returns a dictionary with statistics of the shown step and of each traced rank.

    ``bubble_fraction`` is the idle time divided by the step time. ``times`` contains the mean and
    the population standard deviation of the durations, keyed by kind of action.
    """
    run = selection.run
    step = selection.step
    figures = selection.figures
    parts = figures.parts_ms[np.searchsorted(figures.iterations, step.iteration)]
    column = {pp_rank: index for index, pp_rank in enumerate(figures.pp_rank.tolist())}
    return {
        "iteration": step.iteration,
        "schedule": step.schedule,
        "step_ms": step.step_ns / NS_PER_MS,
        "bubble_fraction": step.bubble_fraction,
        "gpu_ranks": selection.run.gpu_ranks,
        "ranks": [
            {
                "pp_rank": pp_rank,
                "label": step.label(pp_rank),
                "num_actions": len(step.rows[pp_rank]),
                "busy_ms": int(rank_figures.busy_ns[0]) / NS_PER_MS,
                "wait_ms": sum(span.wait_ns for span in step.rows[pp_rank]) / NS_PER_MS,
                "bubble_fraction": step.bubble_fractions[pp_rank],
                "times": _times(step.rows[pp_rank]),
                "peak_microbatches": int(rank_figures.peak_microbatches[0]),
                "peak_in_flight_bytes": int(rank_figures.peak_in_flight_bytes[0]),
                "transfer_bytes": int(rank_figures.transfer_bytes[0]),
                "parts_ms": dict(zip(PARTS, parts[column[pp_rank]].tolist(), strict=True)),
            }
            for pp_rank, rank_figures in step.figures.items()
        ],
        **_experts(run, step.iteration),
        **_layers(run, step.iteration),
        **_collectives(run, step.iteration),
        **_kernels(run, step.iteration),
        "missing": step.missing,
        "lengths": step.lengths,
        "run": run.run,
        "clocks": {
            "count": max(1, len(run.alignment.clocks)),
            "residual_us": run.alignment.residual_ns / 1e3,
        },
    }


def _experts(run: RunTrace, iteration: int) -> dict[str, Any]:
    """Returns the load of the experts in an iteration, or ``{}`` if there are no MoE layers.

    ``tokens`` is the number of tokens per layer and expert, summed over all ranks. ``exchange_ms``
    is the time in milliseconds that each rank spent on exchanging tokens with other ranks.
    """
    tokens: dict[int, Counter[int]] = {}
    exchange_ms = {}
    for rank, trace in run.ranks.items():
        if (marker := trace.experts.get(iteration)) is None:
            continue
        exchange_ms[rank] = marker.exchange_ns / NS_PER_MS
        for layer, first, *counts in marker.tokens:
            tokens.setdefault(layer, Counter()).update(dict(enumerate(counts, first)))
    layers = {layer: dict(sorted(counter.items())) for layer, counter in sorted(tokens.items())}
    return {"experts": {"tokens": layers, "exchange_ms": exchange_ms}} if layers else {}


def _layers(run: RunTrace, iteration: int) -> dict[str, Any]:
    """Returns the times of layers in an iteration, or ``{}`` if layers were not traced."""
    figures = layer_figures(run, iteration)
    return {"layers": [asdict(of_layer) for of_layer in figures]} if figures else {}


def _collectives(run: RunTrace, iteration: int) -> dict[str, Any]:
    """Returns the times of each kind of collective, or ``{}`` if collectives were not traced."""
    figures = collective_figures(run, iteration)
    return {"collectives": [asdict(of_kind) for of_kind in figures]} if figures else {}


def _kernels(run: RunTrace, iteration: int) -> dict[str, Any]:
    """Returns the kernels that took the most time, or ``{}`` if kernels were not recorded."""
    figures = kernel_figures(run, iteration)[:_MOST_KERNELS]
    return {"kernels": [asdict(of_name) for of_name in figures]} if figures else {}


def _kernel_lines(run: RunTrace, iteration: int, step_ms: float) -> list[str]:
    """Returns a table of the kernels with the most total time in ``iteration``, as lines of text.

    If kernels were recorded only in other iterations, the result is a line that lists these
    iterations. If no kernels were recorded, the result is empty.
    """
    figures = kernel_figures(run, iteration)[:_KERNELS_SHOWN]
    if not figures:
        recorded = sorted({step.iteration for rank in run.ranks for step in read_steps(run, rank)})
        where = describe_numbers(recorded)
        return (
            [
                f"kernels were only recorded in iterations {where}; choose one of them with "
                "--iteration"
            ]
            if recorded
            else []
        )
    rows = [("kernel", "rank", "in", "number", "time", "of a step")]
    rows += [
        (
            figure.name[:_KERNEL_WIDTH],
            str(figure.rank),
            figure.action,
            str(figure.count),
            f"{figure.total_ms:.2f} ms",
            f"{figure.total_ms / max(step_ms, 1e-9):.1%}",
        )
        for figure in figures
    ]
    return ["", *aligned(rows, 1)]


def _collective_lines(figures: list[CollectiveFigures], step_ms: float) -> list[str]:
    """Returns a table of collectives as lines of text, or no lines if there are no collectives.

    Times are also shown as fractions of the step, which takes ``step_ms`` milliseconds.
    """
    if not figures:
        return []
    rows = [_COLLECTIVE_COLUMNS]
    for figure in sorted(figures, key=lambda figure: -figure.wait_ms - figure.transfer_ms):
        whole_ms = figure.wait_ms + figure.transfer_ms
        rows.append(
            (
                f"{figure.kind} {figure.operation}",
                str(figure.size),
                f"{figure.count:.4g}",
                f"{figure.size_bytes / 1024:.4g} KiB",
                f"{figure.wait_ms:.2f} ms",
                f"{figure.transfer_ms:.2f} ms",
                f"{whole_ms / max(step_ms, 1e-9):.1%}",
                f"{figure.last_rank}: {figure.last_ms:.2f} ms",
            )
        )
    return ["", *aligned(rows, 1)]


def _layer_lines(figures: list[LayerFigures], step_ms: float) -> list[str]:
    """Returns a table of layers as lines of text, or no lines if layers were not traced.

    Times are also shown as fractions of the step, which takes ``step_ms`` milliseconds.
    """
    if not figures:
        return []
    rows = [_LAYER_COLUMNS]
    for figure in figures:
        whole_ms = figure.forward_ms + figure.backward_ms
        rows.append(
            (
                str(figure.layer),
                str(figure.pp_rank),
                f"{figure.forward_ms:.2f} ms",
                f"{figure.backward_ms:.2f} ms",
                f"{whole_ms / max(step_ms, 1e-9):.1%}",
                f"{figure.slowest_rank}: {figure.slowest_ms:.2f} ms",
            )
        )
    return ["", *aligned(rows, 0)]


def _expert_lines(experts: Mapping[str, Any], step_ms: float) -> list[str]:
    """Returns lines of text about the load of the experts and the exchange of tokens.

    Times are also shown as fractions of the step, which takes ``step_ms`` milliseconds.
    """
    layers = []
    for layer, tokens in experts["tokens"].items():
        expert = max(tokens, key=tokens.__getitem__)
        ratio = tokens[expert] * len(tokens) / max(1, sum(tokens.values()))
        layers.append((ratio, f"{ratio:.2f} in layer {layer} (expert {expert})"))
    shown = [text for _, text in sorted(layers, reverse=True)[:MOST_LAYERS]]
    times = list(experts["exchange_ms"].values())
    parts = " to ".join(f"{ms:.2f} ms ({ms / max(step_ms, 1e-9):.0%})" for ms in _extremes(times))
    return [
        f"tokens of the busiest expert relative to the mean: {', '.join(shown)}",
        f"time in which each rank exchanges tokens (fraction of the step): {parts}",
    ]


def _extremes(values: Sequence[float]) -> tuple[float, ...]:
    """Returns the minimum and the maximum of ``values``, or only one value if both are equal."""
    return tuple(dict.fromkeys((min(values), max(values))))


def _times(row: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Returns the count, mean and standard deviation of durations in ms, keyed by kind of action.

    Args:
        row: Spans of one rank.
    """
    statistics_by_action = {}
    for action in DRAWN_ACTIONS:
        lengths = [span.duration_ns / NS_PER_MS for span in row if span.action == action]
        if lengths:
            mean = statistics.fmean(lengths)
            spread = statistics.pstdev(lengths)
            statistics_by_action[action] = {
                "count": len(lengths),
                "mean_ms": mean,
                "stdev_ms": spread,
            }
    return statistics_by_action


def _report_lines(selection: ViewInput) -> list[str]:
    """Returns the report as lines of text for the terminal."""
    run = selection.run
    step = selection.step
    report = _report(selection)
    lines = [
        f"{run.origin}: run {run.run}, schedule {step.schedule}, {run.num_ranks} ranks x "
        f"{run.num_chunks} chunks, {step.microbatches}{step.replica}",
        f"iteration {step.iteration}: step {report['step_ms']:.2f} ms, "
        f"bubble {report['bubble_fraction']:.1%} (idle / step time){run.bubble_note}",
        *_length_lines(step.lengths),
        *aligned(_table(report["ranks"], step.actions), 1),
        *aligned(_parts_table(report["ranks"]), 1),
    ]
    if len(selection.iterations) > 1:
        lines.append(_over_iterations(selection))
    if "experts" in report:
        lines += _expert_lines(report["experts"], report["step_ms"])
    lines += _layer_lines(layer_figures(run, step.iteration), report["step_ms"])
    lines += _collective_lines(collective_figures(run, step.iteration), report["step_ms"])
    lines += _kernel_lines(run, step.iteration, report["step_ms"])
    lines.append(f"clocks: {run.alignment.describe()}")
    return lines


def _length_lines(lengths: Lengths) -> list[str]:
    """Returns a line about the lengths of the step's microbatches, or no lines if all are equal."""
    if not lengths:
        return []
    positions = [microbatch[0] for microbatch in lengths]
    tokens = [sum(microbatch[1:]) for microbatch in lengths]
    return [
        f"{sum(tokens):,} tokens, {min(tokens):,} to {max(tokens):,} per microbatch, padding "
        f"{1 - sum(tokens) / max(1, sum(positions)):.1%}, longest document "
        f"{max(max(microbatch[1:], default=0) for microbatch in lengths):,}"
    ]


def _table(ranks: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[list[str]]:
    """Returns the cells of a table: a row of headings, and one row per rank.

    The table has a column for each kind of action in ``kinds``.
    """
    show_bytes = any(rank["peak_in_flight_bytes"] for rank in ranks)
    head = ["", "actions", "busy ms", "wait ms", "bubble"]
    table = [[*head, *(f"{kind} ms" for kind in kinds), "peak in flight"]]
    for rank in ranks:
        cells = [rank["label"], str(rank["num_actions"]), f"{rank['busy_ms']:.2f}"]
        cells += [f"{rank['wait_ms']:.2f}", f"{rank['bubble_fraction']:.1%}"]
        for kind in kinds:
            time = rank["times"].get(kind)
            cells.append("-" if time is None else "{mean_ms:.2f} ± {stdev_ms:.2f}".format(**time))
        size_text = f" ({rank['peak_in_flight_bytes'] / 2**20:.1f} MiB)" if show_bytes else ""
        table.append([*cells, f"{rank['peak_microbatches']}{size_text}"])
    return table


def _parts_table(ranks: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the cells of a table that breaks down the step time of each rank.

    Parts of the step that take no time on any rank are omitted, except for ``busy``.
    """
    parts = [rank["parts_ms"] for rank in ranks]
    shown = [
        name for name in PARTS if name == "busy" or any(rank_parts[name] for rank_parts in parts)
    ]
    table = [["of the step, ms", *(PARTS[name] for name in shown)]]
    for rank, rank_parts in zip(ranks, parts, strict=True):
        total_ms = max(sum(rank_parts.values()), 1e-9)
        cells = [f"{rank_parts[name]:.2f} ({rank_parts[name] / total_ms:.0%})" for name in shown]
        table.append([rank["label"], *cells])
    return table


def _over_iterations(selection: ViewInput) -> str:
    figures = selection.figures
    has_actions = (figures.num_actions > 0).any(axis=1)
    steps = (figures.step_ns[has_actions].max(axis=1) / NS_PER_MS).tolist()
    bubbles = np.nanmean(figures.bubble_fraction[has_actions], axis=1).tolist()
    return (
        f"over {len(selection.iterations)} complete iterations "
        f"({describe_numbers(selection.iterations)}): "
        f"step median {statistics.median(steps):.2f} ms ({min(steps):.2f} to {max(steps):.2f}), "
        f"bubble median {statistics.median(bubbles):.1%} "
        f"({min(bubbles):.1%} to {max(bubbles):.1%}){selection.run.bubble_note}"
    )
