"""Defines the settings of a run: command-line flags, environment variables and their checks.

Every flag is a field of a frozen dataclass (``model.py``, ``parallel.py``, ...), and the parser in
``arguments.py`` is built from these fields. No module of this package imports torch, and only
``environment.py`` reads environment variables.
"""
