"""``auto`` moves the stages of a job that trains, and nothing of the training is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.trace.live_state import PROGRESS_NAME
from megatron.adaptive.trace.read import read_run

from .launch import torchrun

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(200),
]

WORKER = Path(__file__).with_name("move_worker.py")
LIMIT_S = 90.0
# A V puts both stages that have layers on rank 0, a loop one on each rank.
FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 7 "
    "--lr 1e-3 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 255 --mock-data "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --clip-grad 0 --log-interval 3 "
    "--fp16 --initial-loss-scale 1024 --loss-scale-window 3 "
    "--pipeline-schedule auto --pipeline-model-parallel-size 2 --model-chunks 2 "
    "--partition 4-0-0-4 --distributed-timeout-minutes 1"
)


def train(name: str, extra: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """What each rank saw, and the log."""
    results, log = folder / name, folder / f"{name}.txt"
    torchrun(
        WORKER,
        [str(results), *FLAGS.split(), *extra.split()],
        world_size=2,
        log=log,
        limit_s=LIMIT_S,
    )
    return [json.loads(Path(f"{results}.{rank}").read_text()) for rank in range(2)], log.read_text()


def last_iteration(traces: Path | str) -> dict[str, Any]:
    """The last line of a run's progress that is about an iteration."""
    lines = Path(traces, PROGRESS_NAME).read_text().splitlines()
    told = [json.loads(line) for line in lines]
    return [line for line in told if "iteration" in line][-1]  # type: ignore[no-any-return]


def numbers(ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """What the ranks with the loss said, in order: one of them at each iteration."""
    return sorted(entry for rank in ranks for entry in rank["iterations"] if entry[-1])


def test_a_job_that_moves_trains_as_one_that_stays(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    moved, log = train("moved", f"--trace-dir {traces}", tmp_path)
    stayed, plain_log = train("stayed", "--pipeline-placement v", tmp_path)
    assert "the stages now lie in a loop: moved in" in log
    assert "in a v at best" in log
    assert "the stages" not in plain_log
    # Losses, learning rates, samples and loss scales, bit for bit; the loss is elsewhere now.
    assert numbers(moved) == numbers(stayed)
    assert [[bool(entry[-1]) for entry in rank["iterations"]] for rank in moved] == [
        [True] * 4 + [False] * 3,
        [False] * 4 + [True] * 3,
    ]
    # Averages go on across the move.
    assert mean_losses(log) == mean_losses(plain_log)
    assert [rank["left_behind"] for rank in moved] == [[0], [0]]
    assert read_run(f"{traces}-1").complete_iterations() == (1, 2, 3, 4)
    assert read_run(traces).complete_iterations() == (5, 6, 7)
    # So does what the trainer tells of its progress.
    assert [last["iteration"] for last in map(last_iteration, (f"{traces}-1", traces))] == [4, 7]


def mean_losses(log: str) -> list[str]:
    """The loss of each line of the log."""
    return [
        line.split("lm loss: ")[1].split(" |")[0] for line in log.splitlines() if "lm loss:" in line
    ]
