"""Implements ``profile``, which measures layers and links between ranks for the planner.

``docs/reference/planner.md`` describes the profile file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.cli.common import EXIT_EXPECTED_ERROR, show
from megatron.adaptive.cli.plan_inputs import (
    add_host_argument,
    measured_kinds,
    parse_counts,
    traced_runs,
)
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, number
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.errors import AdaptiveError, ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.calibrate import calibrate
from megatron.adaptive.planner.cluster import read_cluster
from megatron.adaptive.planner.model_file import read_model, usual_attention


def main(argv: Sequence[str]) -> int:
    """Creates a profile from measurements, traces or other profiles, and writes it to a file."""
    environment = Environment.read()
    try:
        return _run(argv, environment)
    except ConfigError:
        # All processes detect the same error, so let only rank 0 report it.
        if environment.rank == 0:
            raise
        return EXIT_EXPECTED_ERROR


def _run(argv: Sequence[str], environment: Environment) -> int:
    options = _parser().parse_args(argv)
    sources = {
        "--model": options.model,
        "--merge": options.merge,
        "--cut-points": options.cut_points,
    }
    if options.from_run:
        _write(_fit_runs(options), options.output)
        return 0
    chosen = [name for name, value in sources.items() if value]
    if len(chosen) != 1:
        raise ConfigError(
            f"profile requires exactly one of {', '.join(sources)}"
            + (f", got {' and '.join(chosen)}" if chosen else " to select what to profile")
        )
    if options.merge:
        _write(profile_file.load_all(options.merge), options.output)
    elif options.cut_points:
        name = options.name or options.cut_points.stem
        profile = profile_file.profile_of_cut_points(
            options.cut_points, name, options.precision or "fp32"
        )
        _write(profile, options.output)
    else:
        measured = _measure(options, environment)
        if measured is not None:
            _write(measured, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} profile",
        description="Measure a model's layers and the links between ranks, for the planner.",
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE.json", help="path of the profile")
    add("--model", metavar="MODEL", help='model name, arguments, or file; see "plan --help"')
    add("--merge", type=Path, nargs="+", metavar="FILE", help="merge profiles of the same model")
    text = "CSV or JSON file with costs of the pieces of a plain module"
    add("--cut-points", type=Path, metavar="FILE", help=text)
    text = "fit the model's profile to traced runs"
    add("--from-run", type=Path, nargs="+", metavar="DIR", help=text)
    add("--cluster", type=Path, metavar="FILE", help="cluster on which the runs of --from-run ran")
    add_host_argument(parser)
    add("--name", help="name of the model, with --cut-points; default: the name of the file")
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    text = "precision; default: bf16 on a GPU, fp32 on a CPU"
    add("--precision", choices=("fp32", "fp16", "bf16"), help=text)
    add("--tp", metavar="1,2,4", help="tensor-parallel sizes; default: all possible powers of two")
    text = "samples per microbatch (%(default)s)"
    add("--micro-batch-sizes", default="1,2,4", metavar="1,2,4", help=text)
    ranks = "expert-parallel sizes to measure (%(default)s)"
    add("--expert-parallel-size", default="1", metavar="1,8", help=ranks)
    repeats = number(int, 1, 100_000)
    text = "number of microbatches to measure (%(default)s)"
    add("--repeats", type=repeats, default=7, help=text)
    text = "type of this node; default: the name of its GPU"
    add("--node-type", default="", metavar="NAME", help=text)
    add("--no-links", action="store_true", help="do not measure links and all-reduces")
    add("--distributed-backend", choices=("nccl", "gloo"), help="the trainer's flag of this name")
    return parser


def _fit_runs(options: argparse.Namespace) -> dict[str, Any]:
    """Fits a profile to traced runs, and merges it with the profile at ``--output``, if any."""
    if not options.model or options.cluster is None:
        raise ConfigError(
            "--from-run requires --model and --cluster, which describe the runs; add both"
        )
    cluster = read_cluster(options.cluster)
    existing = profile_file.load(options.output) if options.output.exists() else None
    default = "bf16" if existing is None else profile_file.precision_of(existing["model"])
    attention = usual_attention(on_gpus=cluster.has_known_gpus)
    model = read_model(options.model, options.precision, default=default, attention=attention)
    if existing is not None:
        profile_file.check_model(existing, model, str(options.output))
    elif not model.arguments:
        raise ConfigError(
            f"--from-run: {model.name} is not a known model; pass its profile as --output"
        )
    runs = traced_runs(options.from_run, options, model, cluster)
    if existing is None:
        return calibrate(model, runs)
    fitted = calibrate(model, runs, existing["model"])
    return profile_file.merge([(str(options.output), existing), ("the runs", fitted)])


def _measure(options: argparse.Namespace, environment: Environment) -> dict[str, Any] | None:
    """Measures layers and links as one rank of a job, and returns the profile.

    Returns ``None`` on all ranks except rank 0.
    """
    sizes = parse_counts("--micro-batch-sizes", options.micro_batch_sizes)
    widths = parse_counts("--tp", options.tp)
    # Import torch only here, because other uses of this command, such as merging profiles, do not
    # require torch.
    from megatron.adaptive.accelerator import detect
    from megatron.adaptive.training.profile_run import ProfileOptions, profile_layers

    accelerator = detect(environment.local_rank, backend=options.distributed_backend)
    default = "bf16" if accelerator.is_cuda else "fp32"
    attention = usual_attention(on_gpus=accelerator.is_cuda)
    model = read_model(options.model, options.precision, default=default, attention=attention)
    if not model.arguments:
        raise ConfigError(
            f'--model {options.model}: "profile" only measures GPT and Llama models; measure the '
            "pieces of this model yourself, and pass their times with --cut-points"
        )
    spreads = parse_counts("--expert-parallel-size", options.expert_parallel_size)
    if unknown_spreads := set(spreads) - set(model.expert_ranks):
        raise ConfigError(
            "--expert-parallel-size must be one of"
            f" {', '.join(map(str, model.expert_ranks))} for {model.name}, got"
            f" {min(unknown_spreads)}"
        )
    kinds = measured_kinds(model, spreads)
    for width in widths:
        if model.max_tp % width:
            raise ConfigError(
                "--tp must divide the number of heads and the feed-forward size of "
                f"{model.name}, got {width}; use {model.max_tp} or one of its divisors"
            )
    try:
        return profile_layers(
            ProfileOptions(
                name=model.name,
                arguments=model.arguments,
                kinds=kinds,
                last=model.layers[-2],
                widths=widths,
                widest=model.max_tp,
                micro_batches=sizes,
                repeats=options.repeats,
                node=options.node_type,
                links=not options.no_links,
                backend=options.distributed_backend,
            ),
            environment,
        )
    except AdaptiveError as error:
        raise type(error)(f"profile: {error}") from error


def _write(content: dict[str, Any], path: Path) -> None:
    profile_file.write(content, path)
    gpus = ", ".join(sorted({row["gpu"] for row in content["layers"]}))
    show(
        f"wrote {path}: {len(content['layers'])} measurements of {content['model']['name']} on "
        f"{gpus}"
    )
