"""Tests reading complete and truncated runs, and errors about mixed runs and newer formats."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace import block_index as index_module
from megatron.adaptive.trace.read import describe_numbers, read_run
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import Span, header_line, trace_file_name
from tests.trace.conftest import make_header, record, write_spans

FOUR = (("F", 0), ("F", 1), ("B", 0), ("B", 1))


def test_a_run_is_read_whole(write_run: Callable[..., Path]) -> None:
    run = read_run(write_run(2, 2, 4, iterations=3))
    assert (run.run, run.world_size, run.num_ranks, run.num_chunks) == ("run-1", 2, 2, 2)
    assert run.iterations == run.complete_iterations() == (1, 2, 3)
    assert run.missing_ranks == ()
    assert run.truncated_lines == 0
    spans = run.ranks[1].spans(2)
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
    with pytest.raises(TraceError, match=r"trace_rank_00000\.jsonl:5 is not a span"):
        read_run(folder)


def test_missing_ranks_are_named_and_the_rest_is_read(write_run: Callable[..., Path]) -> None:
    folder = write_run(4)
    (folder / trace_file_name(2)).unlink()
    (folder / trace_file_name(3)).write_text("")
    run = read_run(folder)
    assert run.missing_ranks == (2, 3)
    assert [trace is None for trace in run.replica()] == [False, False, True, True]
    assert run.complete_iterations() == (1, 2, 3)


@pytest.mark.parametrize(
    ("ranks", "run", "message"),
    [
        (4, "run-0", r"'run-1' \(ranks 0-1\); 'run-0' \(ranks 2-3\)"),
        (3, "run-1", r"mixes shapes: 2x2x1 \(ranks 0-1\); 3x3x1 \(ranks 2\)"),
    ],
)
def test_mixed_runs_and_shapes_are_refused_and_listed(
    write_run: Callable[..., Path], tmp_path: Path, ranks: int, run: str, message: str
) -> None:
    folder = write_run(2)
    other = write_run(ranks, folder=tmp_path / "other", run=run)
    for rank in range(2, ranks):
        shutil.copy(other / trace_file_name(rank), folder)
    with pytest.raises(TraceError, match=message):
        read_run(folder)


def test_folders_and_files_that_are_no_traces_of_theirs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_run(tmp_path / "gone")
    with pytest.raises(TraceError, match="contains no trace_rank"):
        read_run(tmp_path)
    (tmp_path / trace_file_name(0)).write_text("")
    with pytest.raises(TraceError, match="empty"):
        read_run(tmp_path)
    path = write_spans(tmp_path, make_header(0), [])
    other = path.rename(tmp_path / trace_file_name(1))
    with pytest.raises(TraceError, match=r"header of rank 0.*its name states rank 1"):
        read_run(tmp_path)
    other.unlink()
    write_spans(tmp_path, make_header(0), [Span("F", 1, 0, 1, 2, 1)])
    with pytest.raises(TraceError, match="chunk 1, but its header states 1 chunks"):
        read_run(tmp_path).ranks[0].table()
    path.write_text(path.read_text() + header_line(make_header(0, num_chunks=2)))
    with pytest.raises(
        TraceError, match=r"jsonl:\d+: the file has a second header, .*; use a separate"
    ):
        read_run(tmp_path)


def test_a_repeated_iteration_replaces_the_first(tmp_path: Path) -> None:
    with Recorder(tmp_path, make_header(0, 1, num_microbatches=1)) as recorder:
        for start in (100, 900):
            for iteration in (1, 2) if start == 100 else (2, 3):
                recorder.begin_iteration(iteration, 1)
                record(recorder, "F", 0, 0, start + iteration, start + 10)
    run = read_run(tmp_path)
    assert run.iterations == (1, 2, 3)
    starts = {i: [s.start_ns for s in run.ranks[0].spans(i)] for i in run.iterations}
    assert starts == {1: [101], 2: [902], 3: [903]}


def test_the_microbatch_count_follows_the_marker(tmp_path: Path) -> None:
    spans = [Span(a, 0, m, 1, 2, 1) for a, m in FOUR]
    write_spans(tmp_path, make_header(0, 1, num_microbatches=8), spans, num_microbatches=2)
    run = read_run(tmp_path)
    assert run.ranks[0].num_microbatches == {1: 2}
    assert run.complete_iterations() == (1,)


def test_only_what_is_asked_for_is_parsed(
    write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(2, 1, 4, iterations=50)
    parsed: list[int] = []
    original = index_module.parse_spans

    def counting(data: bytes, *rest: Any) -> Any:
        parsed.append(data.count(b"\n"))
        return original(data, *rest)

    monkeypatch.setattr(index_module, "parse_spans", counting)
    run = read_run(folder)
    assert run.complete_iterations() == tuple(range(1, 51))
    assert parsed == []
    table = run.ranks[1].table([7, 30, 99])
    assert parsed == [2 * 17]
    assert sorted(set(table.iteration.tolist())) == [7, 30]


def test_a_clock_that_was_set_back_is_named(tmp_path: Path) -> None:
    starts = {1: 10**10, 2: 2 * 10**10, 3: 5 * 10**9, 4: 6 * 10**9}
    spans = [Span("F", 0, 0, start, start + 10, i) for i, start in starts.items()]
    write_spans(tmp_path, make_header(0, 1), spans)
    run = read_run(tmp_path)
    assert run.ranks[0].clock_jumps() == (3,)
    assert run.notes() == [
        "the clock of rank 0 was set back before iterations 3; ignore times that span this moment"
    ]


def test_a_span_that_ends_before_it_starts_has_no_length(tmp_path: Path) -> None:
    write_spans(tmp_path, make_header(0, 1), [Span("F", 0, 0, 1000, 900, 1)])
    assert read_run(tmp_path).ranks[0].spans(1) == (Span("F", 0, 0, 1000, 1000, 1),)


def test_version_1_and_a_file_without_a_header_are_refused(write_run: Callable[..., Path]) -> None:
    folder = write_run()
    path = folder / trace_file_name(0)
    text = path.read_text()
    path.write_text(text.replace('"version": 2', '"version": 1', 1))
    with pytest.raises(
        TraceError, match=r"trace_rank_00000\.jsonl:1 has format version 1"
    ) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)
    path.write_text(text.split("\n", 1)[1])
    with pytest.raises(TraceError, match=":1: a trace file must begin with a header"):
        read_run(folder)


def test_replica_picks_one_pipeline(tmp_path: Path) -> None:
    for rank in range(8):
        places = {"pp_rank": rank // 4, "dp_rank": rank // 2 % 2, "tp_rank": rank % 2}
        header = make_header(rank, 2, world_size=8, **places)
        write_spans(tmp_path, header, [Span("F", 0, 0, 1, 2, 1)])
    run = read_run(tmp_path)
    assert [trace.header.rank for trace in run.replica() if trace] == [0, 4]
    assert [trace.header.rank for trace in run.replica(1) if trace] == [2, 6]
    with pytest.raises(TraceError, match="which has data-parallel ranks 0-1"):
        run.replica(2)


def test_describe_numbers() -> None:
    assert describe_numbers([]) == "none"
    assert describe_numbers([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert describe_numbers(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ... up to 98"


def test_times_of_a_shared_gpu_are_called_time_slices(write_run: Callable[..., Path]) -> None:
    run = read_run(write_run(gpu_ranks=2))
    assert run.bubble_note == " (time slices of a shared GPU)"
    assert "up to 2 ranks share a GPU" in run.notes()[0]


def test_times_of_ranks_with_a_gpu_each_are_not(write_run: Callable[..., Path]) -> None:
    run = read_run(write_run())
    assert run.bubble_note == ""
    assert not any("share a GPU" in line for line in run.notes())
