"""Displays a trace in several formats, which are the values of ``trace --format``.

- ``view``      interface of a view, and lookup of views by name
"""

from megatron.adaptive.trace.views.view import View, ViewInput, trace_view

__all__ = ["View", "ViewInput", "trace_view"]
