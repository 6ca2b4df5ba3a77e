"""The name ``get_forward_backward_func`` and who answers to it.

megatron-core defines it in ``pipeline_parallel.schedules`` and repeats it in its package; modules
of Megatron-LM hold it from their own import on. All of them get the same replacement, and later
megatron-core's own function back. The replacement is the plugin's only state. Where stages lie is
:mod:`~megatron.adaptive.plugin.placement_patch`'s.
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
from megatron.adaptive.plugin.first_weights import FirstWeights
from megatron.adaptive.plugin.placement_patch import Placed, exchange
from megatron.adaptive.plugin.settings import Settings, megatron_arguments
from megatron.adaptive.plugin.step_runner import Engine
from megatron.adaptive.without_cuda import renew_program

_NAME = "get_forward_backward_func"
_INTERRUPTED = 130
StepFunction = Callable[..., Any]


class Seam:
    """Answers in place of ``get_forward_backward_func``.

    Args:
        original: megatron-core's own function.
        settings: those of ``install``; flags are read when Megatron-LM first asks for a function.

    Attributes:
        original: see above.
        engine: runs the steps, ``None`` before the first.
        placed: answers where stages lie.
        first_weights: draws first weights by layer, if the settings say so.
    """

    original: StepFunction
    engine: Engine | None
    placed: Placed
    first_weights: FirstWeights

    def __init__(self, original: StepFunction, settings: Settings) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.engine = None
        self.placed = Placed(self._kind)
        self.first_weights = FirstWeights(self._draws_by_layer)
        self._settings = settings
        self._asked: tuple[Any, Settings, Settings] | None = None
        self._is_asked = False
        self._in_force = True

    def change(self, settings: Settings) -> None:
        """Take other settings.

        Raises:
            ConfigError: a step has run with those before.
        """
        if settings == self._settings:
            return
        if self.engine is not None:
            raise ConfigError(
                f"install() was called with {settings} after steps have run with {self._settings}:"
                " call uninstall() on all ranks first"
            )
        self._settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> StepFunction:
        """Return the function that runs a step; arguments as megatron-core's own takes them.

        Raises:
            ConfigError: the settings are not possible, or megatron-core names a loop that is
                unknown here.
        """
        if not self._is_asked:
            self._is_asked = True
            renew_program()
        chosen = self.original(*args, **kwargs)
        if not self._in_force:
            return chosen
        settings = self._settings_in_force()
        alone = chosen is schedules.forward_backward_no_pipelining
        is_own = settings.schedule == "megatron" or alone
        if is_own and not alone and current_device().type == "cpu":
            chosen = _keeping_outputs(chosen)
        if is_own and settings.trace_dir is None:
            return chosen
        if not is_own and chosen not in (
            schedules.forward_backward_pipelining_without_interleaving,
            schedules.forward_backward_pipelining_with_interleaving,
        ):
            raise ConfigError(
                f"megatron-core would run a step with {getattr(chosen, '__name__', chosen)}, which "
                "the engine has nothing for; use schedule megatron"
            )

        @functools.wraps(chosen)
        def step(**given: Any) -> Any:
            if not self._in_force:  # taken out meanwhile
                return chosen(**given)
            if self.engine is None:
                own = chosen if is_own else None
                self.engine = Engine(self._settings_in_force(), self.placed, own)
            return self.engine.run(given)

        return step

    def end(self) -> None:
        """Stand for megatron-core's own function from here on, and close the engine."""
        self._in_force = False
        atexit.unregister(self.leave_at_once)
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def leave_at_once(self) -> None:
        """End the process after an error that nobody caught, with the status Python gives it.

        Runs as one of the last exit functions, installed early as it is. The engine's threads still
        wait for messages; one that comes while the interpreter is torn down would abort it.
        """
        error = getattr(sys, "last_value", None)
        if error is None or self.engine is None or not self.engine.left_open:
            return
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)

    def _kind(self) -> PlacementKind:
        """Return the placement in force; asked several times for each microbatch."""
        return self._settings_of_model().kind

    def _draws_by_layer(self) -> bool:
        return self._settings_of_model().first_weights == "by-layer"

    def _settings_in_force(self) -> Settings:
        return self._settings.overridden(megatron_arguments())

    def _settings_of_model(self) -> Settings:
        """Return the settings in force, worked out once for each set of arguments."""
        arguments, asked = megatron_arguments(), self._asked
        if asked is None or asked[0] is not arguments or asked[1] is not self._settings:
            asked = (arguments, self._settings, self._settings.overridden(arguments))
            self._asked = asked
        return asked[2]


def _keeping_outputs(run_step: StepFunction) -> StepFunction:
    """Return a step of megatron-core's own loop that keeps outputs until they are sent.

    megatron-core frees outputs when sending has begun. On a GPU the stream still holds them, but
    gloo sends directly from their memory, which the next tensor would overwrite.
    """

    @functools.wraps(run_step)
    def step(**given: Any) -> Any:
        model = given["model"]
        chunks = [model] if isinstance(model, torch.nn.Module) else model
        configs = {id(config): config for config in map(get_model_config, chunks)}.values()
        asked = [config.deallocate_pipeline_outputs for config in configs]
        for config in configs:
            config.deallocate_pipeline_outputs = False
        try:
            return run_step(**given)
        finally:
            for config, value in zip(configs, asked, strict=True):
                config.deallocate_pipeline_outputs = value

    return step


def put(settings: Settings) -> None:
    """Let every module that holds megatron-core's function hold a :class:`Seam` instead.

    Raises:
        ConfigError: steps have run with other settings.
    """
    present = getattr(schedules, _NAME)
    if isinstance(present, Seam):
        present.change(settings)
        return
    seam = Seam(present, settings)
    seam.placed.put()
    seam.first_weights.put()
    atexit.register(seam.leave_at_once)
    exchange(schedules, _NAME, present, seam)


def take_back() -> None:
    """Give every module megatron-core's own function back."""
    present = getattr(schedules, _NAME)
    if isinstance(present, Seam):
        exchange(schedules, _NAME, present, present.original)
        try:
            present.end()
        finally:
            present.first_weights.take_back()
            present.placed.take_back()
