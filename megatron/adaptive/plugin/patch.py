"""Replaces megatron-core's ``get_forward_backward_func``, so that steps run on the executor.

megatron-core defines this function in ``pipeline_parallel.schedules``, and exports the function
from the package ``pipeline_parallel``. Modules of Megatron-LM import the function by name. In all
these modules, the plugin replaces the function with a single object, which contains all of the
plugin's state. Uninstalling the plugin restores the function.
:mod:`~megatron.adaptive.plugin.placement_patch` replaces the functions that return the position of
a stage.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.adaptive.accelerator import current_device
from megatron.adaptive.config.schedule_specs import PlacementKind
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.plugin.engines import Engines, Model
from megatron.adaptive.plugin.first_weights import FirstWeights
from megatron.adaptive.plugin.placement_patch import Placed, exchange
from megatron.adaptive.plugin.settings import Settings, megatron_arguments
from megatron.adaptive.without_cuda import renew_program

_NAME = "get_forward_backward_func"
_INTERRUPTED = 130
"""Exit status of a process that SIGINT has killed."""
StepFunction = Callable[..., Any]


class Seam:
    """Replaces ``get_forward_backward_func``, and returns functions that run steps on the engine.

    Args:
        original: Function ``get_forward_backward_func`` of megatron-core.
        settings: Settings passed to ``install``. Flags on the command line are applied when
            Megatron-LM first calls this object.

    Attributes:
        original: Function ``get_forward_backward_func`` of megatron-core.
        engines: Engines that run the steps, one for each model.
        placed: Replacement for megatron-core's functions that return the position of a stage.
        first_weights: Object that replaces constructors, so that initial weights are drawn
            separately for each layer if the setting ``first_weights`` is ``by-layer``.
    """

    original: StepFunction
    engines: Engines
    placed: Placed
    first_weights: FirstWeights

    def __init__(self, original: StepFunction, settings: Settings) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.placed = Placed(self._kind)
        self.engines = Engines(self.placed)
        self.first_weights = FirstWeights(self._draws_by_layer)
        self._settings = settings
        self._cached: tuple[Any, Settings, Settings] | None = None
        self._is_asked = False
        self._in_force = True

    def change(self, settings: Settings) -> None:
        """Changes the settings of all models without settings of their own.

        Raises:
            ConfigError: The settings have changed, but a step has already run with the previous
                settings.
        """
        if settings == self._settings:
            return
        if self.engines.has_shared_settings:
            raise ConfigError(
                f"install() was called with {settings} after steps have run with "
                f"{self._settings}; call uninstall() on all ranks first"
            )
        self._settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> StepFunction:
        """Returns a function that runs a step.

        The arguments are the same as for megatron-core's function.

        Raises:
            ConfigError: A setting is invalid, or the plugin does not support the step function that
                megatron-core returns.
        """
        if not self._is_asked:
            self._is_asked = True
            renew_program()
        chosen: StepFunction = self.original(*args, **kwargs)
        if not self._in_force:
            return chosen
        if not self.engines.has_own_settings:
            settings = self._settings_in_force()
            untouched = _run_by_megatron_core(chosen, settings)
            if untouched is not None and settings.trace_dir is None:
                return untouched

        @functools.wraps(chosen)
        def step(**arguments: Any) -> Any:
            # The program may have called uninstall() since it obtained this function.
            if not self._in_force:
                return chosen(**arguments)
            model = arguments["model"]
            shared = self._settings_of_model()
            settings = self.engines.settings_of(model) or shared
            untouched = _run_by_megatron_core(chosen, settings)
            if untouched is not None and settings.trace_dir is None:
                return untouched(**arguments)
            return self.engines.engine_of(model, shared, untouched).run(arguments)

        return step

    def end(self) -> None:
        """Closes the engines. From then on, this object returns megatron-core's own functions."""
        self._in_force = False
        atexit.unregister(self.leave_at_once)
        engines = self.engines
        self.engines = Engines(self.placed)
        engines.close()

    def leave_at_once(self) -> None:
        """Exits the process after an uncaught error, with the exit status that Python would use.

        This method is registered early, so it is one of the last exit functions to run. At that
        time, the engine's threads may still wait for messages. If a message arrived while Python
        shuts down, the process would abort.
        """
        error = getattr(sys, "last_value", None)
        if error is None or not self.engines.left_open:
            return
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)

    def _kind(self) -> PlacementKind:
        """Returns the current kind of placement.

        This method must be fast, because it is called several times per microbatch.
        """
        return self._settings_of_model().kind

    def _draws_by_layer(self) -> bool:
        return self._settings_of_model().first_weights == "by-layer"

    def _settings_in_force(self) -> Settings:
        return self._settings.overridden(megatron_arguments())

    def _settings_of_model(self) -> Settings:
        """Returns the settings of models without settings of their own, after applying flags.

        The result is cached for each set of parsed arguments.
        """
        arguments = megatron_arguments()
        cached = self._cached
        if cached is None or cached[0] is not arguments or cached[1] is not self._settings:
            cached = (arguments, self._settings, self._settings.overridden(arguments))
            self._cached = cached
        return cached[2]


