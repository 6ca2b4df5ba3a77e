"""Starts the members of a tensor-parallel group as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive import extension

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = Path(__file__).with_name("members.py")
WATCHDOG_S = 90.0
BOARDS = [
    "message",
    pytest.param(
        "memory",
        marks=pytest.mark.skipif(extension.load() is None, reason="the extension is not built"),
    ),
]

Start = Callable[[str, str, int], list[Any]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function ``(program, board, size)`` that runs members and returns their results."""
    processes: list[subprocess.Popen[str]] = []

    def run(program: str, board: str, size: int) -> list[Any]:
        for rank in range(size):
            command = [sys.executable, str(MEMBERS), program, board, str(tmp_path)]
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(size)],
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=WATCHDOG_S)
            assert process.returncode == 0, f"member {rank}: {output}"
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]

    yield run
    for process in processes:
        process.kill()
        process.wait(10)
