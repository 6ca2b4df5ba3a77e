"""Tests that a manager reads the ranks' progress reports, and that its state file is correct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.job_state_file import (
    Incarnation,
    IncarnationProgress,
    ProgressReader,
)
from megatron.adaptive.trace.status_files import PROGRESS_NAME


def write(folder: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    """Appends ``lines`` to the progress file in ``folder``, as a rank does."""
    folder.mkdir(exist_ok=True)
    with (folder / PROGRESS_NAME).open("a") as file:
        file.write(
            "\n".join(
                json.dumps({"unix_ns": unix_ns, **line}) for unix_ns, line in enumerate(lines)
            )
        )
        file.write(end)


def steps(*durations_ms: float, first: int = 1) -> list[dict[str, Any]]:
    """Returns the progress lines of iterations from ``first`` on that take ``durations_ms``."""
    return [
        {"iteration": iteration, "step_ms": ms} for iteration, ms in enumerate(durations_ms, first)
    ]


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    reader, folder = ProgressReader(), tmp_path / "epoch"
    assert reader.read(folder) == IncarnationProgress()
    write(folder, {"total_iterations": 9}, *steps(900.0, 10.0, 30.0))
    now = reader.read(folder)
    assert (now.total, now.iteration, now.first_ns, now.step_s) == (9, 3, 1, 0.02)
    assert reader.read(folder) == now
    slow = {"slow_rank": 1, "times": 2, "factor": 1.5, "pace_ns": [1.0, 1.5], "cost": 0.1}
    write(folder, *steps(50.0, first=4), slow, {"saved": 4, "seconds": 0.5}, {"ended": "so"})
    now = reader.read(folder)
    assert (now.iteration, now.first_ns, now.step_s) == (4, 1, 0.03)
    assert [rank.factor for rank in now.slow] == [1.5]
    assert (now.saved_ns, now.saving_s, now.ended) == (2, 0.5, "so")
    assert now == ProgressReader().read(folder)


def test_ranks_may_find_something_newer_than_the_manager_knew(tmp_path: Path) -> None:
    """Checks that ranks may resume from a local checkpoint that the manager does not know."""
    incarnation = Incarnation(
        number=2, layout="one", processes=2, nodes=("a",), reason="b was killed"
    )
    incarnation.resumed, incarnation.lost_steps, incarnation.source = 20, 13, "checkpoint"
    write(tmp_path, {"total_iterations": 99, "start_iteration": 20})
    incarnation.begun_at(ProgressReader().read(tmp_path).start)
    assert (incarnation.resumed, incarnation.lost_steps, incarnation.source) == (
        20,
        13,
        "checkpoint",
    )
    write(tmp_path / "other", {"total_iterations": 99, "start_iteration": 30})
    for _ in range(2):  # Repeat the call, because a manager also writes the state several times.
        incarnation.begun_at(ProgressReader().read(tmp_path / "other").start)
    assert (incarnation.resumed, incarnation.lost_steps) == (30, 3)
    assert incarnation.source == "checkpoint on the nodes' own disks"
    incarnation.begun_at(None)


def test_steps_of_a_damaged_checkpoint_are_lost_too(tmp_path: Path) -> None:
    """Checks the number of lost steps if ranks resume from an older checkpoint than was planned."""
    incarnation = Incarnation(
        number=2, layout="one", processes=2, nodes=("a",), reason="b was killed"
    )
    incarnation.resumed, incarnation.lost_steps, incarnation.source = 20, 3, "copies in memory"
    write(tmp_path, {"total_iterations": 99, "start_iteration": 10})
    for _ in range(2):
        incarnation.begun_at(ProgressReader().read(tmp_path).start)
    assert (incarnation.resumed, incarnation.lost_steps) == (10, 13)
    assert incarnation.source == "checkpoint: the checkpoint of iteration 20 could not be loaded"


def test_only_what_was_added_is_read(tmp_path: Path) -> None:
    """Checks that the manager reads only the lines that were added since it last read the file."""
    reader, path = ProgressReader(), tmp_path / PROGRESS_NAME
    write(tmp_path, *steps(1.0, 2.0))
    now = reader.read(tmp_path)
    path.write_bytes(b"#" * path.stat().st_size)
    assert reader.read(tmp_path) == now
    write(tmp_path, *steps(4.0, first=3))
    assert reader.read(tmp_path).step_s == 0.003


def test_a_line_that_is_being_written_waits_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    reader = ProgressReader()
    write(tmp_path, *steps(1.0), end="")
    assert reader.read(tmp_path).iteration is None
    write(tmp_path, end='\n{"iteration": 2, "uni\n')
    assert reader.read(tmp_path).iteration == 1
    write(tmp_path, *steps(1.0, first=3))
    assert reader.read(tmp_path).iteration == 3


def test_another_epoch_begins_anew(tmp_path: Path) -> None:
    reader = ProgressReader()
    write(tmp_path / "one", *steps(1.0, 2.0, 3.0))
    assert reader.read(tmp_path / "one").iteration == 3
    assert reader.read(tmp_path / "two") == IncarnationProgress()
    write(tmp_path / "two", *steps(1.0, first=7))
    assert reader.read(tmp_path / "two").iteration == 7
