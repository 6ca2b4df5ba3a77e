"""``validate``: how well the planner predicts runs that were measured.

    python -m megatron.adaptive validate --data DIR [--set NAME] [--rows] [--json]
    python -m megatron.adaptive validate --data DIR --model M --cluster FILE [--profile FILE]

``DIR`` is the folder of a published data set, or of several; or of traces of one's own runs of
model ``M`` on the cluster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.cli.common import CommandParser
from megatron.adaptive.cli.plan_inputs import add_input_arguments
from megatron.adaptive.cli.validate_runs import find_runs, read_own_runs
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.datasets.measured import Measured
from megatron.adaptive.planner.model import RECOMPUTE
from megatron.adaptive.planner.validate import Comparison, Row, compare, read_sets

__all__ = ["main"]

OWN = "own runs"
_FEWEST = {OWN: 1}


def main(argv: Sequence[str]) -> int:
    """Predict the runs of every set found, and print how far off that is.

    Raises:
        ConfigError: an option is wrong, or no data set was found.
    """
    options = _parser().parse_args(argv)
    sets = _sets(options)
    if options.set:
        known = ", ".join(sets)
        if options.set not in sets:
            raise ConfigError(f"--set {options.set}: {options.data} has {known}")
        sets = {options.set: sets[options.set]}
    found = [compare(name, runs, fewest=_FEWEST.get(name, 2)) for name, runs in sets.items()]
    if options.json:
        print(json.dumps([_as_json(one) for one in found], indent=2))
        return 0
    for line in _table(found):
        print(line)
    if options.rows:
        for one in found:
            print(f"\n{one.name}")
            for line in _rows(one):
                print(line)
    return 0


def _sets(options: argparse.Namespace) -> dict[str, list[Measured]]:
    """Published sets, and runs of one's own as one more."""
    own = find_runs(options.data) if options.data.is_dir() else {}
    if not own:
        return read_sets(options.data)
    return {OWN: read_own_runs(own, options), **read_sets(options.data, needed=False)}


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m megatron.adaptive validate",
        description="Compare predicted with measured times and memory.",
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder of data sets")
    add("--set", metavar="NAME", help="only this one")
    add("--rows", action="store_true", help="also every run")
    add("--json", action="store_true", help="for programs")
    add_input_arguments(parser, required=False)
    group = parser.add_argument_group("how one's own runs ran, beside what their traces tell")
    add = group.add_argument
    add("--recompute", choices=RECOMPUTE, default="none", help="as they ran (%(default)s)")
    for name in ("distributed-optimizer", "overlap-grad-reduce", "sequence-parallel"):
        add(f"--{name}", action="store_true", help="they ran with it")
    return parser


def _table(found: Sequence[Comparison]) -> list[str]:
    width = max(len(one.name) for one in found)
    lines = [f"{'set':{width}}  runs  median  worst  ranks  best at  memory"]
    for one in found:
        errors = one.memory_errors
        memory = f"{max(abs(error) for error in errors):.1%} of {len(errors)}" if errors else "-"
        lines.append(
            f"{one.name:{width}}  {len(one.timed):4}  {one.median_error:6.1%}"
            f"  {one.worst_error:5.1%}  {one.correlation:5.3f}  {one.place_of_best:7}  {memory}"
        )
    lines += [
        "",
        "median, worst: error of the predicted time; ranks: correlation of predicted and measured",
        "order; best at: place of the fastest run in the predicted order; memory: worst error",
    ]
    return lines


def _rows(one: Comparison) -> list[str]:
    lines = ["run         tp  dp  pp  size  partition  measured  predicted   error  memory"]
    width = max(len(_partition(row)) for row in one.rows)
    lines[0] = lines[0].replace("partition", f"{'partition':{width}}")
    for row in one.rows:
        plan = row.measured.plan
        seconds, error = row.measured.seconds, row.time_error
        memory = row.memory_error
        lines.append(
            f"{row.measured.name:10}  {plan.tp:2}  {plan.dp:2}  {plan.pp:2}  {plan.micro_batch:4}"
            f"  {_partition(row):{width}}  {'-' if seconds is None else f'{seconds:.4g}':>8}"
            f"  {row.predicted.seconds:9.4g}  {'-' if error is None else f'{error:+.1%}':>6}"
            f"  {'-' if memory is None else f'{memory:+.1%}':>6}"
        )
    return lines


def _partition(row: Row) -> str:
    return format_partition(row.measured.plan.partition)


def _as_json(one: Comparison) -> dict[str, Any]:
    return {
        "set": one.name,
        "runs": len(one.timed),
        "median_error": one.median_error,
        "worst_error": one.worst_error,
        "rank_correlation": one.correlation,
        "place_of_best": one.place_of_best,
        "memory_errors": list(one.memory_errors),
        "rows": [
            {
                "run": row.measured.name,
                "measured_s": row.measured.seconds,
                "predicted_s": row.predicted.seconds,
                "parts_s": dict(row.predicted.parts),
                "measured_peak_bytes": row.measured.peak_bytes,
                "predicted_peak_bytes": row.predicted.peak_bytes,
                "doubt": row.measured.doubt,
            }
            for row in one.rows
        ],
    }
