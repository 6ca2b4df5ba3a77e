"""Checks that cells of the workbook match the trace, and that Excel's limits are respected."""

import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from openpyxl import Workbook, load_workbook
from openpyxl.utils import range_boundaries
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.metrics import PARTS, RunFigures, run_figures
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.step_view import PipelineStep, pipeline_step
from megatron.adaptive.trace.trace_format import Span, trace_file_name
from megatron.adaptive.trace.views import workbook
from megatron.adaptive.trace.views.palette import IDLE, WAIT_COLORS, chunk_color
from megatron.adaptive.trace.views.workbook import (
    MAX_BINS,
    MAX_COLUMNS,
    ChartCell,
    add_order,
    fill_bins,
    lay_out,
    write_workbook,
)
from tests.trace.conftest import make_header, step_of, write_spans


@pytest.fixture
def draw(
    write_run: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[PipelineStep, Path]]:
    def make(*shape: int) -> tuple[PipelineStep, Path]:
        step, _ = write(write_run(*shape, iterations=1), tmp_path / "chart.xlsx")
        return step, tmp_path / "chart.xlsx"

    return make


def write(folder: Path, target: Path) -> tuple[PipelineStep, RunFigures]:
    """Writes a workbook about the last iteration of the run in ``folder`` to ``target``.

    Returns the step of this iteration and the statistics of the run.
    """
    run = read_run(folder)
    step, figures = pipeline_step(run), run_figures(run)
    write_workbook(run, step, figures, target)
    return step, figures


def save_order(step: PipelineStep, path: Path) -> None:
    """Writes a workbook to ``path`` that contains only the sheet *order* for ``step``."""
    book = Workbook()
    del book[book.sheetnames[0]]
    add_order(book, step, "title")
    book.save(path)


def chart_row(sheet: Worksheet, row: int) -> list[tuple[str | None, str, int, int]]:
    """Returns the text, colour, first column and last column of each coloured cell in ``row``."""
    widths = {
        area.min_col: area.max_col for area in sheet.merged_cells.ranges if area.min_row == row
    }
    cells, covered = [], 0
    for cell in sheet[row][1:]:
        if cell.fill.fill_type == "solid" and cell.column > covered:
            covered = widths.get(cell.column, cell.column)
            cells.append((cell.value, cell.fill.start_color.rgb[-6:], cell.column, covered))
    return cells


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
        # There must be no gaps between cells, and all rows must end at the same column.
        assert [first for _, _, first, _ in cells[1:]] == [last + 1 for *_, last in cells[:-1]]
        assert cells[0][2] == 2
        assert cells[-1][3] == 1 + lay_out(step).num_columns


def test_widths_and_idle_cells_show_time(draw: Callable[..., tuple[PipelineStep, Path]]) -> None:
    step, path = draw(2, 1, 2)
    book = load_workbook(path)
    assert book.sheetnames == ["order", "time", "summary", "iterations", "charts"]
    sheet = book["order"]
    shown = [(text, last - first + 1) for text, _, first, last in chart_row(sheet, 4)]
    # Rank 1 is idle until the first forward pass on rank 0 ends. A forward pass is 4 columns wide,
    # and a backward pass is 8 columns wide.
    assert shown == [(None, 4), ("0-0", 4), ("0-1", 4), ("0-0", 8), ("0-1", 8), (None, 8)]
    assert sheet["B2"].value == "0 ms"
    assert sheet["R2"].value == "4 ms"
    assert step.step_ns == 9_000_000
    assert sheet.freeze_panes == "B3"
    assert "adaptive schedule, iteration 1" in sheet["A1"].value
    texts = {cell.value for row in sheet.iter_rows(min_row=6) for cell in row if cell.value}
    assert {"legend", "chunk 0", "forward", "backward", "idle (bubble)"} <= texts


