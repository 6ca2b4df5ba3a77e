"""Tests that the log of a job reports a slow rank."""

from pathlib import Path

import pytest

from .launch import TIMED_LAYERS, Ranks, tail, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(300)]

# Each rank has one layer, which mostly sleeps and computes little. So the rank that sleeps longer
# must be reported even if other programs make the computation several times slower.
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-4 --mock-data --vocab-size 127"
    " --tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --transport gloo"
    " --global-batch-size 4 --train-iters 2000 --eval-iters 0"
    " --trace-dir traces --diagnose-interval 8"
).split()
VARIABLES = {"LAYER_MS": "16", "SLOW_RANKS": "0", "SLOW_FACTOR": "4"}
LIMIT_S = 250.0


@pytest.mark.long
def test_the_log_names_a_slow_rank(tmp_path: Path) -> None:
    log = tmp_path / "output.txt"
    command = [str(TIMED_LAYERS), *FLAGS]
    ranks = Ranks(command, world_size=2, log=log, limit_s=LIMIT_S, variables=VARIABLES)

    def told() -> list[str]:
        return [line for line in log.read_text().splitlines() if "warning: slow rank:" in line]

    try:
        # The diagnosis has the lowest priority, so it may take long if the machine is busy.
        wait_until(lambda: told() or not ranks.processes(), lambda: tail(log), LIMIT_S, 0.2)
    finally:
        ranks.kill()
    # The log may also report a slow link if the machine is busy.
    assert len(told()) == 1, tail(log)
    assert "slow rank: rank 0 (stage 0," in told()[0]
