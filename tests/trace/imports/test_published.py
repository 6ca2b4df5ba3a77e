"""Tests that tables of operations are converted to runs that the trace tools can read."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.adaptive.cli.trace import import_run
from megatron.adaptive.errors import SetupError, TraceError
from megatron.adaptive.trace.imports.published import read_table, run_of_columns, write_run
from megatron.adaptive.trace.metrics import run_figures
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.span_columns import KIND, match_messages

Job = Callable[..., dict[str, Any]]


def write_csv(table: dict[str, Any], path: Path) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(table)
        rows.writerows(zip(*(column.tolist() for column in table.values()), strict=True))
    return path


def test_a_table_becomes_a_run_and_its_files_say_the_same(make_job: Job, tmp_path: Path) -> None:
    run = read_table(write_csv(make_job(), tmp_path / "job.csv"))
    assert (run.world_size, run.num_ranks, run.num_chunks) == (6, 3, 1)
    assert run.complete_iterations(1) == (5, 6)
    write_run(run, tmp_path / "traces")
    again = read_run(tmp_path / "traces")
    # All steps of the table begin at 0. They must be shifted so that each step follows the previous
    # one.
    assert not again.notes()
    for rank, trace in run.ranks.items():
        for span, expected in zip(
            trace.table().spans(), again.ranks[rank].table().spans(), strict=True
        ):
            assert span == expected
    assert run_figures(again, workers=1).bubble_fraction.shape == (2, 6)


def test_messages_join_the_computes_that_sent_and_took_them(make_job: Job) -> None:
    run = run_of_columns(make_job(), Path("job"))
    tables = {rank: trace.table([5]) for rank, trace in run.ranks.items()}
    messages = match_messages(tables)
    # There are 2 directions, 2 replicas, 2 links between stages, and 4 microbatches.
    assert len(messages) == 2 * 2 * 2 * 4
    for n in range(len(messages)):
        source, target = tables[int(messages.source[n])], tables[int(messages.target[n])]
        same = (source.kind == messages.of[n]) & (source.microbatch == messages.microbatch[n])
        assert source.end_ns[same].tolist() == [messages.sent_ns[n]]
        took = (target.kind == messages.of[n]) & (target.microbatch == messages.microbatch[n])
        assert target.start_ns[took].tolist() == [messages.taken_ns[n]]


def test_chunks_and_unnumbered_microbatches() -> None:
    """Checks that the last rank sends messages to the first rank if each rank has two chunks."""
    rows = []
    clock = 0.0
    for chunk in range(2):
        for _ in range(2):
            for stage in range(2):
                model = chunk * 2 + stage
                if model:
                    rows.append((stage, "forward-recv", clock, 0.1, -1, -1))
                rows.append((stage, "forward-compute", clock + 0.1, 1.0, chunk, model))
                if model < 3:
                    rows.append((stage, "forward-send", clock + 1.1, 0.1, -1, -1))
                clock += 1.2
    stage, kind, start, length, mc, gmc = map(np.array, zip(*rows, strict=True))
    keys = [(int(s), str(k)) for s, k in zip(stage, kind, strict=True)]
    table = {
        "dp_rank": stage * 0, "stage": stage, "rank": stage, "step": stage * 0 + 1, "optype": kind,
        "start_ts": start, "duration": length, "mc": mc, "gmc": gmc,
        "seq_id": [keys[:n].count(key) for n, key in enumerate(keys)],
    }  # fmt: skip
    run = run_of_columns(table, Path("job"))
    assert run.num_chunks == 2
    received = run.ranks[0].table().of_kind("receive")
    assert received.chunk.tolist() == [1, 1]
    assert received.microbatch.tolist() == [0, 1]
    assert received.peer.tolist() == [1, 1]
    assert received.of.tolist() == [KIND["F"]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": None, "seq_id": None}, "does not have the columns duration, seq_id"),
        ({"duration": -1.0}, "duration that are missing or negative"),
        ({"step": -1}, "step that are missing or negative"),
        ({"rank": -2}, "rank that are missing or negative"),
        ({"start_ts": np.nan}, "start_ts that are missing"),
        ({"stage": "first"}, "has a column with text"),
        ({"gmc": 7}, "gmc .the index of a chunk in the model. must equal mc"),
        ({"optype": "sleep"}, "contains no forward-compute"),
    ],
)
def test_bad_tables_are_refused_by_name(
    make_job: Job, change: dict[str, Any], message: str
) -> None:
    table = make_job()
    for name, value in change.items():
        column = table.pop(name)
        if value is not None:
            table[name] = np.full(len(column), value)
    with pytest.raises(TraceError, match=message):
        run_of_columns(table, Path("job"))


def test_two_jobs_in_a_table_are_refused(make_job: Job) -> None:
    table = make_job()
    twice = {name: np.concatenate([column, column]) for name, column in table.items()}
    with pytest.raises(
        TraceError, match=r"has forward-compute 0 of rank 0 in step 5 twice, .* keep"
    ):
        run_of_columns(twice, Path("job"))


def test_unknown_kinds_are_counted_and_the_command_says_so(
    make_job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = make_job(extra=[("moe-dispatch", 0.5)])
    path = write_csv(table, tmp_path / "job.csv")
    assert import_run([str(path), "--output", str(tmp_path / "traces")]) == 0
    said = capsys.readouterr()
    assert "unknown kinds are left out: moe-dispatch (2)" in said.err
    assert "6 ranks (3 pipeline ranks x 2 replicas), iterations 5-6" in said.out
    with pytest.raises(TraceError, match="already contains the traces of a run"):
        import_run([str(path), "--output", str(tmp_path / "traces")])


def test_clocks_that_are_minutes_apart_are_put_right(make_job: Job) -> None:
    table = make_job()
    table["start_ts"] = table["start_ts"] + np.where(table["rank"] == 3, 300.0, 0.0)
    run, right = (run_of_columns(t, Path("job")) for t in (table, make_job()))
    assert run.notes() == [
        "clocks of ranks 3 are off by up to 300 s; the import assumes that the first steps of all "
        "ranks begin together"
    ]
    assert abs(run.ranks[3].table().start_ns - right.ranks[3].table().start_ns).max() < 1e9


def test_parquet_holds_the_same_table(make_job: Job, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = make_job()
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table(table), tmp_path / "job.parquet"
    )
    table_read = read_table(tmp_path / "job.parquet").ranks[0].table()
    assert (
        table_read.spans()
        == read_table(write_csv(table, tmp_path / "job.csv")).ranks[0].table().spans()
    )


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(
        (SetupError, TraceError), match=r"parquet\]|cannot be read as a Parquet file"
    ):
        read_table(path)
