"""The text form: our files survive it, and files of the program it comes from are read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.order import legacy_name, read_legacy, write_legacy
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.step import pipeline_step


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


def test_the_last_twenty_iterations_or_one_as_text(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = read_run(write_run(1, 1, 1, iterations=25, folder=tmp_path / "long"))
    write_legacy(run, tmp_path / "order.txt")
    assert read_legacy(tmp_path / "order.txt", 1, 1).iterations == tuple(range(6, 26))
    path = tmp_path / "order.txt"
    write_legacy(read_run(write_run(2, 2, 2, placement="loop")), path, 2)
    lines = path.read_text().splitlines()
    assert lines[:9] == [
        "# run run-1",
        "# schedule adaptive",
        "# placement loop",
        "rank 0 iteration starts at timestamp 0.000000% iteration 2",
        "0, 0, forward start, 0.000000%",
        "0, 0, forward finished, 1.000000%",
        "0, 1, forward start, 1.000000%",
        "0, 1, forward finished, 2.000000%",
        "0, 2, forward start, 2.000000%",
    ]
    # Backward numbers count chunks from the last one, so chunk 0 of microbatch 1 is 2 + 1.
    assert "0, 3, backward finished, 15.000000%" in lines
    assert lines[-1] == "rank 1 iteration ends at timestamp 13.000000% iteration 2"


def test_a_file_without_markers_counts_iterations_by_repetition(tmp_path: Path) -> None:
    # Output of ranks that share a stream: records run together, other lines lie between.
    path = tmp_path / "trace_pipeline_2_model_chunks_1.txt"
    path.write_text(
        "[rank0] loading\n"
        "0, 0, forward start, 10.0%0, 0, forward finished, 11.0%\n"
        "1, 0, forward start, 11.5%\n"
        "0, 0, backward start, 14.0%1, 0, forward finished, 12.0%\n"
        "0, 0, can reduce, 14.2%\n"
        "0, 0, backward finished, 15.0%\n"
        "0, 0, forward start, 20.0%\n"
        "0, 0, forward finished, 21.0%\n"
        "0, 0, backward start, 22.0%\n"
    )
    run = read_legacy(path)
    assert run.iterations == (1, 2)
    assert [span.action for span in run.ranks[0].spans(1)] == ["F", "B"]
    assert [span.start_ns for span in run.ranks[0].spans(2)] == [20_000_000]
    assert run.truncated_lines == 1


def test_global_ranks_are_divided_among_pipeline_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trace_pipeline_2_model_chunks_1.txt"
    pair = "{0}, 0, forward start, 1.0%\n{0}, 0, forward finished, 2.0%\n"
    path.write_text("".join(pair.format(rank) for rank in range(4)))
    run = read_legacy(path)
    assert [trace.header.rank for trace in run.replica(0) if trace] == [0, 2]
    assert [trace.header.rank for trace in run.replica(1) if trace] == [1, 3]


def test_bad_files_are_refused(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    empty = tmp_path / "trace_pipeline_2_model_chunks_1.txt"
    empty.write_text("nothing here\n")
    with pytest.raises(TraceError, match="holds no action"):
        read_legacy(empty)
    with pytest.raises(TraceError, match="does not say its shape"):
        read_legacy(tmp_path / "order.txt")
    with pytest.raises(TraceError, match="cannot read"):
        read_legacy(tmp_path / "order.txt", 2, 1)
    empty.write_text("2, 0, forward start, 1.0%\n2, 0, forward finished, 2.0%\n")
    with pytest.raises(TraceError, match="not a multiple of 2"):
        read_legacy(empty)
    with pytest.raises(TraceError, match="iteration 8 is not in"):
        write_legacy(read_run(write_run()), tmp_path / "out.txt", 8)
    assert not (tmp_path / "out.txt").exists()
