"""Checks the settings of a pipeline before its model is cut."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.adaptive.config.flags import check_values, fields_of
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.schedule import ScheduleConfig
from megatron.adaptive.config.trace_settings import check_collector, require_profiled_steps
from megatron.adaptive.engine.executor_setup import require_equal_settings
from megatron.adaptive.engine.process_context import Job
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.assembly import PipelineSettings
from megatron.adaptive.modules.batch import (
    BatchShape,
    is_list,
    microbatch_list,
    require_whole,
    samples_in,
)
from megatron.adaptive.modules.cut_points import CutPoint
from megatron.adaptive.modules.cutting import check_groups
from megatron.adaptive.modules.fake_recording import is_on_meta

# Settings that affect measurements of a model. Their order must not change, because elastic jobs
# identify a model by a hash of these settings.
_SIGNED_CUT = ("shared_weights", "partition", "weights", "slicing")
_SIGNED_SHAPE = (
    "pipeline_size",
    "micro_batch_size",
    "samples",
    "schedule",
    "chunks",
    "activation_cap",
    "split_backward",
)

_ALIKE = (
    "mixed_precision",
    "decisive_entries",
    "slicing",
    "recompute",
    "order",
    "dealing",
    "compare_batches",
    "repartition",
    "repartition_interval",
    "repartition_gain",
    "pipeline_size",
    "micro_batch_size",
    "batch_size",
    "trace_detail",
    "trace_interval",
    "trace_iterations",
    "schedule",
    "chunks",
    "activation_cap",
    "split_backward",
    "partition",
    "seed",
)
"""Names of settings that must be equal on all ranks, because the ranks' messages depend on them."""

_LIKE_FLAGS = (
    "hang_after_s",
    "on_hang",
    "trace_detail",
    "repartition",
    "repartition_interval",
    "repartition_gain",
)

_OF_KERNELS = ("profile_ranks", "profile_step_start", "profile_step_end")


class _Condition(NamedTuple):
    """Condition under which some settings have an effect.

    Attributes:
        names: Names of the settings.
        is_met: Function that returns whether the settings of a pipeline meet the condition.
        needed: Settings that meet the condition, as text for error messages.
        reason: Reason why ``names`` have no effect otherwise, as text for error messages.
    """

    names: tuple[str, ...]
    is_met: Callable[[PipelineSettings], bool]
    needed: str
    reason: str


_CONDITIONS = (
    _Condition(
        ("trace_detail", "trace_interval", "trace_iterations", *_OF_KERNELS),
        lambda request: request.trace_dir is not None,
        "trace_dir",
        "this setting only affects traces",
    ),
    _Condition(
        _OF_KERNELS,
        lambda request: request.trace_detail == "kernels",
        "trace_detail='kernels'",
        "this setting only affects the recording of kernels",
    ),
    _Condition(
        ("repartition_interval", "repartition_gain"),
        lambda request: request.repartition != "off",
        "repartition='auto'",
        "segments do not move otherwise",
    ),
    _Condition(
        ("on_hang",),
        lambda request: request.hang_after_s != 0,
        "a hang_after_s other than 0",
        "hangs are not detected otherwise",
    ),
)


def check_settings(request: PipelineSettings) -> None:
    """Checks the values of the settings in ``request``.

    Several settings have the same valid values as the trainer's flags.

    Raises:
        ConfigError: If a value is outside its range, or a setting would have no effect.
    """
    values = {name: getattr(request, name) for name in _LIKE_FLAGS}
    check_values(values, {spec.dest: spec for spec in fields_of(ScheduleConfig)})
    require_whole(1, max_recordings=request.max_recordings)
    _check_traced(request)
    _check_effects(request)
    if request.initialize is not None and not is_on_meta(request.model):
        raise ConfigError(
            "initialize would not be called, because no parameter or buffer of the model is on the "
            'meta device; build the model within `with torch.device("meta")`, or remove initialize'
        )


def _check_traced(request: PipelineSettings) -> None:
    """Checks the trace settings in ``request``, such as the traced and profiled steps.

    Raises:
        ConfigError: If a value is invalid.
    """
    require_whole(1, trace_interval=request.trace_interval)
    if request.trace_iterations is not None:
        require_whole(1, trace_iterations=request.trace_iterations)
    first, end = request.profile_step_start, request.profile_step_end
    require_whole(0, profile_step_start=first, profile_step_end=end)
    require_profiled_steps(first, end)
    check_collector(request.trace_otlp, request.trace_dir)


