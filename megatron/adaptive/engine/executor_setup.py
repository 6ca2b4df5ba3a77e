"""Builds a rank's executor and trace from the process groups of megatron-core.

All ranks of the job must call :func:`build_executor` at the same point, because channels and
process groups are created collectively and in the same order on all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive import extension
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.agreement import Agreement, connect
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.engine.model_groups import ModelGroups
from megatron.adaptive.engine.process_context import (
    Job,
    from_first,
    gather,
    is_alone,
    process_groups,
)
from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.network import interface_towards
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.unequal_widths import Widths
from megatron.adaptive.trace.clock import start_clock_sync
from megatron.adaptive.trace.files import set_aside
from megatron.adaptive.trace.machine_counters import MachineCounters
from megatron.adaptive.trace.otlp import SpanSender
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import TraceHeader
from megatron.adaptive.transport.connect import Connector
from megatron.adaptive.transport.gloo import gloo_group
from megatron.adaptive.transport.interface import Transport
from megatron.adaptive.transport.kind import Payloads
from megatron.adaptive.transport.liveness import describe, here
from megatron.adaptive.transport.stand_in import StandIn


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Connections of a rank to other ranks, which stay open until the run ends.

    Attributes:
        executor: Executor that runs the steps of this rank.
        transport: Channels through which the executor sends and receives tensors, or ``None`` in a
            pipeline with one rank.
        agreement: Object that makes all ranks of the decision group run the same actions.
        groups: Process groups that were created for these connections.
    """

    executor: Executor
    transport: Transport | None
    agreement: Agreement
    groups: Sequence[Any]

    def close(self) -> None:
        """Closes the channels to other ranks. All ranks of the pipeline must call this."""
        self.agreement.close()
        if self.transport is not None:
            self.transport.close()


@dataclass(frozen=True, kw_only=True)
class _Neighbourhood:
    """Ranks with which this rank communicates in its pipeline.

    Attributes:
        members: Global ranks of the pipeline, or all ranks of the job if stages have different
            numbers of ranks.
        peers: Global ranks with which this rank exchanges messages.
        route: Function that takes a pipeline rank and a microbatch's index on this rank. It returns
            the global rank at that pipeline rank, and the same microbatch's index on that rank.
    """

    members: list[int]
    peers: list[int]
    route: Callable[[int, int], tuple[int, int]]

    @classmethod
    def of(
        cls, placement: Placement, pp_ranks: Sequence[int], widths: Widths | None
    ) -> _Neighbourhood:
        """Returns the ranks with which this rank communicates.

        See :func:`build_executor` for the arguments.
        """
        rank = dist.get_rank()
        if widths is not None:
            return cls(
                members=list(range(widths.num_ranks)),
                peers=list(widths.neighbours_of(rank)),
                route=partial(widths.route, rank),
            )

        def route(position: int, microbatch: int) -> tuple[int, int]:
            return pp_ranks[position], microbatch

        neighbours = placement.neighbours_of(pp_ranks.index(rank))
        return cls(
            members=list(pp_ranks),
            peers=[pp_ranks[position] for position in neighbours],
            route=route,
        )


