"""Settings of the plugin, in code or on Megatron-LM's command line.

Imports neither torch nor megatron-core: flags are added before either is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.config.flag_rules import Given, order_rules
from megatron.adaptive.config.flags import FieldSpec, assign, check_values, fields_of, flag
from megatron.adaptive.config.model import RecomputeConfig
from megatron.adaptive.config.parallel import AUTO, ParallelConfig, TransportConfig
from megatron.adaptive.config.schedule import ScheduleConfig
from megatron.adaptive.config.schedule_specs import PlacementKind, schedule_spec


@dataclass(frozen=True, kw_only=True)
class _PluginFlags:
    """Flags that our own trainer has no need of, and settings of a model that rules ask for."""

    moe_token_dispatcher_type: str = flag("How tokens get to their experts.", "allgather")

    first_weights: str = flag(
        "Draw first weights by pipeline rank, as Megatron-LM does, or by the number of their "
        "layer: then they are the same in a loop, in a V and for every number of stages.",
        "by-rank",
        choices=("by-rank", "by-layer"),
    )
    keyed_dropout: bool = flag(
        "Draw dropout's numbers from step, microbatch and layer, so that the order of work does "
        "not change them; else they are Megatron-LM's own, in the order of the forwards.",
        False,
        takes_value=True,
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of :func:`~megatron.adaptive.plugin.install`.

    Attributes:
        schedule: a rule that chooses at run time (``adaptive``, ``hinted``, ``dfc``, ``bfc``), a
            fixed order (``1f1b``, ``interleaved``, ``gpipe``, ``breadth-first``, ``varuna``,
            ``zb-h1``, ``zb-v``, ``v-half``), ``auto``, which measures the first steps and takes
            what is fastest in simulation, ``file``, or ``megatron``: megatron-core's own code.
        placement: how stages lie over the ranks of the pipeline where each holds two chunks:
            ``loop``, as in megatron-core, or ``v``, there and back, which must be known before
            megatron-core's process groups are made. A V where ``None`` only for ``zb-v`` and
            ``v-half``.
        auto_candidates: Names of schedules of yours that ``auto`` tries beside its own, each as
            ``package.module:name``.
        schedule_file: the order of ``file``: JSON, or the CSV of ``torch.distributed.pipelining``.
        activation_cap: most activations that a rank keeps, in microbatches over all its chunks; for
            a rule. Chosen from the shape of the pipeline where ``None``.
        split_backward: compute weight gradients as work of their own. Of itself with ``zb-h1``, and
            with ``adaptive`` and ``hinted`` where it costs nothing (see docs/plugin.md).
        weight_pieces: parts into which a rule may cut each weight gradient, with
            ``split_backward``.
        keyed_dropout: draw dropout's numbers from step, microbatch and layer, as our own trainer
            does, so that the order of work does not change them. Else they are Megatron-LM's own,
            which depend on that order where a rank has several chunks.
        first_weights: ``by-rank``, as Megatron-LM draws them, or ``by-layer``, by seed and layer
            number. A new GPT then begins with the same weights in a loop, in a V and for every
            number of stages. Must be set before the model is built.
        trace_dir: folder for a trace of every rank; none is written where ``None``.
        diagnose_interval: with ``trace_dir``, look every so many steps for what slows the run, and
            report it once; 0 for never.
        transport: what connects neighbouring ranks of the pipeline: ``shm``, ``rdma``, ``tcp``,
            ``gloo``, ``nccl``, or ``auto``, which chooses for each pair.
        transport_silence_s: a rank from which nothing, not even a heartbeat, came for so long is
            lost.
        timeout_s: limit of every wait for a message of the pipeline.
        hang_after_s: name the rank that others wait for when nothing has moved for this long; 0 for
            never, 10 times the median step and at least 30 s where ``None``.
        on_hang: ``report``, a page and a line, or ``end`` the job besides.

    Raises:
        ConfigError: one of them is not possible, by itself or with another.
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
        """Holds the settings against the rules of orders.

        Args:
            model: further settings, of a model and its layout.

        Raises:
            ConfigError: the first rule that is broken.
        """
        own = {spec.dest: getattr(self, name) for name, spec in _flags().items()}
        Given(own | model, _specs()).require(order_rules(self.schedule))

    @property
    def kind(self) -> PlacementKind:
        """Placement of the stages over the ranks of the pipeline."""
        return self.placement or ("v" if schedule_spec(self.schedule).is_v_only else "loop")

    @property
    def is_rule(self) -> bool:
        """Whether the order is chosen at run time."""
        return schedule_spec(self.schedule).is_rule

    @property
    def splits(self) -> bool | None:
        """Whether backwards are split, ``None`` where the model decides."""
        splits = schedule_spec(self.schedule).splits_backward
        if self.split_backward is None and splits == "by default":
            return None
        return splits == "always" or bool(self.split_backward)

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
    for spec in _flags().values():
        group.add_argument(spec.name, **spec.options())
    return parser


def _flags() -> dict[str, FieldSpec]:
    """Return the trainer's flags of the same meaning, by setting."""
    specs, settings = _specs(), [field.name for field in dataclasses.fields(Settings)]
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
    """Return Megatron-LM's parsed arguments, ``None`` where there are none."""
    training = sys.modules.get("megatron.training")
    get_args = getattr(training, "get_args", None)
    if get_args is None:
        return None
    try:
        return get_args()
    except AssertionError:  # how Megatron-LM says that it has parsed none yet
        return None
