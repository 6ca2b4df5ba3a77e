"""Reading a run back: resumed, killed, incomplete and mixed folders; one clock for all ranks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.event import IterationStart, Span, TraceHeader, trace_file_name
from megatron.adaptive.trace.read import describe_numbers, read_run
from megatron.adaptive.trace.recorder import Recorder


def write_lines(folder: Path, header: TraceHeader, *records: IterationStart | Span) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / trace_file_name(header.rank)
    path.write_text("".join(record.to_line() + "\n" for record in (header, *records)))
    return path


def test_a_run_is_read_whole(write_run: Callable[..., Path]) -> None:
    run = read_run(write_run(2, 2, 4, iterations=3))
    assert (run.run, run.world_size, run.num_ranks, run.num_chunks) == ("run-1", 2, 2, 2)
    assert run.iterations == run.complete_iterations() == (1, 2, 3)
    assert run.missing_ranks == ()
    assert run.truncated_lines == 0
    spans = run.ranks[1].spans[2]
    assert [span.action for span in spans].count("F") == 8
    assert spans[0].action == "data"
    assert run.ranks[0].num_microbatches[2] == 4


def test_a_truncated_last_line_is_dropped_and_counted(write_run: Callable[..., Path]) -> None:
    folder = write_run(2, 1, 4, iterations=2)
    path = folder / trace_file_name(1)
    path.write_bytes(path.read_bytes()[:-10])
    run = read_run(folder)
    assert run.truncated_lines == 1
    assert run.iterations == (1, 2)
    assert run.complete_iterations() == (1,)


def test_a_damaged_line_elsewhere_is_named(write_run: Callable[..., Path]) -> None:
    folder = write_run()
    path = folder / trace_file_name(0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "garbage\n", *lines[4:]]))
    with pytest.raises(TraceError, match=r"trace_rank_00000\.jsonl:5 is not a line of JSON"):
        read_run(folder)


def test_missing_ranks_are_named_and_the_rest_is_read(write_run: Callable[..., Path]) -> None:
    folder = write_run(4)
    (folder / trace_file_name(2)).unlink()
    (folder / trace_file_name(3)).write_text("")
    run = read_run(folder)
    assert run.missing_ranks == (2, 3)
    assert [trace is None for trace in run.replica()] == [False, False, True, True]
    assert run.complete_iterations() == (1, 2, 3)


def test_mixed_runs_are_refused_and_listed(write_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_run(2)
    other = write_run(4, folder=tmp_path / "other", run="run-0")
    for rank in (2, 3):
        shutil.copy(other / trace_file_name(rank), folder)
    with pytest.raises(TraceError, match=r"'run-1' \(ranks 0-1\); 'run-0' \(ranks 2-3\)"):
        read_run(folder)


def test_mixed_shapes_of_one_run_are_refused(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_run(2)
    other = write_run(3, folder=tmp_path / "other")
    shutil.copy(other / trace_file_name(2), folder)
    with pytest.raises(TraceError, match=r"mixes shapes: 2x2x1 \(ranks 0-1\); 3x3x1 \(ranks 2\)"):
        read_run(folder)


@pytest.mark.parametrize("make", [False, True])
def test_an_empty_or_missing_folder_is_refused(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "traces"
    if make:
        folder.mkdir()
    with pytest.raises(TraceError, match="holds no trace_rank" if make else "does not exist"):
        read_run(folder)


def test_a_folder_of_empty_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / trace_file_name(0)).write_text("")
    with pytest.raises(TraceError, match="empty"):
        read_run(tmp_path)


def test_a_renamed_file_and_a_chunk_out_of_range_are_refused(
    tmp_path: Path, make_header: Callable[..., TraceHeader]
) -> None:
    path = write_lines(tmp_path, make_header(0))
    path.rename(tmp_path / trace_file_name(1))
    with pytest.raises(TraceError, match=r"header of rank 0.*named after rank 1"):
        read_run(tmp_path)
    (tmp_path / trace_file_name(1)).unlink()
    write_lines(tmp_path, make_header(0), Span("F", 1, 0, 1, 2, 1))
    with pytest.raises(TraceError, match="chunk 1, the header says 1 chunks"):
        read_run(tmp_path)


def test_a_repeated_iteration_of_a_resumed_run_replaces_the_first(
    tmp_path: Path, make_header: Callable[..., TraceHeader]
) -> None:
    header = make_header(0, 1, num_microbatches=1)
    for start in (100, 900):
        with Recorder(tmp_path, header) as recorder:
            for iteration in (1, 2) if start == 100 else (2, 3):
                recorder.begin_iteration(iteration, 1)
                recorder.record("F", 0, 0, start + iteration, start + 10)
    run = read_run(tmp_path)
    assert run.iterations == (1, 2, 3)
    starts = {i: [span.start_ns for span in spans] for i, spans in run.ranks[0].spans.items()}
    assert starts == {1: [101], 2: [902], 3: [903]}


def test_the_microbatch_count_follows_the_marker(
    tmp_path: Path, make_header: Callable[..., TraceHeader]
) -> None:
    with Recorder(tmp_path, make_header(0, 1, num_microbatches=8)) as recorder:
        recorder.begin_iteration(1, 2)
        for microbatch in range(2):
            recorder.record("F", 0, microbatch, 1, 2)
            recorder.record("B", 0, microbatch, 3, 4)
    run = read_run(tmp_path)
    assert run.ranks[0].num_microbatches == {1: 2}
    assert run.complete_iterations() == (1,)


def test_ranks_of_one_host_keep_their_monotonic_times(
    tmp_path: Path, make_header: Callable[..., TraceHeader]
) -> None:
    # The pairs of readings differ by the time between them and by small corrections.
    header = make_header(0)
    write_lines(tmp_path, header, Span("F", 0, 0, 100, 200, 1))
    later = replace(make_header(1), unix_ns=header.unix_ns + 7_000_050_000)
    later = replace(later, monotonic_ns=header.monotonic_ns + 7_000_000_000)
    write_lines(tmp_path, later, Span("F", 0, 0, 200, 300, 1))
    run = read_run(tmp_path)
    assert run.ranks[0].spans[1][0].start_ns == 100
    assert run.ranks[1].spans[1][0].start_ns == 200


def test_ranks_of_two_hosts_are_moved_onto_unix_time(
    tmp_path: Path, make_header: Callable[..., TraceHeader]
) -> None:
    unix = 1_700_000_000_000_000_000
    here = replace(make_header(0), host="a", monotonic_ns=1_000, unix_ns=unix)
    there = replace(make_header(1), host="b", monotonic_ns=9_000_000, unix_ns=unix + 500)
    write_lines(tmp_path, here, Span("F", 0, 0, 1_100, 1_200, 1))
    write_lines(tmp_path, there, Span("F", 0, 0, 9_000_700, 9_000_900, 1))
    run = read_run(tmp_path)
    assert run.ranks[0].spans[1][0].start_ns == unix + 100
    assert run.ranks[1].spans[1][0].start_ns == unix + 1_200
    assert run.ranks[1].spans[1][0].duration_ns == 200


def test_replica_picks_one_pipeline(
    tmp_path: Path, make_header: Callable[..., TraceHeader]
) -> None:
    for rank in range(8):
        places = {"pp_rank": rank // 4, "dp_rank": rank // 2 % 2, "tp_rank": rank % 2}
        header = make_header(rank, 2, world_size=8, **places)
        write_lines(tmp_path, header, Span("F", 0, 0, 1, 2, 1))
    run = read_run(tmp_path)
    assert [trace.header.rank for trace in run.replica() if trace] == [0, 4]
    assert [trace.header.rank for trace in run.replica(1) if trace] == [2, 6]
    with pytest.raises(TraceError, match="it has data-parallel ranks 0-1"):
        run.replica(2)


def test_describe_numbers() -> None:
    assert describe_numbers([]) == "none"
    assert describe_numbers([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert describe_numbers(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ... up to 98"
