"""Defines the settings of the plugin, in code or on Megatron-LM's command line.

Imports neither torch nor megatron-core, because flags are added before either is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.config.flag_rules import GivenFlags, order_rules
from megatron.adaptive.config.flags import FieldSpec, assign, check_values, fields_of, flag
from megatron.adaptive.config.model import RecomputeConfig
from megatron.adaptive.config.parallel import AUTO, ParallelConfig, TransportConfig
from megatron.adaptive.config.schedule import ScheduleConfig
from megatron.adaptive.config.schedule_specs import PlacementKind, schedule_spec


@dataclass(frozen=True, kw_only=True)
class _PluginFlags:
    """Lists flags that the trainer does not need, and settings of a model that rules check."""

    moe_token_dispatcher_type: str = flag("How tokens get to their experts.", "allgather")

    first_weights: str = flag(
        "Draw first weights by pipeline rank, as Megatron-LM does, or by the number of their "
        "layer: then they are the same in a loop, in a V and for every number of stages.",
        "by-rank",
        choices=("by-rank", "by-layer"),
    )
    keyed_dropout: bool = flag(
        "Draw dropout's random numbers from step, microbatch and layer, so that the order of work "
        "does not change them; otherwise Megatron-LM draws them in the order of the forwards.",
        False,
        takes_value=True,
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Contains the settings of :func:`~megatron.adaptive.plugin.install`.

    Attributes:
        schedule: Rule that chooses at run time (``adaptive``, ``hinted``, ``dfc``, ``bfc``), fixed
            order (``1f1b``, ``interleaved``, ``gpipe``, ``breadth-first``, ``varuna``, ``zb-h1``,
            ``zb-v``, ``v-half``), ``file``, or ``auto``, which measures the first steps and takes
            the schedule that is fastest in simulation. ``megatron`` runs megatron-core's own code.
        placement: Placement of the stages if each rank has two chunks: ``loop``, as in
            megatron-core, or ``v``. A V must be set before megatron-core's process groups are made.
            ``None`` for a V with ``zb-v`` and ``v-half``, a loop with all others.
        auto_candidates: Names of the user's schedules that ``auto`` tries as well, each as
            ``package.module:name``.
        schedule_file: Path of the schedule file for ``file``: JSON, or the CSV of
            ``torch.distributed.pipelining``.
        activation_cap: Most activations that a rank keeps under a rule, in microbatches over all
            its chunks; ``None`` to derive it from the shape of the pipeline.
        split_backward: Whether weight gradients are separate actions. ``None`` for True with
            ``zb-h1``, and with ``adaptive`` and ``hinted`` if it costs nothing (see
            docs/plugin.md).
        weight_pieces: Most parts into which a rule cuts each weight gradient, with
            ``split_backward``.
        keyed_dropout: True to draw dropout's random numbers from step, microbatch and layer, as in
            the trainer of this package, so that the order of work does not change them. Otherwise
            Megatron-LM draws them, and they depend on that order if a rank has several chunks.
        first_weights: ``by-rank`` to draw first weights as Megatron-LM does, or ``by-layer`` to
            draw them by seed and layer number. A new GPT then begins with the same weights in a
            loop, in a V and for every number of stages. It must be set before the model is built.
        trace_dir: Folder for a trace of every rank, ``None`` for no trace.
        diagnose_interval: Number of steps between two searches for causes that slow the run, each
            reported once; needs ``trace_dir``; 0 for never.
        transport: Connection between neighbouring ranks of the pipeline: ``shm``, ``rdma``,
            ``tcp``, ``gloo``, ``nccl``, or ``auto``, which chooses for each pair.
        transport_silence_s: Seconds without any message or heartbeat after which a rank is lost.
        timeout_s: Time limit in seconds of every wait for a message of the pipeline.
        hang_after_s: Seconds without progress after which the rank that others wait for is named;
            0 for never, ``None`` for 10 times the median step and at least 30 s.
        on_hang: ``report`` to write a page and a line, ``end`` to end the job as well.

    Raises:
        ConfigError: A setting is not possible, by itself or with another one.
    """

    schedule: str = "adaptive"
    placement: PlacementKind | None = None
    auto_candidates: tuple[str, ...] | None = None
    schedule_file: str | None = None
    activation_cap: float | None = None
    split_backward: bool | None = None
    weight_pieces: int = 4
    keyed_dropout: bool = False
    first_weights: str = "by-rank"
    trace_dir: str | None = None
    diagnose_interval: int = ScheduleConfig.diagnose_interval
    transport: str = AUTO
    transport_silence_s: float = TransportConfig.transport_silence_s
    timeout_s: float = 600.0
    hang_after_s: float | None = None
    on_hang: str = "report"

    def __post_init__(self) -> None:
        for name in ("schedule_file", "trace_dir"):
            if (path := getattr(self, name)) is not None:
                assign(self, name, os.fspath(path))
        check_values(vars(self), _flags())
        self.require()

    def require(self, **model: Any) -> None:
        """Checks the settings against the rules of schedules.

        Args:
            **model: Further settings, of a model and its layout.

        Raises:
            ConfigError: A rule is broken.
        """
        settings = {spec.dest: getattr(self, name) for name, spec in _flags().items()}
        GivenFlags(settings | model, _specs()).require(order_rules(self.schedule))

    @property
    def kind(self) -> PlacementKind:
        """Returns the kind of placement of the stages."""
        return self.placement or ("v" if schedule_spec(self.schedule).is_v_only else "loop")

    @property
    def is_rule(self) -> bool:
        """Returns whether the order is chosen at run time."""
        return schedule_spec(self.schedule).is_rule

    @property
    def splits(self) -> bool | None:
        """Returns whether backwards are split, ``None`` if that depends on the model."""
        splits = schedule_spec(self.schedule).splits_backward
        if self.split_backward is None and splits == "by default":
            return None
        return splits == "always" or bool(self.split_backward)

    def overridden(self, arguments: Any) -> Settings:
        """Returns these settings, overridden by the flags on the command line.

        Args:
            arguments: Parsed arguments of Megatron-LM, or ``None``. An attribute that is missing or
                ``None`` does not change a setting.

        Raises:
            ConfigError: The resulting settings are not possible.
        """
        values = {name: getattr(arguments, spec.dest, None) for name, spec in _flags().items()}
        flags = {field: value for field, value in values.items() if value is not None}
        return dataclasses.replace(self, **flags)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plugin's flags; for ``extra_args_provider`` of Megatron-LM's ``pretrain``.

    For flags that are not on the command line, the settings of
    :func:`~megatron.adaptive.plugin.install` apply.

    Returns:
        The same ``parser``.
    """
    group = parser.add_argument_group(title="megatron.adaptive")
    for spec in _flags().values():
        group.add_argument(spec.name, **spec.options())
    return parser


def _flags() -> dict[str, FieldSpec]:
    """Returns the trainer's flag for each setting."""
    specs = _specs()
    settings = [field.name for field in dataclasses.fields(Settings)]
    names = {
        "schedule": "pipeline_schedule",
        "placement": "pipeline_placement",
        "timeout_s": "pipeline_timeout_s",
    }
    return {name: specs[names.get(name, name)] for name in settings}


def _specs() -> dict[str, FieldSpec]:
    groups = (ScheduleConfig, TransportConfig, ParallelConfig, RecomputeConfig, _PluginFlags)
    return {spec.dest: spec for group in groups for spec in fields_of(group)}


def megatron_arguments() -> Any:
    """Returns Megatron-LM's parsed arguments, ``None`` if there are none."""
    training = sys.modules.get("megatron.training")
    get_args = getattr(training, "get_args", None)
    if get_args is None:
        return None
    try:
        return get_args()
    except AssertionError:  # Megatron-LM raises it before it has parsed arguments
        return None
