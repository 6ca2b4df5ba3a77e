"""Provides a fixture that runs the programs of ``members.py`` on several ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive import accelerator, extension

accelerator.install()  # This call must precede all imports of megatron.core in these tests.

from ..multiprocess.launch import run_ranks, tail  # noqa: E402

MEMBERS = Path(__file__).with_name("members.py")
WATCHDOG_S = 90.0
BOARDS = [
    "message",
    pytest.param(
        "memory",
        marks=pytest.mark.skipif(extension.load() is None, reason="the extension is not built"),
    ),
]

Start = Callable[..., list[Any]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Returns a function that runs a program on ``size`` ranks, and returns each rank's result."""

    def run(program: str, argument: str, size: int) -> list[Any]:
        log = tmp_path / "output.txt"
        arguments = [program, argument, str(tmp_path)]
        status = run_ranks([str(MEMBERS), *arguments], world_size=size, log=log, limit_s=WATCHDOG_S)
        assert status == 0, tail(log)
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]

    return run
