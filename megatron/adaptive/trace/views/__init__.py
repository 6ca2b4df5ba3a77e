"""Draws a trace in several forms, the values of ``trace --format``.

- ``view``      interface of a view, and search for views
- ``formats``   the views of this package, a module each, which may call one of the modules below
- ``palette``   the colours shared by the views
- ``workbook``  ``.xlsx`` with timelines, tables of statistics, and charts
- ``picture``   ``.png`` of a step, for papers
- ``page``      one self-contained ``.html`` page with a timeline to zoom in
- ``perfetto``  ``.json.gz`` for the viewers Perfetto and chrome://tracing
"""

from megatron.adaptive.trace.views.view import View, ViewInput, trace_view

__all__ = ["View", "ViewInput", "trace_view"]
