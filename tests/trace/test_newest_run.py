"""Tests that the newest run below the current folder is found, and that its path is printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.locate import newest_run

TRACES = ("traces/*.jsonl",)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, changed_s: float) -> None:
    """Creates a file at ``path`` with the modification time ``changed_s`` (seconds since 1970)."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()
    os.utime(path, (changed_s, changed_s))


def test_without_runs_there_is_none() -> None:
    assert newest_run(TRACES) is None
    Path("runs").mkdir()
    Path("logs").touch()  # This is a file and not a folder, so it cannot contain runs.
    write("runs/empty/other.txt", 10)
    assert newest_run(TRACES) is None


def test_the_run_that_wrote_last_counts(capsys: pytest.CaptureFixture[str]) -> None:
    write("runs/first/traces/a.jsonl", 20)
    write("runs/second/traces/a.jsonl", 10)
    # This file is newer, but is not a trace file, so it is ignored.
    write("runs/second/later.txt", 90)
    assert newest_run(TRACES) == Path("runs/first")
    assert (
        capsys.readouterr().err
        == f"no folder given: reading the newest run, {Path('runs/first').resolve()}\n"
    )
    write("logs/17/traces/a.jsonl", 30)
    assert newest_run(TRACES) == Path("logs/17")
    write("runs/second/traces/b.jsonl", 40)
    assert newest_run(TRACES) == Path("runs/second")
    write("traces/a.jsonl", 50)
    assert newest_run(TRACES) == Path()
    assert newest_run(TRACES, [Path("logs")]) == Path("logs/17")


def test_the_link_names_the_newest_of_its_folder() -> None:
    write("runs/first/traces/a.jsonl", 20)
    write("runs/second/traces/a.jsonl", 10)
    write("logs/17/traces/a.jsonl", 5)
    Path("runs/latest").symlink_to("second")
    assert newest_run(TRACES) == Path("runs/latest")
    write("logs/17/traces/a.jsonl", 30)
    assert newest_run(TRACES) == Path("logs/17")


def test_a_run_that_has_only_begun_counts_if_it_may(tmp_path: Path) -> None:
    Path("runs/begun").mkdir(parents=True)
    Path("runs/latest").symlink_to("begun")
    assert newest_run(TRACES) is None
    assert newest_run(TRACES, may_be_empty=True) == Path("runs/latest")
    write("logs/17/traces/a.jsonl", 30)
    assert newest_run(TRACES, may_be_empty=True) == Path("runs/latest")


def test_a_link_to_nothing_is_an_error() -> None:
    Path("runs").mkdir()
    Path("runs/latest").symlink_to("gone")
    with pytest.raises(TraceError, match="gone, which does not exist; pass the folder of a run"):
        newest_run(TRACES)


def test_an_older_run_counts_if_the_latest_lacks_the_files() -> None:
    write("runs/first/traces/a.jsonl", 20)
    write("runs/second/other.txt", 30)
    Path("runs/latest").symlink_to("second")
    assert newest_run(TRACES) == Path("runs/first")
