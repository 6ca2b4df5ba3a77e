"""Tests which steps of a ``Pipeline`` are traced, and which trace settings are rejected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import profiler

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import Pipeline
from megatron.adaptive.trace.kernels import read_steps
from megatron.adaptive.trace.read import RunTrace, read_run

from .models import Tower

STEPS = 5
MICROBATCHES = 2


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(2 * MICROBATCHES, 16)}


def traced(folder: Path, **options: Any) -> RunTrace:
    """Trains and evaluates in each step, saves a checkpoint, and returns the trace of the run.

    Files are written to ``folder``, and ``options`` are settings of the pipeline.
    """
    with Pipeline(
        Tower(), batch(), micro_batch_size=2, trace_dir=str(folder / "traces"), **options
    ) as pipeline:
        for _ in range(STEPS):
            pipeline.step(batch())
            pipeline.eval(batch())
        pipeline.save(folder / "saved")
    return read_run(folder / "traces")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, (1, 2, 3, 4, 5)),
        ({"trace_interval": 2}, (1, 3, 5)),
        ({"trace_interval": 2, "trace_iterations": 2}, (1, 3)),
    ],
)
def test_only_chosen_steps_are_traced(
    tmp_path: Path, options: dict[str, Any], steps: tuple[int, ...]
) -> None:
    trace = traced(tmp_path, trace_detail="collectives", **options)
    assert trace.iterations == trace.complete_iterations() == steps
    (rank,) = trace.ranks.values()
    kinds = [span.action for step in steps for span in rank.spans(step)]
    assert kinds.count("F") == kinds.count("B") == len(steps) * MICROBATCHES
    assert kinds.count("evaluate") == len(steps)
    assert kinds.count("checkpoint") == (STEPS in steps)
    assert all(rank.layers(step) for step in steps)


def test_a_list_of_microbatches_has_their_sizes(tmp_path: Path) -> None:
    parts = [{"x": torch.ones(length, 16)} for length in (1, 4, 2)]
    with Pipeline(Tower(), parts, trace_dir=str(tmp_path / "listed")) as pipeline:
        pipeline.step(parts)
    (listed,) = read_run(tmp_path / "listed").ranks.values()
    sizes = listed.sizes(1)
    assert [size / sizes[0] for size in sizes] == pytest.approx([1, 4, 2], rel=0.05)
    # If a batch is a dictionary, all microbatches have the same size, so sizes are not traced.
    (equal,) = traced(tmp_path).ranks.values()
    assert equal.sizes(1) == ()


def test_kernels_are_recorded_unless_another_profiler_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: dict[str, Any] = {
        "trace_detail": "kernels",
        "profile_step_start": 2,
        "profile_step_end": 4,
    }
    alone = traced(tmp_path / "alone", **chosen)
    assert [step.iteration for step in read_steps(alone, 0)] == [2, 3]
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]):
        beside = traced(tmp_path / "beside", **chosen)
    assert read_steps(beside, 0) == []
    advice = "stop it, or remove trace_detail='kernels'"
    assert capsys.readouterr().out.count(advice) == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"trace_detail": "kernel"}, "not one of actions, layers, collectives, kernels"),
        ({"trace_interval": 0}, "trace_interval must be an integer of at least 1, got 0"),
        ({"trace_iterations": 0}, "trace_iterations must be an integer of at least 1, got 0"),
        ({"profile_ranks": 0}, "profile_ranks must be a list of ranks such as [0], got 0"),
        (
            {"profile_ranks": [0, -1]},
            "each rank in profile_ranks must be a non-negative integer, got -1",
        ),
        ({"profile_step_end": -1}, "profile_step_end must be an integer of at least 0, got -1"),
        ({"profile_step_start": 12}, "profile_step_end must be greater than profile_step_start"),
        ({"trace_otlp": "localhost:4318"}, "trace_otlp must be a URL such as"),
        (
            {"trace_otlp": "http://me:secret@h:4318", "trace_dir": None},
            "trace_otlp http://...@h:4318 requires trace_dir",
        ),
        *(
            ({name: value, "trace_dir": None}, f"{name}={value!r} requires trace_dir, because this")
            for name, value in (
                ("trace_detail", "layers"),
                ("trace_interval", 2),
                ("trace_iterations", 1),
                ("profile_ranks", (0, 1)),
                ("profile_step_start", 1),
            )
        ),
        (
            {"profile_step_start": 1},
            "profile_step_start=1 requires trace_detail='kernels', because this setting",
        ),
        (
            {"profile_ranks": [0, 1], "trace_detail": "kernels"},
            "profile_ranks contains 1, but the number of processes is 1",
        ),
    ],
)
def test_what_cannot_be_traced_is_named(
    tmp_path: Path, options: dict[str, Any], error: str
) -> None:
    settings = {"trace_dir": str(tmp_path / "traces"), **options}
    with pytest.raises(ConfigError, match=re.escape(error)) as raised:
        Pipeline(Tower(), batch(), micro_batch_size=2, **settings)
    assert "secret" not in str(raised.value)
    assert not (tmp_path / "traces").exists()
