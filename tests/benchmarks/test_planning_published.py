"""Published runs are predicted, and what is no data set is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.planning.measured import literature_rows, read_sets
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.calibrate import compare

PUBLISHED = os.environ.get("PLANNER_DATA", "")


@pytest.mark.parametrize(
    ("folder", "text"),
    [("missing", "no such folder"), ("empty", "no data set"), ("damaged", "cannot be read")],
)
def test_errors_are_one_line(tmp_path: Path, folder: str, text: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    for name in ("measured_homogeneous.csv", "model.json"):
        (tmp_path / "damaged" / name).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=text) as info:
        read_sets(tmp_path / folder)
    assert "\n" not in str(info.value)


@pytest.mark.skipif(not PUBLISHED, reason="PLANNER_DATA names no folder of published sets")
def test_published_runs_are_predicted() -> None:
    for name, runs in read_sets(Path(PUBLISHED)).items():
        found = compare(name, runs)
        assert found.median_error <= 0.10
        assert found.correlation >= 0.9
        assert found.place_of_best <= 3
        assert all(abs(error) <= 0.15 for error in found.memory_errors)


def test_runs_of_the_literature_fit_and_take_what_was_printed() -> None:
    assert all(row.met for row in literature_rows())
