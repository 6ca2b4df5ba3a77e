"""Tests that the trainer chooses, records, replays and reads orders of slices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.adaptive.engine.schedule_record import ScheduleRecord
from megatron.adaptive.schedule.action import each_count
from megatron.adaptive.schedule.catalog import make_schedule
from megatron.adaptive.schedule.schedule_file import save
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.status_files import PROGRESS_NAME
from megatron.adaptive.trace.step_view import pipeline_step
from megatron.adaptive.trace.whatif.answers import what_if

from .launch import TIMED_LAYERS, torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(640)]

# The limit applies to each job. An idle machine with two processors needs a tenth of this time.
LIMIT_S = 200.0
# Ranks wait for a chosen order for at most half of the timeout. On a busy machine, choosing an
# order can take half a minute.
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 3 --lr 1e-3 "
    "--eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --log-interval 1 "
    "--attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 2 --model-chunks 2 "
    "--distributed-timeout-minutes 2 --train-iters 6 --lr-decay-style constant"
)


def losses_of(folder: Path, flags: str) -> list[float]:
    """Trains with ``flags``, and returns the losses of all iterations. Files are in ``folder``."""
    arguments = [*FLAGS.split(), *flags.split(), "--progress-dir", str(folder)]
    torchrun(TIMED_LAYERS, arguments, world_size=2, log=folder.with_suffix(".txt"), limit_s=LIMIT_S)
    lines = map(json.loads, (folder / PROGRESS_NAME).read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def orders_in(record: Path) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Returns the recorded orders of both ranks for each step in the file ``record``."""
    loaded = ScheduleRecord.load(record)
    return {
        # Each step has 3 microbatches.
        step: tuple(loaded.codes(step, rank, 3) for rank in range(2))
        for step in loaded.steps
    }


@pytest.mark.long
def test_orders_are_chosen_recorded_repeated_and_read_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = (tmp_path / f"{name}.json" for name in ("first", "again", "other"))
    ran = losses_of(tmp_path / "ran", f"--sequence-slices 3 --record-schedule {first}")
    replay = f"--replay-schedule {first} --record-schedule"
    assert losses_of(tmp_path / "same", f"--sequence-slices 3 {replay} {again}") == ran
    assert orders_in(again) == orders_in(first)
    # A run with a different number of slices replays the recorded order as closely as possible.
    cut = losses_of(tmp_path / "cut", f"--sequence-slices 2 {replay} {other}")
    assert cut == pytest.approx(ran, rel=1e-5)
    assert ScheduleRecord.load(other).shape.slices == 2

    file = tmp_path / "order.json"
    loop = Placement(num_ranks=2, num_chunks=1)
    save(make_schedule("seq-1f1b", loop, 3, num_slices=3), file)
    flags = f"--model-chunks 1 --pipeline-schedule file --schedule-file {file}"
    assert losses_of(tmp_path / "file", f"{flags} --sequence-slices 3") == pytest.approx(
        ran, rel=1e-5
    )

    # A slow rank gives layers away, and slices must continue on the new stages.
    monkeypatch.setenv("LAYER_MS", "4")
    monkeypatch.setenv("SLOW_RANKS", "1")
    monkeypatch.setenv("SLOW_FACTOR", "6")
    traces = tmp_path / "traces"
    auto = f"--pipeline-schedule auto --sequence-slices 2 --train-iters 14 --trace-dir {traces}"
    assert losses_of(tmp_path / "auto", auto)[: len(ran)] == pytest.approx(ran, rel=1e-5)
    log = (tmp_path / "auto.txt").read_text()
    assert re.search(r"auto takes [a-z0-9-]+ \((v|loop), 2 chunks, 2 slices", log), log
    assert re.search(r"the stages of [0-9-]+ layers are now placed in a (v|loop)", log), log
    run = read_run(traces)
    assert run.ranks[0].slices(run.iterations[-1]) == 2
    assert run.iterations[-1] in run.complete_iterations()


