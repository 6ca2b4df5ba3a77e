"""Reads and writes schedule files, which contain static schedules from users or other programs.

JSON is the format of this package. An action is written as its kind, its chunk, ``-`` and its
microbatch. If a weight gradient is split into several W actions, ``.`` and the index of the W
follow. ``F0-3+`` runs together with the B after it, and ``B0-3+`` with the F after it. In such a
pair, one action computes while the experts of the other action communicate::

    {"version": 1, "name": "mine", "placement": "v", "ranks": 2, "chunks": 2, "microbatches": 1,
     "orders": ["F0-0 F1-0 B1-0 W1-0 B0-0 W0-0.0",
                "F0-0 F1-0 B1-0 B0-0 W1-0 W0-0"]}

The following fields are optional: ``name``, ``placement`` (default: ``loop``) and ``slices``, which
is the number of slices into which each microbatch is cut (default: 1). With slices, the last number
of an action counts slices across all microbatches. For example, with 4 slices, ``F0-6`` is the
third slice of microbatch 1. Without W actions, B also computes weight gradients.

CSV is the format of ``torch.distributed.pipelining``. It has a row per rank and a cell per action,
with the action's stage, kind and microbatch. An empty cell means that the rank waits::

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1

``F`` is a forward pass, ``I`` computes input gradients, ``W`` computes weight gradients, and ``B``
computes both. If a file contains ``I`` or ``W``, each ``B`` is split into these two. The actions in
``(0F1;1B0)OVERLAP_F_B`` run one after the other. Sends, receives and the gathering of sharded
weights are skipped, because this package derives them from the order of actions. The stages must be
assigned to the rows in a loop or a V.

Schedules are always validated after reading (see ``validate``).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.config.input_files import read_json, read_text
from megatron.adaptive.config.schema_files import check_form
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.schedule import Order, Schedule
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind
from megatron.adaptive.schedule.validate import validate

VERSION = 1
_PLACEMENTS: tuple[PlacementKind, ...] = ("loop", "v")

_MOST_UNLISTED = 10_000
"""Number of forward passes per rank above which a file must list at least a tenth of them."""

_ACTION = re.compile(r"([FBW])(\d{1,6})-(\d{1,6})(?:\.(\d{1,6})|(\+))?", re.ASCII)
_CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})", re.ASCII)
_SKIPPED = re.compile(
    r"\d+(?:(?:(?:WAIT_)?SEND|RECV)_[FB]\d*|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)", re.ASCII
)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def load(path: Path) -> Schedule:
    """Reads a schedule from a file and validates it.

    Args:
        path: Path of the ``.json`` or ``.csv`` file.

    Raises:
        ScheduleError: The file cannot be read or parsed, or the schedule is not valid. The message
            contains the position. For an invalid schedule, it also contains a drawing of the
            actions around the error.
    """
    path = Path(path)
    where = f"schedule file {path}"
    form = path.suffix.lower()
    if form not in (".json", ".csv"):
        raise ScheduleError(f"{where}: the file name must end in .json or .csv")
    hint = "specify a schedule file"
    try:
        if form == ".json":
            content = check_form(read_json(path, hint), "schedule", where)
            schedule = _from_json(content, path.stem)
        else:
            schedule = _from_csv(read_text(path, hint), path.stem)
        validate(schedule)
    except ConfigError as error:
        raise ScheduleError(str(error)) from error
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from error
    return schedule


def save(schedule: Schedule, path: Path) -> None:
    """Writes ``schedule`` as JSON that ``load`` can read, with one line per rank.

    Raises:
        ScheduleError: The path does not end in ``.json``, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".json":
        raise ScheduleError(f"schedule file {path}: the file name must end in .json")
    placement = schedule.placement
    content = {
        "version": VERSION,
        "name": schedule.name,
        "placement": placement.kind,
        "ranks": placement.num_ranks,
        "chunks": placement.num_chunks,
        "microbatches": schedule.num_microbatches,
        "orders": [" ".join(map(str, order)) for order in schedule.orders],
    }
    if schedule.num_slices > 1:
        content["slices"] = schedule.num_slices
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"schedule file {path} cannot be written: {error}") from error


def _from_json(content: Mapping[str, Any], name: str) -> Schedule:
    schedule = Schedule(
        name=content.get("name", name),
        placement=Placement(
            num_ranks=content["ranks"],
            num_chunks=content["chunks"],
            kind=content.get("placement", "loop"),
        ),
        num_microbatches=content["microbatches"],
        num_slices=content.get("slices", 1),
        orders=tuple(_parse_order(order, rank) for rank, order in enumerate(content["orders"])),
    )
    _check_size(schedule)
    return schedule


