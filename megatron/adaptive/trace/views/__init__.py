"""Draws a trace in several forms, each written by one module of this package.

- ``palette``   the colours shared by the views
- ``workbook``  ``.xlsx``: the order, the time, figures, native charts
- ``picture``   ``.png`` for papers
- ``scalars``   a curve per figure for TensorBoard
- ``page``      ``.html``: one self-contained page to zoom in
- ``perfetto``  ``.json.gz`` for Perfetto and chrome://tracing
"""
