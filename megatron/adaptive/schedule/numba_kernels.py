"""Builds the simulator's event loop, in plain Python or compiled with numba.

The functions of ``rank_kernel``, ``runtime_rules`` and ``simulator`` run as plain Python and can
also be compiled. numba caches compiled code on disk. The file name in the cache contains a hash of
the source code, so that outdated compiled code is never used.
"""

from __future__ import annotations

import glob
import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from megatron.adaptive.schedule import rank_kernel, runtime_rules, simulator

Rule = Callable[[rank_kernel.State, Sequence[int]], int]
"""Run-time rule that chooses the next action of a rank. It is a function of ``(s, hint)`` that
returns the code of the action to run, or -1 to wait.
"""

LOADED_FROM = 20_000
"""Number of simulated actions above which loading compiled code from disk saves time."""
COMPILED_FROM = 750_000
"""Number of simulated actions above which compiling saves time if no code is cached on disk.

Compiling takes about 10 s of CPU time, and plain Python about 14 us per action.
"""
Modules = tuple[ModuleType, ...]
_MODULES = (rank_kernel, runtime_rules, simulator)


def plain_loop(rule: Rule) -> Callable[[simulator.World], int]:
    """Returns ``simulator.run`` in plain Python, with ``rule`` as the run-time rule.

    Any function can be used as a rule. The loop takes about 10 us per action.
    """
    return _bind(_MODULES, simulator.run, lambda function: function, rule=rule)


def is_known(rule: Rule) -> bool:
    """Returns whether ``rule`` is a function of ``runtime_rules``, which can be compiled."""
    return getattr(runtime_rules, getattr(rule, "__name__", ""), None) is rule


def is_loaded(rule: Rule) -> bool:
    """Returns whether this process has already loaded the compiled loop of ``rule``.

    If it has, the compiled loop is faster even for a short simulation.
    """
    loop = _loops().get(rule)
    # A loop that has been created but never called has no compiled code yet.
    return loop is not None and has_code(loop)


def has_code(loop: Any) -> bool:
    """Returns whether ``loop``, which this module created, can run without compilation.

    With ``NUMBA_DISABLE_JIT``, numba returns plain functions, which are never compiled.
    """
    return bool(getattr(loop, "signatures", True))


def is_cached(loop: Any) -> bool:
    """Returns whether the disk cache contains the compiled code of the function ``loop``."""
    if not hasattr(loop, "stats"):  # numba returns plain functions if NUMBA_DISABLE_JIT is set.
        return False
    folder = Path(loop.stats.cache_path)
    return any(folder.glob(f"*{glob.escape(loop.py_func.__qualname__)}-*.nbi"))


def saves_time(rule: Rule, num_actions: int) -> bool:
    """Returns whether a simulation is faster with the compiled loop of a rule than in plain Python.

    Args:
        rule: Function of ``runtime_rules``.
        num_actions: Number of actions in all planned simulations.
    """
    if is_loaded(rule) or num_actions < LOADED_FROM:
        return is_loaded(rule)
    return num_actions >= COMPILED_FROM or is_cached(compiled_loop(rule))


def compiled_loop(rule: Rule) -> Callable[[simulator.World], int]:
    """Returns ``simulator.run``, compiled with ``rule``, a function of ``runtime_rules``.

    The loop takes less than 1 us per action.

    The first call on a machine compiles the code, which takes about 10 s of CPU time.

    Raises:
        ImportError: numba is not installed.
    """
    loops = _loops()
    if rule not in loops:
        make = _jit(_MODULES, simulator.run, rule.__name__)
        loops[rule] = _bind(_MODULES, simulator.run, make, rule=rule)
    return loops[rule]


@lru_cache
def _loops() -> dict[Rule, Callable[[simulator.World], int]]:
    return {}


def compile_function(module: ModuleType, main: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles the function ``main`` together with the functions of ``module`` that it calls."""
    return _bind((module,), main, _jit((module,), main, ""))


def _jit(modules: Modules, main: Callable[..., Any], label: str) -> Callable[..., Any]:
    from numba import njit  # numba is imported only here because the import takes half a second.

    # The compiled code uses no Python objects, so it can release the GIL (nogil).
    common: dict[str, Any] = {"_nrt": False, "nogil": True}
    source = "".join(map(inspect.getsource, modules)) + repr(common)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{function.__name__}_{label}_{digest}"
        # Only the main function is called from Python; all other functions are compiled into it. So
        # only the main function is cached, and the other functions do not need wrappers for calls
        # from Python or C, which would take a fifth of the compilation time. No function allocates
        # memory, so reference counting (_nrt) is turned off, which halves the run time.
        is_main = function.__name__ == main.__name__
        wrappers = ("no_cpython_wrapper", "no_cfunc_wrapper")
        inner: dict[str, Any] = {} if is_main else dict.fromkeys(wrappers, True)
        compiled: Callable[..., Any] = njit(function, cache=is_main, **inner, **common)
        return compiled

    return jit


def _bind(
    modules: Modules, main: Callable[..., Any], make: Callable[..., Any], **instead: Any
) -> Callable[..., Any]:
    """Copies functions of several modules into one namespace, and returns the copy of ``main``.

    Args:
        modules: Modules that contain the functions.
        main: Function whose copy is returned.
        make: Function applied to each copy, for example to compile the copy.
        **instead: Functions to use instead of the functions with the same names.
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
