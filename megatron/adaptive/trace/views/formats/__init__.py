"""Contains the views of this package. Each module defines a function with ``trace_view``.

New modules in this folder are found without registration. To keep ``trace --help`` fast, modules
import drawing packages such as openpyxl or matplotlib only inside functions.
"""