def test_missing_ranks_are_said(write_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_run(3, 1, 2)
    (folder / trace_file_name(1)).unlink()
    write(folder, tmp_path / "chart.xlsx")
    book = load_workbook(tmp_path / "chart.xlsx")
    for name in ("order", "time"):
        assert book[name]["B4"].value == "no trace of this rank"
        assert chart_row(book[name], 4) == []
        assert len(chart_row(book[name], 5)) == 6
    assert book["summary"]["B4"].value == "no trace of this rank"
    texts = [cell.value for cell in book["summary"]["A"] if cell.value]
    assert f"no trace of ranks 1 in {folder}" in texts


def check_file(path: Path) -> None:
    """Checks that Excel can open the workbook at ``path`` without repairing it.

    Excel would repair a workbook with overlapping cells or too many columns.
    """
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
        for areas in filter(None, by_row.values()):
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


def test_a_long_step_with_short_actions_gets_coarser_columns(tmp_path: Path) -> None:
    # If each action were at least four columns wide, this step would need 40 million columns.
    ends = (Span("F", 0, 0, 0, 10, 1), Span("B", 0, 0, 99_999_990, 100_000_000, 1))
    grid = lay_out(step_of(ends))
    assert grid.num_columns < MAX_COLUMNS
    assert [cell.span for cell in grid.rows[0]] == [ends[0], None, ends[1]]
    save_order(step_of(ends), tmp_path / "chart.xlsx")
    check_file(tmp_path / "chart.xlsx")


def test_crowded_and_empty_actions_keep_their_order() -> None:
    crowd = [Span("F", 0, i, i, i + 1, 1) for i in range(50)]
    for row in ((*crowd, Span("B", 0, 0, 50, 50_000_000, 1)), (Span("F", 0, 0, 0, 0, 1),) * 2):
        cells = lay_out(step_of(row)).rows[0]
        assert [cell.span for cell in cells] == list(row)
        assert all(cell.end > cell.start for cell in cells)


def test_of_more_actions_than_columns_the_first_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbook, "GRID_COLUMNS", 30)
    row = tuple(Span("F", 0, i, i * 10, i * 10 + 10, 1) for i in range(100))
    save_order(step_of(row), tmp_path / "chart.xlsx")
    sheet = load_workbook(tmp_path / "chart.xlsx")["order"]
    assert [text for text, *_ in chart_row(sheet, 3)] == [f"0-{i}" for i in range(30)]
    texts = [str(cell.value) for row in sheet.iter_rows() for cell in row]
    assert any("only the first 30% fit" in text for text in texts)


def test_bins_of_time_show_actions_waits_and_idle_time() -> None:
    ms = 1_000_000
    row = (
        Span("F", 0, 0, 0, 30 * ms, 1),
        Span("F", 0, 1, 30 * ms, 30 * ms + 300_000, 1),
        Span("B", 0, 0, 31 * ms, 40 * ms, 1),
        Span("B", 0, 1, 50 * ms, 60 * ms, 1),
    )
    waits = (
        Span("wait", 0, 0, 30 * ms + 300_000, 30 * ms + 800_000, 1, reason="order"),
        Span("wait", 0, 1, 40 * ms, 46 * ms, 1, reason="memory"),
    )
    step = step_of(row, waits=(waits,))
    bins = fill_bins(step)
    # The time per column is chosen from the series 1, 2, 5, 10, and so on. In this case, 0.1 ms is
    # the smallest value with which at most 600 columns are needed.
    assert (bins.unit_ns, bins.num_columns) == (100_000, 600)
    assert bins.rows[0] == (
        ChartCell(0, 300, row[0]),
        ChartCell(300, 303, row[1]),
        ChartCell(303, 308, waits[0]),
        ChartCell(308, 310, None),
        ChartCell(310, 400, row[2]),
        ChartCell(400, 460, waits[1]),
        ChartCell(460, 500, None),
        ChartCell(500, 600, row[3]),
    )


def test_a_bin_shows_what_goes_on_at_its_middle() -> None:
    # The step takes 600,000 ns and is divided into 600 columns, so each column represents 1000 ns.
    unit = 1000
    row = (
        Span("F", 0, 0, 0, 300, 1),
        Span("F", 0, 1, 400, 900, 1),
        Span("B", 0, 0, 1600, 2000, 1),
        Span("B", 0, 1, 599_400, 600_000, 1),
    )
    waits = (Span("wait", 0, 0, 1000, 1550, 1),)
    step = step_of(row, waits=(waits,))
    bins = fill_bins(step)
    assert bins.unit_ns == unit
    assert bins.rows[0] == (
        ChartCell(0, 1, row[1]),
        ChartCell(1, 2, waits[0]),
        ChartCell(2, 599, None),
        ChartCell(599, 600, row[3]),
    )


def test_the_sheet_time_is_the_bins(tmp_path: Path) -> None:
    header = make_header(0, 1, num_microbatches=1)
    ms = 1_000_000
    spans = (
        Span("F", 0, 0, 0, 4 * ms, 1),
        Span("wait", 0, 0, 4 * ms, 8 * ms, 1, of="B", reason="input"),
        Span("B", 0, 0, 8 * ms, 12 * ms, 1),
    )
    write_spans(tmp_path / "traces", header, spans, num_microbatches=1)
    step, _ = write(tmp_path / "traces", tmp_path / "chart.xlsx")
    sheet = load_workbook(tmp_path / "chart.xlsx")["time"]
    assert sheet["A1"].value.endswith("; one column is 0.02 ms")
    assert chart_row(sheet, 3) == [
        ("0-0", chunk_color("F", 0, 1), 2, 201),
        (None, WAIT_COLORS["input"], 202, 401),
        ("0-0", chunk_color("B", 0, 1), 402, 601),
    ]
    assert fill_bins(step).num_columns == MAX_BINS
    assert sheet["A7"].value == "wait for input"
    assert sheet.freeze_panes == "B3"


