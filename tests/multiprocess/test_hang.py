"""Tests that a stalled training job is diagnosed, and also stopped if this is configured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.soak.hangs import Case, is_named_right, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

PAIR = (2, 2, 1)
AFTER_S = 5.0


@pytest.mark.long
def test_contradicting_orders_are_named_and_the_job_goes_on(tmp_path: Path) -> None:
    case = Case(kind="schedule", shape=PAIR, rank=1, after_s=AFTER_S)
    outcome = run(case, tmp_path / "job")
    assert is_named_right(case, outcome["said"]), outcome["text"][-4000:]
    assert not outcome["ended"]
    page = Path(re.search(r"stacks of all ranks: (\S+)", outcome["said"])[1]).read_text()
    assert page.count("--- rank") == 2
    assert page.count("_await_arrival") == 2


@pytest.mark.long
def test_a_rank_that_holds_the_interpreter_on_another_machine_ends_the_job(tmp_path: Path) -> None:
    case = Case(kind="interpreter lock", shape=PAIR, rank=1, after_s=AFTER_S, machines=2)
    outcome = run(case, tmp_path / "job", on_hang="end")
    assert outcome["said"], outcome["text"][-4000:]
    assert "rank 1 (stage 1" in outcome["said"]
    assert len(outcome["ended"]) == 2
    assert all(outcome["ended"].values())


@pytest.mark.long
def test_a_message_that_only_a_follower_of_a_group_lacks_is_named(tmp_path: Path) -> None:
    # The leader of the group has received its part of the message, and waits for the follower's
    # part.
    case = Case(kind="network", shape=(4, 2, 2), rank=1, after_s=AFTER_S)
    outcome = run(case, tmp_path / "job")
    assert re.search(r"rank 3 \(stage 1.* which rank 1 \(stage 0.*lost", outcome["said"]), outcome[
        "text"
    ]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_does_not_answer_behind_training_is_named(tmp_path: Path, rank: int) -> None:
    # The main thread of each rank waits for the rank's writer thread, and one writer thread is
    # stuck.
    case = Case(kind="disk behind", shape=PAIR, rank=rank, after_s=AFTER_S)
    outcome = run(case, tmp_path / "job")
    assert is_named_right(case, outcome["said"]), outcome["text"][-4000:]


@pytest.mark.long
def test_a_loop_around_a_pipeline_is_watched(tmp_path: Path) -> None:
    case = Case(kind="reader", shape=PAIR, rank=1, after_s=AFTER_S, program="pipeline")
    outcome = run(case, tmp_path / "job")
    assert is_named_right(case, outcome["said"]), outcome["text"][-4000:]
