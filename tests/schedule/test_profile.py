"""StageProfile files: what is read, and what is refused with the name of the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.workload import Link, load_profile

GOOD: dict[str, Any] = {"version": 1, "forward_s": [0.1, 0.2], "backward_s": [0.3, 0.4]}


def load(tmp_path: Path, **changes: Any) -> Any:
    path = tmp_path / "p.json"
    content = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    path.write_text(json.dumps(content))
    return load_profile(path, num_stages=2)


def test_what_is_left_out_is_nothing(tmp_path: Path) -> None:
    profile = load(tmp_path)
    assert profile.times.forward_s == (0.1, 0.2)
    assert profile.times.weight_s == ()
    assert profile.link == Link()
    assert profile.rank_factors is None


def test_everything(tmp_path: Path) -> None:
    profile = load(
        tmp_path,
        weight_s=[0.1, 0],
        recompute_s=[0.1, 0.1],
        latency_s=0.5,
        occupancy_s=0.25,
        rank_factors=[1, 1.5],
        action_sigma=0.1,
        links=[{"from": 1, "to": 0, "occupancy_s": 2}],
    )
    assert profile.times.weight_s == (0.1, 0.0)
    assert profile.link == Link(latency_s=0.5, occupancy_s=0.25)
    assert profile.links == {(1, 0): Link(latency_s=0.5, occupancy_s=2.0)}
    assert profile.rank_factors == (1.0, 1.5)
    assert profile.action_sigma == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has version 2: this program reads version 1"),
        ({"forward_s": None}, "0 values of forward_s: it needs a list of 2"),
        ({"forward_s": [0.1]}, "1 values of forward_s: it needs a list of 2"),
        ({"backward_s": [0.1, -0.2]}, r"backward_s\[1\] = -0.2"),
        ({"backward_s": [0.1, float("nan")]}, r"backward_s\[1\] = nan"),
        ({"backward_s": [0.1, "slow"]}, r"backward_s\[1\] = slow"),
        ({"weight_s": [0.1, 0.2, 0.3]}, "3 values of weight_s"),
        ({"latency_s": float("inf")}, "latency_s = inf"),
        ({"latencies": 1}, "has 'latencies': known are version, forward_s"),
        ({"links": [{"from": 0}]}, r"links\[0\]"),
        ({"links": 3}, r"links\[0\]"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        load(tmp_path, **changes)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_profile(path, num_stages=2)
    path.write_text("[]")
    with pytest.raises(ScheduleError, match="has version None"):
        load_profile(path, num_stages=2)
