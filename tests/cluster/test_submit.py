"""Tests the batch script for Slurm and the error message on a machine without Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.cli import submit
from megatron.adaptive.errors import ConfigError, SetupError

ROOT = Path(__file__).resolve().parents[2]
MIXED = """
MODEL=tiny
HOMOGENEOUS_CLUSTER=false
NODES='a10:1x2 v100:2x1'
PIPELINE_MP_SIZE=4
LOG_DIR='my logs'
JOB_NAME="a job's name"
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "a run" / "conf.sh"
    path.parent.mkdir()
    path.write_text("MODEL=tiny\nPIPELINE_MP_SIZE=2\nNNODES=2\nNPROC_PER_NODE=1\n")
    return path


@pytest.mark.parametrize("requeue", ["true", "false"])
@pytest.mark.parametrize("mixed", [True, False])
def test_the_script_is_clean(
    requeue: str, mixed: bool, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if mixed:
        conf.write_text(MIXED)
    assert submit.main([str(conf), "--dry-run", "--set", f"REQUEUE={requeue}"]) == 0
    text = capsys.readouterr().out
    assert not (conf.parent / "logs").exists()
    assert "#SBATCH --signal=USR1@90" in text
    assert f"#SBATCH --{'no-' if requeue == 'false' else ''}requeue" in text
    assert ("scontrol requeue" in text) == (requeue == "true")
    assert text.count("#SBATCH hetjob") == mixed
    assert ("HET_GROUP_1" in text) == mixed
    assert "%" not in text.replace("%j", "").replace("%%", "").replace("% 10000", "").replace(
        "' %s'", ""
    )
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("no shellcheck: bash prerequisite.sh --test")
    done = subprocess.run(
        [shellcheck, "-"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_without_slurm(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "tr"):
        (programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(
        SetupError, match="sbatch is not installed on this machine: .* run_master.sh"
    ):
        submit.main([str(conf)])
    assert not (conf.parent / "logs").exists()


def test_slurm_must_be_told_how_many(conf: Path) -> None:
    conf.write_text("MODEL=tiny\nNNODES=2\n")
    with pytest.raises(ConfigError, match="require NPROC_PER_NODE"):
        submit.main([str(conf), "--dry-run"])