def _run_by_megatron_core(chosen: StepFunction, settings: Settings) -> StepFunction | None:
    """Returns megatron-core's step function, or ``None`` if the executor runs the step.

    Args:
        chosen: Step function that megatron-core has chosen.
        settings: Settings of the model.

    Raises:
        ConfigError: The engine cannot replace the step function that megatron-core has chosen.
    """
    alone: StepFunction = schedules.forward_backward_no_pipelining
    if chosen is alone:
        return alone
    if settings.schedule == "megatron":
        return _keeping_outputs(chosen) if current_device().type == "cpu" else chosen
    if chosen not in (
        schedules.forward_backward_pipelining_without_interleaving,
        schedules.forward_backward_pipelining_with_interleaving,
    ):
        raise ConfigError(
            f"megatron-core would run the step with {getattr(chosen, '__name__', chosen)}, which "
            "the engine cannot replace; use --pipeline-schedule megatron"
        )
    return None


def _keeping_outputs(run_step: StepFunction) -> StepFunction:
    """Wraps megatron-core's step function so that outputs are kept until they have been sent.

    megatron-core frees an output as soon as its send has started. On a GPU this is safe, because
    the stream keeps the memory in use. But gloo sends directly from the memory of the output, which
    a new tensor could overwrite.
    """

    @functools.wraps(run_step)
    def step(**arguments: Any) -> Any:
        model = arguments["model"]
        chunks = [model] if isinstance(model, torch.nn.Module) else model
        configs = {id(config): config for config in map(get_model_config, chunks)}.values()
        former = [config.deallocate_pipeline_outputs for config in configs]
        for config in configs:
            config.deallocate_pipeline_outputs = False
        try:
            return run_step(**arguments)
        finally:
            for config, value in zip(configs, former, strict=True):
                config.deallocate_pipeline_outputs = value

    return step


def put(settings: Settings, model: Model | None = None) -> None:
    """Replaces ``get_forward_backward_func`` in each module that imported it with a :class:`Seam`.

    Args:
        settings: Settings of the plugin.
        model: Chunks of the model if the settings apply to one model only, or ``None`` for all
            models without settings of their own.

    Raises:
        ConfigError: Steps have already run with different settings, or the model already has
            different settings.
    """
    present = getattr(schedules, _NAME)
    if isinstance(present, Seam):
        if model is None:
            present.change(settings)
        else:
            present.engines.give(model, settings)
        return
    # If the settings apply to one model only, megatron-core runs the steps of all other models.
    seam = Seam(present, settings if model is None else Settings(schedule="megatron"))
    if model is not None:
        seam.engines.give(model, settings)
    seam.placed.put()
    seam.first_weights.put()
    atexit.register(seam.leave_at_once)
    exchange(schedules, _NAME, present, seam)


def take_back() -> None:
    """Restores megatron-core's own functions in every module."""
    present = getattr(schedules, _NAME)
    if isinstance(present, Seam):
        exchange(schedules, _NAME, present, present.original)
        try:
            present.end()
        finally:
            present.first_weights.take_back()
            present.placed.take_back()
