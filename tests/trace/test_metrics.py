"""Compares the statistics of small runs with known values, and of large runs with a simulator."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace import metrics as figures_module
from megatron.adaptive.trace.metrics import (
    PARTS,
    WAIT_CAUSES,
    RunFigures,
    compute_ns,
    rank_figures,
    run_figures,
)
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.trace_format import KINDS, Span, trace_file_name
from tests.support.synthetic_trace import SyntheticRun, write_synthetic
from tests.trace.conftest import make_header, table_of, write_spans

#   time     0    10   20   30   40   50   60   70
#   actions  F0---|    |F1--|B0--------|    W0--|       of iteration 3
MS = 1_000_000
SPANS = (
    Span("data", -1, 0, 2, 5, 3),
    Span("wait", 0, 1, 10, 20, 3, of="F", reason="input", peer=1),
    Span("wait", 0, 0, 50, 60, 3, of="W", reason="memory"),
    Span("receive", 0, 1, 19, 20, 3, bytes=8, peer=1, of="F", reason="seen"),
    Span("send", 0, 0, 10, 11, 3, bytes=16, peer=1, of="F"),
    Span("F", 0, 0, 0, 10, 3, bytes=16, in_flight_bytes=100, queue_depth=1),
    Span("F", 0, 1, 20, 30, 3, bytes=24, in_flight_bytes=200),
    Span("B", 0, 0, 30, 50, 3, in_flight_bytes=200),
    Span("W", 0, 0, 60, 70, 3, piece=1),
    Span("optimizer", -1, -1, 80, 95, 3),
    Span("F", 0, 0, 100, 140, 4),
    Span("checkpoint", -1, -1, 96, 99, 3),
)


def test_figures_of_a_rank_by_hand() -> None:
    figures = rank_figures(table_of(SPANS), 1)
    assert figures.iterations.tolist() == [3, 4]
    assert (figures.start_ns.tolist(), figures.end_ns.tolist()) == ([0, 100], [70, 140])
    assert (figures.num_actions.tolist(), figures.busy_ns.tolist()) == ([4, 1], [50, 40])
    by_cause = dict(zip(WAIT_CAUSES, figures.wait_ns[0].tolist(), strict=True))
    assert by_cause == {"unknown": 0, "input": 10, "memory": 10, "order": 0, "group": 0}
    by_kind = dict(zip(KINDS, figures.kind_ns[0].tolist(), strict=True))
    assert [by_kind[k] for k in ("F", "data", "optimizer", "checkpoint")] == [20, 3, 15, 3]
    assert figures.count[:, 0].tolist() == [[2, 1, 1], [1, 0, 0]]
    assert figures.mean_ns[0, 0].tolist() == [10, 20, 10]
    # Without the time for reading data, the forward passes take 7 and 10 ns.
    assert figures.median_ns[0, 0].tolist() == [8.5, 20, 10]
    assert figures.mad_ns[0, 0].tolist() == [1.5, 0, 0]
    assert np.isnan(figures.mean_ns[1, 0, 1])
    assert figures.peak_microbatches.tolist() == [2, 1]
    assert figures.peak_in_flight_bytes.tolist() == [200, 0]
    assert figures.transfer_bytes[0] == 40


def test_a_frozen_chunk_keeps_no_microbatches() -> None:
    spans = [Span("F", chunk, n, 10 * n + 5 * chunk, 1, 3) for chunk in range(2) for n in range(3)]
    spans += [Span("B", 1, 0, 100, 1, 3)]
    for frozen, peak in ((0, 6), (1, 3)):
        figures = rank_figures(table_of(spans), 2, frozen=lambda _, frozen=frozen: frozen)
        assert figures.peak_microbatches.tolist() == [peak]


def test_overlapping_actions_are_busy_once_and_iterations_do_not_overlap() -> None:
    spans = [Span("F", 0, 0, 0, 6, 1), Span("F", 0, 1, 2, 4, 1), Span("B", 0, 0, 5, 8, 1)]
    # The clock was set back between the iterations, so iteration 2 starts before iteration 1 ends.
    spans += [Span("F", 0, 0, 3, 5, 2)]
    assert rank_figures(table_of(spans), 1).busy_ns.tolist() == [8, 2]


def test_reading_counts_only_where_it_lies_within_an_action() -> None:
    spans = [Span("data", -1, 0, 1, 4, 1), Span("F", 0, 0, 0, 10, 1)]
    spans += [
        Span("data", -1, 1, 11, 14, 1),
        Span("data", -1, 2, 18, 22, 1),
        Span("B", 0, 0, 15, 20, 1),
    ]
    assert compute_ns(table_of(spans)).tolist() == [3, 7, 3, 4, 5]


def test_a_gpu_waits_only_for_the_data_of_the_microbatch_that_it_has_begun() -> None:
    spans = [
        Span("F", 0, 0, 0, 10, 1),
        Span("data", -1, 0, 1, 3, 1),
        # The CPU runs ahead of the GPU, and reads the data of the next microbatch while the GPU
        # still runs this pass.
        Span("data", -1, 1, 4, 9, 1),
        Span("F", 0, 1, 10, 20, 1),
    ]
    assert compute_ns(table_of(spans), "cuda").tolist() == [8, 2, 5, 10]
    # If each microbatch has two slices, both forward passes belong to microbatch 0.
    assert compute_ns(table_of(spans), "cuda", lambda _: 2).tolist() == [8, 2, 5, 10]
    assert compute_ns(table_of(spans), "cpu").tolist() == [3, 2, 5, 10]


def test_steps_are_those_of_each_pipeline(tmp_path: Path) -> None:
    # Ranks 0 and 2 form one pipeline, and ranks 1 and 3 form another pipeline. Rank 3 recorded only
    # iteration 1.
    for rank in range(4):
        header = make_header(rank, 2, world_size=4, pp_rank=rank // 2, dp_rank=rank % 2)
        begin = 100 * (rank % 2) + 10 * (rank // 2)
        spans = [
            Span("wait", 0, 0, begin - 30, begin, 1, of="F", reason="input"),
            Span("F", 0, 0, begin, begin + 20, 1),
            Span("F", 0, 0, begin + 1000, begin + 1030, 2),
        ]
        write_spans(tmp_path, header, spans[: 2 if rank == 3 else 3])
    figures = run_figures(read_run(tmp_path))
    assert figures.ranks.tolist() == [0, 1, 2, 3]
    assert figures.step_ns.tolist() == [[30] * 4, [40, 30, 40, 30]]
    assert figures.bubble_fraction[0].tolist() == pytest.approx([1 / 3] * 4)
    assert np.isnan(figures.bubble_fraction[1, 3])
    parts_ns = np.nan_to_num(figures.parts_ms) * 1e6
    before, after = (parts_ns[..., list(PARTS).index(part)] for part in ("before", "after"))
    assert before == pytest.approx(np.array([[0, 0, 10, 10], [0, 0, 10, 0]]))
    assert after == pytest.approx(np.array([[10, 10, 0, 0], [10, 0, 0, 0]]))
    # The wait before the first action of a step is counted as a wait, but is not part of the step.
    assert figures.wait_ns[0, :, 1].tolist() == [30] * 4
    assert figures.parts_ms[0, :, 1].tolist() == [0] * 4
    only = run_figures(read_run(tmp_path), [2, 77], ranks=[1, 3])
    assert (only.iterations.tolist(), only.ranks.tolist()) == ([2], [1, 3])
    assert only.num_actions.tolist() == [[1, 0]]


def test_handing_a_result_over_is_no_work() -> None:
    table = table_of(
        [
            Span("F", 0, 0, 0, 2_000_000, 1),
            Span("send", 0, 0, 1_600_000, 1_990_000, 1, of="F", peer=1),
            # A short send in the middle of an action does not shorten its compute time.
            Span("F", 0, 1, 3_000_000, 5_000_000, 1),
            Span("send", 0, 1, 3_100_000, 3_200_000, 1, of="F", peer=1),
            # An action may continue after its send, because it then frees memory. Its compute time
            # ends when the send begins.
            Span("F", 0, 2, 6_000_000, 9_000_000, 1),
            Span("send", 0, 2, 7_000_000, 8_800_000, 1, of="F", peer=1),
        ]
    )
    computed_ns = [1_610_000, 390_000, 2_000_000, 100_000, 1_200_000, 1_800_000]
    assert compute_ns(table).tolist() == computed_ns
    figures = rank_figures(table, 1)
    assert figures.busy_ns.tolist() == [4_810_000]
    assert figures.mean_ns[0, 0, 0] == pytest.approx(7_000_000 / 3)
    # An action on a GPU counts with its whole duration, because sends on the host do not stop the
    # GPU.
    assert compute_ns(table, "cuda").tolist() == table.duration_ns.tolist()
    assert rank_figures(table, 1, device="cuda").busy_ns.tolist() == [7_000_000]


@pytest.mark.parametrize(
    "run",
    [
        SyntheticRun(num_ranks=4, replicas=2, iterations=3),
        SyntheticRun(num_ranks=3, num_chunks=2, schedule="interleaved", num_microbatches=6),
        SyntheticRun(num_ranks=4, num_chunks=2, schedule="zb-v", hosts=4, clock_offset_s=3.0),
    ],
)
def test_bubbles_are_those_of_the_simulator(tmp_path: Path, run: SyntheticRun) -> None:
    truth = write_synthetic(tmp_path, run)
    figures = run_figures(read_run(tmp_path))
    # The times of spans are rounded to nanoseconds, and the offsets between clocks of several hosts
    # are only estimates.
    limit = 1e-5 if run.hosts == 1 else 5e-4
    assert np.abs(figures.bubble_fraction - truth.bubble_fraction).max() < limit
    idle = figures.bubble_fraction * figures.step_ns
    attributed = 1e6 * figures.parts_ms[..., 1:-1].sum(axis=2)
    if run.hosts == 1:
        assert attributed == pytest.approx(idle, abs=2000)


def assert_equal(first: RunFigures, second: RunFigures) -> None:
    for name in RunFigures.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


def test_several_processes_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_synthetic(tmp_path, SyntheticRun(replicas=2, iterations=3))
    run = read_run(tmp_path)
    alone = run_figures(run, workers=1)
    assert_equal(alone, run_figures(run, workers=2))
    monkeypatch.setattr(figures_module, "SERIAL_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert_equal(alone, run_figures(run))


def test_damage_is_named_whoever_reads(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SyntheticRun(iterations=2))
    path = tmp_path / trace_file_name(2)
    text = path.read_text()
    path.write_text(text.replace("\n[", "\n(", 3).replace("\n(", "\n[", 2))
    for workers in (1, 2):
        with pytest.raises(TraceError, match=r"trace_rank_00002\.jsonl:5 is not a span"):
            run_figures(read_run(tmp_path), workers=workers)


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """Writes the traces of two ranks in a step of 12 ms, and returns their folder.

    The second rank runs actions and waits for actions from 4 ms to 11 ms.
    """
    rows = (
        (
            Span("F", 0, 0, 0, 3 * MS, 1),
            Span("wait", 0, 0, 3 * MS, 9 * MS, 1, of="B", reason="input"),
            Span("B", 0, 0, 10 * MS, 12 * MS, 1),
        ),
        (
            Span("wait", 0, 0, -1 * MS, 4 * MS, 1, of="F", reason="input"),
            Span("F", 0, 0, 4 * MS, 6 * MS, 1),
            Span("wait", 0, 0, 6 * MS, 7 * MS, 1, of="B", reason="order"),
            Span("wait", 0, 0, 7 * MS, 8 * MS, 1, of="B", reason="memory"),
            Span("B", 0, 0, 8 * MS, 11 * MS, 1),
        ),
    )
    for rank, row in enumerate(rows):
        header = make_header(rank, num_microbatches=1)
        moved = [
            Span(s.action, 0, 0, s.start_ns + 10**9, s.end_ns + 10**9, 1, of=s.of, reason=s.reason)
            for s in row
        ]
        write_spans(tmp_path / "traces", header, moved, num_microbatches=1)
    return tmp_path / "traces"


def test_the_parts_of_a_step_add_up_to_it(two_ranks: Path) -> None:
    parts = run_figures(read_run(two_ranks)).parts_ms
    measured = [dict(zip(PARTS, row, strict=True)) for row in parts[0].tolist()]
    nothing = dict.fromkeys(PARTS, 0.0)
    assert measured[0] == {**nothing, "busy": 5, "input": 6, "rest": 1}
    # This rank waits for the first input before its first action. The wait must be counted only as
    # part of the time before the first action.
    assert measured[1] == {**nothing, "busy": 5, "order": 1, "memory": 1, "before": 4, "after": 1}
    assert np.allclose(parts.sum(axis=-1), 12)
