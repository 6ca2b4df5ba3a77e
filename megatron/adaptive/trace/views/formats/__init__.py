"""Contains the views of this package. Each module defines a function with ``trace_view``.

New modules in this folder need no registration. To keep ``trace --help`` fast, modules import
drawing packages such as openpyxl or matplotlib only inside functions.
"""
