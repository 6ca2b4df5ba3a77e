"""Runs the pipeline steps of a user's own Megatron-LM on this package's engine.

While the plugin is installed, it replaces megatron-core's ``get_forward_backward_func``.
Megatron-LM calls it to get the function that runs a step, and now gets one that uses this package's
executor. If stages are placed in a V, the plugin also replaces megatron-core's functions that
return the position of a stage::

    Megatron-LM ── get_forward_backward_func() ──> Seam ── one pipeline rank ──> megatron-core's own
                                                     └──── several ───────────> Engine ─> executor

Model, data, optimizer, checkpoints and logging remain those of Megatron-LM. The trainer in
``megatron.adaptive.training`` is not used.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from megatron.adaptive.plugin.settings import Settings, add_arguments

__all__ = ["add_arguments", "install", "uninstall"]


def install(schedule: str = "adaptive", **more: Any) -> None:
    """Makes Megatron-LM run its pipeline steps on this package's engine.

    Call it on every rank before the first step, and on a machine without CUDA before megatron-core
    is imported. Flags of :func:`add_arguments` on the command line override the arguments. A second
    call with the same settings does nothing. A call with other settings changes them, if no step
    has run.

    Args:
        schedule: Name of a static schedule or run-time scheduling rule.
        **more: Other settings, which are the attributes of
            :class:`~megatron.adaptive.plugin.settings.Settings`.

    Raises:
        ConfigError: A setting is not possible, or differs from the settings of earlier steps.
        SetupError: The installed megatron-core is not compatible with the engine, or was imported
            too early on a machine without CUDA.
    """
    settings = Settings(schedule=schedule, **more)
    # The order of these imports matters: megatron-core needs a device (or its substitute) when it
    # is imported, and the engine must only be imported after megatron-core has passed the check.
    from megatron.adaptive import accelerator, without_cuda

    accelerator.install()
    # The calling module uses torch, so it too needs the substitutes for CUDA functions.
    without_cuda.include_program(sys._getframe(1).f_globals)
    from megatron.adaptive.plugin import versions

    versions.check()
    from megatron.adaptive.plugin import patch

    patch.put(settings)


# Set the signature so that ``help()`` and notebooks show the settings by name, with their defaults.
install.__signature__ = inspect.signature(Settings)  # type: ignore[attr-defined]


def uninstall() -> None:
    """Restores megatron-core's own functions and closes the engine's channels.

    All ranks must call it, between two steps. If :func:`install` was not called before, it does
    nothing.

    Raises:
        TransportError: Another rank did not close its channels in time.
    """
    if "megatron.adaptive.plugin.patch" in sys.modules:
        from megatron.adaptive.plugin import patch

        patch.take_back()
