"""Tests that the trace of a real two-process job is complete, consistent and correct."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron.adaptive.trace.metrics import PARTS, run_figures
from megatron.adaptive.trace.monitor import LiveRun
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.span_columns import REASON, match_messages
from megatron.adaptive.trace.trace_format import CAUSES

from ..support.otlp_collector import Collector, serving
from .launch import ROOT, torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ITERATIONS, MICROBATCHES, CHUNKS = 5, 4, 2
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --max-position-embeddings 64 --micro-batch-size 1 --lr 1e-4 --mock-data --vocab-size 1023"
    " --tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --transport gloo"
    f" --global-batch-size {MICROBATCHES} --train-iters {ITERATIONS} --model-chunks {CHUNKS}"
    " --eval-iters 1 --eval-interval 3 --save saved --save-interval 3"
    " --trace-dir traces --trace-interval 2"
).split()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunTrace, Collector]:
    """Runs the job, and returns its trace and the collector that received the spans."""
    folder = tmp_path_factory.mktemp("job")
    with serving() as collector:
        flags = [*FLAGS, "--trace-otlp", collector.url]
        log = folder / "output.txt"
        torchrun(ROOT / "pretrain_gpt.py", flags, world_size=2, log=log, limit_s=200)
    return read_run(Path(folder / "traces")), collector


@pytest.fixture
def run(job: tuple[RunTrace, Collector]) -> RunTrace:
    return job[0]


def test_a_collector_got_all_spans_while_the_job_ran(job: tuple[RunTrace, Collector]) -> None:
    run, collector = job
    recorded = Counter(
        "megatron.train_step" if span.action == "step" else span.action
        for trace in run.ranks.values()
        for iteration in trace.iterations
        for span in trace.spans(iteration)
    )
    names = Counter(span["name"] for span in collector.spans)
    assert names.total() == recorded.total() == len({s["spanId"] for s in collector.spans})
    assert names["megatron.train_step"] == recorded["megatron.train_step"] == 2 * 3
    assert names["megatron.microbatch.forward"] == recorded["F"]
    assert names["megatron.save_checkpoint"] == recorded["checkpoint"] > 0
    assert collector.ranks == {"0", "1"}


def test_every_other_iteration_is_there(run: RunTrace) -> None:
    assert run.iterations == run.complete_iterations() == (1, 3, 5)
    assert run.notes() == []


def test_work_around_the_pipeline_is_told(run: RunTrace) -> None:
    for trace in run.ranks.values():
        table = trace.table([3])
        for kind in ("reduce", "optimizer", "step", "evaluate", "checkpoint"):
            assert table.where(kind).sum() == 1, kind
        step = table.of_kind("step")
        inside = table.of_kind("F", "B", "W", "reduce", "optimizer")
        assert (inside.start_ns >= step.start_ns[0]).all()
        assert (inside.end_ns <= step.end_ns[0]).all()
        after = table.of_kind("evaluate", "checkpoint")
        assert (after.start_ns >= step.end_ns[0]).all()
    # The first rank of a V placement reads the data of both the first and the last stage.
    assert [int(t.table([3]).where("data").sum()) for t in run.ranks.values()] == [MICROBATCHES, 0]


def test_messages_arrive_after_they_were_sent(run: RunTrace) -> None:
    matches = match_messages({rank: trace.table() for rank, trace in run.ranks.items()})
    # The two middle stages of a V placement with four stages are on the same rank, so they exchange
    # no messages.
    assert len(matches) == 3 * MICROBATCHES * 2 * 2
    assert (matches.arrived_ns > matches.sent_ns).all()
    assert (matches.taken_ns >= matches.arrived_ns).all()


def test_figures_add_up(run: RunTrace) -> None:
    figures = run_figures(run)
    counts = figures.count.sum(axis=2)
    assert (figures.count[..., :2] == MICROBATCHES).all()
    assert (counts > 0).all()
    assert (figures.transfer_bytes == figures.transfer_bytes[:, ::-1]).all()
    assert ((figures.bubble_fraction >= 0) & (figures.bubble_fraction < 1)).all()
    # Waits are only a part of a rank's idle time. The rest is overhead between actions.
    after_ns = 1e6 * figures.parts_ms[..., list(PARTS).index("after")]
    idle = figures.step_ns - figures.busy_ns - after_ns
    waits_ms = figures.parts_ms[..., 1:-2].sum(axis=2)
    assert (1e6 * waits_ms <= idle + 1_000_000).all()


def test_actions_and_waits_say_why(run: RunTrace) -> None:
    for trace in run.ranks.values():
        for span in trace.table().spans():
            if span.action == "wait":
                assert span.reason in CAUSES
                assert span.of in ("F", "B", "W")
            elif span.action in ("F", "B", "W"):
                assert span.reason in ("turn", "deepest", "filler")
                assert span.in_flight_bytes > 0


def test_messages_were_seen_to_arrive(run: RunTrace) -> None:
    for trace in run.ranks.values():
        receives = trace.table().of_kind("receive")
        assert len(receives)
        # The reason "seen" means that the threads of gloo noticed the arrival of the message.
        assert (receives.reason == REASON["seen"]).all()


def test_who_looks_on_sees_how_far_it_is(run: RunTrace) -> None:
    snapshot = LiveRun(run.origin).refresh()
    assert (snapshot.state, snapshot.detail) == ("ended", "all iterations are done")
    assert (snapshot.iteration, snapshot.total_iterations) == (ITERATIONS, ITERATIONS)
    assert [rank.is_ended for rank in snapshot.ranks] == [True, True]
    assert [rank.now.iteration for rank in snapshot.ranks if rank.now] == [ITERATIONS] * 2
    for name in ("loss", "tokens_per_s", "learning_rate", "grad_norm", "step_ms"):
        assert snapshot.last(name) is not None, name
