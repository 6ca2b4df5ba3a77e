"""Builds the simulator's event loop from its functions, as plain Python or compiled with numba.

The functions of ``rank_kernel``, ``runtime_rules`` and ``simulator`` are written so that both work.
numba caches compiled code on disk, under a name that contains a digest of these sources, so that a
changed rule never runs from old code.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from megatron.adaptive.schedule import rank_kernel, runtime_rules, simulator

Rule = Callable[[rank_kernel.State, Sequence[int]], int]
"""Function ``rule(s, hint)`` of ``runtime_rules``."""

Modules = tuple[ModuleType, ...]
_MODULES = (rank_kernel, runtime_rules, simulator)


def plain_loop(rule: Rule) -> Callable[[simulator.World], int]:
    """Returns ``simulator.run`` in plain Python, about 10 us per action; any callable is a rule."""
    return _bind(_MODULES, simulator.run, lambda function: function, rule=rule)


def is_known(rule: Rule) -> bool:
    """Returns whether the rule is a function of ``runtime_rules``, so that it can be compiled."""
    return getattr(runtime_rules, getattr(rule, "__name__", ""), None) is rule


@lru_cache
def compiled_loop(rule: Rule) -> Callable[[simulator.World], int]:
    """Returns ``simulator.run`` compiled for a rule of ``runtime_rules``, below 1 us per action.

    The first call on a machine compiles, which takes some seconds.

    Raises:
        ImportError: numba is not installed.
    """
    return _bind(_MODULES, simulator.run, _jit(_MODULES, simulator.run, rule.__name__), rule=rule)


def compile_function(module: ModuleType, main: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of a module together with the functions that it calls there."""
    return _bind((module,), main, _jit((module,), main, ""))


def _jit(modules: Modules, main: Callable[..., Any], label: str) -> Callable[..., Any]:
    from numba import njit  # the import takes half a second

    # The code touches no Python object, so it may release the GIL for other threads.
    common: dict[str, Any] = {"_nrt": False, "nogil": True}
    source = "".join(map(inspect.getsource, modules)) + repr(common)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{function.__name__}_{label}_{digest}"
        # Only the main function is called from Python, so only it is cached; the others are
        # compiled into it. They allocate nothing, so reference counting (_nrt) is off, which
        # halves the time.
        compiled: Callable[..., Any] = njit(
            function, cache=function.__name__ == main.__name__, **common
        )
        return compiled

    return jit


def _bind(
    modules: Modules, main: Callable[..., Any], make: Callable[..., Any], **instead: Any
) -> Callable[..., Any]:
    """Copies the functions of all modules into one namespace and returns the copy of ``main``.

    Args:
        modules: Modules with the functions.
        main: Function to return.
        make: Function that turns each copy into the one to call.
        **instead: Replacements of functions, by name.
    """
    namespace: dict[str, Any] = {}
    for module in modules:
        namespace |= vars(module)
    namespace |= instead
    module_names = {module.__name__ for module in _MODULES + modules}
    for name, function in list(namespace.items()):
        if inspect.isfunction(function) and function.__module__ in module_names:
            copy = FunctionType(function.__code__, namespace, function.__name__)
            copy.__module__ = function.__module__
            namespace[name] = make(copy)
    made: Callable[..., Any] = namespace[main.__name__]
    return made
