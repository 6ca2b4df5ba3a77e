"""Tests messages between stages that are frozen and therefore need no gradients."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import Candidate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.transport.interface import Label

from .loopback import WATCHDOG_S, Ranks, Writing, arrival

B, F = ActionKind.B, ActionKind.F
MICROBATCHES, LEAD = 6, 2


@pytest.mark.parametrize(
    ("ranks", "chunks", "kind", "frozen"),
    [(3, 1, "loop", 1), (3, 1, "loop", 2), (2, 2, "loop", 3), (3, 2, "v", 2), (3, 2, "v", 4)],
)
def test_frozen_stages_get_acknowledgments_instead_of_gradients(
    ranks: int, chunks: int, kind: str, frozen: int
) -> None:
    """Checks that frozen stages receive acknowledgments instead of gradients, in two steps."""
    placement = Placement(num_ranks=ranks, num_chunks=chunks, kind=kind)  # type: ignore[arg-type]
    candidate = Candidate(
        name="adaptive", placement=placement, weight_pieces=1, cap=1.0, frozen_stages=frozen
    )
    options: dict[str, Any] = {"cap": 1.0, "weight_pieces": 1, "frozen_stages": frozen}
    pipeline = Ranks(placement)
    for _ in range(2):
        for transport in pipeline.transports:
            transport.sent.clear()
        policies = candidate.policies(MICROBATCHES)
        stages, states = pipeline.step(policies, MICROBATCHES, **options)
        for rank in range(ranks):
            counts = Counter(name.split("-")[0] for name in stages[rank].actions)
            expected = {}
            for chunk in range(chunks):
                is_frozen = placement.stage_of(rank, chunk) < frozen
                for letter in "F" if is_frozen else "FBW":
                    expected[f"{letter}{chunk}"] = MICROBATCHES
            assert counts == expected
            assert states[rank].done
            assert not pipeline.executors[rank]._inputs
        sent = Counter(str(label.action.kind) for t in pipeline.transports for label in t.sent)
        borders = [
            stage
            for stage in range(placement.num_stages - 1)
            if placement.locate(stage)[0] != placement.locate(stage + 1)[0]
        ]
        assert sent["F"] == MICROBATCHES * len(borders)
        assert sent["B"] == sum(MICROBATCHES - (LEAD if stage < frozen else 0) for stage in borders)


def test_a_frozen_stage_that_waits_names_the_stage_that_must_take_its_output() -> None:
    pipeline = Ranks(Placement(num_ranks=2, num_chunks=1))
    executor = pipeline.executors[0]
    state = pipeline.state(0, MICROBATCHES, cap=1.0, frozen_stages=1)
    candidate = Candidate(name="adaptive", placement=pipeline.placement, cap=1.0, frozen_stages=1)
    (policy, _) = candidate.policies(MICROBATCHES)
    stages = Writing()
    thread = threading.Thread(target=executor.run, args=(stages, policy, state), daemon=True)
    thread.start()
    end_s = time.monotonic() + WATCHDOG_S
    while not executor.evidence().get("needs") and time.monotonic() < end_s:
        time.sleep(0.01)
    assert executor.evidence()["needs"] == [[11, "F", 0, 0, "0"]]
    assert stages.actions == ["F0-0", "F0-1"]
    for microbatch in range(MICROBATCHES - LEAD):
        label = Label(0, Action(B, 0, microbatch))
        pipeline.transports[0].completions.put(arrival(label, 11, torch.zeros(1)))
    thread.join(WATCHDOG_S)
    assert not thread.is_alive()
    assert stages.actions == [f"F0-{microbatch}" for microbatch in range(MICROBATCHES)]
