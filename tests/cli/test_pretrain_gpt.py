"""Tests the errors that a trainer process reports, and runs the trainer without a launcher."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron.adaptive.cli import pretrain_gpt
from megatron.adaptive.engine.folder_lease import Lease

from ..multiprocess.launch import run_forked, run_ranks, tail
from ..support.recorded_sleeps import record_sleeps

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 120.0
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 "
    "--lr 1e-3 --mock-data --vocab-size 100 --eval-iters 0 --log-interval 1"
)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Removes the environment variables of a launcher, in case one has started the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_complains_before_the_others(
    rank: int, as_rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = record_sleeps(as_rank)
    as_rank.setenv("RANK", str(rank))
    as_rank.setenv("WORLD_SIZE", "2")
    assert pretrain_gpt.run([*FLAGS.split(), "--pipeline-model-parallel-size", "3"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert len(waited) == rank


@pytest.mark.usefixtures("as_rank")
def test_a_process_alone_trains(tmp_path: Path) -> None:
    command = [str(ROOT / "pretrain_gpt.py"), *FLAGS.split()]
    done = run_forked(command, folder=tmp_path, limit_s=WATCHDOG_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(
        line.startswith(
            "using world size: 1, data-parallel-size: 1, tensor-model-parallel size: 1, "
            "pipeline-model-parallel size: 1"
        )
        for line in lines
    ), done.stdout
    logged = [line for line in lines if " iteration " in line and "lm loss:" in line]
    assert [int(re.search(r"iteration\s+(\d+)/\s*3 ", line)[1]) for line in logged] == [1, 2, 3]  # type: ignore[index]
    assert "Traceback" not in done.stderr
    # The run must write no files, because no output was requested.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiprocess
def test_a_job_warns_once_of_flags_without_effect_and_of_skipped_steps(tmp_path: Path) -> None:
    """Checks a job in float16 whose loss scale is too high for its few steps."""
    log = tmp_path / "log"
    more = "--fp16 --pipeline-model-parallel-size 2 --trace-interval 5 --wandb-exp-name first"
    command = [str(ROOT / "pretrain_gpt.py"), *FLAGS.split(), *more.split()]
    assert run_ranks(command, world_size=2, log=log, limit_s=WATCHDOG_S) == 0, tail(log)
    assert [line for line in log.read_text().splitlines() if "warning" in line] == [
        "warning: these flags have no effect: --wandb-exp-name first (needs --wandb-project), "
        "--trace-interval 5 (needs --trace-dir); remove them, or set what they need",
        "warning: 3 of 3 steps were skipped because gradients were infinite or NaN in float16, so "
        "the model is unchanged; lower --initial-loss-scale 4294967296, or use --bf16",
    ]


@pytest.mark.multiprocess
def test_a_second_job_on_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    """Checks that a second job is rejected, because the jobs would overwrite each other's files."""
    first = Lease(tmp_path)
    first.claim(job="first", restarts=0)
    first.keep_up(print)
    try:
        arguments = [*FLAGS.split(), "--save", str(tmp_path), "--save-interval", "1"]
        command = [str(ROOT / "pretrain_gpt.py"), *arguments]
        done = run_forked(command, folder=tmp_path, limit_s=WATCHDOG_S)
    finally:
        first.end()
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path} is written by process {os.getpid()} on " in line
    assert "(job first) since 20" in line
    assert not list(tmp_path.glob("*iter_*"))
