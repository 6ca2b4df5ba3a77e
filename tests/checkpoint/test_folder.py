"""Tests that a checkpoint folder lists only complete checkpoints, and rejects damaged ones."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.checksums import BLOCK_BYTES, sealed
from megatron.adaptive.checkpoint.folder import (
    FORMAT_VERSION,
    INDEX,
    CheckpointFolder,
    PipelineFolder,
)
from megatron.adaptive.engine.folder_lease import Lease, LeaseTakenError
from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError
from tests.soak.damages import Saved, damaged

MANIFEST = {
    "progress": {"iteration": 10},
    "config": {"model": {}},
    "shape": {"tensor": 1},
    "padded_vocab_size": 128,
    "has_optimizer": True,
    "has_rng": True,
}
TRACKER = "latest_checkpointed_iteration.txt"


def write_checkpoint(folder: CheckpointFolder, iteration: int, content: bytes = b"old") -> Path:
    partial = folder.begin(iteration)
    (partial / "metadata.json").write_text("{}")
    (partial / INDEX).write_text("{}")
    (partial / "__0_0.distcp").write_bytes(content)
    return folder.commit(iteration, {**MANIFEST, "progress": {"iteration": iteration}})


def reseal(manifest: Path, **values: object) -> None:
    """Sets entries of the manifest file ``manifest`` to ``values``, and updates its checksum."""
    body = json.loads(manifest.read_text()) | values
    del body["checksum"]
    manifest.write_text(
        sealed([f"{json.dumps(n)}: {json.dumps(value)}" for n, value in body.items()])
    )


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_a_checkpoint_appears_under_its_name_and_is_the_latest(folder: CheckpointFolder) -> None:
    partial = folder.begin(10)
    assert partial.name.startswith(".")
    (partial / "metadata.json").write_text("{}")
    (partial / INDEX).write_text("{}")
    assert folder.latest() is None
    path = folder.commit(10, MANIFEST)
    assert path == folder.path / "iter_0000010"
    assert (folder.path / TRACKER).read_text() == "10"
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["iter_0000010", TRACKER]
    opened, manifest = folder.open(10)
    assert opened == path
    assert manifest["files"] == {"metadata.json": 2, INDEX: 2}
    assert manifest["progress"] == {"iteration": 10}


def test_without_tracker_the_last_complete_checkpoint_counts(folder: CheckpointFolder) -> None:
    write_checkpoint(folder, 10)
    write_checkpoint(folder, 9)
    (folder.path / TRACKER).unlink()
    # This checkpoint has no manifest, so it is incomplete.
    (folder.path / "iter_0000020").mkdir()
    assert folder.latest() == 10


def write_and_die(folder: CheckpointFolder, iteration: int, moment: int) -> bool:
    """Writes checkpoint ``iteration`` in a child that is killed at file operation ``moment``.

    Returns whether the child was killed. Otherwise, it needed fewer file operations.
    """
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = moment

    def count(event: str, args: object) -> None:
        nonlocal left
        if event.split(".")[0] in ("open", "os", "shutil"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        write_checkpoint(folder, iteration, b"new")
    finally:
        os._exit(0)


@pytest.mark.parametrize("iteration", [10, 20])
def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(
    folder: CheckpointFolder, iteration: int
) -> None:
    """Checks that a complete checkpoint exists after a writer was killed at any file operation."""
    write_checkpoint(folder, 10, b"old")
    seen = set()
    for moment in range(1, 80):
        is_dead = write_and_die(folder, iteration, moment)
        latest = folder.latest()
        assert latest in (10, iteration)
        path, _ = folder.open(latest)
        content = (path / "__0_0.distcp").read_bytes()
        assert content in ((b"old", b"new") if latest == iteration else (b"old",))
        if not is_dead:
            assert latest == iteration
            assert content == b"new"
            break
        seen.add(content)
        # The next run must remove all files that the killed writer has left behind.
        write_checkpoint(folder, 10, b"old")
        for other in folder.path.glob("iter_0000020"):
            shutil.rmtree(other)
        names = sorted(entry.name for entry in folder.path.iterdir())
        assert names == ["iter_0000010", TRACKER]
    else:
        pytest.fail("the writer never finished")
    assert b"old" in seen


def test_a_former_checkpoint_is_read_and_restored_after_a_crash(folder: CheckpointFolder) -> None:
    path = write_checkpoint(folder, 10)
    path.rename(folder.path / ".iter_0000010.replaced")
    opened, _ = folder.open(10)
    assert opened.name == ".iter_0000010.replaced"
    folder.begin(20)
    assert folder.open(10)[0] == path


def test_a_tracker_without_a_number_is_refused(folder: CheckpointFolder) -> None:
    folder.path.mkdir()
    (folder.path / TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match="'release', which is not an iteration"):
        folder.latest()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: (path / "__0_0.distcp").write_bytes(b"o"), "1 bytes instead of 3"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda path: (path / "metadata.json").unlink(), "metadata.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text('{"form'), "cannot read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "was not written by this program"),
        (lambda path: (path.parent / TRACKER).write_text("30"), "iter_0000030 does not exist"),
    ],
)
def test_damage_is_refused_with_another_checkpoint_to_take(
    folder: CheckpointFolder, damage: object, text: str
) -> None:
    write_checkpoint(folder, 10)
    path = write_checkpoint(folder, 20)
    assert callable(damage)
    damage(path)
    with pytest.raises(CheckpointError, match=text) as caught:
        folder.open(folder.latest() or 0)
    assert f"--ckpt-step {10 if folder.latest() == 20 else 20}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_format_is_named(folder: CheckpointFolder) -> None:
    path = folder.complete_path(5)
    path.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is incomplete"):
        folder.open(5)
    (path / "metadata.json").touch()
    with pytest.raises(CheckpointError, match="Megatron-LM .* pass --trust-checkpoint"):
        folder.open(5)
    (path / "mp_rank_00").mkdir()
    with pytest.raises(CheckpointError, match="old torch format"):
        folder.open(5)


def test_a_newer_format_is_refused(folder: CheckpointFolder) -> None:
    path = write_checkpoint(folder, 10)
    reseal(path / "manifest.json", version=FORMAT_VERSION + 1)
    with pytest.raises(
        CheckpointError, match="format version 3, but this program reads .* up to 2"
    ):
        folder.open(10)


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointFolder(str(path)).latest()


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for iteration in (10, 20, 10**7):
        write_checkpoint(folder, iteration)
    folder.keep(3)
    assert len(list(tmp_path.glob("iter_*"))) == 3
    folder.keep(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000020",
        "iter_10000000",
        TRACKER,
    ]
    folder.open(20)


@pytest.mark.parametrize("moment", ["before", "while it publishes"])
def test_who_was_taken_over_publishes_nothing_and_removes_nothing(
    folder: CheckpointFolder, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that checkpoints of two runs that save to the same folder are not mixed."""
    folder.lease = Lease(folder.path)
    folder.lease.claim()
    write_checkpoint(folder, 10)
    write_checkpoint(folder, 20)
    (folder.begin(20) / "metadata.json").write_text("{}")
    other = CheckpointFolder(folder.path)
    other.lease = Lease(folder.path)

    def take_over() -> None:
        assert other.lease is not None
        other.lease.claim()
        other.clear()
        (other.begin(20) / "metadata.json").write_text("{}")

    if moment == "before":
        take_over()
    else:  # The other job takes over the folder after this job's last check.
        looks = [take_over, folder.lease.require]
        monkeypatch.setattr(folder.lease, "require", lambda: looks.pop(0)())
        for name in ("metadata.json", "__0_0.distcp"):
            (folder.partial_path(20) / name).write_bytes(b"new")
    with pytest.raises((LeaseTakenError, FileNotFoundError)):
        folder.commit(20, MANIFEST)
    assert (folder.open(20)[0] / "__0_0.distcp").read_bytes() == b"old"
    with pytest.raises(LeaseTakenError):
        Lease.require(folder.lease)
    folder.abandon(20)
    assert other.partial_path(20).is_dir()
    assert other.commit(20, MANIFEST).is_dir()
    assert other.latest() == 20
    assert not list(folder.path.glob(".iter*"))


