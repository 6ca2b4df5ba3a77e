"""Tests the durations, sleeps and checks of the emulated pipeline."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.emulated.competitors import COMPETITORS
from benchmarks.emulated.modules import EmulatedChunk
from benchmarks.emulated.scenarios import SCENARIOS, Draws, Times
from benchmarks.emulated.table import goals, make_table, markdown, simulated_s, speedup
from harness.emulated_work import RankWork, WorkError, seconds_of
from harness.sleeping_ranks import DTYPE, WIDTH, DelayedQueue, Sleeper
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import Arrival, HeldArrival, Label

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
TIMES = Times(forward_s=1e-4, backward_s=2e-4, weight_s=3e-4)
ONE = Placement(num_ranks=4, num_chunks=1)
LOOP = Placement(num_ranks=4, num_chunks=2)
V = Placement(num_ranks=4, num_chunks=2, kind="v")


def drawn(scenario: str, repetition: int = 0, num_ranks: int = 4, microbatches: int = 6) -> Draws:
    return Draws(
        scenario=SCENARIOS[scenario],
        num_ranks=num_ranks,
        num_microbatches=microbatches,
        times=TIMES,
        seed=3,
        repetition=repetition,
    )


def table(draws: Draws, placement: Placement) -> dict[ActionKind, list[list[float]]]:
    return seconds_of(draws.workload(placement))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_single_chunk_takes_what_its_halves_take(scenario: str) -> None:
    """Checks that a chunk takes as long as the two halves into which it can be split."""
    draws = drawn(scenario)
    whole, halves = table(draws, ONE), table(draws, LOOP)
    factor = 1 / SCENARIOS[scenario].rank_factor
    speeds = [1.0, 1.0, factor, 1.0, 1.0, 1.0, factor, 1.0]
    for kind in ActionKind:
        for rank in range(4):
            both = [[s * speeds[h] for s in halves[kind][h]] for h in (2 * rank, 2 * rank + 1)]
            sums = [sum(pair) / speeds[rank] for pair in zip(*both, strict=True)]
            assert whole[kind][rank] == pytest.approx(sums, abs=1e-11)
    assert table(drawn(scenario), ONE) == whole
    if SCENARIOS[scenario].jitter_sigma or SCENARIOS[scenario].length_sigma:
        assert table(drawn(scenario, repetition=1), ONE) != whole


def test_a_slow_link_delays_both_ways_and_no_other_link() -> None:
    draws = drawn("slow link")
    assert draws.delay_s(1, 2) == draws.delay_s(2, 1) == 2 * TIMES.forward_s
    assert draws.delay_s(0, 1) == draws.delay_s(1, 1) == 0.0


def chunk_of(stage: int) -> tuple[EmulatedChunk, RankWork, torch.Tensor, torch.Tensor]:
    """Returns the chunk of ``stage`` on 4 ranks, its work, and the chunk's input and output."""
    draws = drawn("quiet", microbatches=2)
    work = RankWork(LOOP, stage % 4, table(draws, LOOP), Sleeper())
    chunk = EmulatedChunk(stage, LOOP.num_stages)
    chunk.work = work
    received = message(1, stage * (stage + 1) / 2).requires_grad_(stage > 0)
    return chunk, work, received, chunk(received)


def message(microbatch: int, total: float) -> torch.Tensor:
    tensor = torch.zeros(1, WIDTH, dtype=DTYPE)
    tensor[0, 0], tensor[0, 1] = microbatch, total
    return tensor


def kinds(work: RankWork) -> list[ActionKind]:
    return [span.kind for span in work.spans]


@pytest.mark.parametrize("stage", [3, 7])
def test_a_split_backward_sleeps_b_for_inputs_and_w_for_weights(stage: int) -> None:
    chunk, work, received, output = chunk_of(stage)
    if chunk.is_last:
        outputs, gradients = [chunk.loss(output)], None
    else:
        outputs, gradients = [output], [message(1, 36 - (stage + 1) * (stage + 2) / 2)]
    (gradient,), groups = stage_backward_input(outputs, gradients, [received], chunk.parameters())
    assert kinds(work) == [F, B]
    assert gradient is not None
    assert gradient[0, :2].tolist() == [1, 36 - stage * (stage + 1) / 2]
    stage_backward_weight(chunk.parameters(), groups)
    assert kinds(work) == [F, B, W]
    chunk.check_gradient(1)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_whole_backward_sleeps_both_and_sends_at_the_end(stage: int) -> None:
    chunk, work, received, output = chunk_of(stage)
    output.backward(message(1, 36 - (stage + 1) * (stage + 2) / 2))
    assert kinds(work) == [F, W, B]
    if stage:
        assert received.grad is not None
        assert received.grad[0, 2] >= work.spans[-1].end_s
    chunk.check_gradient(1)