@pytest.mark.long
def test_the_number_of_slices_is_chosen_from_two_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = "--train-iters 10 --global-batch-size 2 --partition 1-1-1-1"
    ran = losses_of(tmp_path / "ran", f"{longer} --sequence-slices 2")
    # Exact times make an action take equally long for any number of tokens. So slices only increase
    # the step time.
    monkeypatch.setenv("LAYER_MS", "10")
    monkeypatch.setenv("EXACT_TIMES", "1")
    traces = tmp_path / "traces"
    auto = f"{longer} --pipeline-schedule auto --sequence-slices auto --trace-dir {traces}"
    assert losses_of(tmp_path / "auto", auto) == pytest.approx(ran, rel=1e-6)
    log = (tmp_path / "auto.txt").read_text()
    # Sequences of 64 tokens can have at most 4 slices.
    assert "auto has measured 4 slices per sequence, and measures 2 next" in log
    assert "sequences now run in 2 slices: rebuilt in" in log
    assert re.search(
        r"auto takes .*simulated step times by number of slices: 1: .* ms, 2: .* 4: ", log
    )
    hinted = f"{longer} --pipeline-schedule hinted --sequence-slices 2"
    assert losses_of(tmp_path / "hinted", hinted) == pytest.approx(ran, rel=1e-6)
    pattern = r"hinted adapts .* a forward pass, a message takes [0-9.]+, B [0-9.]+ and W "
    assert re.search(pattern, (tmp_path / "hinted.txt").read_text())
    assert "sequences are no longer cut into slices: rebuilt in" in log
    run = read_run(traces)
    assert run.ranks[0].slices(run.iterations[-1]) == 1
    assert run.iterations[-1] in run.complete_iterations()


@pytest.mark.long
def test_the_length_of_slices_is_chosen_from_two_that_were_measured(tmp_path: Path) -> None:
    lengths = "--variable-seq-lengths --train-iters 9 --global-batch-size 6"
    ran = losses_of(tmp_path / "ran", f"{lengths} --slice-tokens 16")
    traces = tmp_path / "traces"
    auto = f"{lengths} --pipeline-schedule auto --slice-tokens auto --trace-dir {traces}"
    assert losses_of(tmp_path / "auto", auto) == pytest.approx(ran, rel=1e-6)
    log = (tmp_path / "auto.txt").read_text()
    assert "auto has measured slices of 16 tokens, and measures 32 next" in log
    assert "slices now have 32 tokens: rebuilt in" in log
    pattern = r"auto takes slices of (\d+) tokens, adaptive \((v|loop), 2 chunks.*simulated step "
    chosen = re.search(pattern + r"times by slice length: 16: .* ms, 32: .* ms, 64: ", log)
    assert chosen is not None, log
    if chosen[1] != "32" or chosen[2] != "v":
        assert f"slices now have {chosen[1]} tokens" in log.split("auto takes")[1]
    run = read_run(traces)
    assert run.iterations[-1] in run.complete_iterations()


@pytest.mark.long
def test_cap_and_placement_are_chosen_for_a_given_length_of_slices(tmp_path: Path) -> None:
    # If --slice-tokens is a number, the activation cap and the placement must still be chosen.
    lengths = "--variable-seq-lengths --train-iters 6 --global-batch-size 6 --slice-tokens 32"
    ran = losses_of(tmp_path / "ran", lengths)
    auto = losses_of(tmp_path / "auto", f"{lengths} --pipeline-schedule auto")
    assert auto == pytest.approx(ran, rel=1e-6)
    log = (tmp_path / "auto.txt").read_text()
    assert "auto simulates schedules for at most 60 s" in log
    pattern = r"auto takes slices of 32 tokens, adaptive \((v|loop), 2 chunks.*slice length: 32: "
    chosen = re.search(pattern, log)
    assert chosen is not None, log
    assert ("stages are placed in a loop: rebuilt in" in log) == (chosen[1] == "loop")


def test_traces_name_microbatches_and_the_slices_that_ran(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    lengths = "--variable-seq-lengths --slice-tokens 16 --model-chunks 1 --train-iters 2"
    losses_of(tmp_path / "ran", f"{lengths} --global-batch-size 6 --trace-dir {traces}")
    run = read_run(traces)
    assert run.complete_iterations() == (1, 2)
    for trace in run.ranks.values():
        for iteration in run.iterations:
            forwards = sum(span.action == "F" for span in trace.spans(iteration))
            rows = trace.num_microbatches[iteration]
            counts = each_count(rows, trace.slices(iteration))
            # The longest document spans several slices, and several short documents share a slice.
            assert sum(counts) == forwards > rows > 1
            lengths_of_rows = [positions for positions, *_ in trace.lengths(iteration)]
            assert lengths_of_rows == [16 * count for count in counts]
    step = pipeline_step(run)
    numbers = {step.numbers(span) for row in step.rows for span in row}
    most = max(each_count(step.num_microbatches, step.num_slices))
    assert most > 1
    assert any(number.endswith(f".{most - 1}") for number in numbers)
    assert len(what_if(run).recorded_s) == 2