def _check_effects(request: PipelineSettings) -> None:
    """Checks that each setting in ``request`` has an effect, unless it has its default value.

    Raises:
        ConfigError: If a setting has no effect because another setting is missing.
    """
    defaults = {spec.name: spec.default for spec in dataclasses.fields(request)}
    for condition in _CONDITIONS:
        if condition.is_met(request):
            continue
        for name in condition.names:
            value = getattr(request, name)
            if value != defaults[name]:
                raise ConfigError(
                    f"{name}={value!r} requires {condition.needed}, because {condition.reason}; "
                    f"pass {condition.needed}, or remove {name}"
                )


def check_model_and_sample(request: PipelineSettings) -> tuple[PipelineSettings, int]:
    """Checks ``shared_weights`` and the sample batch in ``request``.

    Returns the settings and the number of samples. If the sample batch is a list of microbatches,
    ``micro_batch_size`` is 1 in the returned settings.

    Raises:
        ConfigError: If the sample batch is invalid or contradicts a setting, or ``shared_weights``
            does not fit the model.
    """
    check_groups(request.model, request.shared_weights)
    sample = request.sample_batch
    if not is_list(sample):
        if request.micro_batch_size is not None:
            BatchShape(sample, request.micro_batch_size)
        return request, samples_in(sample, "sample_batch")
    microbatch_list(sample, "sample_batch")
    if request.micro_batch_size not in (None, 1) or request.pipeline_size == "auto":
        raise ConfigError(
            "sample_batch is a list of microbatches, so their sizes are known; remove "
            "micro_batch_size, and set pipeline_size to a number or None"
        )
    return dataclasses.replace(request, micro_batch_size=1), len(sample)


def require_alike(request: PipelineSettings, job: Job) -> None:
    """Checks that all ranks have the same parameters and settings. All ranks must call this.

    ``request`` contains this rank's settings, and ``job`` connects the ranks.

    If parameters or settings differed, ranks would wait for messages that are never sent or for
    reductions that other ranks do not start. For example, a parameter that is frozen on only one
    rank changes the messages of its stage.

    Raises:
        ConfigError: If ranks differ, or ``profile_ranks`` contains a rank that does not exist. The
            message names the first difference.
    """
    settings = {name: f"{name}={getattr(request, name)!r}" for name in _ALIKE}
    settings["trace_dir"] = "no trace_dir" if request.trace_dir is None else "a trace_dir"
    transport = request.transport or TransportConfig()
    settings["transport"] = f"transport={transport.transport!r}"
    count = 0
    for name, parameter in request.model.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        shape = f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
        settings[f"parameter {name}"] = f"{kind} parameter {name} {shape}"
        count += 1
    settings["number of parameters"] = f"{count} parameters"
    require_equal_settings(settings, job.control_group)
    _check_profile_ranks(request, job)


def _check_profile_ranks(request: PipelineSettings, job: Job) -> None:
    """Checks that the ranks in the setting ``profile_ranks`` exist.

    Elastic jobs are not checked, because their number of ranks may change.

    Raises:
        ConfigError: If a rank does not exist.
    """
    world_size = job.environment.world_size
    missing = [rank for rank in request.profile_ranks if rank >= world_size]
    if missing and job.environment.job is None:
        raise ConfigError(
            f"profile_ranks contains {missing[0]}, but the number of processes is {world_size}; "
            f"pass ranks below {world_size}"
        )


def request_signature(request: PipelineSettings) -> str:
    """Returns a hash of the model and of the settings that affect its measurements."""
    model, sample = request.model, request.sample
    content: dict[str, Any] = {
        "model": type(model).__qualname__,
        "parameters": [
            (n, list(item.shape), str(item.dtype), *(() if item.requires_grad else ("frozen",)))
            for n, item in model.named_parameters()
        ],
        "cuts": [name for name, item in model.named_modules() if isinstance(item, CutPoint)],
        "sample": [(n, list(item.shape[1:]), str(item.dtype)) for n, item in sample.items()],
        "cut": [getattr(request, name) for name in _SIGNED_CUT],
        "wanted": [getattr(request, name) for name in _SIGNED_SHAPE],
        "memory": request.memory_limit_bytes,
        "autocast": str(request.autocast),
    }
    if request.recompute is not None:
        # Without recomputation, omit the entry, so that signatures of earlier versions stay valid.
        content["recompute"] = request.recompute
    text = json.dumps(content, default=list, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
