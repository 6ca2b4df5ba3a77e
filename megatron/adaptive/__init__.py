"""Adaptive pipeline-parallel training on top of megatron-core.

:func:`install` puts the pipeline engine of this package into a Megatron-LM that is used as it is,
:func:`add_arguments` gives it flags; see ``docs/plugin.md``. Importing this module costs nothing:
the two are loaded when they are first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.adaptive.plugin import add_arguments, install, uninstall

__version__ = "0.1.0"

__all__ = ["__version__", "add_arguments", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("megatron.adaptive.plugin"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
