"""Contains the loggers of this package. Each module has a subclass of ``Logger``.

``training.logger`` finds each module in this folder. The package of a tracker is imported in the
logger's constructor, because only one rank needs it.
"""
