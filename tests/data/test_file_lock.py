"""Tests that a process waits until another process releases the lock on a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.adaptive.data.file_lock import locked
from megatron.adaptive.errors import DataError

HOLD = """
import sys
from pathlib import Path
from megatron.adaptive.data.file_lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a process that holds a lock on ``tmp_path/.lock`` until it exits."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_the_wait_for_a_locked_file_has_a_limit(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with (
        pytest.raises(DataError, match=r"\.lock: another process has locked .* than 0.2 s"),
        locked(tmp_path / ".lock", wait_s=0.2),
    ):
        pytest.fail("two processes have the lock")


def test_the_lock_of_a_killed_process_is_free(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    with locked(tmp_path / ".lock", wait_s=30):
        pass
