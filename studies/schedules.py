"""Measures schedules on simulated, emulated and real pipelines, and on recorded jobs.

    python -m studies.schedules [--quick] [--part PART ...] [--json FILE]
    python -m studies.schedules --part traces --folder DIR

The parts are:

- ``study``: Simulates schedules on many pipelines.
- ``experts``: Measures how actions overlap with token exchanges, and how groups of ranks agree.
- ``lengths``: Trains with documents of different lengths and with a slow replica, and distributes
  microbatches over replicas by cost or round-robin.
- ``content``: Trains with 0 to 8 images per microbatch. Compares fixed orders with orders and
  distributions over replicas by cost.
- ``traces``: Replays recorded jobs (operation tables or traces) under other schedules and with
  microbatches redistributed over replicas, and compares the step times with 1F1B.

The command exits with status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

from harness.report import Result, Row, measure, measured, missing, parser_of, ratios
from megatron.adaptive.schedule.catalog import DEFAULT_PIECES
from megatron.adaptive.trace.imports.published import ENDINGS
from megatron.adaptive.trace.locate import load_run
from megatron.adaptive.trace.whatif.operations import pipelines_of, read_operations
from megatron.adaptive.trace.whatif.replay import recorded_times
from studies import experts, schedule_study
from studies.dealing import dealing


def study(_: argparse.Namespace) -> Result:
    """Simulates schedules on many pipelines, for the part ``study``."""
    return Result(rows=schedule_study.measure())


def trading(options: argparse.Namespace) -> Result:
    """Emulates a pipeline with token exchanges, for the part ``experts``."""
    # A chunk has little work between two exchanges, so it must take long enough to make the delay
    # of waking up negligible.
    return Result(rows=experts.measure(quick=options.quick, chunk_ms=40.0))


def content(options: argparse.Namespace) -> Result:
    """Trains with different numbers of images per microbatch, for the part ``content``."""
    # Importing this module prepares torch for machines without CUDA.
    from studies import unequal_content

    return unequal_content.measure(quick=options.quick)


def traces(options: argparse.Namespace) -> Result:
    """Replays recorded jobs under other schedules, for the part ``traces``."""
    if options.folder is None:
        return Result(rows=[missing("recorded jobs", "no folder given")])
    return Result(rows=[row for path in jobs_in(options.folder) for row in replayed(path)])


def jobs_in(folder: Path) -> list[Path]:
    """Returns the recorded jobs in ``folder``, or only ``folder`` if it does not contain any."""
    tables = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS)
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    return [*tables, *runs] or [folder]


def replayed(path: Path) -> list[Row]:
    """Replays the job ``path``, and returns rows with the speed-ups over 1F1B."""
    run_read = load_run(path)
    where = pipelines_of(run_read)
    times = recorded_times([read_operations(run_read, where, run_read.iterations)])
    if times is None:
        return [missing(path.stem, "its ranks have several stages, or no step is complete")]
    steps = list(times.steps)
    base = [times.step_s(step, "1f1b", dealt=False) for step in steps]
    speeds = {}
    for name, schedule, dealt in (
        ("adaptive V", "adaptive", False),
        ("microbatches dealt over replicas, 1F1B", "1f1b", True),
        ("both", "adaptive", True),
    ):
        adapted = [
            times.step_s(step, schedule, dealt=dealt, pieces=DEFAULT_PIECES) for step in steps
        ]
        speeds[name] = ratios(base, adapted)
    best = max(speeds, key=lambda name: statistics.median(speeds[name]))
    goal = next((goal for ending, goal in TRACE_GOALS.items() if path.stem.endswith(ending)), None)
    return [
        *(measured(f"{path.stem}: {name}", values) for name, values in speeds.items()),
        measured(f"{path.stem}: best of ours", speeds[best], goal=goal, least=True, note=best),
    ]


TRACE_GOALS = {"AR": 1.85, "ST": 1.57, "SE": 1.60}
"""Minimum speed-ups over 1F1B, keyed by the end of the name of a published trace."""


PARTS = {
    "study": study,
    "experts": trading,
    "lengths": lambda options: dealing(quick=options.quick),
    "content": content,
    "traces": traces,
}


def main() -> int:
    """Runs the selected parts. Returns 1 if a measurement misses its goal, otherwise 0."""
    parser = parser_of(__doc__, tuple(PARTS))
    parser.add_argument("--folder", type=Path, help="folder of recorded jobs, for part traces")
    options = parser.parse_args()
    return measure({name: partial(part, options) for name, part in PARTS.items()}, options)


if __name__ == "__main__":
    sys.exit(main())
