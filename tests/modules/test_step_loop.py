"""Tests ``Pipeline.loop`` in a single process: its first step, checkpoints, end and errors."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.checkpoint.folder import PipelineFolder
from megatron.adaptive.errors import CheckpointError, ConfigError
from megatron.adaptive.modules import Pipeline
from megatron.adaptive.modules.sizes import JobEnded
from megatron.adaptive.trace.status_files import PROGRESS_NAME

from .models import Net, Tower, Training, batch_of


def train(pipeline: Pipeline, chosen: int, do: Callable[[], object], **options: Any) -> None:
    """Trains ``pipeline`` for nine steps, and calls ``do`` after step ``chosen``.

    ``options`` are arguments of :meth:`Pipeline.loop`.
    """
    for step in pipeline.loop(9, **options):
        pipeline.step(batch_of(step))
        if step == chosen:
            do()


def fail() -> None:
    raise KeyError


def test_it_goes_on_where_it_was_with_the_same_losses(trained: Any, tmp_path: Path) -> None:
    whole = trained()
    whole.run(6, None)
    assert list(whole.losses) == [0, 1, 2, 3, 4, 5]
    first = trained()
    with pytest.raises(KeyError):  # The loop must not save the step that raised the error.
        train(first.pipeline, 2, fail, folder=tmp_path, save_interval=1, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lease") == [
        "step_00000001",
        "step_00000002",
    ]
    other = trained()
    with pytest.raises(CheckpointError, match="not contain the state of 'scheduler'"):
        other.run(6, tmp_path)
    begun = trained()
    begun.run(3, tmp_path / "own", save_interval=2)
    later = trained()
    later.run(6, tmp_path / "own")
    assert begun.losses | later.losses == whole.losses
    assert list(later.losses) == [3, 4, 5]
    assert later.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.025
    done = trained()
    done.run(6, tmp_path / "own")
    assert done.losses == {}


def test_training_goes_on_while_a_checkpoint_is_written(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a checkpoint contains the state of its step, and appears only when complete."""
    whole, gate, commit = trained(), threading.Event(), PipelineFolder.commit
    whole.run(7, None)

    def late(self: PipelineFolder, step: int, *arguments: Any) -> Path:
        assert gate.wait(60.0)
        return commit(self, step, *arguments)

    monkeypatch.setattr(PipelineFolder, "commit", late)
    folder = tmp_path / "checkpoints"
    begun, seen = trained(), []

    def look(step: int) -> None:
        # Step 2 is still being saved at this time, and the weights have changed in the meantime.
        if step == 3:
            seen.extend(path.name for path in folder.glob("step_*"))
            gate.set()

    begun.run(9, folder, save_interval=2, keep=2, async_save=True, before=look, last=7)
    begun.pipeline.close()  # The call of close() waits until the last checkpoint is written.
    assert seen == []
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lease") == [
        "step_00000004",
        "step_00000006",
    ]
    for step in (4, 6):
        later = trained()
        later.pipeline.load(folder, step=step, state=later.state)
        losses = [later.pipeline.step(batch_of(step))[0]]
        assert losses == [whole.losses[step]]


