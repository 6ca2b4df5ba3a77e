"""Tests that programs without a folder argument read the newest run, and print its path."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron.adaptive import __main__ as program
from megatron.adaptive.checkpoint.folder import CheckpointFolder
from tests.checkpoint.test_folder import MANIFEST
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

SMALL = SyntheticRun(num_ranks=2, num_microbatches=2, iterations=2)
LINES = (
    "trace --format perfetto",
    "trace diagnose",
    "trace whatif",
    "trace process",
    "trace draw --format png",
    "job top --once",
    "job report --log-dir logs",
    "checkpoint",
    "checkpoint list",
    "checkpoint verify",
    "checkpoint show",
)


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Runs the command line ``line`` in this process, and returns its status, output and errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["megatron.adaptive", *shlex.split(line)])
        status = program.main()
    output, errors = capsys.readouterr()
    return status, output, errors


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(folder: Path, changed_s: float) -> None:
    """Writes a run with all files that the programs read, and sets their modification time.

    ``changed_s`` is this time in seconds since the epoch.
    """
    write_synthetic(folder / "traces", SMALL)
    (folder / "node-1.out").touch()
    checkpoints = CheckpointFolder(folder / "checkpoints")
    partial = checkpoints.begin(3)
    (partial / "metadata.json").write_text("{}")
    checkpoints.commit(3, {**MANIFEST, "progress": {**MANIFEST["progress"], "iteration": 3}})
    for path in folder.rglob("*"):
        os.utime(path, (changed_s, changed_s))


@pytest.mark.parametrize("line", LINES)
def test_the_newest_run_is_read(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changed_s in (("old", 1e9), ("new", 1.5e9), ("older", 1e8)):
        write_run(Path("logs", name), changed_s)
    status, output, errors = run(line, capsys)
    newest = Path("logs", "new").resolve()
    assert errors.splitlines()[0] == f"no folder given: reading the newest run, {newest}"
    assert (status, errors.count("\n")) == (0, 1)
    assert output


@pytest.mark.parametrize("line", LINES)
def test_without_a_run_one_line_says_where_it_was_searched(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = run(line, capsys)
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(("error: no ", "error: there is no ", "error: found no "))
    assert str(Path("logs").resolve()) in errors
    assert "folder" in errors


def test_a_named_folder_is_read_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("logs", "new"), 1e9)
    write_run(Path("logs", "old"), 1e8)
    status, output, errors = run("trace logs/old --json --format perfetto", capsys)
    assert (status, errors) == (0, "")
    assert output
