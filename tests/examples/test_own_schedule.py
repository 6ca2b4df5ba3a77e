"""Tests that ``examples/own_schedule`` gives the same losses as built-in schedules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.adaptive.cli import simulate

from ..multiprocess.launch import ROOT, torchrun

FOLDER = ROOT / "examples" / "own_schedule"
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 6 --lr 1e-3"
    " --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --log-interval 1"
    " --pipeline-model-parallel-size 2 --train-iters 3"
).split()
NAMES = ("eager_1f1b:eager_1f1b", "oldest_first:oldest_first")


def losses_of(folder: Path, *flags: str) -> list[str]:
    log = folder / "output.txt"
    torchrun(
        ROOT / "pretrain_gpt.py",
        [*FLAGS, *flags],
        world_size=2,
        log=log,
        limit_s=200,
        python_path=f"{FOLDER}:{ROOT}",
    )
    losses = re.findall(r"lm loss: (\S+)", log.read_text())
    assert losses, log.read_text()
    return losses


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_they_train_to_the_same_losses(tmp_path: Path) -> None:
    whole = losses_of(tmp_path, "--pipeline-schedule", "1f1b")
    assert losses_of(tmp_path, "--pipeline-schedule", NAMES[0]) == whole
    rule = losses_of(tmp_path, "--pipeline-schedule", NAMES[1], "--split-backward", "False")
    assert rule == whole
    assert losses_of(tmp_path, "--pipeline-schedule", NAMES[1], "--split-backward", "True")
    also = ("--auto-candidates", ",".join(NAMES))
    assert losses_of(tmp_path, "--pipeline-schedule", "auto", *also) == whole


@pytest.mark.long
def test_they_are_compared_with_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    schedules = ",".join(("1f1b", *NAMES))
    flags = f"--stages 4 --chunks 1 --microbatches 12 --latency 0.5 --schedules {schedules}"
    assert simulate.main(flags.split()) == 0
    output = capsys.readouterr().out
    assert all(f"{name} (loop, 1 chunk" in output for name in NAMES)
    eager, first = (
        float(re.search(rf"{name} \(.*?\)\s+(\S+)", output)[1]) for name in (NAMES[0], "1f1b")
    )
    assert eager < first


def test_each_is_a_page() -> None:
    for name in ("eager_1f1b", "oldest_first"):
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 40
