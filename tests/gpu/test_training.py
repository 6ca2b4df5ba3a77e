"""Training on a GPU: one process, two processes that share it, and running out of its memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.multiprocess.launch import ROOT, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LIMIT_S = 240.0
FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64"
    " --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0"
    " --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --log-interval 1"
    " --mock-data --vocab-size 1023 --tokenizer-type NullTokenizer --eval-iters 0 --seed 7"
    # On the device each stage would draw its weights from a generator of its own.
    " --use-cpu-initialization"
).split()


def train(
    folder: Path, flags: str, *, world_size: int, iterations: int = 4, base: list[str] = FLAGS
) -> list[float]:
    """Train; returns the losses that the log tells."""
    log = folder / f"log-{world_size}-{abs(hash(flags))}.txt"
    torchrun(
        ROOT / "pretrain_gpt.py",
        [*base, "--train-iters", str(iterations), *flags.split()],
        world_size=world_size,
        log=log,
        limit_s=LIMIT_S,
    )
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", log.read_text())]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-schedule 1f1b",
        "--pipeline-schedule adaptive",
        "--pipeline-schedule adaptive --num-virtual-stages-per-pipeline-rank 2"
        " --pipeline-placement v --split-backward True",
    ],
)
def test_two_processes_on_one_gpu_train_as_one_does(flags: str, tmp_path: Path) -> None:
    alone = train(tmp_path, "", world_size=1)
    two = train(tmp_path, f"--pipeline-model-parallel-size 2 {flags}", world_size=2)
    assert len(alone) == 4
    assert two == pytest.approx(alone, rel=1e-4)


@pytest.mark.multiprocess
def test_bf16_trains_on_one_gpu(tmp_path: Path) -> None:
    losses = train(tmp_path, "--bf16", world_size=1, iterations=8)
    assert losses[-1] < losses[0]


@pytest.mark.multiprocess
def test_too_large_a_batch_says_what_to_lower(tmp_path: Path) -> None:
    # Logits of one microbatch alone take a multiple of any GPU's memory.
    huge = "--micro-batch-size 4096 --global-batch-size 4096 --seq-length 2048".split()
    base = [*FLAGS, *huge, "--max-position-embeddings", "2048"]
    with pytest.raises(AssertionError) as failure:
        train(tmp_path, "--vocab-size 200000", world_size=1, base=base)
    said = [line for line in str(failure.value).splitlines() if "ran out of memory" in line]
    assert said, str(failure.value)
    for word in ("rank 0", "--micro-batch-size", "--recompute-granularity", "GiB"):
        assert word in said[0]
