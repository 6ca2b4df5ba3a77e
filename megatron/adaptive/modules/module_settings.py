"""Detects changes in a model's modules that existing recordings do not reflect.

A recording contains the operations that the model's Python code called. If the user later changes a
dropout probability, adds a hook or puts a submodule into evaluation mode, existing recordings still
use the old setting. A new recording, for a microbatch with another shape, would use the new
setting, so the microbatches of one step could use different settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.recording import MODES, Forwards, Mode, host_random_state
from megatron.adaptive.modules.tape import Tape, makes_same_calls

_PLAIN = (bool, int, float, str)
# Attributes of torch.nn.Module that contain forward hooks.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_ABSENT = object()
# Maximum number of changed attributes to test in the search for an attribute that affects the
# recording.
_MOST_TRIED = 16

Settings = dict[tuple[str, str], Any]
"""Values of plain attributes and hooks, keyed by the names of the module and the attribute."""


def _settings_of(model: torch.nn.Module, mode: Mode) -> Settings:
    """Returns the attributes and hooks that ``model`` has when it is recorded in ``mode``."""
    is_training = mode == "training"
    settings: Settings = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if type(value) in _PLAIN:
                settings[name, key] = value
            elif key in _HOOKS:
                settings[name, key] = value.copy()
        if model.training != is_training:
            # The model will be switched to ``mode`` before it is recorded.
            settings[name, "training"] = is_training
    return settings


def _differences(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> set[tuple[str, str]]:
    """Returns the keys whose values differ between ``first`` and ``second``."""
    return {
        key
        for key in first.keys() | second.keys()
        if not _is_same(first.get(key, _ABSENT), second.get(key, _ABSENT))
    }


def _is_same(first: Any, second: Any) -> bool:
    # Treat two NaNs as equal.
    return type(first) is type(second) and (
        first == second or (first != first and second != second)
    )


@contextlib.contextmanager
def _with_settings(model: torch.nn.Module, settings: Settings) -> Iterator[None]:
    """Sets attributes of ``model`` to the values in ``settings``, and restores them on exit."""
    modules = dict(model.named_modules())
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (name, key), value in settings.items():
            if name in modules:
                table = modules[name].__dict__
                before.append((table, key, table.get(key, _ABSENT)))
                _assign(table, key, value.copy() if isinstance(value, dict) else value)
        yield
    finally:
        for table, key, value in before:
            _assign(table, key, value)


def _assign(table: dict[str, Any], key: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


class ModuleSettings:
    """Stores the initial values of the plain attributes and hooks of a model's modules.

    Plain attributes are numbers, strings and booleans, including ``training``.

    Args:
        model: Model whose forward pass is recorded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._first = {mode: _settings_of(model, mode) for mode in MODES}
        # Attributes that the forward pass itself changes. Their changes are ignored.
        self._ignored: set[tuple[str, str]] = set()

    def record(self, mode: Mode, record: Callable[[], Forwards]) -> Forwards:
        """Calls ``record`` to record the model in ``mode``, and checks the model's settings.

        Attributes that the forward pass itself changes, such as counters, are ignored. If other
        attributes have changed since this object was created, the model is recorded again with the
        old values, to check whether the recording depends on them.

        Raises:
            ConfigError: If the recording depends on an attribute or a hook that has changed since
                this object was created.
        """
        before = _settings_of(self._model, mode)
        first = self._first[mode]
        numbers = host_random_state()
        forwards = record()
        by_forward = _differences(before, _settings_of(self._model, mode))
        self._ignored |= by_forward
        names = {name for name, _ in first}
        changed = {key for key in _differences(first, before) - self._ignored if key[0] in names}
        if changed and host_random_state() == numbers:
            former = {key: first.get(key, _ABSENT) for key in changed}
            if any(attribute == "training" for _, attribute in changed):
                former |= {key: first[key] for key in first if key[1] == "training"}
            # Recordings for comparison must start with the same values of those attributes that the
            # forward pass changes, such as counters.
            counters = {key: before.get(key, _ABSENT) for key in by_forward}

            def matters(settings: Settings) -> bool:
                with _with_settings(self._model, {**settings, **counters}):
                    return not _makes(record, forwards.tapes[mode], mode)

            if matters(former):
                tried = sorted(changed)[:_MOST_TRIED]
                alone = (key for key in tried if matters({key: former[key]}))
                raise ConfigError(_message(next(alone, tried[0]), before, first))
        return forwards


def _makes(record: Callable[[], Forwards], tape: Tape, mode: Mode) -> bool:
    """Returns whether a recording by ``record`` contains the same calls as ``tape``."""
    try:
        other = record().tapes[mode]
    except Exception:
        # The model fails with the old values, so the recording depends on the new ones.
        return False
    gradients = [[call.with_grad for call in each.calls] for each in (tape, other)]
    return makes_same_calls(tape, other) and gradients[0] == gradients[1]


def _message(key: tuple[str, str], now: Settings, first: Settings) -> str:
    """Returns the error message for the changed attribute ``key``.

    ``now`` contains the current settings, and ``first`` contains those from the time when the
    pipeline was created.
    """
    path = ".".join(filter(None, key))
    if key[1] in _HOOKS:
        change = f"the forward hooks of {key[0] or 'the model'} differ from those"
    elif key not in now or key not in first:
        change = f"{path} was {'added' if key in now else 'removed'} after the time"
    else:
        change = f"{path} is {now[key]!r}, but was {first[key]!r}"
    return (
        f"{change} when the Pipeline was created; the Pipeline replays a recording of the earlier "
        "model, so undo the change, or create a new Pipeline after it"
    )
