"""Defines the order of a pipeline's actions, with static schedules or run-time rules.

This package does not import torch. This file exports the names that users need in their own
schedules (``examples/own_schedule``). Other names must be imported from their modules. Exported
names are imported on first use, so that a process loads only the modules it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.adaptive.config.schedule_specs import fixed_order, run_time_rule
    from megatron.adaptive.schedule.action import Action, ActionKind
    from megatron.adaptive.schedule.rank_state import RankState
    from megatron.adaptive.schedule.stage_placement import Placement

__all__ = ["Action", "ActionKind", "Placement", "RankState", "fixed_order", "run_time_rule"]

_MODULES = {
    "Action": "schedule.action",
    "ActionKind": "schedule.action",
    "Placement": "schedule.stage_placement",
    "RankState": "schedule.rank_state",
    "fixed_order": "config.schedule_specs",
    "run_time_rule": "config.schedule_specs",
}


def __getattr__(name: str) -> Any:
    """Imports the exported name ``name`` on first use, and returns its value."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron.adaptive.{_MODULES[name]}"), name)
