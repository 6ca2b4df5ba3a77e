"""Adaptive pipeline-parallel training on top of megatron-core.

:func:`install` replaces the pipeline schedules of an unmodified Megatron-LM with this package's
engine, and :func:`add_arguments` adds the engine's flags (see ``docs/plugin.md``).
:class:`Pipeline` trains any module in which :class:`CutPoint` marks the possible stage boundaries,
and :class:`Profiler` measures the layers of such a module (see ``docs/cutpoint.md``).
:func:`record_trace` records a trace of a user's own training loop, from which the what-if analysis
can estimate how much time a change would save (see ``docs/traces.md``).

Importing this package is fast, because each module is imported only when one of its names is first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.adaptive.engine.tracing import record_trace
    from megatron.adaptive.modules import CutPoint, Pipeline, Profiler
    from megatron.adaptive.plugin import add_arguments, install, uninstall

__version__ = "0.2.0"

__all__ = [
    "__version__",
    "CutPoint",
    "Pipeline",
    "Profiler",
    "add_arguments",
    "install",
    "record_trace",
    "uninstall",
]

_HOMES = {
    "CutPoint": "modules",
    "Pipeline": "modules",
    "Profiler": "modules",
    "add_arguments": "plugin",
    "install": "plugin",
    "record_trace": "engine.tracing",
    "uninstall": "plugin",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
