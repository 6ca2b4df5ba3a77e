"""Contains the views of this package: each module has a function under ``trace_view``.

A module here is found by itself. To keep ``trace --help`` fast, a module imports what draws, such
as openpyxl or matplotlib, inside its function.
"""
