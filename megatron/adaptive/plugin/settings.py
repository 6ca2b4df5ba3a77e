"""Settings of the plugin, in code or on Megatron-LM's command line.

Imports neither torch nor megatron-core: flags are added before either is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.config.flags import FieldSpec, fields_of, flag
from megatron.adaptive.config.parallel import AUTO, TRANSPORTS, TransportConfig
from megatron.adaptive.config.schedule import (
    RULES,
    SPLIT_SCHEDULES,
    V_ONLY,
    V_SCHEDULES,
    PlacementKind,
    ScheduleConfig,
)
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.registry import policy_names

_REFUSED = {
    "forward-only": "has no backwards; evaluation takes it by itself",
}
_MAY_SPLIT = ("adaptive", "auto", "file", "hinted")
_KNOWN = sorted(("auto", "file", *policy_names()))
CHOICES = ("megatron", *(name for name in _KNOWN if name not in _REFUSED))
"""Values of ``schedule``."""


def _why_no_schedule(name: str) -> str:
    reason = _REFUSED.get(name, "is unknown")
    return f"pipeline schedule {name} {reason}: choose one of {', '.join(CHOICES)}"


def _schedule(word: str) -> str:
    if word not in CHOICES:
        raise ValueError(_why_no_schedule(word))
    return word


@dataclass(frozen=True, kw_only=True)
class _PluginFlags:
    """Flags that our own trainer has no need of."""

    keyed_dropout: bool = flag(
        "Draw dropout's numbers from step, microbatch and layer, so that the order of work does "
        "not change them; else they are Megatron-LM's own, in the order of the forwards.",
        False,
        takes_value=True,
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of :func:`~megatron.adaptive.plugin.install`, which describes them.

    Raises:
        ConfigError: one of them is not possible, by itself or with another.
    """

    schedule: str = "adaptive"
    placement: PlacementKind | None = None
    schedule_file: str | None = None
    activation_cap: float | None = None
    split_backward: bool | None = None
    weight_pieces: int = 4
    keyed_dropout: bool = False
    trace_dir: str | None = None
    diagnose_interval: int = ScheduleConfig.diagnose_interval
    transport: str = AUTO
    transport_silence_s: float = TransportConfig.transport_silence_s
    timeout_s: float = 600.0
    hang_after_s: float | None = None
    on_hang: str = "report"

    def __post_init__(self) -> None:
        given = f"pipeline schedule {self.schedule}"
        if self.schedule not in CHOICES:
            raise ConfigError(_why_no_schedule(self.schedule))
        if self.placement not in (None, "loop", "v"):
            raise ConfigError(f"placement {self.placement} is unknown: choose loop or v")
        if self.placement == "v" and self.schedule not in V_SCHEDULES:
            possible = ", ".join(name for name in CHOICES if name in V_SCHEDULES)
            raise ConfigError(
                f"placement v with {given}, which lays stages in a loop: use placement loop, or "
                f"one of {possible}"
            )
        if self.placement == "loop" and self.schedule in V_ONLY:
            raise ConfigError(
                f"placement loop with {given}, which lays stages in a v: use placement v, or "
                "adaptive"
            )
        if (self.schedule == "file") != (self.schedule_file is not None):
            raise ConfigError(
                f"{given} with schedule_file {self.schedule_file}: the two go together; give both "
                "or neither"
            )
        if self.keyed_dropout and self.schedule == "megatron":
            raise ConfigError(
                f"keyed dropout with {given}, whose forwards megatron-core runs: drop it or use "
                "adaptive"
            )
        cap, rule = self.activation_cap, self.is_rule
        if cap is not None and not rule:
            raise ConfigError(
                f"activation cap {cap:g} has no effect with {given}, whose order fixes what is "
                "kept: drop it or use adaptive"
            )
        if cap is not None and not cap >= 1:
            raise ConfigError(
                f"activation cap {cap:g}: every order keeps one microbatch at least; give 1 or more"
            )
        if self.split_backward and not (rule or self.needs_split or self.schedule == "file"):
            raise ConfigError(
                f"split backwards with {given}, whose order has whole ones: use zb-h1 or "
                "adaptive, or drop split_backward"
            )
        if self.needs_split and self.split_backward is False:
            raise ConfigError(
                f"{given} has weight gradients as work of their own: drop split_backward=False "
                "(--split-backward False), or use 1f1b"
            )
        if self.transport not in (AUTO, *TRANSPORTS):
            raise ConfigError(
                f"transport {self.transport} is unknown: choose one of {AUTO}, "
                f"{', '.join(TRANSPORTS)}"
            )
        if self.on_hang not in ("report", "end"):
            raise ConfigError(f"on_hang {self.on_hang} is unknown: choose report or end")
        for name in ("transport_silence_s", "diagnose_interval", "hang_after_s"):
            try:
                if getattr(self, name) is not None:
                    _flags()[name].limits.check(getattr(self, name))
            except ValueError as error:
                what = name.removesuffix("_s").replace("_", " ")
                raise ConfigError(f"{what}: {error}") from None
        if self.weight_pieces < 1:
            raise ConfigError(f"weight pieces {self.weight_pieces}: give 1 or more")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout of {self.timeout_s:g} s: give a number of seconds above 0")

    @property
    def kind(self) -> PlacementKind:
        """Placement of the stages over the ranks of the pipeline."""
        return self.placement or ("v" if self.schedule in V_ONLY else "loop")

    @property
    def is_rule(self) -> bool:
        """Whether the order is chosen at run time."""
        return self.schedule in RULES

    @property
    def needs_split(self) -> bool:
        """Whether the order has weight gradients as work of their own."""
        return self.schedule in SPLIT_SCHEDULES

    @property
    def splits(self) -> bool | None:
        """Whether backwards are split, ``None`` where the model decides."""
        if self.split_backward is None and self.schedule in _MAY_SPLIT:
            return None
        return self.needs_split or bool(self.split_backward)

    def overridden(self, arguments: Any) -> Settings:
        """Return these settings with those that ``arguments`` holds under a flag's name.

        Args:
            arguments: Megatron-LM's, or ``None``; an attribute that is missing or ``None`` leaves
                the setting as it is.

        Raises:
            ConfigError: the result is not possible.
        """
        values = {name: getattr(arguments, spec.dest, None) for name, spec in _flags().items()}
        given = {field: value for field, value in values.items() if value is not None}
        return dataclasses.replace(self, **given)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags; for ``extra_args_provider`` of Megatron-LM's ``pretrain``.

    A flag that is not given leaves the setting to :func:`~megatron.adaptive.plugin.install`.

    Returns:
        ``parser``.
    """
    group = parser.add_argument_group(title="megatron.adaptive")
    for name, spec in _flags().items():
        own = name == "schedule"
        group.add_argument(
            spec.name,
            type=functools.partial(_convert, _schedule if own else spec.convert),
            choices=None if own else spec.flag.choices or None,
            metavar="NAME" if own else spec.unit or None,
            help=f"Order of work of the pipeline, one of {', '.join(CHOICES)}; megatron is "
            "megatron-core's own code."
            if own
            else spec.flag.help,
        )
    return parser


def _flags() -> dict[str, FieldSpec]:
    """Return the trainer's flags of the same meaning, by setting."""
    groups = (ScheduleConfig, TransportConfig, _PluginFlags)
    specs = {spec.dest: spec for group in groups for spec in fields_of(group)}
    names = {
        "schedule": "pipeline_schedule",
        "placement": "pipeline_placement",
        "timeout_s": "pipeline_timeout_s",
    }
    settings = [field.name for field in dataclasses.fields(Settings)]
    return {name: specs[names.get(name, name)] for name in settings}


def _convert(convert: Callable[[str], Any], word: str) -> Any:
    try:
        return convert(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def megatron_arguments() -> Any:
    """Return Megatron-LM's parsed arguments, ``None`` where there are none."""
    training = sys.modules.get("megatron.training")
    get_args = getattr(training, "get_args", None)
    if get_args is None:
        return None
    try:
        return get_args()
    except AssertionError:  # how Megatron-LM says that it has parsed none yet
        return None
