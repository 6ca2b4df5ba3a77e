"""Tests that the chosen number of slices is used even if the time limit ends the search."""

from __future__ import annotations

import datetime
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.adaptive.engine.policy_factory import Orders
from megatron.adaptive.profiling.pipeline_times import Sample
from megatron.adaptive.rebalance import auto_schedule
from megatron.adaptive.rebalance.auto_schedule import Tuner
from megatron.adaptive.schedule.action import ActionKind
from megatron.adaptive.schedule.choose_by_simulation import ScheduleChoice, choose
from megatron.adaptive.schedule.choose_slices import SliceTrial
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageTimes

PLACEMENT = Placement(num_ranks=2, num_chunks=1)
MICROBATCHES = 4
MS = 1_000_000


def sample(pp_rank: int) -> Sample:
    """Returns measurements of rank ``pp_rank`` in steps with 2 slices. Each action takes 10 ms."""
    lanes = {(kind, 0): [10 * MS] * 3 * MICROBATCHES for kind in (ActionKind.F, ActionKind.B)}
    return Sample(
        pp_rank=pp_rank,
        free_bytes=1 << 30,
        kept_bytes=(1 << 20,),
        held_bytes=(1 << 20,),
        durations_ns=lanes,
    )


def test_a_number_that_was_chosen_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose_late(
        *arguments: Any, quick: bool, until_s: float, **settings: Any
    ) -> ScheduleChoice:
        # Simulate that the quick comparisons have used up all of the available time.
        until_s = math.inf if quick else time.monotonic()
        return choose(*arguments, quick=quick, until_s=until_s, **settings)

    monkeypatch.setattr(auto_schedule, "choose", choose_late)
    # The first comparison after an installation compiles code, which may take half of the usual
    # limit.
    monkeypatch.setattr(auto_schedule, "LIMIT_S", 600.0)
    orders = Orders(schedule="auto", placement=PLACEMENT, pp_rank=0, slice_shares=(0.5, 0.5))
    tuner = Tuner(
        job=SimpleNamespace(rank=0, timeout=datetime.timedelta(minutes=10)),  # type: ignore[arg-type]
        pp_ranks=(0, 1),
        chunks=(),
        forward_backward=SimpleNamespace(orders=orders),  # type: ignore[arg-type]
        transport=None,
        payload_shape=(1,),
        payload_dtype=torch.float32,
        loads=None,
        gain=None,
        cap=None,
        can_turn=False,
        timeout_s=1.0,
        numbers=(1, 2, 4),
        # Each additional slice takes as long as a whole microbatch, so whole microbatches are
        # fastest.
        trial=SliceTrial(
            num_slices=4,
            times=StageTimes(forward_s=(0.02, 0.02), backward_s=(0.02, 0.02), weight_s=(0.0, 0.0)),
        ),
        say=print,
    )
    decision = tuner._choose([sample(0), sample(1)], None, MICROBATCHES)
    assert decision.move is not None
    assert decision.move.num_slices == 1
    assert "simulated step times by number of slices: 1: " in decision.text
    assert "no other schedules were compared: no schedule was simulated before the" in decision.text
