"""Figures of steps small enough to compute by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.trace.event import Span, trace_file_name
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.step import PipelineStep, pipeline_step
from megatron.adaptive.trace.summary import format_table, summarize


def test_bubble_of_all_forward_then_all_backward(write_run: Callable[..., Path]) -> None:
    # p ranks and m microbatches: a rank idles (p - 1) / (m + p - 1) of the step.
    summary = summarize(pipeline_step(read_run(write_run(4, 1, 8))))
    assert summary.step_ms == pytest.approx((8 + 3) * 3.0)
    for rank in summary.ranks:
        assert rank.busy_ms == pytest.approx(24.0)
        assert rank.bubble_fraction == pytest.approx(3 / 11)
        assert (rank.num_actions, rank.peak_microbatches) == (16, 8)
        assert rank.wait_ms == pytest.approx(16 * 7e-6)
        assert rank.peak_in_flight_bytes == 1 << 20
        assert rank.transfer_bytes == 1600
    assert summary.bubble_fraction == pytest.approx(3 / 11)


def step_of(*rows: tuple[Span, ...]) -> PipelineStep:
    end = max(span.end_ns for row in rows for span in row)
    missing = tuple(rank for rank, row in enumerate(rows) if not row)
    return PipelineStep(1, "x", "loop", len(rows), 1, 2, rows, missing, 0, end)


def test_mean_and_spread_per_kind() -> None:
    spans = [Span("F", 0, 0, 0, 2_000_000, 1), Span("F", 0, 1, 2_000_000, 6_000_000, 1)]
    spans += [Span("B", 0, 0, 6_000_000, 9_000_000, 1), Span("W", 0, 0, 9_000_000, 10_000_000, 1)]
    rank = summarize(step_of(tuple(spans))).ranks[0]
    assert (rank.times["F"].mean_ms, rank.times["F"].stdev_ms) == (3.0, 1.0)
    assert (rank.times["B"].count, rank.times["W"].mean_ms) == (1, 1.0)
    assert rank.peak_microbatches == 2
    assert rank.bubble_fraction == 0.0


def test_missing_ranks_do_not_enter_the_mean(write_run: Callable[..., Path]) -> None:
    folder = write_run(4, 1, 8)
    (folder / trace_file_name(1)).unlink()
    summary = summarize(pipeline_step(read_run(folder)))
    assert summary.missing == (1,)
    assert [rank.pp_rank for rank in summary.ranks] == [0, 2, 3]
    assert summary.bubble_fraction == pytest.approx(3 / 11)


def test_table_has_a_line_per_rank_and_json_holds_the_same(write_run: Callable[..., Path]) -> None:
    summary = summarize(pipeline_step(read_run(write_run(2, 2, 4))))
    lines = format_table(summary).splitlines()
    assert lines[0].split()[:3] == ["actions", "busy", "ms"]
    assert lines[1].startswith("rank 0 (stages 0, 2)")
    assert "1.00 ± 0.00" in lines[2]
    assert "8 (1.0 MiB)" in lines[2]
    again = json.loads(json.dumps(summary.to_json()))
    assert again["ranks"][1]["times"]["B"]["mean_ms"] == 2.0


def test_a_step_without_length_has_no_bubble() -> None:
    assert summarize(step_of((Span("F", 0, 0, 0, 0, 1),))).bubble_fraction == 0.0
