"""Generates orders of actions that no schedule has, and writes them for ``--schedule-file``.

Each order is a schedule of this project in which neighboring actions were swapped at random while
the schedule remained valid.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.catalog import make_schedule, placement_for
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.schedule_file import save
from megatron.adaptive.schedule.validate import validate

MICROBATCHES = 8
ORIGINS = {
    "loop.json": "interleaved",
    "v.json": "zb-v",
    "loop.csv": "breadth-first",
    "v.csv": "v-half",
}
"""Each file is made from this schedule, with two ranks and two chunks per rank."""


def free_order(file: str) -> Schedule:
    """Returns the schedule to write to ``file``."""
    origin = ORIGINS[file]
    schedule = make_schedule(origin, placement_for(origin, 2, 2), MICROBATCHES)
    chance = random.Random(file)
    for _ in range(200):
        orders = [list(order) for order in schedule.orders]
        order = chance.choice(orders)
        index = chance.randrange(len(order) - 1)
        order[index : index + 2] = order[index + 1], order[index]
        changed = dataclasses.replace(
            schedule, name=Path(file).stem, orders=tuple(map(tuple, orders))
        )
        try:
            validate(changed)
        except ScheduleError:
            continue
        schedule = changed
    return schedule


def write_files(folder: Path) -> None:
    """Writes all schedule files to ``folder``."""
    for file in ORIGINS:
        if file.endswith(".json"):
            save(free_order(file), folder / file)
        else:
            (folder / file).write_text(as_csv(free_order(file)), encoding="utf-8")


def as_csv(schedule: Schedule) -> str:
    """Returns ``schedule`` in the CSV format of torch.distributed.pipelining."""
    kinds = {"F": "F", "B": "I" if schedule.weight_pieces else "B", "W": "W"}
    rows = [
        ",".join(
            f"{schedule.placement.stage_of(rank, action.chunk)}{kinds[action.kind]}"
            f"{action.microbatch}"
            for action in order
        )
        for rank, order in enumerate(schedule.orders)
    ]
    return "\n".join(rows) + "\n"