def test_who_stands_still_while_it_clears_up_leaves_what_is_newer(folder: CheckpointFolder) -> None:
    partials = []
    for number in range(2):
        folder.lease = Lease(folder.path)
        folder.lease.claim()
        partials.append(folder.begin(10 * (number + 1)))
    assert [partial.is_dir() for partial in partials] == [False, True]
    folder.lease = Lease(folder.path)
    folder.lease.number = 1
    with pytest.raises(LeaseTakenError):
        folder.clear()
    folder.lease.require = lambda: None  # type: ignore[method-assign]
    folder.clear()
    assert partials[1].is_dir()


def write_pipeline(folder: PipelineFolder, step: int, text: str = "tensors") -> Path:
    (folder.begin(step) / "__0_0.distcp").write_text(text)
    (folder.partial_path(step) / INDEX).write_text("{}")
    return folder.commit(step, {"step": step})


def test_the_newest_of_a_pipeline_is_found_without_a_tracker(tmp_path: Path) -> None:
    folder = PipelineFolder(tmp_path)
    for step in (2, 10, 100_000_000):
        assert write_pipeline(folder, step).is_dir()
    (folder.begin(200_000_000) / "__0_0.distcp").write_text("half")
    assert folder.latest() == 100_000_000
    assert folder.open(None)[0].name == "step_100000000"
    assert folder.open(2)[0].name == "step_00000002"
    assert folder.open(10)[1]["step"] == 10
    folder.keep(2)
    folder.abandon(200_000_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step_00000010", "step_100000000"]


def test_the_former_of_a_pipeline_comes_back_where_its_successor_died(tmp_path: Path) -> None:
    folder = PipelineFolder(tmp_path)
    # The folder is in this state if a commit was killed between its two renames.
    write_pipeline(folder, 1, "old").rename(tmp_path / ".step_00000001.replaced")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        folder.open(None)
    folder.begin(2)
    assert (folder.open(None)[0] / "__0_0.distcp").read_text() == "old"


def test_what_is_broken_of_a_pipeline_is_named(tmp_path: Path) -> None:
    folder = PipelineFolder(tmp_path)
    path = write_pipeline(folder, 1)
    (path / "__0_0.distcp").write_text("t")
    with pytest.raises(CheckpointError, match="has 1 bytes instead of 7"):
        folder.open(1)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing"):
        folder.open(1)
    reseal(path / "pipeline.json", format=9)
    with pytest.raises(
        CheckpointError, match="format version 9, but this program reads .* up to 2"
    ):
        folder.open(1)
    (path / "pipeline.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        folder.open(1)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; choose one of the steps 1"):
        folder.open(7)


@pytest.mark.parametrize("is_pipeline", [False, True], ids=["trainer", "pipeline"])
def test_any_damage_is_found_and_its_file_named(tmp_path: Path, is_pipeline: bool) -> None:
    chosen = random.Random(11)
    folder = PipelineFolder(tmp_path) if is_pipeline else CheckpointFolder(tmp_path)
    partial = folder.begin(10)
    for name in (INDEX, "metadata.json", ".metadata", "__0_0.distcp", "__1_0.distcp"):
        (partial / name).write_bytes(chosen.randbytes(chosen.randrange(1, 20_000)))
    folder.commit(10, MANIFEST)
    assert folder.verify(10) == []
    saved = Saved(folder=str(tmp_path), step=10, is_pipeline=is_pipeline)
    for seed in range(500):
        with damaged([saved], seed) as (_, names, damage):
            complaints = folder.verify(10)
            assert any(name in complaint for complaint in complaints for name in names), (
                damage,
                complaints,
            )
            if not all(name.endswith(".distcp") for name in names):
                with pytest.raises(DamagedCheckpointError, match="|".join(map(re.escape, names))):
                    folder.open(10)
    assert folder.verify(10) == []
    folder.open(10)


def test_a_block_of_a_large_file_is_named(folder: CheckpointFolder) -> None:
    path = write_checkpoint(folder, 10, bytes(2 * BLOCK_BYTES + 5))
    file = path / "__0_0.distcp"
    with file.open("r+b") as stream:
        stream.seek(BLOCK_BYTES + 7)
        stream.write(b"x")
    (problem,) = folder.verify(10)
    assert problem == (
        f"{file} is damaged (block 1, bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES - 1}, does not match "
        "its checksum)"
    )


def test_a_whole_checkpoint_under_another_ones_name_is_found(folder: CheckpointFolder) -> None:
    write_checkpoint(folder, 10).rename(folder.complete_path(20))
    assert "manifest.json belongs to step 10" in folder.verify(20)[0]
    with pytest.raises(DamagedCheckpointError, match="belongs to step 10"):
        folder.open(20)


def test_what_lost_its_manifest_is_tried_before_older_ones(tmp_path: Path) -> None:
    folder = PipelineFolder(tmp_path)
    for step in (1, 2, 3):
        write_pipeline(folder, step)
    (folder.complete_path(3) / "pipeline.json").unlink()
    assert folder.latest() == 2
    assert [*folder.candidates()] == [3, 2, 1]
    with pytest.raises(DamagedCheckpointError, match=r"pipeline\.json is missing"):
        folder.open(3)


def test_a_former_version_is_opened_where_it_is_trusted(folder: CheckpointFolder) -> None:
    path = write_checkpoint(folder, 10)
    body = json.loads((path / "manifest.json").read_text()) | {"version": 1}
    for name in ("blocks", "checksum", "step"):
        del body[name]
    del body["files"][INDEX]
    (path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="pass --trust-checkpoint if you trust") as caught:
        folder.open(10)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert folder.open(10, trust=True)[1]["blocks"] == {}
    # A damaged new checkpoint must not be mistaken for a checkpoint of an earlier version.
    path = write_checkpoint(folder, 20)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"version": 2', '"version": 1'))
    with pytest.raises(DamagedCheckpointError, match="checksum does not match"):
        folder.open(20, trust=True)


def test_a_whole_checkpoint_that_the_tracker_does_not_name_yet_counts(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks that a complete checkpoint is found even if the tracker file names an older one."""
    for iteration in (10, 20, 30):
        write_checkpoint(folder, iteration)
        (folder.path / TRACKER).write_text("10")
        assert folder.latest() == iteration
    assert list(folder.candidates()) == [30, 20, 10]
    assert "contains iteration 10" in caplog.text
    assert "--ckpt-step 10 to go back" in caplog.text


def test_a_run_that_went_back_goes_on_from_its_own_checkpoints(folder: CheckpointFolder) -> None:
    # The last of these checkpoints was saved by a run that went back with --ckpt-step 10.
    for iteration in (10, 20, 30, 15):
        write_checkpoint(folder, iteration)
    assert folder.latest() == 15
    write_checkpoint(folder, 20)
    assert folder.latest() == 20
    assert next(iter(folder.candidates())) == 20


def test_of_former_versions_times_tell_what_was_written_last(folder: CheckpointFolder) -> None:
    for iteration, time_s in ((10, 100), (20, 300)):
        manifest = write_checkpoint(folder, iteration) / "manifest.json"
        body = json.loads(manifest.read_text())
        del body["checksum"], body["follows"]
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
        manifest.write_text(sealed(lines))
        os.utime(manifest, (time_s, time_s))
    (folder.path / TRACKER).write_text("10")
    for time_s, latest in ((200, 20), (400, 10)):
        os.utime(folder.path / TRACKER, (time_s, time_s))
        assert folder.latest() == latest


@pytest.mark.parametrize("text", ["9" * 5000, "-3", "1e3", "\u0663", "\x1b[2J", ""])
def test_a_tracker_without_an_iteration_is_one_line(folder: CheckpointFolder, text: str) -> None:
    write_checkpoint(folder, 10)
    (folder.path / TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(DamagedCheckpointError, match="which is not an iteration; write") as caught:
        folder.latest()
    assert len(str(caught.value)) < 400
    assert list(folder.candidates()) == [10]


def test_what_is_no_regular_file_is_not_waited_for(folder: CheckpointFolder) -> None:
    path = write_checkpoint(folder, 10)
    (folder.path / TRACKER).unlink()
    os.mkfifo(folder.path / TRACKER)
    with pytest.raises(DamagedCheckpointError, match="a FIFO, not a regular file"):
        folder.latest()
    assert list(folder.candidates()) == [10]
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpointError, match="a device, not a regular file"):
        folder.open(10)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    assert "a FIFO, not a regular file" in folder.verify(10)[0]


@pytest.mark.parametrize(
    "progress",
    [
        {"iteration": float("nan")},
        {"iteration": -3},
        {"iteration": 10**30},
        {"iteration": 11},
        {"iteration": True},
        {"iteration": 10, "consumed_train_samples": -3},
        {"iteration": 10, "consumed_train_samples": 1.5},
        {"iteration": 10, "unknown": 1},
        "x",
    ],
    ids=repr,
)
def test_a_sealed_manifest_with_impossible_progress_is_refused(
    folder: CheckpointFolder, progress: object
) -> None:
    path = write_checkpoint(folder, 10)
    reseal(path / "manifest.json", progress=progress)
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is damaged .*progress"):
        folder.open(10)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", ".."])
def test_a_manifest_names_files_of_its_own_folder_alone(
    folder: CheckpointFolder, name: str
) -> None:
    path = write_checkpoint(folder, 10)
    reseal(path / "manifest.json", files={name: 1})
    with pytest.raises(DamagedCheckpointError, match="not a plain file name"):
        folder.open(10)
