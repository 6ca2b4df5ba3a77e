"""Tests that a rank's executor is built from megatron-core's process groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core import parallel_state  # noqa: E402

from megatron.adaptive.engine.agreement import Agreement  # noqa: E402
from megatron.adaptive.engine.executor_setup import build_executor, gather_places  # noqa: E402
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
