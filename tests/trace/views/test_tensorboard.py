"""Checks the files of curves by reading them with TensorBoard's reader."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.adaptive.errors import TraceError
from megatron.adaptive.trace.metrics import PARTS, run_figures
from megatron.adaptive.trace.read import read_run
from megatron.adaptive.trace.views.formats.tensorboard import FILE_NAME, write_scalars


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Returns the points of the curve ``tag`` in ``folder``, as pairs of step and value."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(point.step, point.value) for point in reader.Scalars(tag)]


def test_a_point_per_iteration_and_rank(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = read_run(write_run(2, 1, 4))
    figures = run_figures(run)
    for _ in range(2):  # The second call must replace the files that the first call wrote.
        tags = write_scalars(run, figures, tmp_path / "curves")
    assert [path.name for path in (tmp_path / "curves" / "mean").iterdir()] == [FILE_NAME]
    assert len(tags) == 2 + len(PARTS)
    assert {"pipeline/bubble fraction", "pipeline/step time ms"} < set(tags)
    assert sorted(path.name for path in (tmp_path / "curves").iterdir()) == [
        "mean",
        "rank 00000",
        "rank 00001",
    ]
    parts, names = figures.parts_ms, list(PARTS)
    for rank in range(2):
        folder = tmp_path / "curves" / f"rank {rank:05d}"
        bubbles = curve(folder, "pipeline/bubble fraction")
        assert [step for step, _ in bubbles] == [1, 2, 3]
        expected = figures.bubble_fraction[:, rank].tolist()
        assert [value for _, value in bubbles] == pytest.approx(expected)
        waits = curve(folder, "pipeline parts/wait input ms")
        expected = parts[:, rank, names.index("input")].tolist()
        assert [value for _, value in waits] == pytest.approx(expected)
    means = curve(tmp_path / "curves" / "mean", "pipeline/step time ms")
    assert [value for _, value in means] == pytest.approx(figures.step_ns[:, 0] / 1e6)


def test_points_lie_at_the_time_of_day(write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = read_run(write_run(1, 1, 1))
    write_scalars(run, run_figures(run), tmp_path)
    reader = EventAccumulator(str(tmp_path / "mean"))
    reader.Reload()
    header = run.ranks[0].header
    first_s = (header.unix_ns - header.monotonic_ns + 15 * 10**9) / 1e9
    points = reader.Scalars("pipeline/step time ms")
    assert points[0].wall_time == pytest.approx(first_s, abs=1e-3)
    assert points[1].wall_time - points[0].wall_time == pytest.approx(10, abs=1e-3)


def test_what_a_rank_did_not_record_is_no_point(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_run(2, 1, 4)
    path = folder / "trace_rank_00001.jsonl"
    text = path.read_text()
    path.write_text(text[: text.index('{"begin_iteration": 3')])
    run = read_run(folder)
    write_scalars(run, run_figures(run), tmp_path / "curves")
    tag = "pipeline/bubble fraction"
    assert [step for step, _ in curve(tmp_path / "curves" / "rank 00000", tag)] == [1, 2, 3]
    assert [step for step, _ in curve(tmp_path / "curves" / "rank 00001", tag)] == [1, 2]
    assert [step for step, _ in curve(tmp_path / "curves" / "mean", tag)] == [1, 2, 3]


def test_a_folder_that_cannot_be_written(write_run: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "curves").write_text("")
    run = read_run(write_run(1, 1, 1))
    with pytest.raises(TraceError, match="cannot write"):
        write_scalars(run, run_figures(run), tmp_path / "curves")
