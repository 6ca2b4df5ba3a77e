"""Tests which iteration is shown by default, and how the rows of ranks are labelled."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.step_view import pipeline_step, stages_of_rank
from megatron.adaptive.trace.trace_format import IterationStart, Span, block_text, trace_file_name
from tests.trace.conftest import make_header, row_of, simulate, step_of, write_spans


def test_a_step_holds_the_executed_order_from_time_zero(write_run: Callable[..., Path]) -> None:
    step = pipeline_step(read_run(write_run(2, 2, 4)), 2)
    rows = [[(s.action, s.chunk, s.microbatch, s.start_ns, s.end_ns) for s in r] for r in step.rows]
    assert rows == simulate(2, 2, 4)
    assert step.step_ns == max(row[-1][-1] for row in simulate(2, 2, 4))
    assert (step.schedule, step.num_microbatches, step.missing) == ("adaptive", 4, ())
    assert step.actions == ("F", "B")
    assert all(span.wait_ns == 7 for row in step.rows for span in row)


def test_waits_are_cut_to_the_step(tmp_path: Path) -> None:
    spans = (
        Span("wait", 0, 0, 50, 110, 1, of="F", reason="input"),
        Span("F", 0, 0, 110, 120, 1),
        Span("wait", 0, 0, 125, 130, 1, of="B", reason="order"),
        Span("B", 0, 0, 130, 140, 1),
    )
    write_spans(tmp_path, make_header(0), [Span("F", 0, 0, 100, 105, 1)])
    write_spans(tmp_path, make_header(1), spans)
    step = pipeline_step(read_run(tmp_path))
    assert step.waits[0] == ()
    waits = [(wait.start_ns, wait.end_ns, wait.of, wait.reason) for wait in step.waits[1]]
    assert waits == [(0, 10, "F", "input"), (25, 30, "B", "order")]
    assert (step.dp_rank, step.num_replicas) == (0, 1)


def test_the_default_is_the_last_complete_iteration(write_run: Callable[..., Path]) -> None:
    folder = write_run(2, 1, 4, iterations=2)
    for rank in range(2):
        with (folder / trace_file_name(rank)).open("a") as file:
            file.write(block_text(IterationStart(3, 4), [row_of(Span("F", 0, 0, 1, 2, 3))]))
    run = read_run(folder)
    assert pipeline_step(run).iteration == 2
    assert pipeline_step(run, 3).iteration == 3
    path = write_run(2, 1, 4, iterations=1, folder=folder.parent / "cut") / trace_file_name(0)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    # There is no complete iteration, so the last iteration is shown although it is incomplete.
    assert pipeline_step(read_run(path.parent)).iteration == 1


def test_an_iteration_out_of_range_says_which_exist(write_run: Callable[..., Path]) -> None:
    run = read_run(write_run(iterations=3))
    with pytest.raises(TraceError, match=r"iteration 9 is not in .*, which has iterations 1-3"):
        pipeline_step(run, 9)


def test_a_run_without_anything_to_draw_is_refused(write_run: Callable[..., Path]) -> None:
    folder = write_run(1, iterations=0)
    with pytest.raises(TraceError, match="does not contain iterations"):
        pipeline_step(read_run(folder))
    (path,) = folder.iterdir()
    path.unlink()
    write_spans(folder, make_header(0, 1), [Span("optimizer", -1, -1, 1, 2, 1)])
    with pytest.raises(TraceError, match="does not contain F, B or W"):
        pipeline_step(read_run(folder))


@pytest.mark.parametrize(
    ("placement", "table"), [("loop", [(0, 2, 4), (1, 3, 5)]), ("v", [(0, 3, 4), (1, 2, 5)])]
)
def test_stages_of_a_rank(placement: str, table: list[tuple[int, ...]]) -> None:
    header = make_header(0, 2, num_chunks=3, placement=placement)
    assert [stages_of_rank(header, rank) for rank in range(2)] == table


@pytest.mark.parametrize(("num_chunks", "label"), [(1, "stage 1"), (2, "rank 1 (stages 1, 3)")])
def test_labels(write_run: Callable[..., Path], num_chunks: int, label: str) -> None:
    assert pipeline_step(read_run(write_run(2, num_chunks, 2))).label(1) == label


def test_a_placement_of_a_newer_program_is_named(write_run: Callable[..., Path]) -> None:
    with pytest.raises(
        TraceError, match="placement is 'odd', but this program supports only loop and v"
    ):
        read_run(write_run(2, placement="odd"))


def test_bubble_of_all_forward_then_all_backward(write_run: Callable[..., Path]) -> None:
    # If there are p ranks and m microbatches, a rank is idle for a fraction (p - 1) / (m + p - 1)
    # of a step.
    folder = write_run(4, 1, 8)
    # Rank 1 has no trace. The mean over ranks must ignore it.
    (folder / trace_file_name(1)).unlink()
    step = pipeline_step(read_run(folder))
    assert step.missing == (1,)
    assert [len(row) for row in step.rows] == [16, 0, 16, 16]
    assert step.step_ns == (8 + 3) * 3_000_000
    assert step.bubble_fractions == pytest.approx(dict.fromkeys((0, 2, 3), 3 / 11))
    assert step.bubble_fraction == pytest.approx(3 / 11)
    assert step_of((Span("F", 0, 0, 0, 0, 1),)).bubble_fraction == 0
