"""A job says by itself which of its ranks is slow."""

from pathlib import Path

import pytest

from .launch import TIMED_LAYERS, torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-4 --mock-data --vocab-size 127"
    " --tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --transport gloo"
    " --global-batch-size 4 --train-iters 12 --eval-iters 0"
    " --trace-dir traces --diagnose-interval 8"
).split()


def test_the_log_names_a_slow_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "output.txt"
    for name, value in {"LAYER_MS": "2", "SLOW_RANKS": "0", "SLOW_FACTOR": "4"}.items():
        monkeypatch.setenv(name, value)
    torchrun(TIMED_LAYERS, FLAGS, world_size=2, log=log, limit_s=200)
    told = [line for line in log.read_text().splitlines() if "warning: slow rank:" in line]
    # A link may be slow as well: on a busy machine messages are.
    assert len(told) == 1, told
    assert "slow rank: rank 0 (stage 0," in told[0]
