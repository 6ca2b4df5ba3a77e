"""Access to the optional C++ extension ``megatron.adaptive._C``.

Owns the import and the reason why there is none. Nothing else imports ``_C``, and nothing imports
it at the top of a module: without the extension everything but what it speeds up keeps working.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from megatron.adaptive.errors import SetupError

_NAME = "megatron.adaptive._C"
# The same number stands in csrc/bindings/module.cc; both rise when Python code needs a new build.
_INTERFACE = 6
_REMEDY = "build it with `python setup.py build_ext --inplace` in the checkout"


def load() -> ModuleType | None:
    """Returns the extension, or ``None`` where it cannot be used; see :func:`why_missing`."""
    return _attempt()[0]


def why_missing() -> str | None:
    """Returns in one line why :func:`load` gives ``None``, ``None`` where it gives a module."""
    return _attempt()[1]


def require(purpose: str) -> ModuleType:
    """Returns the extension.

    Args:
        purpose: what needs it, as the subject of the message.

    Raises:
        SetupError: there is none; the message says why and how to get it.
    """
    module, reason = _attempt()
    if module is None:
        raise SetupError(f"{purpose} needs the C++ extension: {reason}")
    return module


@functools.cache
def _attempt() -> tuple[ModuleType | None, str | None]:
    # Tried once: a module that failed to load fails again, and callers ask often.
    try:
        module = importlib.import_module(_NAME)
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            return None, f"{_NAME} cannot be loaded: {error}"
        return None, f"{_NAME} is not built for this Python; {_REMEDY}"
    except ImportError as error:
        return None, f"{_NAME} cannot be loaded: {error}"
    found = getattr(module, "INTERFACE", None)
    if found != _INTERFACE:
        return None, f"{_NAME} has interface {found}, this code needs {_INTERFACE}; {_REMEDY}"
    return module, None
