"""Runs a program with a time limit, and kills all processes that it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.report import ROOT

_SET_SUBREAPER = 36
_GRACE_S = 3.0


def adopt_orphans() -> None:
    """Makes this process the parent of all its descendants whose own parent exits."""
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1)


def run_limited(
    command: Sequence[str], output: Any, limit_s: float, variables: Mapping[str, str]
) -> int | None:
    """Runs a program, and kills all processes that it leaves behind.

    Shortly before its time limit, the program is asked to exit. At the time limit, it is killed.

    Args:
        command: Command line of the program.
        output: Open file for the program's output.
        limit_s: Time limit in seconds.
        variables: Additional environment variables of the program.

    Returns:
        The exit status of the program, or ``None`` if it was stopped.
    """
    folders = [str(ROOT), str(ROOT / "build/gpu-check-site"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    end_s = time.monotonic() + limit_s
    try:
        program = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **fixed, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        output.write(f"{command[0]}: {error.strerror}\n")
        return 127
    status: int | None = None
    try:
        status = program.wait(max(0.1, min(limit_s - _GRACE_S, limit_s * 0.9)))
    except subprocess.TimeoutExpired:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(max(0.1, end_s - time.monotonic()))
    finally:
        _kill_children()
        program.poll()
    return status


def _kill_children() -> None:
    """Kills all descendants of this process, including those whose parents have exited."""
    end_s = time.monotonic() + _GRACE_S
    while time.monotonic() < end_s:
        below = _descendants()
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _descendants() -> set[int]:
    """Returns the process IDs of all descendants of this process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except OSError:
            continue  # This process has exited since the folder was listed.
        parents[int(stat.parent.name)] = int(fields.split()[1])
    below: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        below |= level
    return below
