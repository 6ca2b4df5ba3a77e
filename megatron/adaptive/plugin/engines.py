"""Manages the engines of a process, one for each model, and the settings of individual models.

A program may train several models, for example an actor and a critic. Each model has its own
engine, channels, schedule and trace, so steps of different models may run in any order. A model is
identified by its chunks, without the wrappers around them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron.adaptive.config.input_files import say
from megatron.adaptive.errors import ConfigError, TraceError, TransportError
from megatron.adaptive.plugin.placement_patch import Placed
from megatron.adaptive.plugin.settings import Settings
from megatron.adaptive.plugin.step_runner import Engine, Watch

Model = torch.nn.Module | Sequence[torch.nn.Module]


@dataclass(frozen=True, kw_only=True, eq=False)
class _OwnSettings:
    """Settings that the user passed for a single model.

    Attributes:
        chunks: Model chunks on this rank, without wrappers such as data parallelism.
        settings: Settings of the model.
    """

    chunks: list[torch.nn.Module]
    settings: Settings


class Engines:
    """Creates an engine at the first step of each model, and closes all engines at the end.

    Args:
        placed: Replacement for megatron-core's functions that return the position of a stage.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._own: list[_OwnSettings] = []
        self._engines: list[Engine] = []
        self._trace_folders: list[str] = []
        self._watch = Watch(self._close_at_exit)

    @property
    def has_own_settings(self) -> bool:
        """Returns whether any model has settings that apply only to this model."""
        return bool(self._own)

    @property
    def has_shared_settings(self) -> bool:
        """Returns whether a model without settings of its own has already run a step."""
        return any(self._settings_of(engine.modules) is None for engine in self._engines)

    @property
    def left_open(self) -> bool:
        """Returns whether channels of an engine are still open because a step failed."""
        return any(engine.left_open for engine in self._engines)

    def give(self, model: Model, settings: Settings) -> None:
        """Stores ``settings``, which apply only to ``model``.

        Raises:
            ConfigError: The model already has different settings or has already run a step, or
                ``model`` is neither a module nor a list of modules.
        """
        parts = [model] if isinstance(model, torch.nn.Module) else list(model)
        if not parts or not all(isinstance(part, torch.nn.Module) for part in parts):
            raise ConfigError(
                "model must be a module, or the list of the model's chunks on this rank as "
                f"passed to the schedule, got {model!r}"
            )
        chunks = _bare(parts)
        for entry in self._own:
            if chunks == entry.chunks and settings == entry.settings:
                return
            if _share_chunks(chunks, entry.chunks):
                raise ConfigError(
                    f"install() was called twice for {_name(chunks)}, "
                    f"{_change(entry, settings)}; call it once for each model, with the complete "
                    "list of its chunks"
                )
        if any(_share_chunks(chunks, engine.modules) for engine in self._engines):
            raise ConfigError(
                f"install() was called for {_name(chunks)} after the model has run steps; call "
                "it before the model's first step"
            )
        self._own.append(_OwnSettings(chunks=chunks, settings=settings))

    def settings_of(self, model: Model) -> Settings | None:
        """Returns the settings that apply only to ``model``, or ``None`` if there are none."""
        return self._settings_of(_bare(model)) if self._own else None

    def engine_of(
        self, model: Model, shared: Settings, traced: Callable[..., Any] | None
    ) -> Engine:
        """Returns the engine of ``model``. Creates it in the model's first step.

        Args:
            model: Chunks of the model, as the caller passes them to the schedule.
            shared: Settings of all models without settings of their own.
            traced: Step function of megatron-core that the engine runs and traces, or ``None`` if
                the executor runs the steps.
        """
        chunks = _bare(model)
        for engine in self._engines:
            if _share_chunks(chunks, engine.modules):
                return engine
        settings = self._settings_of(chunks)
        settings = shared if settings is None else settings.in_process_of(shared)
        number = len(self._engines) + 1
        folder = settings.trace_dir
        if folder is not None:
            self._trace_folders.append(folder)
            if (models := self._trace_folders.count(folder)) > 1:
                # Two models must not write their trace files to the same folder.
                settings = dataclasses.replace(settings, trace_dir=f"{folder}-model-{models}")
        engine = Engine(
            settings, self._placed, traced, modules=chunks, number=number, watch=self._watch
        )
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """Closes all engines in reverse order. All ranks must call this.

        Raises:
            TransportError: Another rank did not close its channels in time.
        """
        self._watch.close()
        is_orderly = not any(engine.has_failed for engine in self._engines)
        # Each engine's trace wraps functions of megatron-core that the traces of earlier engines
        # have already wrapped, so close the last engine first.
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.callback(engine.close, is_orderly=is_orderly)

    def _close_at_exit(self) -> None:
        # After an uncaught error, other ranks do not close their channels, so do not wait for them.
        if getattr(sys, "last_value", None) is not None:
            for engine in self._engines:
                engine.has_failed = True
        try:
            self.close()
        except (TransportError, TraceError) as error:
            say(f"megatron.adaptive at exit: {error}")

    def _settings_of(self, chunks: Sequence[torch.nn.Module]) -> Settings | None:
        for entry in self._own:
            if _share_chunks(chunks, entry.chunks):
                return entry.settings
        return None


def _bare(model: Model) -> list[torch.nn.Module]:
    """Returns the chunks of ``model`` without the wrappers around each chunk."""
    chunks: list[torch.nn.Module] = unwrap_model(
        [model] if isinstance(model, torch.nn.Module) else list(model)
    )
    return chunks


def _share_chunks(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> bool:
    return any(chunk is other for chunk in chunks for other in others)


def _name(chunks: Sequence[torch.nn.Module]) -> str:
    return f"a {type(chunks[0]).__name__} of {len(chunks)} chunk{'s' * (len(chunks) > 1)}"


def _change(entry: _OwnSettings, settings: Settings) -> str:
    """Describes the first difference between ``entry`` and ``settings``, for an error message."""
    for field in dataclasses.fields(settings):
        before, after = getattr(entry.settings, field.name), getattr(settings, field.name)
        if before != after:
            return f"with {field.name}={before} and then {field.name}={after}"
    return f"first with {len(entry.chunks)} of its chunks"
