"""Tests that layers move away from a slow rank, and do not move if all ranks are equally fast."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron.adaptive.schedule.action import each_count
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.status_files import PROGRESS_NAME

from .launch import TIMED_LAYERS, torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(250)]

LIMIT_S = 100.0
FLAGS = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--lr-decay-style constant --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--mock-data --attention-dropout 0.1 --hidden-dropout 0.1 --clip-grad 0 --log-interval 1 "
    "--pipeline-model-parallel-size 2 --distributed-timeout-minutes 1 "
    "--train-iters 8 --repartition auto --repartition-interval 4 --use-distributed-optimizer"
)
MOVED = re.compile(
    r"repartition: 3-3 -> ([0-9])-([0-9]): rank 1 of the pipeline takes [0-9.]+ times"
)


def train(folder: Path, *extra: str, world_size: int = 2) -> tuple[dict[int, float], str]:
    """Trains on ``world_size`` ranks with the flags ``extra``, and returns the losses and the log.

    The progress file is in ``folder``.

    The losses are keyed by iteration.
    """
    log = folder.with_suffix(".txt")
    arguments = [*FLAGS.split(), "--progress-dir", str(folder), *extra]
    torchrun(TIMED_LAYERS, arguments, world_size=world_size, log=log, limit_s=LIMIT_S)
    return losses_in(folder), log.read_text()


def slow_down(monkeypatch: pytest.MonkeyPatch, layer_ms: int, steps: str = "0-1000000") -> None:
    """Makes rank 1 of the following jobs six times as slow as rank 0.

    Args:
        monkeypatch: Object that restores the environment after the test.
        layer_ms: Milliseconds that a layer's forward pass takes on rank 0.
        steps: Steps in which rank 1 is slow. ``7-16`` means from the 7th to the 15th.
    """
    monkeypatch.setenv("LAYER_MS", str(layer_ms))
    monkeypatch.setenv("SLOW_RANKS", "1")
    monkeypatch.setenv("SLOW_FACTOR", "6")
    monkeypatch.setenv("SLOW_STEPS", steps)


def losses_in(folder: Path | str) -> dict[int, float]:
    """Returns the losses in the progress file in ``folder``, keyed by iteration."""
    lines = map(json.loads, Path(folder, PROGRESS_NAME).read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines if "iteration" in line}


def partition_in(saved: Path) -> list[int]:
    """Returns the partition in the only checkpoint in ``saved``."""
    (manifest,) = saved.glob("*/manifest.json")
    settings = json.loads(manifest.read_text())["config"]
    return settings["schedule"]["partition"]  # type: ignore[no-any-return]


@pytest.mark.long
def test_layers_leave_a_slow_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, traces = tmp_path / "saved", tmp_path / "traces"
    monkeypatch.setenv("LAYER_MS", "8")
    # Without a slow rank, no move can gain this much, even if other programs disturb the ranks.
    quiet, quiet_log = train(tmp_path / "quiet", "--repartition-gain", "0.5")
    assert "repartition:" not in quiet_log
    monkeypatch.setenv("SLOW_RANKS", "1")
    monkeypatch.setenv("SLOW_FACTOR", "6")
    more = ["--save", str(saved), "--save-interval", "50", "--trace-dir", str(traces)]
    more += ["--exit-interval", "7"]
    moved, log = train(tmp_path / "moved", *more)
    match = MOVED.search(log)
    assert match is not None, log
    first, second = map(int, match.groups())
    assert first + second == 6
    assert second < 3
    assert moved == {iteration: quiet[iteration] for iteration in range(1, 8)}
    # Traces and checkpoints must contain the current partition, and the job must be able to resume.
    assert read_run(f"{traces}-1").ranks[0].header.layers == (3, 3)
    assert read_run(traces).ranks[0].header.layers == (first, second)
    assert partition_in(saved) == [first, second]
    monkeypatch.delenv("SLOW_RANKS")
    again = ["--load", str(saved), "--save", str(tmp_path / "again"), "--save-interval", "50"]
    on, _ = train(tmp_path / "on", *again)
    assert on == {8: quiet[8]}
    assert partition_in(tmp_path / "again") == [first, second]


@pytest.mark.long
def test_layers_leave_a_slow_rank_that_runs_slices_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that layers move even if steps have different numbers of slices."""
    flags = "--seq-length 64 --max-position-embeddings 64 --variable-seq-lengths --slice-tokens 16 "
    flags += "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 6"
    still, _ = train(tmp_path / "still", *flags.split(), "--repartition", "off")
    slow_down(monkeypatch, layer_ms=4)
    moved, log = train(tmp_path / "moved", *flags.split(), "--trace-dir", str(tmp_path / "traces"))
    match = MOVED.search(log)
    assert match is not None, log
    assert int(match[2]) < 3
    assert moved == pytest.approx(still, rel=1e-6)
    run = read_run(tmp_path / "traces")
    numbers = {
        sum(each_count(len(run.ranks[0].lengths(n)), run.ranks[0].slices(n)))
        for n in run.iterations
    }
    assert len(numbers) > 1
    assert "gained nothing" not in log


