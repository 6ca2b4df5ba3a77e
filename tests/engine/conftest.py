"""Starts the members of a tensor-parallel group as processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive import extension

from ..multiprocess.launch import environment, forkserver, tail

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
    server = forkserver()
    keys: list[str] = []

    def run(program: str, board: str, size: int) -> list[Any]:
        log = tmp_path / "output.txt"
        for rank in range(size):
            words = [str(MEMBERS), program, board, str(tmp_path), str(rank), str(size)]
            keys.append(server.start(words, output=log, error=log, variables=environment()))
        statuses = server.wait(keys, WATCHDOG_S)
        assert list(statuses.values()) == [0] * size, tail(log)
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]

    yield run
    server.kill(keys)
