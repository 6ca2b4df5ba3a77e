"""Any ``torch.nn.Module`` as a pipeline: mark where it may be cut, and train it in stages.

::

    model with CutPoint()s ──record──> Tape ──slice──> StageProgram per stage ──> Executor
                                        (calls of      (calls, parameters,
                                         torch, in      what comes in and
                                         order)         what goes out)

Owns how a model is cut and how one step of the pieces ends: sums over replicas and shared weights,
the norm, the optimizer. Order of work, messages and traces are those of ``pipeline``, ``transport``
and ``trace``. Nothing here knows a model of megatron-core; of its parallel state the mesh is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.adaptive.modules.pipeline import Pipeline
    from megatron.adaptive.modules.profiler import Profiler
    from megatron.adaptive.modules.recording import CutPoint

__all__ = ["CutPoint", "Pipeline", "Profiler"]

_HOMES = {"CutPoint": "recording", "Pipeline": "pipeline", "Profiler": "profiler"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
