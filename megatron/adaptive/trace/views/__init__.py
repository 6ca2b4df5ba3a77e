"""Displays a trace in several formats, which are the values of ``trace --format``.

- ``view``      interface of a view, and lookup of views by name
- ``formats``   views of this package, one per module; a view may use a module listed below
- ``palette``   colours that the views share
- ``workbook``  ``.xlsx`` file with timelines, tables of statistics, and charts
- ``picture``   ``.png`` picture of a step, for papers
- ``page``      self-contained ``.html`` page with a timeline that can be zoomed
- ``perfetto``  ``.json.gz`` file for the viewers Perfetto and chrome://tracing
"""

from megatron.adaptive.trace.views.view import View, ViewInput, trace_view

__all__ = ["View", "ViewInput", "trace_view"]
