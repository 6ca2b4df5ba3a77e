"""Contains the views of this package; each module has a function decorated with ``trace_view``.

A new module here needs no registration. To keep ``trace --help`` fast, a module imports drawing
packages, such as openpyxl or matplotlib, only inside its function.
"""
