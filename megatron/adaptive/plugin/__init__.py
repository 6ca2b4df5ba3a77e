"""The pipeline engine of this package inside a user's own Megatron-LM.

Owns one name, ``get_forward_backward_func``, for as long as it is installed: Megatron-LM asks it
for the function that runs a step, and gets one that runs on our executor. Where stages are to lie
in a V, it answers for megatron-core where they do, too::

    Megatron-LM ── get_forward_backward_func() ──> seam ── one pipeline rank ──> megatron-core's own
                                                     └──── several ───────────> engine ─> executor

Model, data, optimizer, checkpoints and logging stay Megatron-LM's. Nothing of the trainer in
``megatron.adaptive.training`` is used.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from megatron.adaptive.plugin.settings import Settings, add_arguments

__all__ = ["add_arguments", "install", "uninstall"]


def install(schedule: str = "adaptive", **more: Any) -> None:
    """Let Megatron-LM run its pipeline steps on the engine of this package.

    Call it on every rank, before the first step; on a machine without CUDA before megatron-core is
    imported. Flags of :func:`add_arguments` that the command line gives win over what is given
    here. Calling it again with the same settings does nothing; with others it changes them, as long
    as no step has run.

    Args:
        schedule: the order of work.
        more: the other attributes of :class:`~megatron.adaptive.plugin.settings.Settings`.

    Raises:
        ConfigError: a setting is not possible, or differs from those that a step has run with.
        SetupError: megatron-core has another interface than the one this engine calls, or was
            imported too early on a machine without CUDA.
    """
    settings = Settings(schedule=schedule, **more)
    # Each import needs what is done before it: megatron-core must find its device, and the engine
    # a megatron-core that it can be imported with.
    from megatron.adaptive import accelerator, without_cuda

    accelerator.install()
    # The calling module uses torch, so it gets the substitutes too.
    without_cuda.include_program(sys._getframe(1).f_globals)
    from megatron.adaptive.plugin import versions

    versions.check()
    from megatron.adaptive.plugin import patch

    patch.put(settings)


# What ``help()`` and notebooks show: the settings by name, with their defaults.
install.__signature__ = inspect.signature(Settings)  # type: ignore[attr-defined]


def uninstall() -> None:
    """Give Megatron-LM megatron-core's own function back and close the engine's channels.

    All ranks call it, between two steps. Without :func:`install` before, it does nothing.

    Raises:
        TransportError: another rank did not close its channels in time.
    """
    if "megatron.adaptive.plugin.patch" in sys.modules:
        from megatron.adaptive.plugin import patch

        patch.take_back()
