"""Checks that LibreOffice can open the workbook without repairs, and keeps its content.

LibreOffice loads the workbook and saves a new file, which must have the same content.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from openpyxl import load_workbook
from openpyxl.workbook import Workbook
from openpyxl.worksheet.worksheet import Worksheet

from megatron.adaptive.trace.metrics import RunFigures, run_figures
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.step_view import PipelineStep, pipeline_step
from megatron.adaptive.trace.views.palette import IDLE, chunk_color
from megatron.adaptive.trace.views.workbook import fill_bins, write_workbook
from tests.trace.views.test_workbook import chart_row

SOFFICE = shutil.which("soffice")

pytestmark = pytest.mark.skipif(
    SOFFICE is None, reason="needs LibreOffice Calc: bash prerequisite.sh --views"
)


@pytest.fixture
def opened(
    write_run: Callable[..., Path], tmp_path: Path
) -> tuple[PipelineStep, RunFigures, Workbook, Workbook]:
    """Returns the step, the run's statistics, the written workbook and LibreOffice's copy of it."""
    run = read_run(write_run(3, 2, 6))
    step, figures = pipeline_step(run), run_figures(run)
    path = tmp_path / "chart.xlsx"
    write_workbook(run, step, figures, path)
    done = subprocess.run(
        [
            *(str(SOFFICE), "--headless", "--norestore"),
            f"-env:UserInstallation=file://{tmp_path}/profile",
            *("--convert-to", "xlsx:Calc MS Excel 2007 XML", "--outdir", str(tmp_path / "saved")),
            str(path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = (done.stdout + done.stderr).lower()
    assert not [word for word in ("repair", "corrupt", "error") if word in output], output
    saved = tmp_path / "saved" / "chart.xlsx"
    assert saved.exists(), done.stdout + done.stderr
    return step, figures, load_workbook(path), load_workbook(saved)


def values_of(sheet: Worksheet) -> dict[str, object]:
    """Returns the value of each non-empty cell in ``sheet``, by the name of the cell."""
    return {cell.coordinate: cell.value for row in sheet for cell in row if cell.value is not None}


def test_it_opens_and_nothing_is_lost(
    opened: tuple[PipelineStep, RunFigures, Workbook, Workbook],
) -> None:
    step, figures, written, saved = opened
    assert saved.sheetnames == written.sheetnames

    # LibreOffice's copy must contain the same values in the same cells.
    for name in written.sheetnames:
        before, after = values_of(written[name]), values_of(saved[name])
        assert after.keys() == before.keys()
        for position, value in before.items():
            close = isinstance(value, int | float)
            assert after[position] == (pytest.approx(value, rel=1e-12) if close else value), (
                position
            )
    assert len(saved["charts"]._charts) == len(written["charts"]._charts) == 2

    # The cells of the two charts must match the trace.
    for pp_rank, spans in enumerate(step.rows):
        drawn = [(text, color) for text, color, *_ in chart_row(saved["order"], 3 + pp_rank)]
        assert [cell for cell in drawn if cell[1] != IDLE] == [
            (f"{s.chunk}-{s.microbatch}", chunk_color(s.action, s.chunk, 2)) for s in spans
        ]
    for pp_rank, bins in enumerate(fill_bins(step).rows):
        texts = [(text, first) for text, _, first, _ in chart_row(saved["time"], 3 + pp_rank)]
        shown = [b.span if b.span and b.span.action != "wait" else None for b in bins]
        assert texts == [
            (s and f"{s.chunk}-{s.microbatch}", 2 + b.start)
            for s, b in zip(shown, bins, strict=True)
        ]

    # The values in the two tables must match the statistics.
    heads = [cell.value for cell in saved["summary"][2]]
    for rank in range(3):
        line = dict(zip(heads, (cell.value for cell in saved["summary"][3 + rank]), strict=True))
        assert line["busy ms"] == pytest.approx(figures.busy_ns[-1, rank] / 1e6)
        assert line["bubble fraction"] == pytest.approx(figures.bubble_fraction[-1, rank])
    for row, iteration in enumerate(figures.iterations.tolist()):
        cells = [cell.value for cell in saved["iterations"][3 + row]]
        assert cells[:2] == [iteration, pytest.approx(figures.step_ns[row].max() / 1e6)]
