"""The pipeline engine of this package inside a user's own Megatron-LM.

Owns one name, ``get_forward_backward_func``, for as long as it is installed: Megatron-LM asks it
for the function that runs a step, and gets one that runs on our executor. Where stages are to lie
in a V, it answers for megatron-core where they do, too::

    Megatron-LM ── get_forward_backward_func() ──> seam ── one pipeline rank ──> megatron-core's own
                                                     └──── several ───────────> engine ─> executor

Model, data, optimizer, checkpoints and logging stay Megatron-LM's. Nothing of the trainer in
``megatron.adaptive.training`` is used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron.adaptive.plugin.settings import Settings, add_arguments

if TYPE_CHECKING:
    from megatron.adaptive.config.schedule import PlacementKind

__all__ = ["add_arguments", "install", "uninstall"]


def install(
    schedule: str = "adaptive",
    *,
    placement: PlacementKind | None = None,
    schedule_file: str | os.PathLike[str] | None = None,
    activation_cap: float | None = None,
    split_backward: bool | None = None,
    weight_pieces: int = 4,
    keyed_dropout: bool = False,
    trace_dir: str | os.PathLike[str] | None = None,
    diagnose_interval: int = 100,
    transport: str = "auto",
    transport_silence_s: float = 60.0,
    timeout_s: float = 600.0,
    hang_after_s: float | None = None,
    on_hang: str = "report",
) -> None:
    """Let Megatron-LM run its pipeline steps on the engine of this package.

    Call it on every rank, before the first step; on a machine without CUDA before megatron-core is
    imported. Flags of :func:`add_arguments` that the command line gives win over what is given
    here. Calling it again with the same settings does nothing; with others it changes them, as long
    as no step has run.

    Args:
        schedule: a rule that chooses at run time (``adaptive``, ``hinted``, ``dfc``, ``bfc``), a
            fixed order (``1f1b``, ``interleaved``, ``gpipe``, ``breadth-first``, ``varuna``,
            ``zb-h1``, ``zb-v``, ``v-half``), ``auto``, which measures the first steps and takes
            what is fastest in simulation, ``file``, or ``megatron``: megatron-core's own code.
        placement: how stages lie over the ranks of the pipeline where each holds two chunks:
            ``loop``, as in megatron-core, or ``v``, there and back, which must be known before
            megatron-core's process groups are made. A V where ``None`` only for ``zb-v`` and
            ``v-half``.
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
        ConfigError: a setting is not possible, or differs from those that a step has run with.
        SetupError: megatron-core has another interface than the one this engine calls, or was
            imported too early on a machine without CUDA.
    """
    settings = Settings(
        schedule=schedule,
        placement=placement,
        schedule_file=None if schedule_file is None else os.fspath(schedule_file),
        activation_cap=activation_cap,
        split_backward=split_backward,
        weight_pieces=weight_pieces,
        keyed_dropout=keyed_dropout,
        trace_dir=None if trace_dir is None else os.fspath(trace_dir),
        diagnose_interval=diagnose_interval,
        transport=transport,
        transport_silence_s=transport_silence_s,
        timeout_s=timeout_s,
        hang_after_s=hang_after_s,
        on_hang=on_hang,
    )
    # Each import needs what is done before it: megatron-core must find its device, and the engine
    # a megatron-core that it can be imported with.
    from megatron.adaptive import accelerator

    accelerator.install()
    from megatron.adaptive.plugin import versions

    versions.check()
    from megatron.adaptive.plugin import seam

    seam.put(settings)


def uninstall() -> None:
    """Give Megatron-LM megatron-core's own function back and close the engine's channels.

    All ranks call it, between two steps. Without :func:`install` before, it does nothing.

    Raises:
        TransportError: another rank did not close its channels in time.
    """
    import sys

    if "megatron.adaptive.plugin.seam" in sys.modules:
        from megatron.adaptive.plugin import seam

        seam.take_back()
