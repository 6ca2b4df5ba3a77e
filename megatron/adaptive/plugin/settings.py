"""Defines the settings of the plugin, which users set in code or on Megatron-LM's command line.

This module imports neither torch nor megatron-core, because the flags are added before these
packages are needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.adaptive.config.collector import collector_url
from megatron.adaptive.config.flag_effects import add_note, effect_notes, effect_warning
from megatron.adaptive.config.flag_rules import GivenFlags, order_rules
from megatron.adaptive.config.flags import FieldSpec, assign, check_values, fields_of, flag
from megatron.adaptive.config.model import RecomputeConfig
from megatron.adaptive.config.parallel import AUTO, ParallelConfig, TransportConfig
from megatron.adaptive.config.run import RunConfig
from megatron.adaptive.config.schedule import ScheduleConfig, trace_details
from megatron.adaptive.config.schedule_specs import PlacementKind, schedule_spec
from megatron.adaptive.config.trace_settings import checked_profile_ranks, require_profiled_steps
from megatron.adaptive.errors import ConfigError

OF_PROCESS = {
    "placement": "process groups depend on the placement",
    "first_weights": "weights are drawn when the model is built",
    "hang_after_s": "all models share one hang detector",
    "on_hang": "all models share one hang detector",
}
"""Reasons why some settings must be the same for all models of a process, keyed by setting."""


OF_MEGATRON = ("profile_ranks", "profile_step_start", "profile_step_end")
"""Names of the settings for which Megatron-LM has its own flags."""


@dataclass(frozen=True, kw_only=True)
class _PluginFlags:
    """Flags of the plugin, and the model's ``moe_token_dispatcher_type``, checked with them."""

    moe_token_dispatcher_type: str = flag("How tokens are sent to their experts.", "allgather")

    first_weights: str = flag(
        "Seed initial weights by pipeline rank, as Megatron-LM does, or by layer number, so that "
        "they do not depend on the placement or the number of stages.",
        "by-rank",
        choices=("by-rank", "by-layer"),
    )
    keyed_dropout: bool = flag(
        "Seed dropout with step, microbatch and layer, so that it does not depend on the order of "
        "actions; otherwise, Megatron-LM draws random numbers in the order of forward passes.",
        False,
        takes_value=True,
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the plugin, which are the arguments of :func:`~megatron.adaptive.plugin.install`.

    Attributes:
        schedule: Scheduling rule that chooses actions at run time (``adaptive``, ``hinted``,
            ``dfc``, ``bfc``), static schedule (for example ``1f1b``, ``interleaved`` or ``zb-h1``;
            docs/schedules.md lists them), ``file``, or ``auto``, which measures the first steps and
            chooses the schedule that is fastest in simulations. ``megatron`` runs megatron-core's
            own code.
        placement: Assignment of stages to ranks that have two chunks each: ``loop``, as in
            megatron-core, or ``v``. A V-shaped placement must be set before megatron-core's process
            groups are created, and a model with placement ``loop`` cannot use groups that were
            created for a V. ``None`` means ``v`` with schedules that only support a V, such as
            ``zb-v``, and ``loop`` with all other schedules.
        auto_candidates: Names of the user's own schedules that ``auto`` also tries, in the form
            ``package.module:name``.
        schedule_file: Path of the file for schedule ``file``: JSON, or the CSV of
            ``torch.distributed.pipelining``.
        activation_cap: Maximum number of activations that a rank keeps under a run-time rule. The
            unit is one microbatch in all chunks of the rank. ``None`` uses a default that depends
            on the numbers of stages and microbatches.
        split_backward: Whether weight gradients are separate actions, instead of part of the
            backward pass. ``None`` means true with schedules that always split, such as ``zb-h1``,
            and with ``adaptive``, ``hinted`` and ``auto`` if the split costs nothing (see
            docs/reference/plugin.md).
        weight_pieces: Maximum number of actions into which a run-time rule splits each weight
            gradient, if weight gradients are separate actions.
        keyed_dropout: Whether dropout's random numbers depend only on step, microbatch and layer,
            as in the trainer of this package. If false, Megatron-LM draws the numbers, and they
            depend on the order of actions if a rank has several chunks.
        first_weights: ``by-rank`` to draw initial weights as Megatron-LM does, or ``by-layer`` to
            draw them from the seed and the layer number. With ``by-layer``, a new GPT has the same
            initial weights with both placements and with every number of stages. This setting must
            be made before the model is built.
        trace_dir: Folder for the trace files of all ranks, or ``None`` to turn tracing off.
        trace_detail: Events in a trace. ``actions`` records only actions. ``layers`` adds the
            forward and backward passes of each transformer layer. ``collectives`` also adds each
            collective. ``kernels`` also adds operators (CPU) or kernels (GPU) in some iterations on
            some ranks.
        profile_ranks: Global ranks that record kernels. ``None`` uses Megatron-LM's
            ``--profile-ranks``, or rank 0 in a program without Megatron-LM's flags.
        profile_step_start: First iteration whose kernels are recorded. ``None`` uses Megatron-LM's
            ``--profile-step-start``, or 10 in a program without Megatron-LM's flags.
        profile_step_end: Iteration after the last iteration whose kernels are recorded. ``None``
            uses Megatron-LM's ``--profile-step-end``, or 12 in a program without Megatron-LM's
            flags.
        trace_otlp: URL of an OpenTelemetry collector that also receives the spans while the job
            runs (OTLP over HTTP), or ``None``. Requires ``trace_dir``.
        diagnose_interval: Number of steps between two diagnoses of the causes that slow down the
            run, or 0 to turn diagnoses off. Requires ``trace_dir``. Each cause is reported once.
        transport: Transport between neighbouring ranks of the pipeline: ``shm``, ``rdma``,
            ``tcp``, ``gloo``, ``nccl``, or ``auto``, which chooses one for each pair of ranks.
        transport_silence_s: Maximum time without any message or heartbeat, in seconds. After that,
            a rank is considered lost.
        timeout_s: Maximum time to wait for a message of the pipeline, in seconds.
        hang_after_s: Time in seconds without progress after which the job is considered hanging.
            The rank that other ranks wait for is then reported. 0 turns the detection off, and
            ``None`` means 10 times the median step time, but at least 30 s.
        on_hang: ``report`` to write a report page and print a line, or ``end`` to also stop the
            job.

    Raises:
        ConfigError: A value is invalid, or two settings contradict each other.
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
    trace_detail: str = ScheduleConfig.trace_detail
    profile_ranks: Sequence[int] | None = None
    profile_step_start: int | None = None
    profile_step_end: int | None = None
    trace_otlp: str | None = None
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
        flags = _flags()
        check_values({name: getattr(self, name) for name in flags}, flags)
        self._check_profiled()
        if self.trace_otlp is not None:
            collector_url("--trace-otlp", self.trace_otlp)
        self.require()

    def require(self, **model: Any) -> None:
        """Checks that these settings do not contradict each other or the settings of the model.

        Args:
            **model: Settings of the model, including its division into chunks, keyed by name.

        Raises:
            ConfigError: Two settings contradict each other.
        """
        GivenFlags(self._by_flag() | model, _specs()).require(order_rules(self.schedule))

    def warning_about_effects(self) -> str | None:
        """Returns a line that names all settings without effect, or ``None`` if there are none."""
        # Assume that backward passes are split if this is not decided yet.
        settings = self._by_flag() | {"split_backward": self.splits is not False}
        return effect_warning(GivenFlags(settings, _specs()), self.schedule)

    def _by_flag(self) -> dict[str, Any]:
        """Returns the values of the settings, keyed by the names of the trainer's flags."""
        return {spec.dest: getattr(self, name) for name, spec in _flags().items()}

    def _check_profiled(self) -> None:
        """Checks the settings that select the ranks and iterations whose kernels are recorded.

        Raises:
            ConfigError: A value is not a non-negative integer, or the range of iterations is empty.
        """
        if self.profile_ranks is not None:
            assign(self, "profile_ranks", checked_profile_ranks(self.profile_ranks))
        numbers = {
            name: step
            for name in ("profile_step_start", "profile_step_end")
            if (step := getattr(self, name)) is not None
        }
        for name, number in numbers.items():
            if type(number) is not int or number < 0:
                raise ConfigError(f"{name} must be a non-negative integer, got {number!r}")
        if self.profile_step_start is not None and self.profile_step_end is not None:
            require_profiled_steps(self.profile_step_start, self.profile_step_end)

    def kernel_iterations(self, rank: int, arguments: Any) -> range:
        """Returns the iterations in which ``rank`` records kernels. The range may be empty.

        Args:
            rank: Global rank.
            arguments: Parsed arguments of Megatron-LM, or ``None``. Settings that are ``None`` are
                taken from these arguments.

        Raises:
            ConfigError: Megatron-LM's own profiler is also enabled, or the range of iterations is
                empty. All ranks raise this error, so no rank has to wait for the others.
        """

        def chosen(name: str, default: Any) -> Any:
            value = getattr(self, name)
            return getattr(arguments, name, default) if value is None else value

        if "kernels" not in trace_details(self.trace_detail):
            return range(0)
        first = chosen("profile_step_start", RunConfig.profile_step_start)
        end = chosen("profile_step_end", RunConfig.profile_step_end)
        uses_torch = getattr(arguments, "use_pytorch_profiler", False)
        if getattr(arguments, "profile", False) and uses_torch:
            raise ConfigError(
                "trace_detail='kernels' and --profile --use-pytorch-profiler use the same "
                "profiler; remove one of them"
            )
        require_profiled_steps(first, end)
        is_chosen = rank in chosen("profile_ranks", RunConfig.profile_ranks)
        return range(first, end) if is_chosen else range(0)

    @property
    def kind(self) -> PlacementKind:
        """Returns the kind of placement of the stages, ``loop`` or ``v``."""
        return self.placement or ("v" if schedule_spec(self.schedule).is_v_only else "loop")

    @property
    def channels(self) -> TransportConfig:
        """Returns the settings of the channels between ranks."""
        return TransportConfig(
            transport=self.transport, transport_silence_s=self.transport_silence_s
        )

    @property
    def is_rule(self) -> bool:
        """Returns whether the order of actions is chosen at run time."""
        return schedule_spec(self.schedule).is_rule

    @property
    def splits(self) -> bool | None:
        """Returns whether weight gradients are separate actions, or ``None`` if undecided."""
        splits = schedule_spec(self.schedule).splits_backward
        if self.split_backward is None and splits == "by default":
            return None
        return splits == "always" or bool(self.split_backward)

    def in_process_of(self, shared: Settings) -> Settings:
        """Returns a copy of these settings, with the process-wide settings taken from ``shared``.

        Args:
            shared: Settings of all models without settings of their own.

        Raises:
            ConfigError: A setting contradicts a setting of the process.
        """
        common = {name: getattr(shared, name) for name in OF_PROCESS}
        return dataclasses.replace(self, **common)

    def require_of_model(self) -> None:
        """Checks that these settings can be used for a single model of the process.

        Raises:
            ConfigError: A setting that must be the same for all models differs from its default.
        """
        for name, reason in OF_PROCESS.items():
            value = getattr(self, name)
            if value != getattr(Settings, name):
                raise ConfigError(
                    f"{name}={value} was passed to install() for one model, but {reason}; call "
                    f"install({name}={value!r}) without the argument model"
                )

    def overridden(self, arguments: Any) -> Settings:
        """Returns a copy of these settings, overridden by the flags on the command line.

        Args:
            arguments: Parsed arguments of Megatron-LM, or ``None``. If an attribute is missing or
                ``None``, the corresponding setting does not change.

        Raises:
            ConfigError: The resulting settings are invalid.
        """
        values = {name: getattr(arguments, spec.dest, None) for name, spec in _flags().items()}
        flags = {field: value for field, value in values.items() if value is not None}
        return dataclasses.replace(self, **flags)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plugin's flags to ``parser``, and returns ``parser``.

    Pass this function to Megatron-LM's ``pretrain`` as ``extra_args_provider``.

    If a flag is not given on the command line, the setting passed to
    :func:`~megatron.adaptive.plugin.install` is used.

    Returns:
        The same ``parser``.
    """
    group = parser.add_argument_group(title="megatron.adaptive")
    notes = effect_notes(_specs())
    for spec in _flags().values():
        group.add_argument(spec.name, **add_note(spec, notes).options())
    return parser


def _flags() -> dict[str, FieldSpec]:
    """Returns the command-line flags of the settings, keyed by the names of the settings."""
    specs = _specs()
    settings = [
        field.name for field in dataclasses.fields(Settings) if field.name not in OF_MEGATRON
    ]
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
    """Returns Megatron-LM's parsed arguments, or ``None`` if there are none yet."""
    training = sys.modules.get("megatron.training")
    get_args = getattr(training, "get_args", None)
    if get_args is None:
        return None
    try:
        return get_args()
    except AssertionError:  # Megatron-LM has not parsed its arguments yet.
        return None


def timeout_of_groups(arguments: Any) -> datetime.timedelta:
    """Returns the timeout after which a rank stops waiting for the other ranks of the job.

    Args:
        arguments: Parsed arguments of Megatron-LM, or ``None`` for a program without such
            arguments, for which the timeout is 10 minutes.
    """
    seconds = getattr(arguments, "distributed_timeout_seconds_after_init", None)
    if seconds:
        return datetime.timedelta(seconds=seconds)
    return datetime.timedelta(minutes=getattr(arguments, "distributed_timeout_minutes", 10))
