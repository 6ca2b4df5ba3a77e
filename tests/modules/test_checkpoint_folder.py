"""Checkpoints appear whole or not at all, whenever the writer dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.folder import PipelineFolder, read_pipeline_manifest
from megatron.adaptive.errors import CheckpointError


def write(folder: Path, step: int, text: str = "tensors", keep: int | None = None) -> Path:
    (PipelineFolder(folder).begin(step) / "__0_0.distcp").write_text(text)
    path = PipelineFolder(folder).commit(step, {"step": step})
    if keep is not None:
        PipelineFolder(folder).keep(keep)
    return path


def find(folder: Path, step: int | None) -> Path:
    return PipelineFolder(folder).find(step)


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    for step in (2, 10, 100_000_000):
        assert write(tmp_path, step).is_dir()
    assert find(tmp_path, None).name == "step_100000000"
    assert find(tmp_path, 2).name == "step_00000002"
    assert read_pipeline_manifest(find(tmp_path, 10))["step"] == 10


def test_one_that_was_being_written_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (PipelineFolder(tmp_path).begin(2) / "__0_0.distcp").write_text("half")
    assert find(tmp_path, None).name == "step_00000001"
    write(tmp_path, 3)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def test_the_former_comes_back_where_its_successor_died(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    # As between the two renames of a commit.
    find(tmp_path, 1).rename(tmp_path / ".step_00000001.replaced")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find(tmp_path, None)
    PipelineFolder(tmp_path).begin(2)
    assert (find(tmp_path, None) / "__0_0.distcp").read_text() == "old"


def test_another_takes_its_place(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    write(tmp_path, 1, "new")
    assert (find(tmp_path, 1) / "__0_0.distcp").read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["step_00000001"]


def test_the_oldest_go(tmp_path: Path) -> None:
    for step in (3, 5, 4):
        write(tmp_path, step, keep=2)
    assert PipelineFolder(tmp_path).latest() == 5
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "__0_0.distcp").write_text("t")
    with pytest.raises(CheckpointError, match="has 1 bytes and was written with 7"):
        read_pipeline_manifest(path)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing"):
        read_pipeline_manifest(path)
    (path / "pipeline.json").write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match="format is 9"):
        read_pipeline_manifest(path)
    (path / "pipeline.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pipeline_manifest(path)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7: there are steps 1"):
        find(tmp_path, 7)
