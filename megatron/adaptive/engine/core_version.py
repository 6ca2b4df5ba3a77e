"""Checks that the installed megatron-core has the functions that the engine calls.

The check compares function signatures instead of version numbers, because a checkout of Megatron-LM
between two releases has no exact version number. This module only imports names that exist in every
release of megatron-core since 0.14.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import megatron.core
from megatron.core import package_info, process_groups_config
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules

from megatron.adaptive.config.core_copies import shadowed_copies
from megatron.adaptive.config.environment import is_first_process
from megatron.adaptive.errors import SetupError

NEWEST = (0, 20)
"""Newest release of megatron-core that the tests cover."""

# ``backward_step`` is not listed here, because its arguments differ between releases.
# ``engine.stages`` checks these arguments.
_CALLS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "forward_step": (
        [
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "input_tensor",
            "forward_data_store",
            "config",
            "cp_group_size",
        ],
        [
            "collect_non_loss_data",
            "is_first_microbatch",
            "current_microbatch",
            "vp_stage",
            "is_last_stage",
        ],
    ),
    "check_first_val_step": (["first_val_step", "forward_only", "cond"], []),
    "deallocate_output_tensor": (["out", "deallocate_pipeline_outputs"], []),
    "finalize_model_grads": (["model", "num_tokens"], ["pg_collection"]),
}
"""Positional and keyword arguments that the engine passes to each function of megatron-core."""


def check(oldest: tuple[int, ...], remedy: str) -> None:
    """Raises an error if the engine cannot use the installed release of megatron-core.

    The job's first process prints a warning if the release is newer than the newest tested release,
    or if there are several copies of megatron-core on the path.

    Args:
        oldest: Oldest release that the caller supports, such as ``(0, 16, 1)``.
        remedy: End of the error message, which says what users can do instead.

    Raises:
        SetupError: A function of megatron-core is missing or has different parameters.
    """
    functions: dict[str, Any] = {name: getattr(schedules, name, None) for name in _CALLS}
    functions["finalize_model_grads"] = finalize_model_grads
    has_groups = hasattr(process_groups_config, "ProcessGroupCollection")
    reason = why_not(functions, has_groups=has_groups)
    release = (package_info.MAJOR, package_info.MINOR)
    if reason is None and (*release, package_info.PATCH) < oldest:
        reason = "it is older than the oldest supported release"
    if reason is not None:
        raise SetupError(f"megatron-core {megatron.core.__version__}: {reason}; {remedy}")
    if not is_first_process():
        return
    if (line := shadowed_copies()) is not None:
        warnings.warn(f"{line}; remove one of them from PYTHONPATH or uninstall it", stacklevel=3)
    if release > NEWEST:
        warnings.warn(
            f"megatron-core {megatron.core.__version__} is newer than the newest release that "
            f"megatron.adaptive is tested with ({NEWEST[0]}.{NEWEST[1]}); its functions are "
            "compatible, but compare the losses of a few steps with --pipeline-schedule megatron",
            stacklevel=3,
        )


def why_not(functions: Mapping[str, Callable[..., Any] | None], *, has_groups: bool) -> str | None:
    """Returns the reason why the engine cannot use this megatron-core, or ``None`` if it can.

    Args:
        functions: Functions of megatron-core, keyed by name, with ``None`` for missing functions.
        has_groups: Whether megatron-core has ``ProcessGroupCollection``.
    """
    if not has_groups:
        return "it has no ProcessGroupCollection, which the schedules get their process groups from"
    for name, (positional, keywords) in _CALLS.items():
        function = functions[name]
        if function is None:
            return f"it has no schedule {name}"
        if not _takes(function, positional, keywords):
            taken = ", ".join(inspect.signature(function).parameters)
            passed = ", ".join((*positional, *keywords))
            return f"its {name} takes ({taken}), but the pipeline engine passes ({passed})"
    return None


def _takes(
    function: Callable[..., Any], positional: Sequence[str], keywords: Sequence[str]
) -> bool:
    try:
        bound = inspect.signature(function).bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return all(bound.arguments.get(name) == name for name in positional)