def test_another_microbatchs_tensor_or_a_skipped_stage_is_an_error() -> None:
    chunk, work, _, output = chunk_of(3)
    with pytest.raises(WorkError, match="F of stage 3, microbatch 0 got microbatch 1"):
        work.forward(3, message(1, 6), 0)
    with pytest.raises(WorkError, match="a sum of 5, but the sum must be 6"):
        chunk(message(0, 5))
    with pytest.raises(WorkError, match="B of stage 3, microbatch 1 got microbatch 0"):
        output.backward(message(0, 26))


def test_a_step_is_complete_when_each_action_ran_once() -> None:
    work = RankWork(ONE, 1, table(drawn("quiet", microbatches=1), ONE), Sleeper())
    work.forward(1, message(0, 1), 0)
    work.backward(1, message(0, 7), 0, whole=False)
    work.weights(1, 0, 0.5)
    with pytest.raises(WorkError, match="W of stage 1, microbatch 0 ran 0.5x"):
        work.check_complete()
    work.weights(1, 0, 0.5)
    work.check_complete()
    assert work.peak == 1.0
    work.weights(1, 0)
    with pytest.raises(WorkError, match="ran 2x"):
        work.check_complete()


def put(queue: DelayedQueue, peer: int, sent_s: float) -> None:
    payload = torch.tensor([0.0, 0.0, sent_s], dtype=DTYPE)
    queue.put(HeldArrival(Label(0, Action(F, 0, peer)), peer, 0, lambda: payload))


def test_a_delayed_message_lets_others_pass_and_comes_when_its_time_has_passed() -> None:
    queue = DelayedQueue({0: 1e6, 1: 0.0})
    put(queue, 0, time.monotonic())
    put(queue, 1, time.monotonic())
    item = queue.poll()
    assert isinstance(item, Arrival)
    assert item.peer == 1
    assert queue.wait(time.monotonic() + 0.01) is None
    queue, sent_s = DelayedQueue({0: 0.02}), time.monotonic()
    put(queue, 0, sent_s)
    assert isinstance(queue.wait(sent_s + 60), Arrival)
    assert time.monotonic() >= sent_s + 0.02


def test_simulated_1f1b_is_its_closed_form() -> None:
    closed_form_s = (6 + 4 - 1) * 2 * (1e-4 + 2e-4 + 3e-4)
    assert simulated_s(COMPETITORS["1f1b"], drawn("quiet")) == pytest.approx(closed_form_s)


def test_gains_are_compared_with_those_of_the_simulation() -> None:
    names, draws = (
        ("megatron 1f1b", "megatron interleaved", "adaptive, V"),
        drawn("jitter 0.3", microbatches=8),
    )
    records = [
        {
            "competitor": name,
            "scenario": "jitter 0.3",
            "repetition": 0,
            "makespan_s": 2 * simulated_s(COMPETITORS[name], draws),
            "peak": 4.0,
        }
        for name in names
    ]
    table = make_table(records, ranks=4, microbatches=8, times=TIMES, seed=3)
    assert all(steps.of_bound == pytest.approx(0.5) for steps in table.values())
    assert speedup(table, "megatron 1f1b", "jitter 0.3") == 1
    assert speedup(table, "zb-v", "jitter 0.3") is None
    rows = {row.what: row for row in goals(table, ranks=4, microbatches=8)}
    gains = [row for title, row in rows.items() if "share of the simulated gain" in title]
    assert [row.value for row in gains] == pytest.approx([1.0, 1.0])
    assert all(row.met for row in gains)
    assert rows["step without any cost over the measured one, worst"].met is False
    assert markdown(table).count("| 0.500-0.500 |") == 3