def build_executor(
    *,
    placement: Placement,
    accelerator: Accelerator,
    places: list[dict[str, Any]],
    payload_shape: tuple[int, ...] | None,
    payload_dtype: torch.dtype,
    payload_varies: bool = False,
    timeout_s: float,
    tracing: Tracing | None = None,
    transport: TransportConfig | None = None,
    in_flight: int | None = None,
    widths: Widths | None = None,
    pp_ranks: Sequence[int] | None = None,
    model: Any = None,
    model_groups: ModelGroups | None = None,
) -> Wiring:
    """Builds this rank's executor, and connects this rank to other ranks.

    All ranks of the job must call this function after megatron-core has initialized its parallel
    state.

    Args:
        placement: Assignment of pipeline stages to ranks.
        accelerator: CPU or GPU on which this rank computes.
        places: Host and process of every rank, as returned by :func:`gather_places`.
        payload_shape: Shape of the tensors sent between stages. If the shapes vary, this is the
            shape of the largest tensor.
        payload_dtype: Dtype of the tensors sent between stages.
        payload_varies: Whether the tensors sent between stages vary in shape.
        timeout_s: Maximum time in seconds that the executor waits for an input.
        tracing: Trace of this rank, or ``None`` if tracing is off. The trace also publishes the
            executor's current activity.
        transport: Settings of the connections, or ``None`` to choose a transport automatically for
            each pair of ranks.
        in_flight: Maximum number of received inputs that a rank keeps at the same time. It
            determines the size of the receive buffers (see ``Orders.inputs_in_flight``).
        widths: Number of data-parallel ranks of each stage if the numbers differ, otherwise
            ``None``.
        pp_ranks: Global ranks of this pipeline in the order of the placement, or ``None`` for the
            order of megatron-core.
        model: megatron-core's configuration of the model, or ``None`` for a model without experts.
            It determines which ranks must run the same actions, such as ranks that exchange tokens.
        model_groups: Process groups of the model, or ``None`` for the groups of ``parallel_state``.
    """
    model_groups = model_groups or ModelGroups()
    if pp_ranks is None:
        pp_ranks = dist.get_process_group_ranks(model_groups.pp)
    groups_before = process_groups()
    ranks = _Neighbourhood.of(placement, pp_ranks, widths)
    channels: Transport | None = None
    payloads = Payloads(
        shape=payload_shape, dtype=payload_dtype, varies=payload_varies, in_flight=in_flight
    )
    if len(ranks.members) > 1 and is_alone():
        channels = StandIn(accelerator, payloads, ranks.peers, transport or TransportConfig())
    elif len(ranks.members) > 1:
        connector = Connector(
            members=ranks.members,
            gather=gather,
            accelerator=accelerator,
            payloads=payloads,
            describe=partial(describe, places),
            timeout_s=timeout_s,
            collective_ranks=max(map(dist.get_world_size, _meeting_groups(model, model_groups))),
        )
        options = transport or TransportConfig()
        end = connector.own_end(places, options, _store_host())
        channels = connector.connect(end, ranks.peers, options, _say)
    agreement = _build_agreement(model, model_groups, places, channels, timeout_s)
    executor = Executor(
        placement=placement,
        pp_rank=pp_ranks.index(dist.get_rank()),
        route=ranks.route,
        transport=channels,
        agreement=agreement,
        clock=accelerator.clock(),
        recorder=None if tracing is None else tracing.recorder,
        timeout_s=timeout_s,
    )
    if tracing is not None:
        tracing.watch(executor.snapshot)
    groups = [group for group in process_groups() if group not in groups_before]
    return Wiring(executor=executor, transport=channels, agreement=agreement, groups=groups)


def gather_places(model_groups: ModelGroups | None = None) -> list[dict[str, Any]]:
    """Returns the host and process of every rank, indexed by global rank.

    Each entry of the list is a result of ``liveness.here``. ``model_groups`` contains the process
    groups of the model.

    All ranks must call this function.
    """
    return gather(here((model_groups or ModelGroups()).pp_rank))


def _set_aside_earlier_run(folder: str, job: Job) -> None:
    """Moves the traces of an earlier run out of ``folder``. All ranks must call this function."""
    machines = [entry["machine"] for entry in job.places]
    if machines.index(machines[job.rank]) == job.rank:
        set_aside(folder)
    dist.barrier(group=job.control_group)


def _machine_counters(job: Job) -> MachineCounters:
    """Returns an object that reads the counters of this process, its GPU and the job's network."""
    environment, accelerator = job.environment, job.accelerator
    interface = interface_towards(environment.socket_interface, environment.master_addr)
    return MachineCounters(accelerator.gpu_uuid, accelerator.shares, interface)


