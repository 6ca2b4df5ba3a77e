"""Contains the loggers of this package. Each module has a subclass of ``Logger``.

``training.logger`` finds each module in this folder. A logger's constructor imports the tracker's
package, because only one rank needs it.
"""
