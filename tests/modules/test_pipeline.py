"""``Pipeline`` on four processes; ``worker.py`` has what they do and what must come of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ..multiprocess.launch import run_ranks, tail

pytestmark = pytest.mark.multiprocess

WORKER = Path(__file__).with_name("worker.py")
RANKS, LIMIT_S = 4, 300.0
PROGRAMS = re.findall(r"^def (\w+)\(\) -> None:", WORKER.read_text(), re.MULTILINE)[:-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of each rank; one job for all tests."""
    folder = tmp_path_factory.mktemp("pipeline")
    log = folder / "output.txt"
    run_ranks([str(WORKER), str(folder), *PROGRAMS], world_size=RANKS, log=log, limit_s=LIMIT_S)
    paths = [folder / f"{rank}.json" for rank in range(RANKS)]
    assert any(path.is_file() for path in paths), tail(log)
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_four_processes(results: list[dict[str, Any]], program: str) -> None:
    errors = [one["error"] for one in results if one["error"]]
    assert [program in one["done"] for one in results] == [True] * RANKS, "\n".join(errors)
