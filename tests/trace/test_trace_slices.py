"""Checks that all views show microbatch and slice numbers if microbatches are split into slices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from openpyxl import load_workbook

from megatron.adaptive.cli.trace import main
from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.diagnose.find_causes import diagnose
from megatron.adaptive.trace.diagnose.samples import measure
from megatron.adaptive.trace.hang_watch import RankEvidence, find_culprit
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.step_view import pipeline_step
from megatron.adaptive.trace.trace_format import COLUMNS, header_line, parse_line, trace_file_name
from megatron.adaptive.trace.views.page import write_page
from megatron.adaptive.trace.views.perfetto import perfetto_events
from megatron.adaptive.trace.whatif.answers import what_if
from tests.support.sliced_run import SlicedRun
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic
from tests.trace.conftest import make_header

SLICES = 4
LAST = f"2.{SLICES - 1}"


def sliced(folder: Path, num_slices: int = SLICES, **shape: object) -> RunTrace:
    """Returns a synthetic run with three microbatches, on three ranks with two chunks each.

    Each microbatch is split into ``num_slices`` slices. ``shape`` contains settings that replace
    the default values.
    """
    changes = {"num_ranks": 3, "num_chunks": 2, "num_microbatches": 3, "iterations": 4, **shape}
    write_synthetic(folder, SyntheticRun(num_slices=num_slices, **changes))  # type: ignore[arg-type]
    return read_run(folder)


def test_a_header_without_the_number_means_whole_microbatches() -> None:
    line = json.loads(header_line(make_header(0, num_slices=SLICES)))
    assert parse_line(json.dumps(line), "file:1").num_slices == SLICES  # type: ignore[union-attr]
    del line["num_slices"]
    assert parse_line(json.dumps(line), "file:1").num_slices == 1  # type: ignore[union-attr]


def test_a_step_is_complete_only_with_all_slices(tmp_path: Path) -> None:
    run = sliced(tmp_path)
    assert run.complete_iterations() == (1, 2, 3, 4)
    for file in tmp_path.iterdir():
        head, rest = file.read_text().split("\n", 1)
        head = head.replace(f'"num_slices": {SLICES}', f'"num_slices": {SLICES + 1}')
        file.write_text(f"{head}\n{rest}")
    assert read_run(tmp_path).complete_iterations() == ()


def test_views_name_microbatch_and_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sliced(tmp_path / "traces")
    assert main([str(tmp_path / "traces"), "--format", "xlsx", "--output-dir", str(tmp_path)]) == 0
    assert f"3 microbatches in {SLICES} slices" in capsys.readouterr().out
    step = pipeline_step(run)
    numbers = {step.numbers(span) for row in step.rows for span in row}
    items = {f"{m}.{part}" for m in range(3) for part in range(SLICES)}
    assert numbers == {f"{chunk}-{item}" for chunk in range(2) for item in items}
    (book,) = tmp_path.glob("*.xlsx")
    cells = {cell.value for row in load_workbook(book)["order"].iter_rows() for cell in row}
    assert numbers <= cells
    events = list(perfetto_events(run, [4]))
    names = {event["name"] for event in events}
    assert {f"forward 0-{LAST}", f"backward 1-{LAST}", f"receive F0-{LAST}"} <= names
    # The data of a microbatch is read once, regardless of the number of slices.
    assert {name for name in names if name.startswith("data")} == {"data 0", "data 1", "data 2"}
    (last, *_) = (e for e in events if e["name"] == f"forward 0-{LAST}" and e["cat"] == "forward")
    assert (last["args"]["microbatch"], last["args"]["slice"]) == (2, SLICES - 1)


def test_the_page_knows_the_number_of_slices(tmp_path: Path) -> None:
    run = sliced(tmp_path / "traces")
    write_page(run, tmp_path / "page.html", run.iterations[-1:])
    text = (tmp_path / "page.html").read_text()
    assert f'"slices": {SLICES}' in text
    assert f"3 microbatches in {SLICES} slices" in text


def test_figures_are_those_of_whole_microbatches(tmp_path: Path) -> None:
    times = [
        measure(sliced(tmp_path / str(n), n, action_sigma=0.0)).microbatch_ns for n in (1, SLICES)
    ]
    assert times[1] == pytest.approx(times[0], rel=0.05)
    fault = Fault(kind="slow-rank", rank=1, factor=1.5)
    slow = sliced(tmp_path / "slow", iterations=20, faults=(fault,))
    assert any(finding.ranks == (1,) for finding in diagnose(slow).findings)


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_slices_would_save_is_what_they_save(chunks: int, tmp_path: Path) -> None:
    shape = {"num_chunks": chunks, "weight_pieces": 2 * (chunks - 1), "latency_s": 1e-5}
    whole = what_if(sliced(tmp_path / "whole", 1, **shape))
    (repair,) = (
        r for r in whole.repairs if r.description.startswith("sequences cut into 8 slices")
    )
    assert repair.flag == "--sequence-slices 8"
    cut = what_if(sliced(tmp_path / "cut", 8, **shape))
    assert repair.step_s == pytest.approx(cut.recorded_s.mean(), rel=0.02)
    assert not any("sequence-slices" in r.flag for r in cut.repairs)


# A slice has 100 tokens. The documents are packed into three rows of tokens, and the row with the
# document of 400 tokens is split into 4 slices. The other two rows have one slice each, so the
# slices of the rows have the numbers 0, 1 to 4, and 5.
UNEQUAL = SlicedRun(documents=(60, 400, 40, 30, 70), tokens=100)


def unequal(folder: Path, run: SlicedRun = UNEQUAL) -> RunTrace:
    run.write(folder)
    return read_run(folder)


def test_views_name_microbatch_and_slice_where_numbers_of_slices_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert UNEQUAL.counts == (1, 4, 1)
    run = unequal(tmp_path / "traces")
    assert run.complete_iterations() == (1, 2, 3)
    assert run.ranks[0].slices(2) == (1, 4, 1)
    assert main([str(tmp_path / "traces"), "--format", "xlsx", "--output-dir", str(tmp_path)]) == 0
    assert "3 microbatches in 1 to 4 slices" in capsys.readouterr().out
    step = pipeline_step(run)
    items = {"0.0", "1.0", "1.1", "1.2", "1.3", "2.0"}
    assert {step.numbers(span) for row in step.rows for span in row} == {f"0-{i}" for i in items}
    (book,) = tmp_path.glob("*.xlsx")
    cells = {cell.value for row in load_workbook(book)["order"].iter_rows() for cell in row}
    assert {f"0-{item}" for item in items} <= cells
    events = list(perfetto_events(run, [3]))
    names = {event["name"] for event in events}
    assert {"forward 0-1.3", "backward 0-2.0", "receive F0-1.2"} <= names
    assert {name for name in names if name.startswith("data")} == {"data 0", "data 1", "data 2"}
    (last, *_) = (e for e in events if e["name"] == "forward 0-1.3" and e["cat"] == "forward")
    shown = {name: last["args"][name] for name in ("microbatch", "slice", "tokens", "lengths")}
    assert shown == {"microbatch": 1, "slice": 3, "tokens": 400, "lengths": [400]}
    write_page(run, tmp_path / "page.html", run.iterations[-1:])
    text = (tmp_path / "page.html").read_text()
    assert "3 microbatches in 1 to 4 slices" in text
    assert '"slices": [1, 4, 1]' in text or '"slices":[1,4,1]' in text


def test_figures_add_up_slices_where_their_numbers_differ(tmp_path: Path) -> None:
    run = unequal(tmp_path)
    measured = measure(run)
    assert measured.num_microbatches == 3
    # These indices select the forward passes of the first rank in the first iteration.
    times = measured.action_ns[0, 0, 0, 0]
    step = pipeline_step(run)
    forwards = [span for span in step.rows[0] if span.action == "F"]
    whole = [s.duration_ns for s in sorted(forwards, key=lambda span: span.microbatch)]
    assert times == pytest.approx([whole[0], sum(whole[1:5]), whole[5]], rel=1e-3)
    assert max(f.peak_microbatches[0] for f in step.figures.values()) <= 3


def test_a_trace_that_counts_slices_as_microbatches_reads_as_before(tmp_path: Path) -> None:
    UNEQUAL.write(tmp_path)
    for file in tmp_path.iterdir():
        text = file.read_text()
        assert '"slices": [1, 4, 1]' in text
        text = text.replace(', "slices": [1, 4, 1]', "").replace(
            '"num_microbatches": 3', '"num_microbatches": 6'
        )
        file.write_text(text)
    run = read_run(tmp_path)
    assert run.complete_iterations() == (1, 2, 3)
    step = pipeline_step(run)
    assert step.microbatches == "6 microbatches"
    assert {step.numbers(span) for row in step.rows for span in row} == {f"0-{n}" for n in range(6)}


@pytest.mark.parametrize("count", [0, -1, "3", 1 << 30])
def test_a_damaged_number_of_slices_is_named(count: object, tmp_path: Path) -> None:
    UNEQUAL.write(tmp_path)
    file = next(tmp_path.iterdir())
    file.write_text(file.read_text().replace("[1, 4, 1]", json.dumps([1, count, 1])))
    with pytest.raises(TraceError, match="'slices' must be integers from 1 to .*, got"):
        read_run(tmp_path)


MANY = SlicedRun(documents=(1600, *(50, 120, 200, 310) * 8), tokens=400, num_ranks=4)


@pytest.mark.parametrize("chunks", [1, 2])
def test_slices_of_half_the_length_save_what_a_run_with_them_takes_less(
    chunks: int, tmp_path: Path
) -> None:
    run = replace(MANY, num_chunks=chunks)
    answers = what_if(unequal(tmp_path / "long", run))
    assert answers.simulated_s == pytest.approx(answers.recorded_s, rel=0.01)
    assert not any("sequence-slices" in repair.flag for repair in answers.repairs)
    (repair,) = (r for r in answers.repairs if r.flag == "--slice-tokens 200")
    assert repair.description == "slices of 200 tokens, if they cost no extra time"
    short = what_if(unequal(tmp_path / "short", replace(run, tokens=200)))
    assert repair.step_s == pytest.approx(short.recorded_s.mean(), rel=0.02)
    assert repair.step_s < answers.recorded_s.mean()


@pytest.mark.parametrize(("token_ranks", "is_offered"), [(None, False), (8, False), (1, True)])
def test_lengths_that_tensor_parallel_ranks_cannot_share_are_left_out(
    token_ranks: int | None, is_offered: bool, tmp_path: Path
) -> None:
    """Checks which slice lengths are suggested if tensor-parallel ranks may share the tokens.

    If these ranks share the tokens, the lengths must be multiples of the number of these ranks.
    """
    whole = {repair.flag for repair in what_if(unequal(tmp_path, MANY)).repairs}
    assert whole >= {"--slice-tokens 100", "--slice-tokens 200"}
    for rank, file in enumerate(sorted(tmp_path.iterdir())):
        head, _, spans = file.read_text().partition("\n")
        header = json.loads(head) | {"world_size": 2 * MANY.num_ranks}
        del header["token_ranks"]  # Traces of earlier versions do not contain this field.
        if token_ranks is not None:
            header["token_ranks"] = token_ranks
        file.write_text(json.dumps(header) + "\n" + spans)
        header |= {"tp_rank": 7, "rank": MANY.num_ranks + rank}
        other = tmp_path / trace_file_name(MANY.num_ranks + rank)
        other.write_text(json.dumps(header) + "\n" + spans)
    flags = {repair.flag for repair in what_if(read_run(tmp_path)).repairs}
    assert "--slice-tokens 200" in flags
    assert ("--slice-tokens 100" in flags) == is_offered


def test_a_length_that_leaves_too_few_documents_is_no_repair(tmp_path: Path) -> None:
    """Checks that a slice length is not suggested if it leaves too few rows for two replicas."""
    for replica, documents in enumerate([(450, 150), (200,)]):
        run = SlicedRun(documents=documents, tokens=400)
        run.write(tmp_path / f"of {replica}")
        for rank, file in enumerate(sorted((tmp_path / f"of {replica}").iterdir())):
            head, *lines = file.read_text().splitlines()
            header = json.loads(head)
            first = replica * run.num_ranks
            header |= {"rank": first + rank, "dp_rank": replica, "world_size": 2 * run.num_ranks}
            text = json.dumps(header) + "\n"
            for line in lines:
                if line.startswith("["):
                    span = json.loads(line)
                    peer = COLUMNS.index("peer")
                    span[peer] += first if span[peer] >= 0 else 0
                    line = json.dumps(span, separators=(",", ":"))
                text += line + "\n"
            folder = tmp_path / "traces"
            folder.mkdir(exist_ok=True)
            (folder / trace_file_name(first + rank)).write_text(text)
    flags = {repair.flag for repair in what_if(read_run(tmp_path / "traces")).repairs}
    assert "--slice-tokens 100" not in flags
    answers = what_if(read_run(tmp_path / "traces"))
    assert not any("are not simulated" in note for note in answers.notes)


@pytest.mark.parametrize("change", ["no documents", "no tokens", "negative", "too many", "huge"])
def test_damaged_lengths_of_rows_give_no_answer(change: str, tmp_path: Path) -> None:
    """Checks that damaged row lengths in a trace lead neither to errors nor to huge allocations."""
    UNEQUAL.write(tmp_path)
    rows = [[UNEQUAL._width(row), *row] for row in UNEQUAL.rows]
    changed = {
        "no documents": [[width] for width, *_ in rows],
        "no tokens": [[0 for _ in row] for row in rows],
        "negative": [[width, *(-n for n in documents)] for width, *documents in rows],
        "too many": [[width, *(1000 * n for n in documents)] for width, *documents in rows],
        "huge": [[10**15 * n for n in row] for row in rows],
    }[change]
    for file in tmp_path.iterdir():
        text = file.read_text()
        assert json.dumps(rows) in text
        file.write_text(text.replace(json.dumps(rows), json.dumps(changed)))
    answers = what_if(read_run(tmp_path))
    assert not any("slice-tokens" in repair.flag for repair in answers.repairs)


def test_other_lengths_are_not_simulated_where_the_trace_does_not_fit(tmp_path: Path) -> None:
    hinted = what_if(unequal(tmp_path / "hinted", replace(MANY, schedule="bfc")))
    assert not any("slice-tokens" in repair.flag for repair in hinted.repairs)
    assert any("the schedule must be adaptive or auto, not bfc" in note for note in hinted.notes)


def test_a_hang_report_names_microbatch_and_slice() -> None:
    waits = (("/x/megatron/adaptive/transport/native.py", 364, "wait"),)
    computes = (("/x/user.py", 7, "forward"),)
    now = {"doing": "B", "chunk": 1, "microbatch": 2, "slice": 3, "iteration": 5, "step": 5}
    busy = RankEvidence(rank=1, name="rank 1", now=now, frames=computes)
    # Item ``"0.3"`` is the last slice of microbatch 0, so the sender processes it in its first
    # backward action.
    needs = {"doing": "wait", "step": 5, "needs": [[1, "B", 1, 0, "0.3"]], "finished": {}}
    waiting = RankEvidence(rank=0, name="rank 0", now=needs, frames=waits)
    culprit = find_culprit([waiting, busy])
    assert culprit.ranks == (1,)
    assert "the backward of microbatch 2.3 (chunk 1) in iteration 5" in culprit.text
    sent = RankEvidence(rank=1, name="rank 1", now={**needs, "finished": {"B1": 1}}, frames=waits)
    lost = "the backward of microbatch 0.3, which rank 1 has sent"
    assert lost in find_culprit([waiting, sent]).text
