"""Checks that all views show microbatch and slice for runs with sliced microbatches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openpyxl import load_workbook

from megatron.adaptive.cli.trace import main
from megatron.adaptive.trace.diagnose.find_causes import diagnose
from megatron.adaptive.trace.diagnose.samples import measure
from megatron.adaptive.trace.hang_watch import RankEvidence, find_culprit
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.step_view import pipeline_step
from megatron.adaptive.trace.trace_format import header_line, parse_line
from megatron.adaptive.trace.views.page import write_page
from megatron.adaptive.trace.views.perfetto import perfetto_events
from megatron.adaptive.trace.whatif.answers import what_if
from tests.support.synthetic_trace import Fault, SyntheticRun, write_synthetic
from tests.trace.conftest import make_header

SLICES = 4
LAST = f"2.{SLICES - 1}"


def sliced(folder: Path, num_slices: int = SLICES, **shape: object) -> RunTrace:
    """Returns a synthetic run of three microbatches on three ranks with two chunks."""
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
    (repair,) = (r for r in whole.repairs if r.description.startswith("sequences in 8 slices"))
    assert repair.flag == "--sequence-slices 8"
    cut = what_if(sliced(tmp_path / "cut", 8, **shape))
    assert repair.step_s == pytest.approx(cut.recorded_s.mean(), rel=0.02)
    assert not any("sequence-slices" in r.flag for r in cut.repairs)


def test_a_hang_report_names_microbatch_and_slice() -> None:
    waits = (("/x/megatron/adaptive/transport/native.py", 364, "wait"),)
    computes = (("/x/user.py", 7, "forward"),)
    now = {"doing": "B", "chunk": 1, "microbatch": 2, "slice": 3, "iteration": 5, "step": 5}
    busy = RankEvidence(rank=1, name="rank 1", now=now, frames=computes)
    # Backward 0 of the sender belongs to the last slice of microbatch 0.
    needs = {"doing": "wait", "step": 5, "needs": [[1, "B", 1, 0, "0.3"]], "finished": {}}
    waiting = RankEvidence(rank=0, name="rank 0", now=needs, frames=waits)
    culprit = find_culprit([waiting, busy])
    assert culprit.ranks == (1,)
    assert "the backward of microbatch 2.3 (chunk 1) in iteration 5" in culprit.text
    sent = RankEvidence(rank=1, name="rank 1", now={**needs, "finished": {"B1": 1}}, frames=waits)
    assert "the backward of microbatch 0.3, which rank 1 sent" in find_culprit([waiting, sent]).text
