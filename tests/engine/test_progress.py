"""Tests the progress file of a run, which monitoring programs read."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.engine import progress
from megatron.adaptive.engine.progress import ProgressFile
from megatron.adaptive.trace.status_files import PROGRESS_NAME


def lines(folder: Path) -> list[dict[str, Any]]:
    lines_read = [json.loads(line) for line in (folder / PROGRESS_NAME).read_text().splitlines()]
    assert all(line.pop("unix_ns") > 10**18 for line in lines_read)
    return lines_read


def test_logged_iterations_and_two_a_second_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [50.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    file = ProgressFile(str(tmp_path / "traces"))
    file.begins(0, 9)
    for iteration in range(1, 10):
        file.iteration(iteration, {"loss": iteration / 2}, is_logged=iteration == 5)
        clock[0] += 0.2
    file.report({"ended": "all iterations are done"})
    file.close()
    written = lines(tmp_path / "traces")
    assert written[0] == {"total_iterations": 9, "start_iteration": 0}
    assert written[1] == {"iteration": 1, "loss": 0.5}
    assert [line["iteration"] for line in written[1:-1]] == [1, 4, 5, 8, 9]
    assert written[-1] == {"ended": "all iterations are done"}


def test_a_later_start_goes_on(tmp_path: Path) -> None:
    for start in (0, 4):
        file = ProgressFile(str(tmp_path))
        file.begins(start, 9)
        file.close()
        file.close()
    assert [line["start_iteration"] for line in lines(tmp_path)] == [0, 4]


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    file = ProgressFile(str(tmp_path))
    file.iteration(1, {"loss": float("nan"), "grad_norm": float("inf")}, is_logged=True)
    assert lines(tmp_path) == [{"iteration": 1, "loss": None, "grad_norm": None}]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    file = ProgressFile(None)
    file.begins(0, 9)
    file.iteration(1, {}, is_logged=True)
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PROGRESS_NAME).mkdir()
    file = ProgressFile(str(tmp_path))
    file.begins(0, 9)
    file.iteration(1, {}, is_logged=True)
    assert capsys.readouterr().err == (
        f"warning: cannot write {tmp_path / PROGRESS_NAME}: Is a directory; "
        "the run continues and drops the data\n"
    )


@contextmanager
def no_file_grows_beyond(size_bytes: int) -> Iterator[None]:
    """Makes writes beyond ``size_bytes`` of a file fail in this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_was_full_costs_lines_and_not_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ProgressFile(str(tmp_path))
    file.iteration(1, {}, is_logged=True)
    size = (tmp_path / PROGRESS_NAME).stat().st_size
    with no_file_grows_beyond(size + 9):
        for iteration in (2, 3, 4):  # The first of these three writes fails after some bytes.
            file.iteration(iteration, {}, is_logged=True)
    file.iteration(5, {}, is_logged=True)
    file.close()
    first, last = (tmp_path / PROGRESS_NAME).read_text().splitlines()
    assert json.loads(first)["iteration"] == 1
    assert json.loads(last)["iteration"] == 5
    failed, works = capsys.readouterr().err.splitlines()
    assert "cannot write" in failed
    assert works.endswith("can be written again; 3 lines were lost")
