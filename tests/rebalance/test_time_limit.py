"""Tests that no rank waits longer than the timeout for a decision of another rank."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import pytest

from megatron.adaptive.rebalance.time_limit import limit_of_search, result_within
from tests.multiprocess.launch import torchrun

SCRIPT = Path(__file__).with_name("slow_choice.py")
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3"
    " --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --log-interval 1"
    " --pipeline-model-parallel-size 2 --train-iters 6"
).split()


def test_an_action_is_left_behind_at_the_limit() -> None:
    end = threading.Event()
    assert result_within(0.05, lambda: end.wait(60), False) is False
    end.set()
    assert result_within(60.0, lambda: 7, 0) == 7
    with pytest.raises(KeyError):
        result_within(60.0, lambda: {}["none"], 0)


def test_a_search_ends_before_other_ranks_stop_to_wait_for_it() -> None:
    # The other ranks wait for at most 60 s, so the search must end earlier.
    assert limit_of_search(60.0, datetime.timedelta(minutes=1)) == 30.0
    assert limit_of_search(60.0, datetime.timedelta(minutes=10)) == 60.0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_slow_simulation_of_schedules_does_not_hold_up_training(tmp_path: Path) -> None:
    log = tmp_path / "output.txt"
    flags = [*FLAGS, "--pipeline-schedule", "auto"]
    torchrun(SCRIPT, flags, world_size=2, log=log, limit_s=250)
    text = log.read_text()
    assert "auto simulates schedules for at most 0.5 s; all ranks wait for rank 0" in text
    assert "auto keeps adaptive (" in text
    assert "no schedule was simulated within 0.5 s; the processors are busy" in text


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_slow_simulation_of_layers_does_not_hold_up_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "output.txt"
    flags = [*FLAGS, "--repartition", "auto", "--repartition-interval", "4"]
    torchrun(SCRIPT, flags, world_size=2, log=log, limit_s=250)
    assert "layers stay, because no partition was simulated within 0.5 s" in log.read_text()
