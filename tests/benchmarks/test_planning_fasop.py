"""The comparison with FASOP, on its published inputs and plans."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.planning import fasop
from benchmarks.planning.fasop_cost import CostFunction
from benchmarks.planning.published.fasop import Fasop
from megatron.adaptive.errors import ConfigError

DATA = Path(os.environ.get("PLANNER_DATA", "")) / "fasop"
published = pytest.mark.skipif(
    not os.environ.get("PLANNER_DATA") or not DATA.is_dir(),
    reason="PLANNER_DATA names no folder of published sets",
)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.json.*give the folder of the data set"):
        Fasop(tmp_path)


@published
def test_its_cost_function_gives_the_costs_it_published() -> None:
    """Of every plan listed, so that ours are compared with what FASOP itself counts."""
    data = Fasop(DATA)
    assert len(data.runs) == 6
    for name in data.runs:
        function = CostFunction(DATA, name)
        for plan in data.run(name).plans:
            seconds, too_large = function.cost(plan, plan.partition)
            assert seconds == pytest.approx(plan.plan_cost_s, rel=1e-3), (name, plan)
            assert too_large == plan.out_of_memory, (name, plan)


@published
def test_our_plans_are_never_slower_than_its_best() -> None:
    rows = [row for row in fasop.neutral_rows(Fasop(DATA)) if "CPU seconds" not in row["what"]]
    assert [row["what"] for row in rows if not row["met"]] == []
    assert sum("seconds of our best plan" in row["what"] for row in rows) == 6


@published
def test_our_search_likes_its_cost_function_better_than_its_own() -> None:
    function = CostFunction(DATA, "T5")
    seconds, one, partition = function.best()
    assert function.cost(one, partition) == (pytest.approx(seconds), False)
    assert seconds < min(plan.plan_cost_s for plan in function.run.plans if not plan.out_of_memory)


@published
def test_unknown_runs_are_listed() -> None:
    with pytest.raises(ConfigError, match="its runs are"):
        Fasop(DATA).run("gpt5")
