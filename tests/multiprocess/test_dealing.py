"""Tests that a slow replica gets fewer microbatches, and that losses do not change."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from megatron.adaptive.engine.schedule_record import ScheduleRecord

from .launch import TIMED_LAYERS, torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.long]

BATCH, FIRST, END, LAST = 40, 7, 16, 24
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --mock-data --vocab-size 127"
    " --tokenizer-type NullTokenizer --attention-dropout 0.1 --hidden-dropout 0.1 --eval-iters 0"
    f" --global-batch-size {BATCH} --train-iters {LAST} --log-interval 1"
).split()


def losses_of(folder: Path, *flags: str) -> list[float]:
    arguments = [*FLAGS, *flags, "--progress-dir", str(folder)]
    folder.mkdir()
    torchrun(TIMED_LAYERS, arguments, world_size=2, log=folder / "output.txt", limit_s=200)
    lines = map(json.loads, (folder / "progress.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_slow_replica_gets_less_and_losses_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.json"
    # Ranks sleep for longer than any delay that other programs may cause.
    slow = {"LAYER_MS": "8", "SLOW_RANKS": "0", "SLOW_FACTOR": "3", "SLOW_STEPS": f"{FIRST}-{END}"}
    for name, value in slow.items():
        monkeypatch.setenv(name, value)
    balanced = ("--balance-replicas", "speed")
    dealt = losses_of(tmp_path / "dealt", *balanced, "--record-schedule", str(record))
    loaded = ScheduleRecord.load(record)
    counts = {step: len(loaded.dealt(step, BATCH)[0]) for step in loaded.steps}
    assert len(counts) == len(dealt) == LAST

    # Other programs also use this machine, so check only the median. Ideally, the slow replica
    # would get 10 of 40 microbatches.
    slowed, after = range(FIRST + 3, END), range(END + 3, LAST + 1)
    assert statistics.median(counts[step] for step in slowed) <= 15, counts
    assert statistics.median(counts[step] for step in after) >= 17, counts

    monkeypatch.setenv("LAYER_MS", "0")
    # Replicas that get the same microbatches again must compute bitwise equal losses.
    again = losses_of(tmp_path / "again", *balanced, "--replay-schedule", str(record))
    assert again == dealt
    undealt = losses_of(tmp_path / "undealt", "--balance-replicas", "off")
    assert dealt == pytest.approx(undealt, rel=1e-6)
