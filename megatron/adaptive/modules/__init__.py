"""Trains any ``torch.nn.Module`` as a pipeline of stages, cut at positions that the user marks.

::

    model with CutPoint()s ──record──> Tape ──slice──> StageProgram per stage ──> Executor
                                        (calls of      (calls, parameters,
                                         torch, in      received and sent
                                         order)         tensors)

This package cuts the model into stages. At the end of each step, the package reduces gradients over
replicas and over copies of shared weights, computes the gradient norm and calls the optimizer. The
package ``engine`` runs the stages, ``transport`` sends the messages between them, and ``trace``
records when stages run and messages are sent. The model does not have to use megatron-core. The
only part of megatron-core that this package uses is ``parallel_state``, which creates the process
groups.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.adaptive.modules.cut_points import CutPoint
    from megatron.adaptive.modules.pipeline import Pipeline
    from megatron.adaptive.modules.profiler import Profiler

__all__ = ["CutPoint", "Pipeline", "Profiler"]

_HOMES = {"CutPoint": "cut_points", "Pipeline": "pipeline", "Profiler": "profiler"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