@pytest.mark.long
def test_auto_chooses_layers_together_with_the_order_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, layer_ms=4)
    shape = "--num-layers 8 --model-chunks 2 --repartition off --log-interval 5 --fp16".split()
    shape += "--initial-loss-scale 1024 --loss-scale-window 3 --train-iters 16".split()
    folder = tmp_path / "moved"
    moved, log = train(folder, *shape, "--pipeline-schedule", "auto", "--trace-dir", str(folder))
    assert re.search(r"auto measures 8 more steps", log), log
    assert re.search(
        r"auto takes .*; with the v of 2-2-2-2 layers, a step takes .* at best", log
    ), log
    now = re.search(r"the stages of ([0-9-]+) layers are now placed in a (loop|v): moved in", log)
    assert now is not None, log
    layers, kind = tuple(map(int, now[1].split("-"))), now[2]
    header = read_run(folder).ranks[1].header
    assert (header.layers, header.placement) == (layers, kind)
    placement = Placement(num_ranks=2, num_chunks=2, kind=kind)  # type: ignore[arg-type]
    assert sum(layers[placement.stage_of(1, chunk)] for chunk in range(2)) < 4
    # After the move, the trace and the progress file must continue in another folder.
    assert read_run(f"{folder}-1").complete_iterations() == tuple(range(1, 13))
    assert read_run(folder).complete_iterations() == (13, 14, 15, 16)
    before = losses_in(f"{folder}-1")
    assert (max(before), max(moved)) == (12, 16)
    monkeypatch.setenv("LAYER_MS", "0")
    still, plain_log = train(tmp_path / "still", *shape)
    both = (before | moved).keys() & still.keys()
    assert {5, 10, 15, 16} <= both
    assert {number: (before | moved)[number] for number in both} == {
        number: still[number] for number in both
    }
    # Averages, learning rates and loss scales must continue after the move.
    assert len(numbers(log)) >= 8
    assert numbers(log) == numbers(plain_log)


@pytest.mark.long
def test_layers_that_auto_moved_return_if_the_slowness_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, layer_ms=4, steps="1-13")
    more = "--pipeline-schedule auto --repartition off --train-iters 26".split()
    more += ["--pipeline-placement", "loop"]
    _, log = train(tmp_path / "moved", *more)
    moved = re.search(r"the stages of (\d)-(\d) layers are now placed in a loop", log)
    assert moved is not None, log
    first, second = map(int, moved.groups())
    assert first > second
    returned = re.search(rf"repartition: {first}-{second} -> (\d)-(\d): ", log)
    assert returned is not None, log
    assert int(returned[2]) > second


@pytest.mark.long
def test_auto_moves_no_layers_if_the_slowness_passes_while_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, layer_ms=8, steps="1-5")
    # If ranks are equally fast, other programs cannot make a move of layers gain this much.
    more = "--pipeline-schedule auto --repartition off --train-iters 14 --repartition-gain 0.3"
    _, log = train(tmp_path / "stayed", *more.split(), "--pipeline-placement", "loop")
    assert "auto measures 8 more steps" in log
    assert log.count("auto simulates schedules") == 2
    assert re.search(r"auto takes \S+ \(", log), log
    assert "the stages of" not in log


def numbers(log: str) -> list[str]:
    """Returns the values that ``log`` contains for all iterations, except durations."""
    pattern = r"iteration +\d+/.*?(?=\| elapsed)|learning rate: \S+|lm loss: \S+|loss scale: \S+"
    return re.findall(pattern, log)


@pytest.mark.long
def test_expert_layers_are_not_taken_for_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that layers move correctly if expert layers take six times as long as dense layers."""
    experts = (
        "--num-experts 4 --moe-layer-freq [0,0]+[1]*4 --moe-ffn-hidden-size 32 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--disable-bias-linear --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --train-iters 11"
    ).split()
    monkeypatch.setenv("LAYER_MS", "6")
    monkeypatch.setenv("EXPERT_FACTOR", "6")
    traces = tmp_path / "traces"
    traced = ["--trace-dir", str(traces), "--diagnose-interval", "0"]
    moved, log = train(tmp_path / "moved", *experts, *traced, world_size=4)
    assert re.search("repartition: 3-3 -> [45]-[12]: ", log), log
    # Each layer with experts must be measured on its new stage in the last iteration.
    tokens: dict[int, Counter[int]] = {}
    for trace in read_run(traces).ranks.values():
        for layer, _, *counts in trace.experts[11].tokens:
            tokens.setdefault(layer, Counter())[trace.header.pp_rank] += sum(counts)
    first = read_run(traces).ranks[0].header.layers[0]
    assert {layer: list(ranks) for layer, ranks in tokens.items()} == {
        layer: [int(layer >= first)] for layer in range(2, 6)
    }
    assert len({ranks.total() for ranks in tokens.values()}) == 1
    monkeypatch.setenv("LAYER_MS", "0")
    off = ["--repartition", "off"]
    assert moved == train(tmp_path / "still", *experts, *off, world_size=4)[0]
