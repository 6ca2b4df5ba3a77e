"""Contains the loggers of this package: each module has a subclass of ``Logger``.

A module here is found by itself. Its class imports the tracker's package when it is made, because
only one rank needs it.
"""
