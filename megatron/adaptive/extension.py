"""Gives access to the optional C++ extension ``megatron.adaptive._C``.

Only this module imports ``_C``, and only when a caller asks for it, so that all Python code works
without the extension. If the import fails, this module keeps the reason.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from megatron.adaptive.errors import SetupError

_NAME = "megatron.adaptive._C"
# csrc/bindings/module.cc has the same number. Raise both if Python code needs a new build.
_INTERFACE = 6
_REMEDY = "build it with `python setup.py build_ext --inplace` in the checkout"


def load() -> ModuleType | None:
    """Returns the extension, or ``None`` if it cannot be used; see :func:`why_missing`."""
    return _attempt()[0]


def why_missing() -> str | None:
    """Returns one line that says why :func:`load` returns ``None``; ``None`` if it loads."""
    return _attempt()[1]


def require(purpose: str) -> ModuleType:
    """Returns the extension.

    Args:
        purpose: Name of the feature that needs the extension; it begins the error message.

    Raises:
        SetupError: The extension is missing; the message says why and how to get it.
    """
    module, reason = _attempt()
    if module is None:
        raise SetupError(f"{purpose} needs the C++ extension: {reason}")
    return module


@functools.cache
def _attempt() -> tuple[ModuleType | None, str | None]:
    # The result is cached: a module that failed to load fails again, and callers ask often.
    try:
        module = importlib.import_module(_NAME)
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            return None, f"{_NAME} cannot be loaded: {error}"
        return None, f"{_NAME} is not built for this Python; {_REMEDY}"
    except ImportError as error:
        return None, f"{_NAME} cannot be loaded: {error}"
    interface = getattr(module, "INTERFACE", None)
    if interface != _INTERFACE:
        return None, f"{_NAME} has interface {interface}, this code needs {_INTERFACE}; {_REMEDY}"
    return module, None
