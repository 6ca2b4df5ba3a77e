"""Generates random orders of actions, which differ from all schedules, and writes them to files.

The files are for ``--schedule-file``. To generate an order, random pairs of neighboring actions are
swapped in one of this project's schedules. A swap is kept only if the schedule stays valid.
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
"""Maps each file name to the schedule that is changed to generate the file's order."""


def free_order(file: str) -> Schedule:
    """Returns the generated schedule for ``file``. The file name is also the random seed."""
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
    """Writes the file of each generated schedule to ``folder``."""
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
