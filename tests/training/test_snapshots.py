"""Copies of a real model's state, kept by real keepers, become a checkpoint to go on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.adaptive.checkpoint import restore_snapshots as restore
from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.snapshot_keeper import Buddy, SnapshotKeeper
from megatron.adaptive.checkpoint.snapshots import Snapshots, SnapshotSettings
from megatron.adaptive.checkpoint.training import RunState
from megatron.adaptive.cluster.snapshot_placement import HeldSnapshot, SnapshotSource, newest

Make = Callable[..., Any]


# Random states are not in copies: the trainer draws dropout from the seed and the step alone.
STILL = {"hidden_dropout": "0", "attention_dropout": "0"}


class Log:
    """What the user would read, and who looks on."""

    def __init__(self) -> None:
        self.said = self.told = ""

    def say(self, text: str) -> None:
        self.said += text + "\n"

    def tell(self, text: str) -> None:
        self.told = text


@pytest.fixture
def keepers() -> Iterator[list[SnapshotKeeper]]:
    """Those of two nodes: what the first is given, it sends to the second."""
    found = [SnapshotKeeper("127.0.0.1") for _ in range(2)]
    buddy = Buddy(name="b", address="127.0.0.1", port=found[1].port)
    found[0].prepare("run", "secret", buddy)
    found[1].prepare("run", "secret", None)
    yield found
    for keeper in found:
        keeper.close()


class Copying:
    """Copies a training's state, on node ``a``."""

    def __init__(self, training: Any, keeper: SnapshotKeeper, log: Log, **changes: Any) -> None:
        settings = {"run": "run", "node": "a", "domain": "a", "buddy": "b", "every": 1}
        told = {**settings, "limit_bytes": None, "address": keeper.address, **changes}
        parts = {name: getattr(training, name) for name in ("chunks", "optimizer", "scheduler")}
        run: Any = SimpleNamespace(job=training.checkpoints._job, **parts)
        state = RunState(run, lambda: self._progress)
        self._progress: Any = None
        self.now = Snapshots(
            state, run.job, SnapshotSettings.read(json.dumps(told)), log.tell, log.say
        )

    def take(self, progress: Any) -> None:
        self._progress = progress
        self.now.take(progress.iteration)


def left_with(*keepers: SnapshotKeeper, within_s: float = 10.0) -> SnapshotSource:
    """What can be restored from these nodes."""
    held, needs = [], {}
    for number, keeper in enumerate(keepers):
        for told in keeper.inventory(within_s):
            if "needs" in told:
                needs[told["run"], told["generation"]] = told.pop("needs")
            held.append(HeldSnapshot(node=str(number), **{**told, "steps": tuple(told["steps"])}))
    return newest(held, needs)


def write_out(source: SnapshotSource, folder: Path) -> None:
    """Make a checkpoint of it, as the nodes do."""
    CheckpointFolder(folder).begin(source.step)
    common = {"checkpoints": str(folder), "is_pipeline": False, "step": source.step}
    parts = [{**vars(one), "needs": needs} for one, needs in source.parts]
    told = {**common, "what": "write", "index": 0, "parts": parts, "has_common": True}
    assert restore.main([json.dumps(told)]) == 0
    assert restore.main([json.dumps({**common, "what": "assemble", "count": 1})]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"bf16": None},
        {"fp16": None, "initial_loss_scale": "4294967296"},
        {"optimizer": "sgd"},
        {"use_distributed_optimizer": None},
    ],
    ids=str,
)
def test_training_goes_on_bit_for_bit_from_copies(
    make: Make,
    worker: Any,
    tmp_path: Path,
    keepers: list[SnapshotKeeper],
    flags: dict[str, str | None],
) -> None:
    training, log = make(**flags, **STILL), Log()
    copies = Copying(training, keepers[0], log)
    training.learn(0, 2)
    copies.take(worker.progress(2))
    copies.now.before_update()
    training.learn(2, 3)
    copies.now.settle(3)
    copies.take(worker.progress(3))
    copies.now.before_update()
    expected = training.learn(3, 8)
    copies.now.close()
    assert "every step 0." in log.said
    assert left_with(*keepers).step == 3
    keepers[0].close()  # the node is lost with all that it kept
    source = left_with(keepers[1])
    assert (source.step, source.seen, source.why) == (3, 3, "")
    write_out(source, tmp_path)
    resumed = make(load=tmp_path, **flags, **STILL)
    assert resumed.checkpoints.load() == worker.progress(3)
    assert resumed.learn(3, 8) == expected
    assert list(tmp_path.glob(".*")) == []


def test_a_step_that_is_not_whole_does_not_count(
    make: Make, worker: Any, keepers: list[SnapshotKeeper]
) -> None:
    """A rank that is killed while it copies leaves the step before."""
    training, log = make(**STILL), Log()
    copies = Copying(training, keepers[0], log)
    for step in (1, 2):
        copies.take(worker.progress(step))
        copies.now.before_update()
        copies.now.settle(step + 1)
    assert left_with(*keepers, within_s=0.0).step == 2
    assert copies.now._file is not None
    copies.now._file.begin(0, 3)
    assert left_with(keepers[0], within_s=0.0).step == 2
    copies.now._file.begin(1, 4)  # with both in vain there is still what was sent
    assert left_with(keepers[0], within_s=0.0).step == 0
    assert left_with(*keepers, within_s=0.0).step == 2
    copies.now.close()


def test_too_little_memory_is_told_and_nothing_is_kept(
    make: Make, worker: Any, keepers: list[SnapshotKeeper]
) -> None:
    training, log = make(**STILL), Log()
    copies = Copying(training, keepers[0], log, limit_bytes=1 << 20)
    for step in (1, 2):
        copies.take(worker.progress(step))
        copies.now.before_update()
        training.learn(step, step + 1)
        copies.now.settle(step + 1)
    copies.now.close()
    assert "warning: no copies of the state are kept in memory: they take" in log.said
    assert log.said.count("warning") == 1
    assert log.told.startswith("off: they take")
    assert left_with(*keepers) == SnapshotSource(why="no node that is left keeps copies")


def test_training_goes_on_without_a_buddy_that_is_lost(
    make: Make, worker: Any, keepers: list[SnapshotKeeper]
) -> None:
    training, log = make(**STILL), Log()
    copies = Copying(training, keepers[0], log)
    copies.take(worker.progress(1))
    copies.now.settle(2)
    keepers[1].close()
    for step in (2, 3, 4):
        copies.take(worker.progress(step))
        copies.now.settle(step + 1)
    copies.now.close()
    assert "warning: no copies of the state are kept in memory: node b does not take" in log.said
