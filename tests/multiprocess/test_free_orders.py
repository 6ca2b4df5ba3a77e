"""The files of free orders are what they are for: valid, unlike any schedule with a name."""

from __future__ import annotations

import contextlib
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule.file import load
from megatron.adaptive.schedule.registry import make_schedule, schedule_names

from .free_orders import MICROBATCHES, ORIGINS, free_order, write_files


@pytest.mark.parametrize("file", ORIGINS)
def test_a_free_order_has_no_name(file: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    schedule = load(tmp_path / file)
    assert schedule == free_order(file)
    compared = 0
    for name in schedule_names():
        with contextlib.suppress(ScheduleError):  # one for other placements
            named = make_schedule(name, schedule.placement, MICROBATCHES)
            assert all(map(operator.ne, named.orders, schedule.orders)), name
            compared += 1
    assert compared


@pytest.mark.parametrize("file", [file for file in ORIGINS if file.endswith(".csv")])
def test_torch_reads_the_csv(file: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    write_files(tmp_path)
    schedule = free_order(file)
    places = [schedule.placement.stage_of(0, chunk) for chunk in range(2)]
    stages: list[Any] = [
        SimpleNamespace(
            group_size=2, group_rank=0, num_stages=4, stage_index=stage, submod=torch.nn.Identity()
        )
        for stage in places
    ]
    reader = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=lambda output, target: output)
    reader._load_csv(str(tmp_path / file), format="compute_only")
    rows = (tmp_path / file).read_text().splitlines()
    for rank, order in enumerate(schedule.orders):
        assert ",".join(map(str, reader.pipeline_order[rank])) == rows[rank]
        # With its messages: torch found an order in which every rank gets what it waits for.
        assert len(reader.pipeline_order_with_comms[rank]) > len(order)
