"""Starts programs of ``worker.py`` on four processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS, LIMIT_S = 4, 240.0


def run_programs(folder: Path, programs: Sequence[str]) -> list[dict[str, Any]]:
    """What each rank told, by rank."""
    command = [sys.executable, "-m", "megatron.adaptive", "launch", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(HERE / "worker.py"), str(folder), *programs]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "WATCHDOG_S": str(LIMIT_S),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 30,
    )
    said = done.stdout[-4000:] + done.stderr[-4000:]
    paths = [folder / f"{rank}.json" for rank in range(RANKS)]
    assert all(path.is_file() for path in paths), said
    told = [json.loads(path.read_text()) for path in paths]
    errors = [one["error"] for one in told if "error" in one]
    assert not errors, errors[0]
    assert done.returncode == 0, said
    for one in told:
        one["folder"] = str(folder)
    return told
