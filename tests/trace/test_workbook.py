"""The workbook re-read: its cells are the trace, nothing overlaps, Excel's limits hold."""

import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from openpyxl import load_workbook
from openpyxl.utils import range_boundaries
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace import workbook as workbook_module
from megatron.adaptive.trace.event import Span, trace_file_name
from megatron.adaptive.trace.palette import IDLE, chunk_color
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.step import PipelineStep, pipeline_step
from megatron.adaptive.trace.workbook import MAX_COLUMNS, lay_out, write_workbook


@pytest.fixture
def draw(
    write_run: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[PipelineStep, Path]]:
    def make(*shape: int) -> tuple[PipelineStep, Path]:
        step = pipeline_step(read_run(write_run(*shape, iterations=1)))
        write_workbook(step, tmp_path / "chart.xlsx")
        return step, tmp_path / "chart.xlsx"

    return make


def chart_row(sheet: Worksheet, row: int) -> list[tuple[str | None, str, int, int]]:
    """Text, colour, first and last column of each coloured cell of a row."""
    widths = {
        area.min_col: area.max_col for area in sheet.merged_cells.ranges if area.min_row == row
    }
    found = []
    for cell in sheet[row][1:]:
        if cell.fill.fill_type == "solid":
            last = widths.get(cell.column, cell.column)
            found.append((cell.value, cell.fill.start_color.rgb[-6:], cell.column, last))
    return found


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 8), (4, 1, 6)])
def test_cells_are_the_trace(
    draw: Callable[..., tuple[PipelineStep, Path]], shape: tuple[int, int, int]
) -> None:
    step, path = draw(*shape)
    sheet = load_workbook(path)["order"]
    for pp_rank, row in enumerate(step.rows):
        assert sheet.cell(3 + pp_rank, 1).value == step.label(pp_rank)
        cells = chart_row(sheet, 3 + pp_rank)
        drawn = [(text, color) for text, color, _, _ in cells if color != IDLE]
        assert drawn == [
            (f"{s.chunk}-{s.microbatch}", chunk_color(s.action, s.chunk, step.num_chunks))
            for s in row
        ]
        # Cells follow each other without a gap and all rows end at the same column.
        assert [first for _, _, first, _ in cells[1:]] == [last + 1 for *_, last in cells[:-1]]
        assert cells[0][2] == 2
        assert cells[-1][3] == 1 + lay_out(step).num_columns


def test_widths_and_idle_cells_show_time(draw: Callable[..., tuple[PipelineStep, Path]]) -> None:
    step, path = draw(2, 1, 2)
    sheet = load_workbook(path)["order"]
    shown = [(text, last - first + 1) for text, _, first, last in chart_row(sheet, 4)]
    # Rank 1 waits for the first forward; a backward takes twice a forward, which is 4 columns.
    assert shown == [(None, 4), ("0-0", 4), ("0-1", 4), ("0-0", 8), ("0-1", 8), (None, 8)]
    assert sheet["B2"].value == "0 ms"
    assert sheet["R2"].value == "4 ms"
    assert step.step_ns == 9_000_000


def test_title_legend_and_frozen_panes(draw: Callable[..., tuple[PipelineStep, Path]]) -> None:
    _, path = draw(2, 2, 4)
    book = load_workbook(path)
    sheet = book["order"]
    assert sheet.freeze_panes == "B3"
    assert "adaptive schedule, iteration 1" in sheet["A1"].value
    assert "bubble" in sheet["A1"].value
    words = {cell.value for row in sheet.iter_rows(min_row=6) for cell in row if cell.value}
    assert {"legend", "chunk 0", "chunk 1", "forward", "backward", "idle (bubble)"} <= words
    assert book.sheetnames == ["order", "summary"]
    assert book["summary"]["A2"].value == "rank 0 (stages 0, 2)"
    assert book["summary"]["B2"].value == 16


