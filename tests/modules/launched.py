"""Starts programs of ``worker.py`` on four processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..multiprocess.launch import run_ranks, tail

HERE = Path(__file__).resolve().parent
RANKS, LIMIT_S = 4, 240.0


def run_programs(folder: Path, programs: Sequence[str]) -> list[dict[str, Any]]:
    """What each rank told, by rank."""
    log = folder / "output.txt"
    arguments = [str(folder), *programs]
    status = run_ranks(HERE / "worker.py", arguments, world_size=RANKS, log=log, limit_s=LIMIT_S)
    said = tail(log)
    paths = [folder / f"{rank}.json" for rank in range(RANKS)]
    assert all(path.is_file() for path in paths), said
    told = [json.loads(path.read_text()) for path in paths]
    errors = [one["error"] for one in told if "error" in one]
    assert not errors, errors[0]
    assert status == 0, said
    for one in told:
        one["folder"] = str(folder)
    return told
