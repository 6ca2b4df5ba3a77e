"""Tests that a rank's executor is built from megatron-core's process groups."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator
from megatron.adaptive.config.environment import Environment

accelerator.install()

from megatron.core import parallel_state  # noqa: E402

from megatron.adaptive.engine.agreement import Agreement  # noqa: E402
from megatron.adaptive.engine.executor_setup import build_executor, gather_places, open_trace  # noqa: E402
from megatron.adaptive.schedule.stage_placement import Placement  # noqa: E402


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_rank_alone_needs_neither_channels_nor_agreement() -> None:
    places = gather_places()
    assert len(places) == 1
    wiring = build_executor(
        placement=Placement(num_ranks=1, num_chunks=1),
        accelerator=accelerator.detect(0, backend="gloo"),
        places=places,
        payload_shape=(4, 1, 8),
        payload_dtype=torch.float32,
        timeout_s=1.0,
    )
    assert wiring.transport is None
    assert type(wiring.agreement) is Agreement
    wiring.close()


@pytest.mark.usefixtures("one_rank")
def test_the_writer_of_a_trace_makes_the_processs_gpu_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    monkeypatch.setattr(
        accelerator.Accelerator,
        "make_current",
        lambda self: threads.append(threading.current_thread().name),
    )
    job: Any = types.SimpleNamespace(
        places=gather_places(),
        rank=0,
        control_group=None,
        environment=Environment(),
        accelerator=accelerator.detect(0, backend="gloo"),
        from_first=lambda value: value,
        gather=lambda value: [value],
    )
    placement = Placement(num_ranks=1, num_chunks=1)
    trace = open_trace(str(tmp_path), job, placement, schedule="1f1b", num_microbatches=1)
    trace.close()
    assert threads == ["trace-writer"]
