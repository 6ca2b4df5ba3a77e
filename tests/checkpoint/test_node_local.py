"""Tests that runs resume from local disks after ranks, nodes or disks have failed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.checkpoint import node_local
from megatron.adaptive.checkpoint.folder import CheckpointFolder
from megatron.adaptive.checkpoint.node_local import share_out
from megatron.adaptive.errors import CheckpointError, ConfigError

from ..multiprocess.launch import limited_disk
from .test_trainer_checkpoints import TRACKER, ranks

Make = Callable[..., Any]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the messages in ``caplog`` that this package has logged."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("megatron.adaptive")
    ]


def test_every_file_is_copied_once_by_one_that_has_it() -> None:
    files = {"a": 1, "b": 2, "c": 3, "d": 4}
    first, second = {"a": 1, "b": 2, "c": 3}, {"a": 1, "d": 4}
    shares = share_out([first, first, second], files)
    assert shares is not None
    assert sorted(name for share in shares for name in share) == ["a", "b", "c", "d"]
    for share, has in zip(shares, [first, first, second], strict=True):
        assert set(share) <= set(has)
    assert shares[2] == ["d"]
    assert all(shares)
    assert share_out([first], files) is None
    # Only one node has this file, and the file is truncated there.
    assert share_out([{**first, "d": 3}], files) is None


def test_there_must_be_somewhere_to_copy_to(make: Make) -> None:
    with pytest.raises(
        ConfigError, match="--save-local x requires --save .checkpoints are copied from the local"
    ):
        make(save_local="x")


@pytest.mark.multiprocess
def test_two_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    status, said = ranks(2, "local", tmp_path)
    assert status == 0, said
    assert "local: ok" in said
    # The disk of each node must contain only the files of this node's ranks.
    shares = re.findall(r"each rank has (\S+ to \S+) of the checkpoint of iteration 4", said)
    assert shares
    assert "100% to 100%" not in shares


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_lost", [False, True], ids=["rank", "node"])
def test_a_rank_killed_while_it_copies_costs_nothing_and_a_node_what_was_not_copied(
    tmp_path: Path, is_lost: bool
) -> None:
    status, _ = ranks(2, "copy_killed", tmp_path)
    assert status
    shared = CheckpointFolder(tmp_path / "shared")
    assert shared.latest() == 1
    shared.open(1)
    assert list(shared.steps()) == [1]
    disks = sorted((tmp_path / "disk").glob("*/*"))
    assert [disk.name for disk in disks] == ["node-0", "node-1"]
    assert all((disk / "iter_0000002").is_dir() for disk in disks)
    if is_lost:
        shutil.rmtree(disks[1])
    status, said = ranks(2, "copy_resumed", tmp_path)
    assert status == 0, said
    text = "iteration 2 is not uploaded, because the local disks of these nodes do not have all of"
    assert (text in said) == is_lost
    assert ("continuing the copy of iteration 2 to" in said) == (not is_lost)
    assert shared.latest() == (2 if is_lost else 3)
    shared.open(shared.latest() or 0)


class Storage:
    """Simulates shared storage to which nothing can be copied until a test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        some = node_local._some

        def wait(pieces: Iterator[None]) -> bool:
            assert self.is_open.wait(60)
            return some(pieces)

        monkeypatch.setattr(node_local, "_some", wait)


