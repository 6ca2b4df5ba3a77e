"""Runs a script under ``torchrun`` with a time limit that leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


def torchrun(
    script: Path, arguments: Sequence[str], *, world_size: int, log: Path, limit_s: float
) -> None:
    """Run ``script`` as ``world_size`` ranks on this machine.

    Args:
        script: the program of every rank.
        arguments: its arguments.
        world_size: number of ranks.
        log: file for what all ranks write.
        limit_s: ranks are told it as ``WATCHDOG_S``; five seconds later everything is killed.

    Raises:
        AssertionError: the ranks did not all succeed; holds the end of what they wrote.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "WATCHDOG_S": str(limit_s),
    }
    with log.open("w") as output:
        job = subprocess.Popen(
            [*command, str(script), *arguments],
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = job.wait(limit_s + 5)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_tree(job)
    said = "ended with status " + str(status) if status is not None else "had to be killed"
    assert status == 0, f"{world_size} ranks of {script.name} {said}:\n{tail(log)}"


def run_cases(
    cases: Sequence[dict[str, Any]], *, world_size: int, folder: Path, limit_s: float
) -> tuple[dict[str, Any], str | None]:
    """Train the cases of ``worker.py`` one after the other in one job.

    Returns:
        Results by case, up to the first case that failed, and what the ranks wrote if one did.
    """
    given, taken = folder / "cases.json", folder / "results.json"
    given.write_text(json.dumps(cases))
    error = None
    try:
        torchrun(
            WORKER,
            [str(given), str(taken)],
            world_size=world_size,
            log=folder / "output.txt",
            limit_s=limit_s,
        )
    except AssertionError as failure:
        error = str(failure)
    return json.loads(taken.read_text()) if taken.exists() else {}, error


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """End a process and all it started, the ranks of torchrun in sessions of their own too."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    for member in family:
        if member.is_running():
            member.kill()
    psutil.wait_procs(family, timeout=10)


def tail(path: Path, limit: int = 12_000) -> str:
    """Return the end of a file."""
    text = path.read_text(errors="replace")
    return text if len(text) <= limit else f"...{text[-limit:]}"