def test_missing_ranks_are_said(write_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_run(3, 1, 2)
    (folder / trace_file_name(1)).unlink()
    write_workbook(pipeline_step(read_run(folder)), tmp_path / "chart.xlsx")
    sheet = load_workbook(tmp_path / "chart.xlsx")["order"]
    assert sheet["B4"].value == "no trace of this rank"
    assert chart_row(sheet, 4) == []
    assert len(chart_row(sheet, 5)) == 6


def check_file(path: Path) -> None:
    """What makes Excel or LibreOffice repair a file: overlaps, and columns beyond the last."""
    space = {"x": "http://schemas.openxmlformats.org/spreadsheetml/2006/main"}
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = [name for name in archive.namelist() if name.startswith("xl/worksheets/sheet")]
        roots = [ElementTree.fromstring(archive.read(name)) for name in names]
    for root in roots:
        spans = [
            (int(c.get("min", 0)), int(c.get("max", 0))) for c in root.iterfind("x:cols/*", space)
        ]
        by_row: dict[int, list[tuple[int, int]]] = {0: spans}
        for area in root.iterfind("x:mergeCells/x:mergeCell", space):
            first, top, last, bottom = range_boundaries(area.attrib["ref"])
            assert top == bottom
            by_row.setdefault(top, []).append((first, last))
        for areas in by_row.values():
            areas.sort()
            assert all(a[1] < b[0] for a, b in pairwise(areas))
            assert areas[-1][1] <= MAX_COLUMNS
    assert "order" in load_workbook(path, read_only=True).sheetnames


def test_sixteen_stages_four_chunks_sixty_four_microbatches(
    draw: Callable[..., tuple[PipelineStep, Path]],
) -> None:
    step, path = draw(16, 4, 64)
    check_file(path)
    sheet = load_workbook(path, read_only=True)["order"]
    rows = sheet.iter_rows(min_row=3, max_row=18, min_col=2, values_only=True)
    for cells, spans in zip(rows, step.rows, strict=True):
        texts = [text for text in cells if text]
        assert texts == [f"{span.chunk}-{span.microbatch}" for span in spans]


def step_of(*rows: tuple[Span, ...]) -> PipelineStep:
    end = max(span.end_ns for row in rows for span in row)
    return PipelineStep(1, "x", "loop", len(rows), 1, 1, rows, (), 0, end)


def test_a_long_step_with_short_actions_gets_coarser_columns(tmp_path: Path) -> None:
    # At four columns per action this step would need 40 million columns.
    ends = (Span("F", 0, 0, 0, 10, 1), Span("B", 0, 0, 99_999_990, 100_000_000, 1))
    grid = lay_out(step_of(ends))
    assert grid.num_columns < MAX_COLUMNS
    assert [cell.span for cell in grid.rows[0]] == [ends[0], None, ends[1]]
    write_workbook(step_of(ends), tmp_path / "chart.xlsx")
    check_file(tmp_path / "chart.xlsx")


def test_crowded_short_actions_keep_their_order() -> None:
    crowd = [Span("F", 0, i, i, i + 1, 1) for i in range(50)]
    row = (*crowd, Span("B", 0, 0, 50, 50_000_000, 1))
    grid = lay_out(step_of(row))
    assert [cell.span for cell in grid.rows[0]] == list(row)
    assert all(cell.end > cell.start for cell in grid.rows[0])


def test_more_actions_than_columns_go_on_in_further_sheets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbook_module, "GRID_COLUMNS", 30)
    row = tuple(Span("F", 0, i, i * 10, i * 10 + 10, 1) for i in range(100))
    write_workbook(step_of(row), tmp_path / "chart.xlsx")
    book = load_workbook(tmp_path / "chart.xlsx")
    assert book.sheetnames == ["order", "order 2", "order 3", "order 4", "summary"]
    texts = [text for name in book.sheetnames[:4] for text, *_ in chart_row(book[name], 3)]
    assert texts == [f"0-{i}" for i in range(100)]


def test_zero_length_actions_are_still_drawn() -> None:
    grid = lay_out(step_of((Span("F", 0, 0, 0, 0, 1), Span("B", 0, 0, 0, 0, 1))))
    assert [(cell.start, cell.end) for cell in grid.rows[0]] == [(0, 1), (1, 2)]
