"""Draws a trace in several forms, each written by one module of this package.

- ``palette``   the colours shared by the views
- ``workbook``  ``.xlsx`` with timelines, tables of measured quantities, and charts
- ``picture``   ``.png`` of a step, for papers
- ``scalars``   curves of measured quantities for TensorBoard
- ``page``      one self-contained ``.html`` page with a timeline to zoom in
- ``perfetto``  ``.json.gz`` for the viewers Perfetto and chrome://tracing
"""