def open_trace(
    folder: str | None,
    job: Job,
    placement: Placement,
    *,
    schedule: str,
    num_microbatches: int,
    layers: Sequence[int] = (),
    work: Sequence[float] = (),
    pp_rank: int | None = None,
    model_groups: ModelGroups | None = None,
    num_slices: int = 1,
    transport: str = "",
    layer_kinds: Sequence[int] = (),
    layer_work: Sequence[float] = (),
    content_rules: tuple[str, str] = ("", ""),
    token_ranks: int = 0,
    frozen_stages: int = 0,
    collector: str | None = None,
) -> Tracing:
    """Opens this rank's trace file, and returns the trace.

    Trace files of an earlier run are first moved out of the folder.

    All ranks must call this function after megatron-core has initialized its parallel state.

    Args:
        folder: Folder for the trace files of all ranks, or ``None`` if tracing is off.
        job: Rank, device and control group of this process.
        placement: Assignment of pipeline stages to ranks.
        schedule: Name of the schedule to store in the trace.
        num_microbatches: Number of microbatches per step, or 0 if unknown.
        layers: Number of layers of each stage, or empty if unknown.
        work: Expected compute cost of each stage, in any unit, or empty if unknown.
        pp_rank: Position of this rank in the placement, or ``None`` for its pipeline rank in
            megatron-core.
        model_groups: Process groups of the model, or ``None`` for the groups of ``parallel_state``.
        num_slices: Number of slices into which each microbatch is cut; 1 for whole microbatches.
        transport: Name of the transport of all messages, or empty if it differs between pairs of
            ranks.
        layer_kinds: Index of the kind of each layer. Layers with the same amount of work have the
            same kind. Empty if all layers have the same kind.
        layer_work: Expected compute time of each layer, in any unit, or empty if unknown.
        content_rules: Settings ``order`` and ``dealing`` of a ``Pipeline``, which determine the
            order of microbatches and their distribution over replicas. Empty strings in other
            programs.
        token_ranks: Number of tensor-parallel ranks that share the tokens of a sequence, or 0 if
            unknown.
        frozen_stages: Number of leading stages that run no backward passes.
        collector: URL of an OpenTelemetry collector (OTLP over HTTP) to which the spans are also
            sent, or ``None``.

    Raises:
        ConfigError: ``collector`` is not an HTTP URL.
        TraceError: The trace file cannot be written.
    """
    if folder is None:
        return Tracing()
    groups = model_groups or ModelGroups()
    _set_aside_earlier_run(folder, job)
    accelerator = job.accelerator
    counters = _machine_counters(job)
    header = TraceHeader(
        run=job.from_first(f"{job.environment.run_id}-{time.time_ns()}-{os.getpid()}"),
        rank=job.rank,
        world_size=job.environment.world_size,
        pp_rank=groups.pp_rank if pp_rank is None else pp_rank,
        tp_rank=groups.tp_rank,
        dp_rank=groups.dp_cp_rank,
        num_ranks=placement.num_ranks,
        num_chunks=placement.num_chunks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        placement=placement.kind,
        layers=tuple(layers),
        work=tuple(work),
        gpu_ranks=accelerator.shares,
        num_slices=num_slices,
        uncounted=counters.missing,
        device=accelerator.device.type,
        transport=transport,
        layer_kinds=tuple(layer_kinds),
        layer_work=tuple(layer_work),
        order=content_rules[0],
        dealing=content_rules[1],
        token_ranks=token_ranks,
        frozen_stages=frozen_stages,
    )
    sender = None if collector is None else SpanSender(collector, header)
    recorder = Recorder(folder, header, sender, begin_thread=accelerator.make_current)
    return _begin_trace(recorder, header, job, counters)


