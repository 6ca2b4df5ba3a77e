"""The picture of several simulated steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron.adaptive.errors import TraceError
from megatron.adaptive.schedule.compare import evaluate, make_candidate
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.schedule.workload import StageProfile, StageTimes
from megatron.adaptive.trace.views.palette import chunk_color
from megatron.adaptive.trace.views.picture import write_comparison


def steps(*names: str) -> list[tuple[str, SimResult]]:
    profile = StageProfile(times=StageTimes.equal(4, forward_s=0.1, backward_s=0.1, weight_s=0.1))
    return [
        (name, evaluate(make_candidate(name, 2, 2, 4), 4, profile, [0], compiled=False).example)
        for name in names
    ]


def colors_of(path: Path) -> set[str]:
    pixels = imread(path)[:, :, :3]
    return {
        "".join(f"{round(255 * float(channel)):02X}" for channel in pixel)
        for pixel in pixels.reshape(-1, 3)[::7]
    }


def test_every_kind_and_chunk_has_its_color(tmp_path: Path) -> None:
    path = tmp_path / "steps.png"
    write_comparison(steps("1f1b", "zb-v"), path)
    wanted = {chunk_color(kind, chunk, 2) for kind in "FBW" for chunk in range(2)}
    assert wanted <= colors_of(path)


def test_more_schedules_make_a_higher_picture(tmp_path: Path) -> None:
    one, three = tmp_path / "one.png", tmp_path / "three.png"
    write_comparison(steps("1f1b"), one)
    write_comparison(steps("1f1b", "zb-v", "interleaved"), three)
    assert imread(three).shape[0] > imread(one).shape[0]


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError):
        write_comparison(steps("1f1b"), tmp_path / "file" / "steps.png")
