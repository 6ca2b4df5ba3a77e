"""Implements ``make_trace``, which writes the traces of a synthetic run with chosen faults.

python tools/make_trace.py --output traces --ranks 1024 --pipeline 16 --spans 10000000
python tools/make_trace.py --output traces --fault slow-rank:2:1.3 --fault slow-link:0-1:0.02
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from megatron.adaptive.config.command_parser import CommandParser
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.catalog import policy_names
from megatron.adaptive.trace.files import set_aside
from tests.support.synthetic_trace import FAULTS, Fault, FaultKind, SyntheticRun, write_synthetic

FAULT_HELP = (
    "slow-rank:RANK:FACTOR, slow-link:FROM-TO:SECONDS, spikes:RANK:FACTOR:PROBABILITY or "
    "slow-data:RANK:SECONDS, optionally followed by @FIRST-LAST to limit the iterations; can be "
    "repeated"
)


_SIZES: dict[str, tuple[str, ...]] = {
    "slow-rank": ("factor",),
    "slow-link": ("seconds",),
    "spikes": ("factor", "probability"),
    "slow-data": ("seconds",),
}
_NUMBERS = {
    "--chunks": ("num_chunks", "number of chunks per rank"),
    "--microbatches": ("num_microbatches", "number of microbatches per step and replica"),
    "--iterations": ("iterations", "number of training steps"),
    "--weight-pieces": (
        "weight_pieces",
        "number of pieces per weight gradient; 0 for undivided backward passes",
    ),
    "--jitter": ("action_sigma", "lognormal spread of action times"),
    "--latency": ("latency_s", "latency of a message, in seconds"),
    "--occupancy": ("occupancy_s", "time for which a message occupies its link, in seconds"),
    "--hosts": ("hosts", "number of machines, each with its own clock"),
    "--clock-offset": (
        "clock_offset_s",
        "largest difference between a clock and the first host's clock, in seconds",
    ),
    "--clock-drift": ("clock_drift_ppm", "largest drift of a clock, in parts per million"),
    "--seed": ("seed", "seed of all random numbers"),
}
"""Maps each option that sets a field of the run to the name of the field and the help text."""


def main(argv: Sequence[str]) -> int:
    """Writes the traces that the arguments ``argv`` describe, and prints their number of spans.

    Raises:
        ConfigError: An option is invalid.
        ScheduleError: The schedule does not support the pipeline.
        TraceError: The rank of a fault does not exist, or a file cannot be written.
    """
    options = _parser().parse_args(argv)
    if options.ranks % options.pipeline:
        raise ConfigError(
            f"--ranks must be a multiple of --pipeline {options.pipeline}, got {options.ranks}; "
            "every replica needs all stages"
        )
    run = SyntheticRun(
        **{name: getattr(options, name) for name, _ in _NUMBERS.values()},
        schedule=options.schedule,
        num_ranks=options.pipeline,
        replicas=options.ranks // options.pipeline,
        faults=tuple(parse_fault(text) for text in options.fault),
    )
    if options.spans:
        run = replace(run, iterations=_iterations(run, options.spans))
    set_aside(options.output)
    truth = write_synthetic(options.output, run)
    if options.truth is not None:
        options.truth.write_text(
            json.dumps(
                {
                    "bubble_fraction": truth.bubble_fraction.tolist(),
                    "step_s": truth.step_s.tolist(),
                    "clocks": truth.clocks,
                    "faults": options.fault,
                }
            ),
            encoding="ascii",
        )
    print(
        f"{truth.spans} spans of {run.world_size} ranks in {run.iterations} iterations: "
        f"{options.output}"
    )
    return 0


def parse_fault(text: str) -> Fault:
    """Parses ``text``, a fault in the format of :data:`FAULT_HELP`, and returns the fault.

    Raises:
        ConfigError: The text does not have this format.
    """
    description, _, when = text.partition("@")
    kind, *values = description.split(":")
    try:
        if kind not in FAULTS:
            raise ValueError(f"unknown fault {kind!r}")
        ranks, *numbers = values
        source, _, to = ranks.partition("-")
        ends = {"rank": int(source), "to": int(to) if kind == "slow-link" else -1}
        sizes = dict(zip(_SIZES[kind], map(float, numbers), strict=True))
        fault = Fault(kind=cast(FaultKind, kind), **ends, **sizes)  # type: ignore[arg-type]
        if when:
            first, _, last = when.partition("-")
            fault = replace(fault, first=int(first), last=int(last) if last else None)
    except ValueError as error:
        raise ConfigError(f"invalid --fault {text} ({error}); expected {FAULT_HELP}") from None
    return fault


def _iterations(run: SyntheticRun, spans: int) -> int:
    """Returns the number of iterations of ``run`` that gives approximately ``spans`` spans."""
    with TemporaryDirectory() as folder:
        # Simulate one replica, because all replicas have the same number of spans.
        probe = replace(run, replicas=1, iterations=1, faults=(), hosts=1)
        each = write_synthetic(folder, probe).spans * run.replicas
    return max(1, round(spans / each))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="make_trace",
        description="Write the traces of a synthetic run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the traces")
    add("--ranks", type=_count, default=4, help="number of ranks")
    add("--pipeline", type=_count, default=4, help="number of ranks per pipeline")
    add("--spans", type=_count, metavar="N", help="run as many iterations as give about N spans")
    add("--schedule", choices=policy_names(), default="adaptive", help="schedule of the run")
    add("--fault", action="append", default=[], help=FAULT_HELP)
    add(
        "--truth",
        type=Path,
        metavar="FILE",
        help="also write the ground truth to this file, as JSON",
    )
    for flag, (name, text) in _NUMBERS.items():
        usual = getattr(SyntheticRun, name)
        kind = _count if usual and type(usual) is int else type(usual)
        add(flag, dest=name, type=kind, default=usual, metavar="N", help=text)
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number
