"""Puts a rank's executor and trace together from the process groups of megatron-core.

Every rank of the job calls :func:`build_executor` at the same point: channels and process groups
are made by all ranks together, in one order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive import extension
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.input_files import printable
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.engine.agreement import Agreement, connect
from megatron.adaptive.engine.executor import Executor
from megatron.adaptive.engine.process_context import Job, from_first, gather, process_groups
from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.unequal_widths import Widths
from megatron.adaptive.trace.clock import start_clock_sync
from megatron.adaptive.trace.files import set_aside
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.trace.trace_format import TraceHeader
from megatron.adaptive.transport.connect import Connector, Payloads, gloo_group
from megatron.adaptive.transport.interface import Transport
from megatron.adaptive.transport.liveness import describe, here


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Connects a rank with the others; closed at the end of the run.

    Attributes:
        executor: the engine.
        transport: its channels, ``None`` for a pipeline of one rank.
        agreement: its decision group's decisions.
        groups: process groups that were made for it.
    """

    executor: Executor
    transport: Transport | None
    agreement: Agreement
    groups: Sequence[Any]

    def close(self) -> None:
        """Close channels and decisions; all ranks of the pipeline must do so."""
        self.agreement.close()
        if self.transport is not None:
            self.transport.close()


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
) -> Wiring:
    """Make this rank's executor with its channels and agreement.

    Collective over all ranks of the job, after megatron-core's parallel state is initialized.

    Args:
        placement: where stages live.
        accelerator: this rank's device.
        places: where every rank runs, see :func:`gather_places`.
        payload_shape: shape of the tensors between stages when they are all alike, else of the
            largest.
        payload_dtype: their element type.
        payload_varies: they are not all alike.
        timeout_s: limit of every wait of the executor.
        tracing: where spans go, and who looks at what the executor does.
        transport: how to connect the ranks; chosen for each pair where ``None``.
        in_flight: most inputs that a rank keeps at a time, see ``Orders``.
        widths: of the stages where they are unequal.
        pp_ranks: this rank's pipeline in the order of the placement; megatron-core's where
            ``None``.
        model: megatron-core's configuration of the model, which says whom its layers talk to
            besides tensor- and context-parallel ranks; nobody where ``None``.
    """
    if pp_ranks is None:
        pp_ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    rank, before = dist.get_rank(), process_groups()
    pp_rank = pp_ranks.index(rank)
    if widths is None:
        members = list(pp_ranks)
        peers = [pp_ranks[place] for place in placement.neighbours_of(pp_ranks.index(rank))]

        def route(position: int, microbatch: int) -> tuple[int, int]:
            return pp_ranks[position], microbatch
    else:
        members, peers = list(range(widths.num_ranks)), list(widths.neighbours_of(rank))
        route = partial(widths.route, rank)
    channels = None
    if len(members) > 1:
        options = transport or TransportConfig()
        connector = Connector(
            members=members,
            gather=gather,
            accelerator=accelerator,
            payloads=Payloads(
                shape=payload_shape, dtype=payload_dtype, varies=payload_varies, in_flight=in_flight
            ),
            describe=partial(describe, places),
            timeout_s=timeout_s,
        )
        own = connector.own_end(places, options, _store_host())
        channels = connector.connect(own, peers, options, _say)
    agreement = _build_agreement(model, places, channels, timeout_s)
    executor = Executor(
        placement=placement,
        pp_rank=pp_rank,
        route=route,
        transport=channels,
        agreement=agreement,
        clock=accelerator.clock(),
        recorder=None if tracing is None else tracing.recorder,
        timeout_s=timeout_s,
    )
    if tracing is not None:
        tracing.watch(executor.snapshot)
    made = [group for group in process_groups() if group not in before]
    return Wiring(executor=executor, transport=channels, agreement=agreement, groups=made)


