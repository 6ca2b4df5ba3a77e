"""Tests that the monitor's soak test takes measurements and reports missed goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak import monitor


@pytest.mark.long
def test_the_monitor_on_small_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    arguments = ["--gigabytes", "0.02", "--json", str(target)]
    assert monitor.main(arguments) in (0, 1)
    answer, over_start = json.loads(target.read_text())["rows"]
    assert len(answer["samples"]) == 5
    assert answer["value"] > 0
    assert over_start["met"] == (over_start["value"] <= monitor.MOST_STATUS)
    assert "status: time of an answer" in capsys.readouterr().out
