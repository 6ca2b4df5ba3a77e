"""Tests that the order of actions in a run is written to a file and can be replayed."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.engine.schedule_record import Recording, RecordShape, Replay, ScheduleRecord
from megatron.adaptive.errors import ConfigError, TraceError
from megatron.adaptive.schedule.catalog import make_candidate, make_policies
from megatron.adaptive.schedule.schedule import Schedule
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.validate import validate
from megatron.adaptive.schedule.workload import StageTimes, draw

from ..multiprocess.launch import ROOT
from .conftest import Start
from .loopback import Picks, Ranks, ready_first

SHAPE = RecordShape(ranks=2, chunks=1, placement="loop", weight_pieces=0)
ORDERS = [(0, 0, 1, 1), (0, 1, 0, 1)]


def small(path: Path, steps: tuple[int, ...] = (1, 2)) -> ScheduleRecord:
    record = ScheduleRecord(SHAPE)
    for step in steps:
        record.add(step, ORDERS)
    record.save(path)
    return ScheduleRecord.load(path)


@pytest.mark.parametrize("pieces", [0, 2])
@pytest.mark.parametrize("kind", ["loop", "v"])
def test_a_run_is_repeated(kind: Any, pieces: int, tmp_path: Path) -> None:
    placement = Placement(num_ranks=2, num_chunks=2, kind=kind)
    shape = RecordShape.of(placement, pieces)
    pipeline, record = Ranks(placement), ScheduleRecord(shape)
    taken = {}
    for step, count in ((5, 4), (6, 6)):
        # The second rank runs the newest input first. No static order does this.
        policies = [make_policies("adaptive", placement, count)[0], Picks(ready_first)]
        stages, _ = pipeline.step(policies, count, weight_pieces=pieces)
        taken[step] = [stage.actions for stage in stages]
        record.add(step, [executor.last_codes for executor in pipeline.executors])
    path = tmp_path / "folder" / "schedule.json"
    record.save(path)
    replays = [Replay(ScheduleRecord.load(path), shape, rank) for rank in range(2)]
    pipeline = Ranks(placement)
    for step, count in ((6, 6), (5, 4)):
        for replay in replays:
            replay.begin(step)
        policies = [replay.policy(count) for replay in replays]
        stages, _ = pipeline.step(policies, count, weight_pieces=pieces)
        assert [stage.actions for stage in stages] == taken[step]
        assert policies[0] is replays[0].policy(count)


def test_equal_orders_are_kept_once(tmp_path: Path) -> None:
    record = small(tmp_path / "f", tuple(range(1, 100)))
    content = json.loads((tmp_path / "f").read_text())
    assert content["orders"] == [list(order) for order in ORDERS]
    assert record.steps == tuple(range(1, 100))
    assert record.codes(57, 1, 2) == ORDERS[1]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("ranks", 4, "ranks 2 in the recording, 4 here.* --pipeline-model-parallel-size"),
        ("chunks", 2, "chunks 1 in the recording, 2 here.* --num-virtual-stages"),
        ("placement", "v", "placement loop in the recording, v here.* --pipeline-placement"),
        ("weight_pieces", 3, "weight_pieces 0 in the recording, 3 here"),
        ("replicas", 2, "replicas 0 in the recording, 2 here.* --balance-replicas"),
    ],
)
def test_another_shape_is_refused(field: str, value: Any, text: str, tmp_path: Path) -> None:
    record = small(tmp_path / "f")
    other = RecordShape(**{**record.shape.__dict__, field: value})
    with pytest.raises(ConfigError, match=text) as info:
        Replay(record, other, 0)
    assert str(info.value).startswith(f"{tmp_path / 'f'} was recorded with a different ")


def test_what_was_dealt_comes_back_with_the_orders_of_every_replica(tmp_path: Path) -> None:
    shape, dealt = dataclasses.replace(SHAPE, replicas=2), ((2, 0), (1,))
    record = ScheduleRecord(shape)
    record.add(1, [*ORDERS, (0, 1), (0, 1)], dealt)
    record.save(tmp_path / "f")
    loaded = ScheduleRecord.load(tmp_path / "f")
    replay = Replay(loaded, shape, 3)
    replay.begin(1)
    assert replay.record.dealt(1, 3) == dealt
    assert replay.policy(1) is not None
    with pytest.raises(
        ConfigError, match="step 1 of .* has 3 microbatches, but the step of this run has 4"
    ):
        replay.record.dealt(1, 4)
    content = json.loads((tmp_path / "f").read_text())
    for share in ([2, 1], [2]):
        content["dealt"]["1"][0] = share
        (tmp_path / "f").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="step 1 must assign every microbatch exactly once"):
            ScheduleRecord.load(tmp_path / "f")


def test_steps_that_are_missing_are_named(tmp_path: Path) -> None:
    record = small(tmp_path / "f", (1, 2, 3, 7))
    record.require_steps(1, 3)
    with pytest.raises(ConfigError) as info:
        record.require_steps(2, 9)
    assert str(info.value) == (
        f"{tmp_path / 'f'} contains steps 1-3, 7, but the replay also needs 4-6, 8-9; train "
        "only the recorded iterations, or record more steps"
    )
    replay = Replay(record, SHAPE, 0)
    replay.begin(4)
    with pytest.raises(
        ConfigError, match="contains steps 1-3, 7, but the replay also needs 4; train"
    ):
        replay.policy(2)
    replay.begin(7)
    with pytest.raises(
        ConfigError, match="step 7 of .* has 2 microbatches, but the step of this run has 8; use"
    ):
        replay.policy(8)


def damaged(change: Any) -> str:
    content = {
        "format": "megatron-adaptive schedule",
        "version": 1,
        "shape": {"ranks": 2, "chunks": 1, "placement": "loop", "weight_pieces": 0},
        "orders": [list(order) for order in ORDERS],
        "steps": {"1": [0, 1]},
    }
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", 'its "format" must be'),
        (damaged(lambda c: c.pop("orders")), "no 'orders'"),
        (damaged(lambda c: c["shape"].pop("chunks")), "no 'chunks'"),
        (damaged(lambda c: c["shape"].update(chunks="1")), "\"chunks\" is '1'"),
        (damaged(lambda c: c.update(orders=3)), "not iterable"),
        (damaged(lambda c: c["orders"][0].pop()), "must contain every action exactly once"),
        (damaged(lambda c: c["orders"][0].append(2)), "must contain every action exactly once"),
        (
            damaged(lambda c: c["orders"][0].append("x")),
            "an order must contain only non-negative integers",
        ),
        (
            damaged(lambda c: c["steps"].update({"1": [0, 2]})),
            "step 1 must list one valid order index",
        ),
        (damaged(lambda c: c["steps"].update({"a": [0, 1]})), "invalid literal"),
    ],
)
def test_a_damaged_file_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(ConfigError) as info:
        ScheduleRecord.load(path)
    message = str(info.value)
    assert reason in message
    assert message.startswith(f"{path} is damaged or is not a schedule record: ")
    assert len(message.splitlines()) == 1


def test_what_is_not_there_or_newer_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with pytest.raises(ConfigError, match="f: No such file .*; pass a file that --record-schedule"):
        ScheduleRecord.load(path)
    path.write_text(damaged(lambda c: c.update(version=2)))
    with pytest.raises(ConfigError, match="must have version 1 of the format, got 2"):
        ScheduleRecord.load(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="f is not valid JSON .*; pass a file that --record"):
        ScheduleRecord.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid UTF-8; pass a file"):
        ScheduleRecord.load(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="cannot write"):
        ScheduleRecord(SHAPE).save(tmp_path / "folder")


def test_a_file_of_another_shape_is_not_continued(tmp_path: Path) -> None:
    small(tmp_path / "f")
    other = RecordShape(ranks=2, chunks=2, placement="loop", weight_pieces=0)
    options: dict[str, Any] = {"order_index": 0, "is_writer": True}
    with pytest.raises(ConfigError, match="chunks 1 in the recording, 2 here"):
        Recording(tmp_path / "f", other, after_step=1, **options)
    # A run that starts from the beginning must be able to replace the file.
    Recording(tmp_path / "f", other, after_step=0, **options)


@pytest.mark.multiprocess
def test_ranks_write_one_file(start: Start) -> None:
    for seen in start("record", "message", 3):
        # The run resumed after step 2. Therefore, it dropped step 3, and then recorded step 4.
        assert seen["steps"] == [1, 2, 4]
        static = [list(order) for order in ORDERS]
        assert seen["codes"] == [static, static, [static[0], static[0]]]
        assert seen["pending"] == 0


def test_a_record_is_read_without_torch() -> None:
    code = "import sys, megatron.adaptive.engine.schedule_record; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("pieces", [0, 2])
def test_a_record_of_slices_is_repeated_and_cut_for_another_number(
    pieces: int, tmp_path: Path
) -> None:
    placement = Placement(num_ranks=4, num_chunks=2, kind="v")
    rng = random.Random(pieces)
    for _ in range(30):
        count, recorded, other = (rng.choice((1, 2, 3, 5)) for _ in range(3))
        rule = make_candidate(
            "adaptive",
            4,
            2,
            count,
            weight_pieces=pieces,
            cap=rng.uniform(1, 3),
            num_slices=recorded,
        )
        times = StageTimes.equal(8, forward_s=1.0, backward_s=1.0, weight_s=1.0)
        work = draw(
            placement, count, times, seed=rng.randrange(1000), action_sigma=0.5, num_slices=recorded
        )
        ran = rule.simulate(work, compiled=False)
        shape = RecordShape.of(placement, pieces, slices=recorded)
        record = ScheduleRecord(shape)
        record.add(1, [codes.tolist() for codes in ran.codes])
        record.save(tmp_path / "record.json")
        loaded = ScheduleRecord.load(tmp_path / "record.json")
        assert loaded.shape == shape
        for slices in {recorded, other}:
            orders = []
            for rank in range(4):
                replay = Replay(loaded, dataclasses.replace(shape, slices=slices), rank)
                replay.begin(1)
                orders.append(replay.policy(count).order)
            schedule = Schedule(
                name="replay",
                placement=placement,
                num_microbatches=count,
                orders=tuple(orders),
                num_slices=slices,
            )
            validate(schedule)  # This checks that each action runs once, without a deadlock.
            if slices == recorded:
                assert schedule.orders == ran.to_schedule("ran").orders
