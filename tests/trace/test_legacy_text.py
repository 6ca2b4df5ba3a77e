"""Checks that traces written in the text format are read back unchanged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.legacy_text import legacy_name, read_legacy, write_legacy
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.step_view import pipeline_step


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(1, 1, 1), (2, 2, 8), (3, 4, 7)])
def test_order_and_times_survive(
    write_run: Callable[..., Path], tmp_path: Path, ranks: int, chunks: int, microbatches: int
) -> None:
    run = read_run(write_run(ranks, chunks, microbatches))
    path = tmp_path / f"{legacy_name(ranks, chunks)}.txt"
    write_legacy(run, path)
    again = read_legacy(path)
    assert (again.run, again.iterations) == (run.run, run.iterations)
    for iteration in run.iterations:
        assert bare_rows(again, iteration) == bare_rows(run, iteration)
    assert pipeline_step(again).schedule == "adaptive"
    assert pipeline_step(again).num_microbatches == microbatches


def bare_rows(run: RunTrace, iteration: int) -> list[list[tuple[str, int, int, int, int]]]:
    rows = pipeline_step(run, iteration).rows
    return [[(s.action, s.chunk, s.microbatch, s.start_ns, s.end_ns) for s in r] for r in rows]


def test_the_last_twenty_iterations_as_text(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = read_run(write_run(1, 1, 1, iterations=25, folder=tmp_path / "long"))
    named = tmp_path / "trace_pipeline_1_model_chunks_1.txt"
    write_legacy(run, named)
    assert read_legacy(named).iterations == tuple(range(6, 26))
    path = tmp_path / "order.txt"
    write_legacy(read_run(write_run(2, 2, 2, placement="loop", iterations=1)), path)
    lines = path.read_text().splitlines()
    assert lines[:9] == [
        "# run run-1",
        "# schedule adaptive",
        "# placement loop",
        "rank 0 iteration starts at timestamp 0.000000% iteration 1",
        "0, 0, forward start, 0.000000%",
        "0, 0, forward finished, 1.000000%",
        "0, 1, forward start, 1.000000%",
        "0, 1, forward finished, 2.000000%",
        "0, 2, forward start, 2.000000%",
    ]
    # For backward passes, the text format numbers the two chunks in reverse order. Therefore, chunk
    # 0 is the second chunk, and its microbatch 1 has the number 2 + 1.
    assert "0, 3, backward finished, 15.000000%" in lines
    assert lines[-1] == "rank 1 iteration ends at timestamp 13.000000% iteration 1"


def test_other_lines_are_skipped_and_a_cut_action_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace_pipeline_2_model_chunks_1.txt"
    path.write_text(
        "rank 0 iteration starts at timestamp 10.0% iteration 4\n"
        "0, 0, forward start, 10.0%\n"
        "0, 0, can reduce, 10.2%\n"
        "0, 0, forward finished, 11.0%\n"
        "0, 0, backward start, 22.0%\n"
    )
    run = read_legacy(path)
    assert run.iterations == (4,)
    assert [span.start_ns for span in run.ranks[0].spans(4)] == [10_000_000]
    assert (run.truncated_lines, run.missing_ranks) == (1, (1,))


def test_bad_files_are_refused(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    empty = tmp_path / "trace_pipeline_2_model_chunks_1.txt"
    empty.write_text("nothing here\n")
    with pytest.raises(TraceError, match="does not contain actions"):
        read_legacy(empty)
    with pytest.raises(TraceError, match="must be named trace_pipeline"):
        read_legacy(tmp_path / "order.txt")
    with pytest.raises(TraceError, match="cannot read"):
        read_legacy(tmp_path / "trace_pipeline_1_model_chunks_1.txt")
    empty.write_text("2, 0, forward start, 1.0%\n2, 0, forward finished, 2.0%\n")
    with pytest.raises(
        TraceError, match="has actions of rank 2, but its name states 2 pipeline ranks"
    ):
        read_legacy(empty)
    with pytest.raises(TraceError, match="does not contain iterations"):
        write_legacy(read_run(write_run(iterations=0)), tmp_path / "out.txt")
    assert not (tmp_path / "out.txt").exists()
