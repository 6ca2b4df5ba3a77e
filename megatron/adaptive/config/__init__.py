"""Settings of a run: command line flags, environment variables and the rules between them.

Every flag is one field of a frozen dataclass (``model.py``, ``parallel.py``, ...); the parser in
``arguments.py`` is made from those fields. Nothing in this package imports torch, and nothing
outside ``environment.py`` reads an environment variable.
"""