@pytest.mark.long
def test_training_goes_on_while_the_copy_lags(
    make: Make,
    worker: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage(monkeypatch)
    losses = make().learn(0, 6)
    saved = tmp_path / "saved"
    run = make(save=saved, save_local=tmp_path / "disk", keep_checkpoints=1)
    learned = run.learn(0, 2)
    run.checkpoints.save(worker.progress(2), behind=True)
    learned += run.learn(2, 3)
    run.checkpoints.save(worker.progress(3), behind=True)
    learned += run.learn(3, 4)
    run.checkpoints.save(worker.progress(4), behind=True)
    assert learned + run.learn(4, 6) == losses
    run.checkpoints.saver.finish()
    assert run.checkpoints.saver.completed() is None
    assert CheckpointFolder(saved).latest() is None
    assert len(warned(caplog)) == 2
    for line, iteration in zip(warned(caplog), (3, 4), strict=True):
        assert f"iteration {iteration} stays only on the nodes' local disks, because" in line
    # The checkpoint that is still being copied must be kept, in addition to those that
    # keep_checkpoints allows.
    assert list(run.local._folder.steps()) == [2, 4]
    run.local._timeout_s = 0.1
    with pytest.raises(CheckpointError, match=r"the copy of iteration 2 .* did not finish within"):
        run.checkpoints.saver.drain()
    run.local._timeout_s = 60.0
    storage.is_open.set()
    run.checkpoints.saver.drain()
    assert CheckpointFolder(saved).latest() == 4
    assert list(CheckpointFolder(saved).steps()) == [4]
    path = CheckpointFolder(saved).complete_path
    assert run.checkpoints.saver.completed() == (2, path(2))
    assert run.checkpoints.saver.completed() == (4, path(4))
    assert run.checkpoints.saver.completed() is None
    resumed = make(save=saved, load=saved, save_local=tmp_path / "disk")
    assert resumed.resume() == worker.progress(4)
    assert resumed.learn(4, 6) == losses[4:]


def test_a_former_copy_that_takes_too_long_is_left_out(
    make: Make,
    worker: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved, disk = tmp_path / "saved", tmp_path / "disk"
    run = make(save=saved, save_local=disk)
    run.checkpoints.save(worker.progress(1))
    run.step(1)
    run.checkpoints.save(worker.progress(2))
    # Simulate a run that ended before its last checkpoint was copied completely.
    shutil.rmtree(CheckpointFolder(saved).complete_path(2))
    (saved / TRACKER).write_text("1")

    def slowly(pieces: Iterator[None]) -> bool:
        time.sleep(0.2)
        return any(True for _ in pieces)

    monkeypatch.setattr(node_local, "_some", slowly)
    finish = node_local.LocalDisk.finish_former

    def hurried(self: node_local.LocalDisk, latest: Any) -> None:
        self._timeout_s = 0.5
        finish(self, latest)

    monkeypatch.setattr(node_local.LocalDisk, "finish_former", hurried)
    again = make(save=saved, load=saved, save_local=disk)
    assert again.resume() == worker.progress(1)
    (line,) = warned(caplog)
    assert "the copy of iteration 2 to " in line
    assert line.endswith("; resuming from iteration 1")
    assert not list(saved.glob(".iter*"))


def test_shared_storage_that_fails_is_told_and_the_next_comes_there(
    make: Make,
    worker: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer = tmp_path / "outer"
    with monkeypatch.context() as at_start:  # The shared storage has failed before the run starts.
        at_start.setattr(node_local, "hold", lambda *_, **__: None)
        run = make(save=outer / "saved", save_local=tmp_path / "disk")
    outer.write_text("a file in the way")
    run.checkpoints.save(worker.progress(1), behind=True)
    run.checkpoints.saver.finish()
    run.local._wait(run.local._control, 1e12)
    (line,) = warned(caplog)
    assert "iteration 1 was not copied to" in line
    assert "Not a directory" in line
    assert line.endswith("earlier checkpoints are unchanged")
    with pytest.raises(CheckpointError, match="iteration 2 was not copied to .*Not a directory"):
        run.checkpoints.save(worker.progress(2))
    assert list(run.local._folder.steps()) == [1, 2]
    assert len(warned(caplog)) == 3  # Each failed copy has logged a warning.
    outer.unlink()
    run.checkpoints.saver.drain()  # This call copies the last checkpoint to the shared storage.
    assert CheckpointFolder(outer / "saved").latest() == 2


def test_a_disk_that_cannot_be_written_is_passed_by(
    make: Make, worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.write_text("a file in the way")
    run = make(save=tmp_path / "saved", save_local=disk)
    run.checkpoints.save(worker.progress(1), behind=True)
    run.checkpoints.saver.finish()
    assert CheckpointFolder(tmp_path / "saved").latest() == 1
    (line,) = warned(caplog)
    assert f"{disk}: " in line
    assert "Not a directory" in line
    assert "iteration 1 is written directly to" in line
    disk.unlink()
    assert run.checkpoints.save(worker.progress(2)).is_dir()
    assert list(run.local._folder.steps()) == [2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with limited_disk(tmp_path / "small", "400k") as made:
        yield made


@pytest.mark.parametrize("full", ["local", "shared"])
def test_a_full_disk_is_named(
    make: Make,
    worker: Any,
    small_disk: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    full: str,
) -> None:
    saved, disk = tmp_path / "saved", small_disk
    if full == "shared":
        saved, disk = small_disk / "saved", tmp_path / "disk"
    run = make(save=saved, save_local=disk)
    run.checkpoints.save(worker.progress(1), behind=True)
    run.checkpoints.saver.finish()
    run.local._wait(run.local._control, 1e12)
    (line,) = warned(caplog)
    assert "No space left on device" in line
    assert not list(small_disk.rglob(".iter*"))
    assert CheckpointFolder(saved).latest() == (1 if full == "local" else None)
    if full == "shared":
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
        run.checkpoints.saver.drain()
        assert CheckpointFolder(saved).latest() == 1


def test_what_was_done_again_since_is_not_taken_for_newer(
    make: Make, worker: Any, tmp_path: Path
) -> None:
    """Checks that files that two runs have saved for the same iteration are not mixed."""
    saved, disk = tmp_path / "saved", tmp_path / "disk"
    run = make(save=saved, save_local=disk)
    run.step(1)
    run.checkpoints.save(worker.progress(1))
    run.step(1)
    run.checkpoints.save(worker.progress(3))
    local = run.local._folder
    # Simulate a run that ended before iteration 3 was copied to the shared storage.
    shutil.rmtree(CheckpointFolder(saved).complete_path(3))
    (saved / TRACKER).write_text("1")
    again = make(save=saved, load=saved, save_local=disk, ckpt_step=1)
    # The new run goes back to iteration 1, so it must not copy iteration 3 of the previous run.
    assert again.checkpoints.load() == worker.progress(1)
    again.step(5)
    again.checkpoints.save(worker.progress(2))
    assert list(local.steps()) == [1, 2]
    # Simulate files that belong to another save of the same iteration.
    state = again.state()
    path = local.complete_path(2) / "local.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "save_id": "another"}))
    for file in local.complete_path(2).glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    last = make(save=saved, load=saved, save_local=disk)
    assert last.resume() == worker.progress(2)
    worker.require_equal(last.state(), state, "loaded")
