"""Calls entry points with arguments of wrong types. mypy must report an error for each call.

This file is never executed. ``scripts/check.sh`` only checks it with mypy. Each call ignores the
expected error. If a parameter has lost its type, there is no error to ignore, so mypy fails.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.adaptive.modules import Pipeline
from megatron.adaptive.plugin import install
from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.simulate import simulate
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageTimes


def install_with_wrong_types() -> None:
    install("1f1b", weight_pieces="4")  # type: ignore[arg-type]  # The value is a string.
    install("1f1b", on_hang="stop")  # type: ignore[arg-type]  # It must be "report" or "end".
    install("1f1b", placemen="v")  # type: ignore[call-arg]  # The name is misspelled.


def pipeline_with_wrong_types(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    Pipeline(model, batch, micro_batch_size="2")  # type: ignore[arg-type]  # The value is a string.
    Pipeline(model, batch, slicing="trace")  # type: ignore[arg-type]  # There is no such method.
    # The correct name of the parameter is num_microbatches.
    pipeline = Pipeline(model, batch, micro_batchsize=2)  # type: ignore[call-arg]
    pipeline.loop(10, save_interval=0.5)  # type: ignore[arg-type]  # The value is a fraction.
    pipeline.loop(10, save_every=5)  # type: ignore[call-arg]  # There is no such parameter.


def simulate_with_wrong_types(placement: Placement, policy: Policy, times: StageTimes) -> None:
    # The cap must be a number, not a string.
    make_policies("adaptive", placement, 4, cap="8")  # type: ignore[arg-type]
    simulate(placement, 4, [policy], times, weight_pieces=0.5)  # type: ignore[arg-type]
    # The correct name of the parameter is weight_pieces.
    simulate(placement, 4, [policy], times, pieces=4)  # type: ignore[call-arg]
