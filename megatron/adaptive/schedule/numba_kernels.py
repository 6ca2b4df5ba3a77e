"""Makes the simulator's event loop from its functions: as plain Python, or compiled with numba.

The functions of ``machine``, ``rules`` and ``engine`` are written so that both work. Compiled code
is kept on disk by numba, under a name that holds a digest of these sources, so that a changed rule
is never answered by an old program.
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
"""``rule(s, hint)``, see ``rules``."""

Modules = tuple[ModuleType, ...]
_MODULES = (rank_kernel, runtime_rules, simulator)


def plain_loop(rule: Rule) -> Callable[[simulator.World], int]:
    """``engine.run`` as plain Python, about 10 us an action, with any callable as rule."""
    return _bind(_MODULES, simulator.run, lambda function: function, rule=rule)


def is_known(rule: Rule) -> bool:
    """True if the rule is one of ``rules`` and can be compiled."""
    return getattr(runtime_rules, getattr(rule, "__name__", ""), None) is rule


@lru_cache
def compiled_loop(rule: Rule) -> Callable[[simulator.World], int]:
    """``engine.run`` compiled for a rule of ``rules``, well below 1 us an action.

    The first call on a machine compiles for some seconds.

    Raises:
        ImportError: numba is not installed.
    """
    return _bind(_MODULES, simulator.run, _jit(_MODULES, simulator.run, rule.__name__), rule=rule)


def compile_function(module: ModuleType, main: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of a module, with what it calls there; see ``compiled_loop``."""
    return _bind((module,), main, _jit((module,), main, ""))


def _jit(modules: Modules, main: Callable[..., Any], label: str) -> Callable[..., Any]:
    from numba import njit  # half a second to import

    # The code touches no Python object, so it may release the GIL for other threads.
    common: dict[str, Any] = {"_nrt": False, "nogil": True}
    source = "".join(map(inspect.getsource, modules)) + repr(common)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{function.__name__}_{label}_{digest}"
        # Only the main function is called from outside; what it calls is compiled into it.
        # Nothing is allocated, so that no references need counting: half the time.
        compiled: Callable[..., Any] = njit(
            function, cache=function.__name__ == main.__name__, **common
        )
        return compiled

    return jit


def _bind(
    modules: Modules, main: Callable[..., Any], make: Callable[..., Any], **instead: Any
) -> Callable[..., Any]:
    """Copies all functions into one namespace of their own, some replaced, and returns ``main``."""
    namespace: dict[str, Any] = {}
    for module in modules:
        namespace |= vars(module)
    namespace |= instead
    ours = {module.__name__ for module in _MODULES + modules}
    for name, function in list(namespace.items()):
        if inspect.isfunction(function) and function.__module__ in ours:
            copy = FunctionType(function.__code__, namespace, function.__name__)
            copy.__module__ = function.__module__
            namespace[name] = make(copy)
    made: Callable[..., Any] = namespace[main.__name__]
    return made
