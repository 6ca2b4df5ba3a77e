"""Runs the pipeline steps of a user's own Megatron-LM on this package's engine.

While the plugin is installed, it replaces megatron-core's ``get_forward_backward_func``, which
Megatron-LM calls to get the function that runs a step. Megatron-LM therefore gets a step function
that uses this package's executor. If stages have a V-shaped placement, the plugin also replaces
megatron-core's functions that return the position of a stage::

    Megatron-LM ── get_forward_backward_func() ──> Seam ── one pipeline rank ──> megatron-core's own
                                                     └──── several ───────────> Engine ─> executor

Megatron-LM still provides the model, data, optimizer, checkpoints and logging. The trainer in
``megatron.adaptive.training`` is not used.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Literal

from megatron.adaptive.config.schedule_specs import PlacementKind
from megatron.adaptive.plugin.settings import Settings, add_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["add_arguments", "install", "uninstall"]


def install(
    schedule: str = "adaptive",
    *,
    placement: PlacementKind | None = None,
    auto_candidates: tuple[str, ...] | None = None,
    schedule_file: str | os.PathLike[str] | None = None,
    activation_cap: float | None = None,
    split_backward: bool | None = None,
    weight_pieces: int = 4,
    keyed_dropout: bool = False,
    first_weights: Literal["by-rank", "by-layer"] = "by-rank",
    trace_dir: str | os.PathLike[str] | None = None,
    trace_detail: str = "actions",
    profile_ranks: Sequence[int] | None = None,
    profile_step_start: int | None = None,
    profile_step_end: int | None = None,
    trace_otlp: str | None = None,
    diagnose_interval: int = 100,
    transport: str = "auto",
    transport_silence_s: float = 60.0,
    timeout_s: float = 600.0,
    hang_after_s: float | None = None,
    on_hang: Literal["report", "end"] = "report",
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
) -> None:
    """Makes Megatron-LM run its pipeline steps on this package's engine.

    This function must be called on every rank before the first step. On a machine without CUDA, it
    must also be called before megatron-core is imported. Flags of :func:`add_arguments` on the
    command line override the arguments. A second call with the same settings does nothing. A second
    call with other settings replaces the earlier settings if no step has run yet, and raises an
    error otherwise.

    If ``model`` is given, the settings apply only to this model, in a process that trains several
    models. Flags do not override these settings, and a second call with other settings for the same
    model raises an error.

    Args:
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
        model: Model to which the settings apply, as it is passed to the schedule: a module, or the
            list of its chunks on this rank. ``None`` means all models without separate settings. If
            ``install`` is never called without ``model``, all other models run on megatron-core's
            own code.

    Raises:
        ConfigError: A setting is invalid, or differs from the settings of steps that have already
            run, or of an earlier call for the same model.
        SetupError: The installed megatron-core is not compatible with the engine, or was imported
            too early on a machine without CUDA.
    """
    settings = Settings(
        schedule=schedule,
        placement=placement,
        auto_candidates=auto_candidates,
        schedule_file=None if schedule_file is None else os.fspath(schedule_file),
        activation_cap=activation_cap,
        split_backward=split_backward,
        weight_pieces=weight_pieces,
        keyed_dropout=keyed_dropout,
        first_weights=first_weights,
        trace_dir=None if trace_dir is None else os.fspath(trace_dir),
        trace_detail=trace_detail,
        profile_ranks=profile_ranks,
        profile_step_start=profile_step_start,
        profile_step_end=profile_step_end,
        trace_otlp=trace_otlp,
        diagnose_interval=diagnose_interval,
        transport=transport,
        transport_silence_s=transport_silence_s,
        timeout_s=timeout_s,
        hang_after_s=hang_after_s,
        on_hang=on_hang,
    )
    if model is not None:
        settings.require_of_model()
    _put(settings, model, sys._getframe(1).f_globals)


def _put(
    settings: Settings,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    caller: dict[str, Any],
) -> None:
    """Replaces megatron-core's function that runs a step, and all related functions.

    Args:
        settings: Settings of the plugin.
        model: Model to which the settings apply, or ``None`` for all models.
        caller: Global variables of the module that calls :func:`install`.
    """
    # Keep the order of these imports. megatron-core needs a device, or a substitute for CUDA, when
    # it is imported. The rest of the engine must be imported after the check of megatron-core's
    # version.
    from megatron.adaptive import accelerator, without_cuda

    accelerator.install()
    # The calling module also uses torch, so it needs the substitutes for CUDA functions too.
    without_cuda.include_program(caller)
    from megatron.adaptive.engine import core_version

    core_version.check(
        oldest=(0, 15),
        remedy="use megatron-core 0.15 to 0.20 (tested most with 0.16.1), or do not call install()",
    )
    from megatron.adaptive.plugin import patch

    patch.put(settings, model)


def uninstall() -> None:
    """Restores megatron-core's own functions, and closes the engine's channels.

    This function must be called on all ranks between two steps. It does nothing if :func:`install`
    was not called.

    Raises:
        TransportError: Another rank did not close its channels in time.
    """
    if "megatron.adaptive.plugin.patch" in sys.modules:
        from megatron.adaptive.plugin import patch

        patch.take_back()
