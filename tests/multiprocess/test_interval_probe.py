"""Tests that a job with ``--probe-interval`` reports a slow link during training."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.adaptive.trace.read import read_run

from .launch import ROOT, Ranks, tail

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(700)]

FLAGS = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-4 --mock-data --vocab-size 127"
    " --tokenizer-type NullTokenizer --pipeline-model-parallel-size 3"
    " --transport tests.support.slow_link:SlowLink --global-batch-size 2 --train-iters 3"
    " --eval-iters 0 --log-interval 1 --trace-dir traces --probe-interval 2"
).split()
VARIABLES = {"SLOW_LINK": "1-2", "SLOW_LINK_S": "0.1"}
LIMIT_S = 200.0


TRIES = 3


def probe_lines(folder: Path) -> list[str]:
    """Runs the job in ``folder``, and returns the log lines that the probe has written."""
    folder.mkdir()
    log = folder / "output.txt"
    command = [str(ROOT / "pretrain_gpt.py"), *FLAGS]
    ranks = Ranks(command, world_size=3, log=log, limit_s=LIMIT_S, variables=VARIABLES)
    try:
        assert ranks.wait(LIMIT_S) == [0, 0, 0], tail(log)
    finally:
        ranks.kill()
    lines = [line for line in log.read_text().splitlines() if "  probe: " in line]
    assert lines, tail(log)
    return lines


@pytest.mark.long
def test_the_log_names_a_slow_link(tmp_path: Path) -> None:
    for number in range(TRIES):
        folder = tmp_path / str(number)
        lines = probe_lines(folder)
        assert not any("probe: ranks 0 and 1" in line for line in lines), lines
        if any("probe: ranks 1 and 2 on node" in line for line in lines):
            break
        # Other programs may slow down a rank temporarily, and the probe then skips the links of
        # this rank.
        assert any(f"probe: rank {rank} on node" in line for rank in range(3) for line in lines), (
            lines
        )
    else:
        pytest.fail(f"the slow link was not reported in {TRIES} runs: {lines}")
    run = read_run(folder / "traces")
    for rank in run.ranks.values():
        kinds = {number: [s.action for s in rank.spans(number)] for number in rank.iterations}
        assert {number: k.count("probe") for number, k in kinds.items()} == {1: 0, 2: 1, 3: 0}
