"""Tests which rank copies which parts of the state, and how snapshots become a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.checkpoint.snapshot_keeper import SnapshotKeeper
from megatron.adaptive.checkpoint.snapshots import (
    Need,
    RankParts,
    Snapshots,
    SnapshotSettings,
    make_plan,
    why_not,
)
from megatron.adaptive.checkpoint.trainer_checkpoints import RunState
from megatron.adaptive.cluster.snapshot_placement import SnapshotSource

from .keepers import left_with, write_out

Make = Callable[..., Any]


# Snapshots do not contain random states, because the trainer derives dropout from the seed and the
# step. In the model of these tests, dropout depends on the random state, so turn off dropout.
STILL = {"hidden_dropout": "0", "attention_dropout": "0"}


class Log:
    """Collects the lines that are shown to the user, and keeps the last reported status."""

    def __init__(self) -> None:
        self.said = self.reported = ""

    def say(self, text: str) -> None:
        self.said += text + "\n"

    def report(self, text: str) -> None:
        self.reported = text


class Copying:
    """Takes snapshots of the run ``training``, as a rank on node ``a`` does."""

    def __init__(self, training: Any, keeper: SnapshotKeeper, log: Log, **changes: Any) -> None:
        settings = {"run": "run", "node": "a", "domain": "a", "buddy": "b", "every": 1}
        values = {**settings, "limit_bytes": None, "address": keeper.address, **changes}
        parts = {name: getattr(training, name) for name in ("chunks", "optimizer", "scheduler")}
        run: Any = SimpleNamespace(job=training.job, samples=None, **parts)
        state = RunState(run, lambda: self._progress)
        self._progress: Any = None
        self.now = Snapshots(
            state, run.job, SnapshotSettings.read(json.dumps(values)), log.report, log.say
        )

    def take(self, progress: Any) -> None:
        self._progress = progress
        self.now.take(progress.iteration)


@pytest.mark.parametrize(
    "flags",
    [
        {},
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
    assert "are kept in memory: 0." in log.said
    assert left_with(*keepers).step == 3
    keepers[0].close()  # The first node and its snapshots are lost.
    source = left_with(keepers[1])
    assert (source.step, source.seen, source.why) == (3, 3, "")
    write_out(source, tmp_path)
    resumed = make(load=tmp_path, **flags, **STILL)
    assert resumed.checkpoints.load() == worker.progress(3)
    # GPU kernels may sum in a different order each time, so allow small differences.
    rel = 1e-4 if training.job.accelerator.is_cuda else 0.0
    assert resumed.learn(3, 8) == pytest.approx(expected, rel=rel, abs=0.0)
    assert list(tmp_path.glob(".*")) == []


def test_a_buffer_that_changes_before_the_update_does_not_end_copies(
    make: Make, worker: Any, keepers: list[SnapshotKeeper]
) -> None:
    """Checks that buffers that change before the optimizer's update are copied immediately."""
    flags: dict[str, Any] = {"num_experts": 4, "moe_router_enable_expert_bias": None}
    flags |= {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "none"}
    training, log = make(**flags, **STILL), Log()
    biases = [
        buffer
        for name, buffer in training.chunks[0].named_buffers()
        if name.endswith("expert_bias")
    ]
    assert len(biases) == 4
    copies = Copying(training, keepers[0], log)
    for step in (1, 2):
        copies.take(worker.progress(step))
        copies.now.before_update()
        copies.now.settle(step + 1)
    assert copies.now._pool is not None
    gate = threading.Event()
    copies.now._pool.submit(gate.wait)
    copies.take(worker.progress(3))
    for bias in biases:
        bias += 1
    gate.set()
    copies.now.before_update()
    copies.now.settle(4)
    assert copies.now._failure == ""
    assert "warning" not in log.said
    copies.now.close()


def test_a_step_that_is_not_whole_does_not_count(
    make: Make, worker: Any, keepers: list[SnapshotKeeper]
) -> None:
    """Checks that the previous snapshot stays valid if a rank is killed while it takes another."""
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
    # Both snapshots on the first node are now incomplete, but the second node has a complete one.
    copies.now._file.begin(1, 4)
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
    assert "warning: no copies of the state are kept in memory: the copies need" in log.said
    assert log.said.count("warning") == 1
    assert log.reported.startswith("off: the copies need")
    assert left_with(*keepers) == SnapshotSource(why="no remaining node has copies")


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
    assert (
        "warning: no copies of the state are kept in memory: copies cannot be sent to node b"
        in log.said
    )


