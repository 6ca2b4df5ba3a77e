"""Imports objects from users' code, so that users can extend this package.

Flags refer to objects as ``package.module:name``. An installed package can also provide short names
for its objects, as entry points of a group.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megatron.adaptive.errors import ConfigError


def import_object(path: str, subject: str) -> Any:
    """Imports the object at ``path``. The current working directory is also searched.

    Args:
        path: Path of the object in the form ``package.module:name``.
        subject: Type of the object in error messages, such as ``schedule``.

    Raises:
        ConfigError: The module cannot be imported, or does not contain the object.
    """
    module_name, _, attribute = path.partition(":")
    folder = os.getcwd()
    is_added = folder not in sys.path
    if is_added:
        sys.path.append(folder)
    try:
        loaded = importlib.import_module(module_name)
    except Exception as error:  # A user's module may raise any exception.
        raise ConfigError(
            f"{subject} {path}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        if is_added:
            sys.path.remove(folder)
    for part in attribute.split("."):
        if not hasattr(loaded, part):
            file = getattr(sys.modules[module_name], "__file__", module_name)
            raise ConfigError(f"{subject} {path}: {file} has no {attribute!r}")
        loaded = getattr(loaded, part)
    return loaded


def find_object(name: str, *, group: str, subject: str) -> Any | None:
    """Imports the object to which the value of a flag refers.

    Args:
        name: Value of the flag: either ``package.module:name``, or the name of an entry point.
        group: Entry-point group to search.
        subject: Type of the object in error messages, such as ``schedule``.

    Returns:
        The object, or ``None`` if ``name`` contains no colon and is not the name of an entry point.

    Raises:
        ConfigError: The module cannot be imported, or does not contain the object.
    """
    if ":" in name:
        return import_object(name, subject)
    points = importlib.metadata.entry_points(group=group)
    point = next((point for point in points if point.name == name), None)
    return None if point is None else import_object(point.value, subject)


def modules_in(package: ModuleType, pattern: str = "*") -> Iterator[ModuleType]:
    """Imports the modules of ``package``, and yields them sorted by name.

    Args:
        package: Package whose modules are imported.
        pattern: Pattern of the names to import, such as ``fixed_*``.
    """
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    for name in sorted(fnmatch.filter(names, pattern)):
        yield importlib.import_module(f"{package.__name__}.{name}")


def source_of(function: Any) -> str:
    """Returns the file and line at which the function or class ``function`` is defined."""
    try:
        file = inspect.getsourcefile(function) or "?"
        line = inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return str(getattr(function, "__module__", "?"))
    return f"{os.path.relpath(file)}:{line}"


def line_of_error(error: Exception, user_code: Any) -> str:
    """Returns the file and line at which user code raised ``error``.

    Args:
        error: Exception to locate, perhaps raised in a library that the user's code called.
        user_code: Function or class of the user. The result is the innermost line that was running
            in the file of this code. If there is none, the result is the line that raised the
            error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = inspect.getsourcefile(user_code)
    except TypeError:
        file = None
    last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{os.path.relpath(last.filename)}:{last.lineno}"
