"""Runs the pipeline steps of a user's own Megatron-LM on the engine of this package.

While it is installed, it replaces ``get_forward_backward_func``. Megatron-LM calls this function to
get the function that runs a step, and gets one that runs on the executor of this package. For a
placement in a V, it also replaces megatron-core's functions that return the position of a stage::

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
    """Makes Megatron-LM run its pipeline steps on the engine of this package.

    Call it on every rank before the first step, and on a machine without CUDA before megatron-core
    is imported. Flags of :func:`add_arguments` on the command line override the arguments. A second
    call with the same settings does nothing; with other settings it changes them if no step has
    run.

    Args:
        schedule: Name of the schedule or rule.
        **more: Other attributes of :class:`~megatron.adaptive.plugin.settings.Settings`.

    Raises:
        ConfigError: A setting is not possible, or differs from the settings of earlier steps.
        SetupError: The interface of megatron-core does not fit the engine, or megatron-core was
            imported too early on a machine without CUDA.
    """
    settings = Settings(schedule=schedule, **more)
    # The order matters: megatron-core needs a device when it is imported, and the engine needs a
    # megatron-core that has passed the check.
    from megatron.adaptive import accelerator, without_cuda

    accelerator.install()
    # The calling module uses torch, so it needs the substitutes for CUDA as well.
    without_cuda.include_program(sys._getframe(1).f_globals)
    from megatron.adaptive.plugin import versions

    versions.check()
    from megatron.adaptive.plugin import patch

    patch.put(settings)


# ``help()`` and notebooks then show the settings by name, with their defaults.
install.__signature__ = inspect.signature(Settings)  # type: ignore[attr-defined]


def uninstall() -> None:
    """Restores megatron-core's own function and closes the engine's channels.

    All ranks call it between two steps. Without an earlier :func:`install` it does nothing.

    Raises:
        TransportError: Another rank did not close its channels in time.
    """
    if "megatron.adaptive.plugin.patch" in sys.modules:
        from megatron.adaptive.plugin import patch

        patch.take_back()
