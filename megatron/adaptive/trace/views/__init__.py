"""Displays a trace in several formats, one for each value of ``trace --format``.

- ``view``      defines the interface of a view, and finds views by name
- ``formats``   contains one module per view of this package; most of them use a module below
- ``palette``   defines the colours that the views share
- ``workbook``  writes an ``.xlsx`` file with timelines, tables of statistics, and charts
- ``picture``   draws a ``.png`` picture of a step, for papers
- ``page``      writes a self-contained ``.html`` page with a timeline that can be zoomed
- ``perfetto``  writes a ``.json.gz`` file for the viewers Perfetto and chrome://tracing
"""

from megatron.adaptive.trace.views.view import View, ViewInput, trace_view

__all__ = ["View", "ViewInput", "trace_view"]
