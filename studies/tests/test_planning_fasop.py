"""Tests the comparison with FASOP on the inputs and plans that FASOP's authors published."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.adaptive.errors import ConfigError
from studies.planning import fasop
from studies.planning.published.fasop import Fasop

DATA = Path(os.environ.get("PLANNER_DATA", "")) / "fasop"
published = pytest.mark.skipif(
    not os.environ.get("PLANNER_DATA") or not DATA.is_dir(),
    reason="PLANNER_DATA is not a folder of published data sets",
)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.json.*pass the folder of the data set"):
        Fasop(tmp_path)


@pytest.mark.long
@published
def test_our_plans_are_never_slower_than_its_best() -> None:
    rows = [row for row in fasop.neutral_rows(Fasop(DATA)) if "CPU time" not in row.what]
    assert [row.what for row in rows if not row.met] == []
    assert sum("step of our best plan" in row.what for row in rows) == 6


@published
def test_unknown_runs_are_listed() -> None:
    with pytest.raises(ConfigError, match="its runs are"):
        Fasop(DATA).run("gpt5")
