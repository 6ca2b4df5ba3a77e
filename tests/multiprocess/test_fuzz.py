"""Two hundred random pipelines in real processes: every rule finishes, within its cap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .launch import torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

CASES = 200


def test_no_random_pipeline_deadlocks_in_processes(tmp_path: Path) -> None:
    output = tmp_path / "peaks.json"
    torchrun(
        Path(__file__).with_name("fuzz_worker.py"),
        [str(CASES), "11", str(output)],
        world_size=4,
        log=tmp_path / "log",
        limit_s=200.0,
    )
    peaks = json.loads(output.read_text())
    assert len(peaks) == CASES
    assert all(peak <= cap + 1e-3 for cap, peak in peaks)