def test_summary_and_iterations_are_the_figures(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    step, figures = write(write_run(2, 2, 4), tmp_path / "chart.xlsx")
    book = load_workbook(tmp_path / "chart.xlsx")
    heads = book["summary"][2]
    table = {
        row[0].value: {head.value: cell.value for head, cell in zip(heads, row, strict=True)}
        for row in book["summary"].iter_rows(min_row=3, max_row=4)
    }
    assert list(table) == ["rank 0 (stages 0, 2)", "rank 1 (stages 1, 3)"]
    parts = figures.parts_ms
    for rank, line in enumerate(table.values()):
        assert line["global rank"] == rank
        assert line["actions"] == 16
        assert line["step ms"] == pytest.approx(step.step_ns / 1e6)
        names = [f"{part} ms" for part in PARTS.values()]
        # Waits in the synthetic trace overlap with actions by a few nanoseconds, so the sum is
        # inexact.
        assert sum(line[name] for name in names) == pytest.approx(line["step ms"], abs=1e-3)
        assert line["busy ms"] == pytest.approx(parts[2, rank, 0])
        assert line["bubble fraction"] == pytest.approx(1 - line["busy ms"] / line["step ms"])
        assert line["F chunk 0 mean ms"] == pytest.approx(1)
        assert line["B chunk 1 mean ms"] == pytest.approx(2)
        assert line["B chunk 1 standard deviation ms"] == pytest.approx(0)
        assert line["peak microbatches in flight"] == 8
        assert line["peak bytes in flight"] == 1 << 20
        assert line["bytes moved"] == 1600
    assert book["summary"]["A1"].value == "iteration 3"
    assert book["summary"]["A6"].value == "mean of 3 iterations (1-3); peaks are maxima instead"
    rows = list(book["iterations"].iter_rows(min_row=3, values_only=True))
    assert [row[0] for row in rows] == [1, 2, 3]
    assert [row[1] for row in rows] == pytest.approx([step.step_ns / 1e6] * 3)
    assert [row[2] for row in rows] == pytest.approx(figures.bubble_fraction.mean(axis=1).tolist())
    assert list(rows[0][3 : 3 + len(PARTS)]) == pytest.approx(parts[0].mean(axis=0).tolist())
    assert rows[0][-2:] == pytest.approx(tuple(figures.bubble_fraction[0]))
    assert {book[name].freeze_panes for name in ("summary", "iterations")} == {"B3"}


def test_charts_are_native_and_refer_to_the_tables(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    write(write_run(2, 1, 4), tmp_path / "chart.xlsx")
    bars, curves = load_workbook(tmp_path / "chart.xlsx")["charts"]._charts
    assert (bars.type, bars.grouping) == ("bar", "stacked")
    assert bars.series[0].val.numRef.f == "'summary'!$E$3:$E$4"
    steps, bubbles = (chart.series[0].val.numRef.f for chart in curves._charts)
    assert (steps, bubbles) == ("'iterations'!$B$3:$B$5", "'iterations'!$C$3:$C$5")
    write(write_run(2, 1, 4, iterations=1, folder=tmp_path / "one"), tmp_path / "one.xlsx")
    assert len(load_workbook(tmp_path / "one.xlsx")["charts"]._charts) == 1


def test_long_runs_are_thinned_out(
    write_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbook, "MAX_ITERATIONS", 3)
    monkeypatch.setattr(workbook, "MAX_RANK_COLUMNS", 1)
    write(write_run(2, 1, 1, iterations=7), tmp_path / "chart.xlsx")
    sheet = load_workbook(tmp_path / "chart.xlsx")["iterations"]
    assert [row[0] for row in sheet.iter_rows(min_row=3, values_only=True)] == [1, 4, 7]
    assert "one in 3 of all 7 iterations" in sheet["A1"].value
    assert "the first 1 of 2 ranks" in sheet["A1"].value


def test_hundreds_of_ranks_stay_within_the_limits(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    write(write_run(300, 1, 1, iterations=1), tmp_path / "chart.xlsx")
    check_file(tmp_path / "chart.xlsx")
    book = load_workbook(tmp_path / "chart.xlsx", read_only=True)
    assert book["time"].max_column <= 1 + MAX_BINS
    assert book["summary"].max_row < 350
