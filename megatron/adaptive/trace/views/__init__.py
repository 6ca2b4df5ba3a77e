"""Draws a trace in several forms, which are the values of ``trace --format``.

- ``view``      interface of a view, and lookup of views by name
- ``formats``   the views of this package, one per module; a view may call a module below
- ``palette``   the colours shared by the views
- ``workbook``  ``.xlsx`` with timelines, tables of statistics, and charts
- ``picture``   ``.png`` of a step, for papers
- ``page``      one self-contained ``.html`` page with a timeline to zoom in
- ``perfetto``  ``.json.gz`` for the viewers Perfetto and chrome://tracing
"""

from megatron.adaptive.trace.views.view import View, ViewInput, trace_view

__all__ = ["View", "ViewInput", "trace_view"]
