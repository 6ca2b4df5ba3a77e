"""Copies of a real model's state, kept by real keepers, become a checkpoint to go on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.adaptive.elastic import restore
from megatron.adaptive.elastic.copies import Held, Source, newest
from megatron.adaptive.elastic.keeper import Buddy, Keeper
from megatron.adaptive.training.checkpoint_folder import CheckpointFolder
from megatron.adaptive.training.copies import CopySettings, StateCopies

Make = Callable[..., Any]


# Random states are not in copies: the trainer draws dropout from the seed and the step alone.
STILL = {"hidden_dropout": "0", "attention_dropout": "0"}


class Log:
    """What the user would read."""

    def __init__(self) -> None:
        self.said = ""
        self.told: dict[str, object] = {}

    def message(self, text: str) -> None:
        self.said += text + "\n"

    def tell(self, **values: object) -> None:
        self.told |= values


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    """Those of two nodes: what the first is given, it sends to the second."""
    found = [Keeper("127.0.0.1") for _ in range(2)]
    buddy = Buddy(name="b", address="127.0.0.1", port=found[1].port)
    found[0].prepare("run", "secret", buddy)
    found[1].prepare("run", "secret", None)
    yield found
    for keeper in found:
        keeper.close()


def copies_of(training: Any, keeper: Keeper, log: Log, **changes: Any) -> StateCopies:
    """What copies a training's state, on node ``a``."""
    settings = {"run": "run", "node": "a", "domain": "a", "buddy": "b", "every": 1}
    told = {**settings, "limit_bytes": None, "address": keeper.address, **changes}
    parts = {name: getattr(training, name) for name in ("chunks", "optimizer", "scheduler")}
    run: Any = SimpleNamespace(job=training.checkpoints._job, **parts)
    return StateCopies(run, CopySettings.read(json.dumps(told)), log)  # type: ignore[arg-type]


def left_with(*keepers: Keeper, within_s: float = 10.0) -> Source:
    """What can be restored from these nodes."""
    held, needs = [], {}
    for number, keeper in enumerate(keepers):
        for told in keeper.inventory(within_s):
            if "needs" in told:
                needs[told["run"], told["generation"]] = told.pop("needs")
            held.append(Held(node=str(number), **{**told, "steps": tuple(told["steps"])}))
    return newest(held, needs)


def write_out(source: Source, folder: Path) -> None:
    """Make a checkpoint of it, as the nodes do."""
    CheckpointFolder(folder).begin(source.step)
    common = {"checkpoints": str(folder), "step": source.step}
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
    make: Make, worker: Any, tmp_path: Path, keepers: list[Keeper], flags: dict[str, str | None]
) -> None:
    training, log = make(**flags, **STILL), Log()
    copies = copies_of(training, keepers[0], log)
    training.learn(0, 2)
    copies.take(worker.progress(2))
    copies.before_update()
    training.learn(2, 3)
    copies.settle(3)
    copies.take(worker.progress(3))
    copies.before_update()
    expected = training.learn(3, 8)
    copies.close()
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
    make: Make, worker: Any, keepers: list[Keeper]
) -> None:
    """A rank that is killed while it copies leaves the step before."""
    training, log = make(**STILL), Log()
    copies = copies_of(training, keepers[0], log)
    for step in (1, 2):
        copies.take(worker.progress(step))
        copies.before_update()
        copies.settle(step + 1)
    assert left_with(*keepers, within_s=0.0).step == 2
    assert copies._file is not None
    copies._file.begin(0, 3)
    assert left_with(keepers[0], within_s=0.0).step == 2
    copies._file.begin(1, 4)  # with both in vain there is still what was sent
    assert left_with(keepers[0], within_s=0.0).step == 0
    assert left_with(*keepers, within_s=0.0).step == 2
    copies.close()


def test_too_little_memory_is_told_and_nothing_is_kept(
    make: Make, worker: Any, keepers: list[Keeper]
) -> None:
    training, log = make(**STILL), Log()
    copies = copies_of(training, keepers[0], log, limit_bytes=1 << 20)
    for step in (1, 2):
        copies.take(worker.progress(step))
        copies.before_update()
        training.learn(step, step + 1)
        copies.settle(step + 1)
    copies.close()
    assert "warning: no copies of the state are kept in memory: they take" in log.said
    assert log.said.count("warning") == 1
    assert str(log.told["copies"]).startswith("off: they take")
    assert left_with(*keepers) == Source(why="no node that is left keeps copies")


def test_training_goes_on_without_a_buddy_that_is_lost(
    make: Make, worker: Any, keepers: list[Keeper]
) -> None:
    training, log = make(**STILL), Log()
    copies = copies_of(training, keepers[0], log)
    copies.take(worker.progress(1))
    copies.settle(2)
    keepers[1].close()
    for step in (2, 3, 4):
        copies.take(worker.progress(step))
        copies.settle(step + 1)
    copies.close()
    assert "warning: no copies of the state are kept in memory: node b does not take" in log.said
