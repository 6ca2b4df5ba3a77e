"""Adds layer times and collectives to synthetic traces, in the format of ``--trace-detail``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

NUMBER = 20
"""Number of collectives that each group calls in each iteration."""

Times = Callable[[int, int], tuple[float, float]]
"""Type of a function that maps iteration and rank to arrival delay and transfer time in ms."""

_MARKER = '{"begin_iteration": '


def _edit(folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the line that begins each iteration in the trace of ``rank``.

    ``change`` modifies the parsed line in place. ``folder`` contains the traces.
    """
    path = folder / f"trace_rank_{rank:05d}.jsonl"
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        if line.startswith(_MARKER):
            marker = json.loads(line)
            change(marker)
            lines[index] = json.dumps(marker)
    path.write_text("\n".join(lines) + "\n")


def _starts_ns(folder: Path, rank: int) -> dict[int, int]:
    """Returns the start time of each iteration in ns, from the trace of ``rank`` in ``folder``."""
    starts = {}
    path = folder / f"trace_rank_{rank:05d}.jsonl"
    for line in path.read_text().splitlines():
        if line.startswith(_MARKER):
            marker = json.loads(line)
            starts[marker["begin_iteration"]] = marker["start_ns"]
    return starts


def add_collectives(
    folder: Path, kind: str, groups: Sequence[tuple[int, ...]], times_ms: Times, seed: int = 5
) -> None:
    """Adds all-reduces to the traces of a run whose ranks share a clock.

    Args:
        folder: Folder of the traces.
        kind: Kind of the process groups.
        groups: Ranks of each group.
        times_ms: Function that returns the arrival delay and the transfer time of a collective in
            ms. Small random times are added.
        seed: Seed of the random times.
    """
    numbers = random.Random(seed)
    for members in groups:
        starts_ns = {rank: _starts_ns(folder, rank) for rank in members}
        rows: dict[int, dict[int, list[list[int]]]] = {rank: {} for rank in members}
        for iteration in starts_ns[members[0]]:
            first_ns = min(starts_ns[rank][iteration] for rank in members)
            for number in range(NUMBER):
                arrivals = {
                    rank: int((times_ms(iteration, rank)[0] + numbers.uniform(0, 0.05)) * 1e6)
                    for rank in members
                }
                last_ns = max(arrivals.values())
                for rank, arrival_ns in arrivals.items():
                    transfer_ns = times_ms(iteration, rank)[1] * numbers.uniform(0.9, 1.1) * 1e6
                    shift_ns = first_ns - starts_ns[rank][iteration] + number * 2_000_000
                    row = [
                        number,
                        0,
                        arrival_ns + shift_ns,
                        last_ns - arrival_ns + int(transfer_ns),
                    ]
                    rows[rank].setdefault(iteration, []).append(row)

        for rank in members:
            _edit(folder, rank, partial(_add_group, kind, members, rows[rank]))


def _add_group(
    kind: str, members: tuple[int, ...], rows: dict[int, list[list[int]]], marker: dict[str, Any]
) -> None:
    """Adds a rank's collectives ``rows`` to ``marker``, the first line of their iteration.

    The group has the kind ``kind`` and the ranks ``members``.
    """
    kept = rows[marker["begin_iteration"]]
    group = {
        "kind": kind,
        "lowest_rank": min(members),
        "size": len(members),
        "operations": ["all-reduce"],
        "totals": [[NUMBER, sum(row[3] for row in kept), NUMBER * 4096]],
        "kept": kept,
    }
    marker.setdefault("collectives", []).append(group)


def add_layers(folder: Path, rank: int, times_ms: Sequence[float], seed: int = 5) -> None:
    """Adds layer times to the trace of a rank, with random deviations of 1%.

    Args:
        folder: Folder of the traces.
        rank: Global rank.
        times_ms: Time that each layer takes in a step, in ms. The forward pass takes a third of
            this time.
        seed: Seed of the random deviations.
    """
    numbers = random.Random(seed)

    def add(marker: dict[str, Any]) -> None:
        rows = []
        for index, time_ms in enumerate(times_ms):
            time_ns = int(time_ms * numbers.gauss(1.0, 0.01) * 1e6)
            rows.append([rank * len(times_ms) + index, time_ns // 3, time_ns - time_ns // 3, 8])
        marker["layers"] = rows

    _edit(folder, rank, add)
