"""Segments that move between the processes of a running pipeline, with their optimizer state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import Pipeline

from ..multiprocess.launch import run_ranks, tail
from .models import SHARED, knotty, make_batch

WORKER = Path(__file__).with_name("repartition_worker.py")
MOVING = Path(__file__).with_name("moving_worker.py")
LIMIT_S = 200.0


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("schedule", "partition", "ranks"),
    [pytest.param("zb-v", "1-6-1-1", 2, marks=pytest.mark.long), ("adaptive", "2-7", 4)],
)
def test_segments_move_and_go_back_and_numbers_stay(
    tmp_path: Path, schedule: str, partition: str, ranks: int
) -> None:
    """Losses, parameters, running means and checkpoints are those of the whole model."""
    log = tmp_path / "log"
    command = [str(WORKER), str(tmp_path), schedule, partition]
    status = run_ranks(command, world_size=ranks, log=log, limit_s=LIMIT_S)
    assert status == 0, tail(log)
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(partitions == by_rank[0] for partitions in by_rank)
    first, *others = by_rank[0]
    assert "-".join(map(str, first)) == partition
    assert len(others) > 1
    assert others[-1] == by_rank[0][-3]
    assert all(min(other) >= 1 for other in others)
    text = log.read_text()
    assert text.count(" moved in ") == len(others)
    assert f"repartition: {partition} -> " in text
    assert "the last move gained nothing" in text


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("settings_that_differ_are_named", ""),
        (
            "a_failed_save_does_not_end_a_run_whose_segments_move",
            "training waits until that of iteration 4 is written in its place",
        ),
        (
            "a_slow_search_ends_before_other_ranks_stop_to_wait",
            "repartition: segments stay, as no partition was simulated within 6 s",
        ),
    ],
)
def test_on_two_ranks(tmp_path: Path, program: str, line: str) -> None:
    log = tmp_path / "log"
    status = run_ranks(
        [str(MOVING), str(tmp_path), program], world_size=2, log=log, limit_s=LIMIT_S
    )
    assert status == 0, tail(log)
    assert line in log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repartition": "on"}, "repartition: .*'on'"),
        ({"repartition": "auto", "repartition_interval": 3}, "repartition_interval: "),
        ({"repartition": "auto", "repartition_gain": 0.0}, "repartition_gain: "),
        ({"repartition": "auto", "trace_dir": "traces"}, "'auto' was given with trace_dir"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(knotty(), make_batch(4), micro_batch_size=2, shared_weights=SHARED, **options)
