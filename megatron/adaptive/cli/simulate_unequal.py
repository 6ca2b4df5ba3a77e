"""``simulate --stage-data-parallel-sizes``: stages with unequal numbers of ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron.adaptive.config.schedule import parse_widths
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.profile import load_profile
from megatron.adaptive.schedule.unequal import SCHEDULES, StepOfRanks, simulate
from megatron.adaptive.schedule.widths import Widths
from megatron.adaptive.trace.files import replaced

__all__ = ["ALL", "simulate_unequal"]

ALL = ",".join(SCHEDULES)
"""What is compared where nothing is named."""

_FLAG = "--stage-data-parallel-sizes"
# What this simulation does not know, with what says nothing.
_UNKNOWN = {
    "jitter": 0.0,
    "microbatch_jitter": 0.0,
    "occupancy": 0.0,
    "slow_rank": [],
    "weight_pieces": None,
    "placement": None,
    "timeline": 0,
    "chart": None,
}


def simulate_unequal(options: argparse.Namespace, schedules: str) -> int:
    """Simulate a step of each schedule and print a table.

    Args:
        options: of ``simulate``; microbatches are those of the whole step.
        schedules: names with commas between them.

    Raises:
        ConfigError: an option is wrong, or not for stages of unequal sizes.
    """
    widths = _widths(options)
    for name, nothing in _UNKNOWN.items():
        if getattr(options, name) != nothing:
            raise ConfigError(f"--{name.replace('_', '-')} is not known with {_FLAG}: leave it out")
    count = widths.num_stages
    forward, backward = (options.forward,) * count, (options.backward + options.weight,) * count
    if options.profile is not None:
        times = load_profile(options.profile, num_stages=count).times
        forward = times.forward_s
        pairs = zip(times.backward_s, times.weight_s, strict=True)
        backward = tuple(one + other for one, other in pairs)
    steps = []
    for name in schedules.split(","):
        try:
            step = simulate(
                name.strip(),
                widths,
                options.microbatches,
                forward_s=forward,
                backward_s=backward,
                message_s=(options.latency,) * (count - 1),
                cap=options.cap,
            )
        except ScheduleError as error:
            raise ConfigError(f"--schedules {schedules}: {error}") from error
        steps.append((name.strip(), step))
    _print(widths, steps)
    if options.json is not None:
        told = [_as_json(name, step) for name, step in steps]
        with replaced(options.json) as temporary:
            Path(temporary).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


def _widths(options: argparse.Namespace) -> Widths:
    text = options.stage_data_parallel_sizes
    try:
        widths = Widths(parse_widths(text))
    except ValueError as error:
        raise ConfigError(f"{_FLAG} {error}") from error
    if widths.num_stages != options.stages:
        raise ConfigError(
            f"{_FLAG} {text} tells the ranks of {widths.num_stages} stages, --stages is"
            f" {options.stages}: make them equal"
        )
    return widths


def _print(widths: Widths, steps: list[tuple[str, StepOfRanks]]) -> None:
    print(f"stages of {widths} ranks; peak in microbatches of a rank of each stage\n")
    print(f"{'schedule':9} {'step s':>8}  bubble  peak")
    for name, step in steps:
        peaks = "-".join(
            f"{max(step.peaks[rank] for rank in widths.ranks_of(stage)):g}"
            for stage in range(widths.num_stages)
        )
        print(f"{name:9} {step.seconds:8.4g}  {step.bubble_fraction:6.1%}  {peaks}")


def _as_json(name: str, step: StepOfRanks) -> dict[str, Any]:
    return {
        "schedule": name,
        "makespans_s": [step.seconds],
        "bubble_fraction": step.bubble_fraction,
        "peak_microbatches": list(step.peaks),
        "orders": [" ".join(map(str, order)) for order in step.orders],
    }