def test_a_checkpoint_loads_although_a_later_one_could_not_be_written(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The load does not read the checkpoint whose save failed, so it must not raise that error.
    commit = PipelineFolder.commit

    def fail_at_four(self: PipelineFolder, step: int, *arguments: Any) -> Path:
        if step == 4:
            raise OSError("the disk is full")
        return commit(self, step, *arguments)

    monkeypatch.setattr(PipelineFolder, "commit", fail_at_four)
    begun = trained()
    restored: list[int] = []

    def restore(step: int) -> None:
        if step == 5:
            begun.pipeline._checkpointer.saver.wait()
            begun.pipeline.load(tmp_path, state=begun.state)
            restored.append(begun.pipeline.steps)
            fail()  # Stop the loop, because it cannot continue from an earlier step.

    with pytest.raises(KeyError):
        begun.run(9, tmp_path, save_interval=2, async_save=True, before=restore)
    assert restored == [2]


def test_a_checkpoint_on_the_nodes_disk_comes_to_shared_storage_later(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that a checkpoint on the node's disk is copied to shared storage at the next start."""
    whole, outer = trained(), tmp_path / "outer"
    whole.run(6, None)
    training = trained()
    outer.touch()  # A file of this name makes it impossible to create a folder at the path.
    folders: dict[str, Any] = {"folder": outer / "saved", "local_folder": tmp_path / "disk"}
    with pytest.raises(CheckpointError, match="iteration 3 was not copied to .*Not a directory"):
        training.run(3, save_interval=2, **folders)
    training.pipeline.close()  # The call of close() tries once more to copy the checkpoint.
    (local,) = (tmp_path / "disk").glob("saved-*/*")
    assert sorted(path.name for path in local.iterdir()) == ["iter_0000002", "iter_0000003"]
    outer.unlink()
    later = trained()
    later.run(6, **folders)
    said = capsys.readouterr().out
    assert "continuing the copy of iteration 3" in said
    assert said.count("saved checkpoint from iteration       6") == 1
    assert training.losses | later.losses == whole.losses
    assert list(later.losses) == [3, 4, 5]
    assert max(PipelineFolder(outer / "saved").steps()) == 6
    other = tmp_path / "other"  # Saving to a folder other than the loop's must also work.
    assert later.pipeline.save(other) == other / "step_00000006"


def test_a_nodes_disk_that_cannot_be_written_is_passed_by(
    trained: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training, disk, folder = trained(), tmp_path / "disk", tmp_path / "checkpoints"
    disk.touch()
    training.run(3, folder, local_folder=disk)
    assert sorted(PipelineFolder(folder).steps()) == [3]
    assert f"{disk}: " in caplog.text
    assert f"the checkpoint of iteration 3 is written directly to {folder}" in caplog.text
    with pytest.raises(
        ConfigError, match="local_folder x was passed without folder; also pass a folder"
    ):
        trained().run(3, None, local_folder="x")


def test_a_signal_saves_and_ends_the_program(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, handler = trained(), signal.getsignal(signal.SIGUSR1)
    with pytest.raises(JobEnded) as ended:
        train(training.pipeline, 3, lambda: os.kill(os.getpid(), signal.SIGUSR1), folder=tmp_path)
    assert ended.value.code == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lease"] == ["step_00000004"]
    said = capsys.readouterr().out
    assert "successfully saved checkpoint from iteration       4" in said
    assert "training ends: signal SIGUSR1" in said
    assert signal.getsignal(signal.SIGUSR1) == handler


def test_what_would_lose_or_repeat_samples_is_refused(trained: Any, tmp_path: Path) -> None:
    training = trained()
    steps = training.pipeline.loop(9, folder=tmp_path)
    with pytest.raises(ConfigError, match="outside of the steps"):
        training.pipeline.step(batch_of(0))
    assert next(steps) == 0
    with pytest.raises(ConfigError, match=r"is 4; pass pipeline.share"):
        training.pipeline.step(batch_of(0, 8))
    training.pipeline.step(batch_of(0))
    with pytest.raises(ConfigError, match="called twice in step 0"):
        training.pipeline.step(batch_of(0))
    assert next(steps) == 1
    with pytest.raises(ConfigError, match="step 1 of Pipeline.loop was not trained"):
        next(steps)
    with pytest.raises(ConfigError, match="run all steps in one loop"):
        training.pipeline.loop(9)
    saved = trained()
    saved.run(1, tmp_path / "own")
    with pytest.raises(CheckpointError, match="was saved with 4 samples per step, but the script"):
        trained(8).run(2, tmp_path / "own")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"total_steps": -1}, "total_steps must be an integer of at least 0, got -1"),
        ({"total_steps": 1, "save_interval": 0}, "save_interval must be .* got 0"),
        ({"total_steps": 1, "keep": 1.5}, "keep must be .* got 1.5"),
        ({"total_steps": 1, "state": {"x": 3}}, r"state\['x'\] is a int"),
    ],
)
def test_settings_that_are_none_are_refused(
    options: dict[str, Any], said: str, trained: Any
) -> None:
    with pytest.raises(ConfigError, match=said):
        trained().pipeline.loop(**options)


def test_one_process_takes_the_largest_microbatch_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEGATRON_ADAPTIVE_JOB", raising=False)
    # Net has batch normalization, so a microbatch needs at least two samples.
    tower = {"x": torch.randn(4, 16)}
    for model, sample, size in (
        (Net(), batch_of(0, 4), 4),
        (Net(), batch_of(0, 5), 5),
        (Tower(), tower, 4),
    ):
        with Pipeline(model, sample) as pipeline:
            assert (pipeline.micro_batch_size, pipeline.plan) == (size, None)
        gc.collect()  # Reference cycles keep process groups alive, so collect them.
    assert "profile: " not in capsys.readouterr().out
    # If the estimated memory is too large, the pipeline measures the model. The error then states
    # how much memory the model needs.
    with pytest.raises(ConfigError, match=r"fit into memory: .* needs .* GB but has only 1e-06 GB"):
        Pipeline(Tower(), tower, memory_limit_bytes=1000.0)


def test_a_job_tells_where_to_save_and_hears_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = {
        "checkpoints": str(tmp_path / "c"),
        "progress": str(tmp_path / "p"),
        "model": str(tmp_path / "model.json"),
        "epoch": 1,
        "signature": "",
        "pipeline_size": 0,
        "replicas": 0,
        "micro_batch_size": 0,
        "partition": [],
    }
    monkeypatch.setenv("MEGATRON_ADAPTIVE_JOB", json.dumps(order))
    with pytest.raises(JobEnded) as ended:
        Training()
    assert ended.value.code == 79
    signature = json.loads((tmp_path / "model.json").read_text())["signature"]
    order |= {"signature": signature, "pipeline_size": 1, "replicas": 1, "micro_batch_size": 2}
    monkeypatch.setenv("MEGATRON_ADAPTIVE_JOB", json.dumps({**order, "partition": [2]}))
    training = Training()
    try:
        assert training.pipeline.partition == (2,)
        with pytest.raises(ConfigError, match="outside of Pipeline.loop"):
            training.pipeline.step(batch_of(0))
        training.run(3, tmp_path / "unused", save_interval=2)
        lines = [json.loads(line) for line in (tmp_path / "p" / PROGRESS_NAME).open()]
        assert lines[0]["total_iterations"] == 3
        assert {line["saved"] for line in lines if "saved" in line} == {2, 3}
        assert lines[-1]["ended"] == "all iterations are done"
        assert not (tmp_path / "unused").exists()
    finally:
        training.pipeline.close()
