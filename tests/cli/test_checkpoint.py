"""Tests that ``checkpoint`` lists checkpoints and finds damaged files, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint.folder import INDEX, CheckpointFolder, PipelineFolder, StepFolders
from megatron.adaptive.cli import checkpoint
from megatron.adaptive.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.test_folder import MANIFEST

TENSORS = {"w": {"type": "float32", "whole": [2, 3], "parts": [[[0, 0], [2, 3], "a", 0]]}}
PIPELINE = {"seed": 1, "loss_scale": None, "extra": {}, "groups": [], "plain": {}, "kind": None}


@pytest.fixture(params=[CheckpointFolder, PipelineFolder])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StepFolders:
    """Returns a folder with complete checkpoints of steps 1 and 2."""
    folders: StepFolders = request.param(tmp_path / "saved")
    for step in (1, 2):
        body = PIPELINE
        if request.param is CheckpointFolder:
            body = {**MANIFEST, "progress": {**MANIFEST["progress"], "iteration": step}}
        partial = folders.begin(step)
        (partial / "__0_0.distcp").write_bytes(bytes(range(256)) * step)
        (partial / "metadata.json").write_text("{}")
        (partial / INDEX).write_text(json.dumps({"tensors": TENSORS, "objects": {}}))
        folders.commit(step, body)
    return folders


def test_a_damaged_file_is_named(folder: StepFolders, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["verify", str(folder.path)]) == 0
    assert capsys.readouterr().out.count("verified") == 2
    shard = folder.complete_path(2) / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    assert checkpoint.main(["verify", str(folder.path), "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first["problems"] == []
    assert len(second["problems"]) == 1
    assert f"{shard} is damaged (block 0, bytes 0 to 511" in second["problems"][0]
    assert checkpoint.main(["verify", str(folder.complete_path(1))]) == 0
    assert checkpoint.main(["list", str(folder.path)]) == 0  # This command reads only manifests.


def test_one_is_described(folder: StepFolders, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["show", str(folder.path)]) == 0
    assert "  w: float32 [2, 3] in 1" in capsys.readouterr().out
    index = folder.complete_path(2) / INDEX
    index.write_bytes(b"\xff" * index.stat().st_size)
    with pytest.raises(DamagedCheckpointError, match=r"cannot read .*index\.json"):
        checkpoint.main(["show", str(folder.path)])
    with pytest.raises(CheckpointError, match="step 3; choose one of the steps 1, 2"):
        checkpoint.main(["verify", str(folder.path), "--step", "3"])


def test_it_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from megatron.adaptive.__main__ import main; status = main()\n"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", script, "checkpoint", "verify", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path) in done.stderr