def gather_places() -> list[dict[str, Any]]:
    """Return where every rank runs, by global rank; see ``liveness.here``. Collective."""
    return gather(here(parallel_state.get_pipeline_model_parallel_rank()))


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
) -> Tracing:
    """Opens this rank's trace, in a folder without those of an earlier start.

    Collective over all ranks, after megatron-core's parallel state is initialized.

    Args:
        folder: for the files of all ranks, ``None`` for no trace.
        job: this process within the job.
        placement: where stages live.
        schedule: its name.
        num_microbatches: of a step, as far as it is known.
        layers: of each stage, where they are known.
        work: what each stage should have to do, in any unit; likewise.
        pp_rank: this rank's position in the placement; megatron-core's where ``None``.

    Raises:
        TraceError: the file cannot be written.
    """
    if folder is None:
        return Tracing()
    machines = [place["machine"] for place in job.places]
    if machines.index(machines[job.rank]) == job.rank:
        set_aside(folder)
    dist.barrier(group=job.control_group)
    header = TraceHeader(
        run=job.from_first(f"{job.environment.run_id}-{time.time_ns()}-{os.getpid()}"),
        rank=job.rank,
        world_size=job.environment.world_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        num_ranks=placement.num_ranks,
        num_chunks=placement.num_chunks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        placement=placement.kind,
        layers=tuple(layers),
        work=tuple(work),
        gpu_ranks=job.accelerator.shares,
    )
    recorder = Recorder(folder, header)
    sync = start_clock_sync(
        rank=job.rank,
        clock_id=header.clock,
        address=job.environment.master_addr,
        gather=job.gather,
        deliver=recorder.add_clock_samples,
    )
    return Tracing(recorder, job.accelerator.clock(), sync)


def require_equal_settings(settings: Mapping[str, str]) -> None:
    """Refuses ranks with different settings, on all ranks alike. Collective over all ranks.

    Ranks that differ would wait for each other for ever, or add up what does not belong together.

    Args:
        settings: by name, as users write them.

    Raises:
        ConfigError: names a setting, with both values and a rank of each.
    """
    first = from_first(settings)
    differing = next((name for name in settings if settings[name] != first.get(name)), None)
    found = gather(None if differing is None else (settings[differing], first.get(differing)))
    for rank, pair in enumerate(found):
        if pair is not None:
            own, theirs = (text or "nothing in its place" for text in pair)
            raise ConfigError(
                f"{own} on rank {rank}, but {theirs} on rank 0: ranks of a job share their "
                "settings; start all of them with the same ones"
            )


def _store_host() -> str | None:
    """Return the host that serves the job's store, ``None`` where it is none of the network."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def decision_group(model: Any = None) -> list[int]:
    """Returns the ranks that take one decision with this one, in ascending order.

    They meet inside forwards and backwards, directly or through others: tensor- and
    context-parallel ranks, and with experts the replicas of the stage that trade tokens, or all of
    them where a loss balances experts over the whole batch. Collective over all ranks.

    Args:
        model: megatron-core's configuration of the model, ``None`` for one without experts.
    """
    groups = [parallel_state.get_tensor_and_context_parallel_group()]
    if getattr(model, "num_moe_experts", None):
        groups.append(parallel_state.get_expert_tensor_and_model_parallel_group())
        if "global_aux_loss" in getattr(model, "moe_router_load_balancing_type", ""):
            groups.append(parallel_state.get_tensor_and_data_parallel_group(True))
    meets = gather({rank for group in groups for rank in dist.get_process_group_ranks(group)})
    found = {dist.get_rank()}
    while (more := found.union(*(meets[rank] for rank in found))) != found:
        found = more
    return sorted(found)


def _say(line: str) -> None:
    print(printable(line), flush=True)


def _build_agreement(
    model: Any, places: list[dict[str, Any]], transport: Transport | None, timeout_s: float
) -> Agreement:
    """Connect this rank with its decision group. Collective over all ranks."""
    if transport is None:
        return Agreement()
    members = decision_group(model)
    if len(members) == 1:  # on all ranks alike
        return Agreement()
    group = gloo_group(members, gather)
    on_one_host = len({places[rank]["machine"] for rank in members}) == 1
    module = extension.load()
    usable = all(gather(module is not None and on_one_host, group))
    own, names = dist.get_rank(), partial(describe, places)
    module = module if usable else None
    return connect(group, members, own, transport.completions, timeout_s, names, module)