MIB = 1024**2
WEIGHT, OTHER = ("weight", (0, 0)), ("other", (0,))


def rank(node: str, *parts: str, **changes: object) -> RankParts:
    """Returns a rank on ``node`` whose state has the parts ``parts``, of 1 MiB each.

    Its snapshots are sent to node ``z``. ``changes`` contains other attributes to replace.
    """
    parts_of_rank = RankParts(
        node=node,
        domain=node,
        buddy="z",
        machine=node,
        available_bytes=1 << 40,
        extra_bytes=100,
        parts={(part, (0,)): MIB for part in parts},
    )
    return dataclasses.replace(parts_of_rank, **changes)  # type: ignore[arg-type]


def test_what_is_on_two_nodes_is_not_sent() -> None:
    ranks = [rank("a", "x", "y"), rank("b", "y", "w")]
    plan = make_plan(ranks)
    assert {part[0]: need for part, need in plan.needs.items()} == {
        "x": Need(ranks=(0,), is_sent=True),
        "y": Need(ranks=(0, 1), is_sent=False),
        "w": Need(ranks=(1,), is_sent=True),
    }
    assert plan.sent_bytes == [MIB, MIB]
    assert plan.tensor_bytes == [2 * MIB, 2 * MIB]
    assert plan.copied_by(0, ranks[0]) == [("x", (0,)), ("y", (0,))]


def test_replicas_on_one_node_share_the_copying() -> None:
    ranks = [rank("a", "v", "w", "x", "y") for _ in range(2)]
    plan = make_plan(ranks)
    assert plan.tensor_bytes == [2 * MIB, 2 * MIB] == plan.sent_bytes
    first, second = (set(plan.copied_by(index, rank)) for index, rank in enumerate(ranks))
    assert first | second == set(ranks[0].parts)
    assert not first & second


def test_two_nodes_of_one_machine_do_not_guard_each_other() -> None:
    ranks = [rank("a", "x", domain="m", machine="m"), rank("b", "x", domain="m", machine="m")]
    (need,) = make_plan(ranks).needs.values()
    assert need == Need(ranks=(0,), is_sent=True)


def test_alone_nothing_is_sent() -> None:
    ranks = [rank("a", "x", buddy=None)]
    plan = make_plan(ranks)
    assert [*plan.needs.values()] == [Need(ranks=(0,), is_sent=False)]
    assert plan.sent_bytes == [0]


def test_memory_counts_for_who_keeps_the_copies() -> None:
    ranks = [rank("a", "x"), rank("z", "y", buddy="a")]
    plan = make_plan(ranks)
    assert why_not(plan, ranks, None) is None
    # A node needs memory for two snapshots of its state, and for two snapshots of another node.
    assert why_not(plan, ranks, 4 * MIB + 4 * 4096) is None
    why = why_not(plan, ranks, 4 * MIB)
    assert why is not None
    assert "on node a, but --replicate-memory allows only 0.00391 GiB" in why
    short = [ranks[0], dataclasses.replace(ranks[1], available_bytes=5 * MIB)]
    why = why_not(plan, short, None)
    assert why is not None
    assert "the machine of node z, which is more than four fifths of its 0.00488 GiB of" in why
    # The memory would be large enough for one node, but both nodes run on the same machine.
    both = [dataclasses.replace(rank, machine="m", available_bytes=8 * MIB) for rank in ranks]
    assert why_not(plan, both, None) is not None


def test_the_thread_that_copies_makes_the_processs_gpu_current(
    make: Any, worker: Any, keepers: list[SnapshotKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the thread that takes snapshots selects its GPU instead of using GPU 0."""
    threads: list[str] = []
    monkeypatch.setattr(
        Accelerator, "make_current", lambda self: threads.append(threading.current_thread().name)
    )
    training = make(**STILL)
    copies = Copying(training, keepers[0], Log())
    copies.take(worker.progress(1))
    copies.now.close()
    assert [name.rstrip("0123456789_") for name in threads] == ["snapshots"]
