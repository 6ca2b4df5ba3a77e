"""Imports the optional C++ extension ``megatron.adaptive._C``.

Only this module imports ``_C``, and only when a caller requests the extension. All Python code can
therefore be imported without the extension. If the import fails, this module stores the reason.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from megatron.adaptive.errors import SetupError

_NAME = "megatron.adaptive._C"
# Version of the interface between Python and C++, which must match csrc/bindings/module.cc.
# Increase both numbers when the Python code no longer works with older builds of the extension.
_INTERFACE = 6
_REMEDY = (
    "build it with `python setup.py build_ext --inplace` in the checkout, or install the wheel for "
    "this Python"
)


def load() -> ModuleType | None:
    """Returns the extension, or ``None`` if it is not usable (see :func:`why_missing`)."""
    return _attempt()[0]


def why_missing() -> str | None:
    """Returns the reason why the extension is not usable, or ``None`` if it is usable."""
    return _attempt()[1]


def require(purpose: str) -> ModuleType:
    """Returns the extension, or raises an error if the extension is not usable.

    Args:
        purpose: Name of the feature that needs the extension, for the start of the error message.

    Raises:
        SetupError: The extension is not usable. The message states the reason and how to build the
            extension.
    """
    module, reason = _attempt()
    if module is None:
        raise SetupError(f"{purpose} needs the C++ extension: {reason}")
    return module


@functools.cache
def _attempt() -> tuple[ModuleType | None, str | None]:
    # Cache the result, because this function is called often, and Python would repeat a failed
    # import.
    try:
        module = importlib.import_module(_NAME)
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            return None, f"cannot load {_NAME}: {error}"
        return None, f"{_NAME} is not built for this Python{_builds_for_others()}; {_REMEDY}"
    except ImportError as error:
        return None, f"cannot load {_NAME}: {error}"
    interface = getattr(module, "INTERFACE", None)
    if interface != _INTERFACE:
        return (
            None,
            f"{_NAME} has interface {interface}, but this code needs interface {_INTERFACE}; "
            f"{_REMEDY}",
        )
    return module, None


def _builds_for_others() -> str:
    """Returns a note about builds for other Python versions, or ``""`` if there are none."""
    names = sorted(path.name for path in Path(__file__).parent.glob("_C.*.so"))
    names = [name for name in names if name[2:] not in EXTENSION_SUFFIXES]
    if not names:
        return ""
    return f" ({sys.implementation.cache_tag}), only {', '.join(names)}"
