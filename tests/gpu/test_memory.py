"""Tests that a job frees its GPU memory, and that out-of-memory errors suggest flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multiprocess.launch import ROOT, SMALL_GPT, torchrun

from .device import HAS_GPU, gpu_or_rehearsal, needs_extension, needs_gpu
from .jobs import UNFUSED

LIMIT_S = 100.0
CLOSING = Path(__file__).with_name("closing_rank.py")
# Memory may grow by these numbers of bytes. torch counts allocated bytes exactly, but the GPU
# driver allocates memory in large blocks.
SLACK_BYTES = {"allocated_bytes": 1 << 20, "device_bytes": 32 << 20, "shared_bytes": 1 << 20}
FLAGS = (
    f"{SMALL_GPT} {UNFUSED} --num-layers 4 --train-iters 100 --mock-data"
    " --pipeline-model-parallel-size 2"
    " --pipeline-schedule adaptive --model-chunks 2 --split-backward True --use-cpu-initialization"
    " --hidden-size 256 --seq-length 128 --max-position-embeddings 128"
)


@needs_extension
@pytest.mark.multiprocess
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_memory_is_given_back_at_close(transport: str, tmp_path: Path) -> None:
    result = tmp_path / "held.json"
    arguments = [str(result), *FLAGS.split(), "--transport", transport]
    torchrun(CLOSING, arguments, world_size=2, log=tmp_path / "output.txt", limit_s=LIMIT_S)
    first, second, *_, last = json.loads(result.read_text())
    (_, kept), (working, left) = second, last
    # Compare the last run with the second, because the first run loads kernels, workspaces and
    # communicators that stay in memory.
    for name, slack in SLACK_BYTES.items():
        assert left[name] <= kept[name] + slack, (name, first, second, last)
    if HAS_GPU:
        assert left["allocated_bytes"] < working["allocated_bytes"], last
    if transport == "shm":
        assert left["shared_bytes"] < working["shared_bytes"], last


@pytest.mark.multiprocess
def test_too_large_a_batch_says_what_to_lower(tmp_path: Path) -> None:
    # These flags make the logits of one microbatch too large for any GPU.
    huge = (
        "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 2048"
        " --max-position-embeddings 2048 --micro-batch-size 4096 --global-batch-size 4096"
        " --train-iters 4 --lr 1e-3 --log-interval 1 --mock-data --vocab-size 200000"
        f" --tokenizer-type NullTokenizer --eval-iters 0 {UNFUSED}"
    ).split()
    log = tmp_path / "output.txt"
    with pytest.raises(AssertionError) as failure:
        torchrun(ROOT / "pretrain_gpt.py", huge, world_size=1, log=log, limit_s=LIMIT_S)
    said = [line for line in str(failure.value).splitlines() if "ran out of memory" in line]
    assert said, str(failure.value)
    for word in ("rank 0", "--micro-batch-size", "--recompute-granularity", "GiB"):
        assert word in said[0]


for mark in gpu_or_rehearsal:
    test_memory_is_given_back_at_close = mark(test_memory_is_given_back_at_close)
for mark in needs_gpu:
    test_too_large_a_batch_says_what_to_lower = mark(test_too_large_a_batch_says_what_to_lower)
