"""A number of a process that is used again is not taken for the former process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.forked_nodes.sitecustomize import fork_of, started


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        yield waiting
        waiting.kill()


def test_both_processes_must_have_started_when_the_file_says(
    program: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path, pid = tmp_path / "nodes", program.pid
    file = tmp_path / f"nodes-{pid}"
    assert fork_of(str(path), pid) is None
    file.write_text(f"{started(pid)} {pid} {started(pid)}")
    assert fork_of(str(path), pid) == pid
    for former in (f"1 {pid} {started(pid)}", f"{started(pid)} {pid} 1", ""):
        file.write_text(former)
        assert fork_of(str(path), pid) is None
    file.write_text(f"{started(pid)} {pid} {started(pid)}")
    program.kill()
    program.wait()
    assert fork_of(str(path), pid) is None