def _check_size(schedule: Schedule) -> None:
    """Rejects ``schedule`` if its declared sizes far exceed the number of actions that it lists.

    Without this check, a small file could cause the program to allocate a huge amount of memory.
    """
    chunks = schedule.placement.num_chunks
    microbatches = schedule.num_microbatches * schedule.num_slices
    forwards = chunks * microbatches
    longest = max((len(order) for order in schedule.orders), default=0)
    if forwards > max(10 * longest, _MOST_UNLISTED):
        raise ScheduleError(
            f"{chunks} chunks and {microbatches} microbatches or slices require {forwards} forward"
            f" actions per rank, but the longest order lists only {longest} actions"
        )


def _parse_order(text: str, rank: int) -> Order:
    order = []
    for position, word in enumerate(text.split()):
        match = _ACTION.fullmatch(word)
        if match is None or (match[4] and match[1] != "W") or (match[5] and match[1] == "W"):
            raise ScheduleError(
                f"rank {rank}, position {position}: {word!r} is not an action: write F0-3, B0-3,"
                " W0-3 or W0-3.1 (kind, chunk, microbatch, piece), F0-3+ for a pair with the next"
            )
        numbers = int(match[2]), int(match[3]), int(match[4] or 0)
        order.append(Action(ActionKind(match[1]), *numbers, bool(match[5])))
    return tuple(order)


class _Cell(NamedTuple):
    stage: int
    kind: str
    microbatch: int


def _from_csv(text: str, name: str) -> Schedule:
    try:
        table = list(csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"the file is not valid CSV: {error}") from error
    while table and not any(cell.strip() for cell in table[-1]):
        table.pop()
    rows = [_parse_row(cells, row) for row, cells in enumerate(table)]
    cells = [cell for row in rows for cell in row]
    if not cells:
        raise ScheduleError(
            "the file contains no actions; it must have a row per rank with cells such as 0F0"
        )
    split = any(cell.kind in "IW" for cell in cells)
    placement = _placement_of(rows)
    schedule = Schedule(
        name=name,
        placement=placement,
        num_microbatches=1 + max(cell.microbatch for cell in cells),
        orders=tuple(
            tuple(action for cell in row for action in _actions_of(cell, placement, split))
            for row in rows
        ),
    )
    _check_size(schedule)
    return schedule


def _parse_row(texts: Sequence[str], row: int) -> list[_Cell]:
    cells = []
    for column, text in enumerate(texts):
        text = text.strip()
        overlap = _OVERLAP.fullmatch(text)
        for part in overlap[1].split(";") if overlap else [text]:
            match = _CELL.fullmatch(part.strip())
            if match is not None:
                cells.append(_Cell(int(match[1]), match[2], int(match[3])))
            elif part and not _SKIPPED.fullmatch(part.strip()):
                raise ScheduleError(
                    f"row {row + 1}, column {column + 1}: a cell must be STAGE, then F, B, I or W, "
                    "then MICROBATCH, such as 0F3, or two of these, such as (0F3;1B2)OVERLAP_F_B, "
                    f"got {text!r}"
                )
    return cells


def _placement_of(rows: Sequence[Sequence[_Cell]]) -> Placement:
    """Returns the assignment of stages to ranks, given the cells of each rank in ``rows``."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            if rank_of.setdefault(cell.stage, rank) != rank:
                raise ScheduleError(
                    f"a stage must be in a single row, but stage {cell.stage} is in rows "
                    f"{rank_of[cell.stage] + 1} and {rank + 1}"
                )
    ranks = len(rows)
    chunks, rest = divmod(1 + max(rank_of), ranks)
    missing = [stage for stage in range(max(rank_of)) if stage not in rank_of]
    if rest or missing:
        raise ScheduleError(
            "every row must have the same number of stages, counted from 0 without gaps, but "
            f"there are {len(rank_of)} stages up to {max(rank_of)} in {ranks} rows"
        )
    for kind in _PLACEMENTS:
        placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)
        if all(placement.locate(stage)[0] == rank for stage, rank in rank_of.items()):
            return placement
    rows_text = ", ".join(f"{stage} in row {rank_of[stage] + 1}" for stage in sorted(rank_of))
    raise ScheduleError(
        f"the stages must be assigned to the rows in a loop or a V, got {rows_text}"
    )


def _actions_of(cell: _Cell, placement: Placement, split: bool) -> tuple[Action, ...]:
    chunk = placement.locate(cell.stage)[1]
    kinds = {"I": "B", "B": "BW" if split else "B"}.get(cell.kind, cell.kind)
    return tuple(Action(ActionKind(kind), chunk, cell.microbatch) for kind in kinds)
