"""The benchmark of launching measures, and says where a goal is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import launch


def test_the_monitor_on_small_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "told.json"
    words = ["--part", "status", "--gigabytes", "0.02", "--json", str(target)]
    assert launch.main(words) in (0, 1)
    (row,) = json.loads(target.read_text())["rows"]
    assert len(row["samples"]) == 5
    assert row["value"] > 0
    assert row["met"] == (row["value"] <= 2)
    assert "status: time of an answer" in capsys.readouterr().out
