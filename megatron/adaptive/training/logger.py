"""Defines loggers, which receive the metrics of a run, and finds the loggers of a run.

A logger is a subclass of :class:`Logger`. The loggers of this package are modules in the folder
``loggers``, where this module finds them. Your own logger can be anywhere: pass ``--logger
package.module:Class``. A package can also publish its loggers as entry points of the group
``megatron_adaptive.loggers``, which are selected by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from megatron.adaptive.config.own_code import find_object, line_of_error, modules_in
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import AdaptiveError, ConfigError

ENTRY_POINTS = "megatron_adaptive.loggers"
"""Name of the entry-point group through which installed packages provide loggers."""


class Logger:
    """Passes the values of a run to an experiment tracker, such as TensorBoard.

    Subclasses override the methods that they need. All other methods do nothing. Only the rank that
    writes the log creates a logger object. If a method raises an error, a warning is printed, and
    the logger receives no more values, but training continues.

    Args:
        cfg: Settings of the run.

    Attributes:
        name: Name of the logger for ``--logger``. Empty if the class is not part of this package.
        flag: Field of ``LoggingConfig`` whose flag turns the logger on. Empty if only ``--logger``
            turns it on.
    """

    name: ClassVar[str] = ""
    flag: ClassVar[str] = ""

    def __init__(self, cfg: TrainerConfig) -> None:
        """Opens the tracker. An error here stops the run before its first step."""

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Adds the point (``step``, ``value``) to the curve ``tag``.

        Args:
            tag: Name of the curve.
            value: Value of the point.
            step: Index of the iteration.
        """

    def picture(self, path: Path, step: int) -> None:
        """Stores the image of a pipeline step in the file ``path`` for iteration ``step``."""

    def note(self, name: str, content: Any) -> None:
        """Stores the JSON-serializable ``content`` as ``name``, and replaces earlier content."""

    def close(self) -> None:
        """Writes all pending points and disconnects."""


def built_in_loggers() -> dict[str, type[Logger]]:
    """Returns the loggers that are defined in the folder ``loggers``, keyed by name."""
    from megatron.adaptive.training import loggers

    values = [value for module in modules_in(loggers) for value in vars(module).values()]
    return {value.name: value for value in values if _is_logger(value) and value.name}


def find_loggers(cfg: TrainerConfig) -> list[type[Logger]]:
    """Returns the classes of all loggers that a run with the settings ``cfg`` uses.

    Raises:
        ConfigError: If a name in ``--logger`` is unknown, cannot be imported, or is not a logger.
    """
    table = built_in_loggers()
    settings = cfg.logging
    classes = [
        logger for logger in table.values() if logger.flag and getattr(settings, logger.flag)
    ]
    for name in settings.logger or ():
        logger = table[name] if name in table else _own_logger(name)
        if logger.flag and logger not in classes:
            flag = f"--{logger.flag.replace('_', '-')}"
            raise ConfigError(f"argument --logger: {name} requires {flag}; add this flag")
        classes.append(logger)
    return list(dict.fromkeys(classes))


def make_logger(logger: type[Logger], cfg: TrainerConfig) -> Logger:
    """Creates an object of the class ``logger`` for a run with the settings ``cfg``.

    Raises:
        ConfigError: If the logger cannot be opened.
    """
    try:
        return logger(cfg)
    except AdaptiveError:
        raise
    except Exception as error:  # A user's class may raise any exception.
        raise ConfigError(
            f"logger {logger.__module__}:{logger.__name__}: {line_of_error(error, logger)} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _own_logger(name: str) -> type[Logger]:
    loaded = find_object(name, group=ENTRY_POINTS, subject="logger")
    if loaded is None:
        raise ConfigError(
            f"argument --logger: {name!r} must be one of {', '.join(built_in_loggers())}, or "
            "package.module:Class of your own logger"
        )
    if not _is_logger(loaded):
        raise ConfigError(
            f"logger {name} must be a subclass of megatron.adaptive.training.logger.Logger, but is "
            f"a {type(loaded).__name__} ({loaded!r:.60})"
        )
    return loaded


def _is_logger(value: Any) -> TypeGuard[type[Logger]]:
    return isinstance(value, type) and issubclass(value, Logger)