def _begin_trace(
    recorder: Recorder, header: TraceHeader, job: Job, counters: MachineCounters
) -> Tracing:
    """Starts to synchronize the clocks of the ranks, and returns this rank's trace.

    ``recorder`` writes the trace with the header ``header``, and ``counters`` are closed with the
    trace.
    """
    sync = start_clock_sync(
        rank=job.rank,
        clock_id=header.clock,
        address=job.environment.master_addr,
        gather=job.gather,
        deliver=recorder.add_clock_samples,
    )
    return Tracing(recorder, job.accelerator.clock(), sync, counters)


def require_equal_settings(settings: Mapping[str, str], group: Any = None) -> None:
    """Raises an error on all ranks if the ``settings`` differ between ranks.

    All ranks must call this function.

    Ranks with different settings would deadlock, or sum tensors that do not belong together.

    Args:
        settings: Values of the settings, keyed by name. Names and values appear in the error
            message, so they must be spelled as users write them.
        group: Process group of all ranks, or ``None`` for the default process group.

    Raises:
        ConfigError: The value of a setting differs between two ranks. The message contains both
            values and the ranks.
    """
    first = from_first(settings, group)
    differing = next((name for name in settings if settings[name] != first.get(name)), None)
    pairs = gather(
        None if differing is None else (settings[differing], first.get(differing)), group
    )
    for rank, pair in enumerate(pairs):
        if pair is not None:
            here_text, first_text = (text or "no such setting" for text in pair)
            raise ConfigError(
                f"{here_text} on rank {rank}, but {first_text} on rank 0; start all ranks of a "
                "job with the same settings"
            )


def _store_host() -> str | None:
    """Returns the host of the job's key-value store, or ``None`` if the store has no host."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def decision_group(model: Any, model_groups: ModelGroups) -> list[int]:
    """Returns the global ranks that must run the same actions as this rank, in ascending order.

    These ranks communicate during forward and backward passes, directly or through other ranks.
    They are the tensor- and context-parallel ranks of the stage and, with experts, the replicas of
    the stage that exchange tokens. If an auxiliary loss balances experts over the whole batch, all
    replicas of the stage belong to the group. All ranks must call this function.

    Args:
        model: megatron-core's configuration of the model, or ``None`` for a model without experts.
        model_groups: Process groups of the model.
    """
    groups = _meeting_groups(model, model_groups)
    meets = gather({rank for group in groups for rank in dist.get_process_group_ranks(group)})
    members = {dist.get_rank()}
    while (more := members.union(*(meets[rank] for rank in members))) != members:
        members = more
    return sorted(members)


def _meeting_groups(model: Any, model_groups: ModelGroups) -> list[Any]:
    """Returns the groups whose ranks communicate in forward and backward passes of ``model``."""
    groups = model_groups.meeting
    if getattr(model, "num_moe_experts", None):
        groups += model_groups.experts
        if "global_aux_loss" in getattr(model, "moe_router_load_balancing_type", ""):
            groups += model_groups.balanced
    return groups


def _say(line: str) -> None:
    print(printable(line), flush=True)


def _build_agreement(
    model: Any,
    model_groups: ModelGroups,
    places: list[dict[str, Any]],
    transport: Transport | None,
    timeout_s: float,
) -> Agreement:
    """Connects this rank to its decision group, and returns the rank's ``Agreement``.

    ``places`` contains the host and process of every rank, and ``timeout_s`` limits the time for
    sending a report. See :func:`decision_group` for ``model`` and ``model_groups``. Without a
    ``transport``, no agreement is needed.

    All ranks must call this function.
    """
    if transport is None or is_alone():
        return Agreement()
    members = decision_group(model, model_groups)
    # All members of a decision group get the same list, so either all of them return here or none.
    if len(members) == 1:
        return Agreement()
    group = gloo_group(members, gather)
    on_one_host = len({places[rank]["machine"] for rank in members}) == 1
    module = extension.load()
    usable = all(gather(module is not None and on_one_host, group))
    return connect(
        group,
        members,
        dist.get_rank(),
        transport.completions,
        timeout_s,
        partial(describe, places),
        module if usable else None,
    )
