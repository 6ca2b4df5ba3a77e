"""Checks that the picture shows forward, backward and idle time in the proportions of the trace."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.catalog import make_candidate
from megatron.adaptive.schedule.choose_by_simulation import evaluate
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.workload import StageProfile, StageTimes
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.step_view import pipeline_step
from megatron.adaptive.trace.trace_format import Span, trace_file_name
from megatron.adaptive.trace.views import picture
from megatron.adaptive.trace.views.palette import IDLE, WAIT_COLORS, chunk_color
from megatron.adaptive.trace.views.picture import write_comparison, write_picture
from tests.trace.conftest import step_of


def share(path: Path, color: str) -> float:
    """Returns the fraction of the pixels in the picture ``path`` that have the colour ``color``."""
    pixels = np.rint(imread(path)[..., :3] * 255).astype(int)
    channels = [int(color[i : i + 2], 16) for i in (0, 2, 4)]
    return float(np.all(pixels == channels, axis=-1).mean())


def test_colours_cover_what_the_trace_says(write_run: Callable[..., Path], tmp_path: Path) -> None:
    step = pipeline_step(read_run(write_run(2, 1, 4)))
    write_picture(step, tmp_path / "chart.png")
    forward = share(tmp_path / "chart.png", chunk_color("F", 0, 1))
    backward = share(tmp_path / "chart.png", chunk_color("B", 0, 1))
    idle = share(tmp_path / "chart.png", IDLE)
    # Forward passes of each rank take 4 ms, backward passes 8 ms, and idle time 3 ms. The legend
    # and the texts also cover some pixels, so the fractions differ slightly.
    assert backward / forward == pytest.approx(2, rel=0.15)
    assert idle / forward == pytest.approx(0.75, rel=0.15)


@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1, 1), (12, 1, 4), (2, 3, 4), (2, 20, 2)),
        pytest.param((16, 4, 64), marks=pytest.mark.long),
    ],
)
def test_any_shape_is_drawn(
    write_run: Callable[..., Path], tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    write_picture(pipeline_step(read_run(write_run(*shape, iterations=1))), tmp_path / "c.png")
    height, width, _ = imread(tmp_path / "c.png").shape
    assert 2000 <= width <= 4000
    assert 300 <= height <= 1200
    for chunk in range(shape[1] if shape[1] <= 4 else 0):
        assert share(tmp_path / "c.png", chunk_color("F", chunk, shape[1])) > 0.01
        assert share(tmp_path / "c.png", chunk_color("B", chunk, shape[1])) > 0.01


def test_waits_have_the_colour_of_their_cause(tmp_path: Path) -> None:
    row = (Span("F", 0, 0, 0, 30, 1), Span("B", 0, 0, 90, 120, 1))
    waits = (
        Span("wait", 0, 0, 30, 50, 1, reason="memory"),
        Span("wait", 0, 0, 50, 80, 1, reason="order"),
    )
    step = step_of(row, waits=(waits,))
    write_picture(step, tmp_path / "chart.png")
    forward = share(tmp_path / "chart.png", chunk_color("F", 0, 1))
    shares = {
        cause: share(tmp_path / "chart.png", color) / forward
        for cause, color in WAIT_COLORS.items()
    }
    assert shares["memory"] == pytest.approx(2 / 3, rel=0.15)
    assert shares["order"] == pytest.approx(1, rel=0.15)
    assert shares["input"] == shares["group"] == shares[""] == 0
    assert share(tmp_path / "chart.png", IDLE) / forward == pytest.approx(1 / 3, rel=0.25)


def test_many_rows_share_a_limited_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_ROWS_IN", 2.0)
    rows = tuple((Span("F", 0, 0, i, i + 9, 1),) for i in range(50))
    write_picture(step_of(*rows), tmp_path / "chart.png")
    assert imread(tmp_path / "chart.png").shape[0] < 4 * picture.DPI


def test_missing_ranks_and_zero_length_steps_are_drawn(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_run(3)
    (folder / trace_file_name(1)).unlink()
    write_picture(pipeline_step(read_run(folder)), tmp_path / "missing.png")
    row = (Span("F", 0, 0, 0, 0, 1),)
    write_picture(step_of(row), tmp_path / "zero.png")
    assert (tmp_path / "missing.png").stat().st_size > 1000
    assert (tmp_path / "zero.png").stat().st_size > 1000


def simulated(*names: str) -> list[tuple[str, SimResult]]:
    profile = StageProfile(times=StageTimes.equal(4, forward_s=0.1, backward_s=0.1, weight_s=0.1))
    return [
        (name, evaluate(make_candidate(name, 2, 2, 4), 4, profile, [0]).example) for name in names
    ]


def test_simulated_steps_have_every_kind_and_chunk_in_its_color(tmp_path: Path) -> None:
    single, double = tmp_path / "one.png", tmp_path / "two.png"
    write_comparison(simulated("1f1b"), single)
    write_comparison(simulated("1f1b", "zb-v"), double)
    assert imread(double).shape[0] > imread(single).shape[0]
    assert all(share(double, chunk_color(kind, chunk, 2)) for kind in "FBW" for chunk in range(2))
    with pytest.raises(TraceError):
        write_comparison(simulated("1f1b"), single / "steps.png")
