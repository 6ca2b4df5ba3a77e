"""Puts a rank's executor together from the process groups of megatron-core.

Every rank of the job calls :func:`build_executor` at the same point: process groups are made by
all ranks together, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.adaptive import extension
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.pipeline.agreement import Agreement, Alone, connect
from megatron.adaptive.pipeline.board import Describe, Links, MemoryLinks, MessageLinks
from megatron.adaptive.pipeline.executor import Executor
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.trace.recorder import Recorder
from megatron.adaptive.transport.gloo import GlooTransport
from megatron.adaptive.transport.interface import Transport
from megatron.adaptive.transport.liveness import here
from megatron.adaptive.transport.nccl import NcclTransport


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What connects a rank with the others; closed at the end of the run.

    Attributes:
        executor: the engine.
        transport: its channels, ``None`` for a pipeline of one rank.
        agreement: its tensor-parallel group's decisions.
    """

    executor: Executor
    transport: Transport | None
    agreement: Agreement

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
    timeout_s: float,
    recorder: Recorder | None,
) -> Wiring:
    """Make this rank's executor with its channels and agreement.

    Collective over all ranks of the job, after megatron-core's parallel state is initialized.

    Args:
        placement: where stages live.
        accelerator: this rank's device.
        places: where every rank runs, see :func:`gather_places`.
        payload_shape: shape of the tensors between stages when they are all alike.
        payload_dtype: their element type.
        timeout_s: limit of every wait of the executor.
        recorder: where spans go.
    """
    pp_ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()

    def describe(rank: int) -> str:
        place = places[rank]
        return f"rank {rank} (stage {place['pp_rank']}, pid {place['pid']} on {place['host']})"

    transport = _build_transport(
        pp_ranks,
        placement,
        accelerator,
        {"payload_shape": payload_shape, "dtype": payload_dtype},
        {"describe": describe, "timeout_s": timeout_s},
    )
    agreement = _build_agreement(places, describe, transport, timeout_s)
    executor = Executor(
        placement=placement,
        pp_rank=pp_rank,
        peer_of=pp_ranks.__getitem__,
        transport=transport,
        agreement=agreement,
        clock=accelerator.clock(),
        recorder=recorder,
        timeout_s=timeout_s,
    )
    return Wiring(executor=executor, transport=transport, agreement=agreement)


def gather_places() -> list[dict[str, Any]]:
    """Return where every rank runs, by global rank; see ``liveness.here``. Collective."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, here(parallel_state.get_pipeline_model_parallel_rank()))
    return places


def _all_groups(ranks: list[int]) -> list[list[int]]:
    """Return every rank's list once, sorted: the order in which all ranks make groups."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ranks)
    return sorted({tuple(group): list(group) for group in gathered}.values())


def _new_gloo_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """Make a gloo group for each distinct ``ranks`` of the job; returns this rank's."""
    mine = None
    for members in _all_groups(ranks):
        group = dist.new_group(members, backend="gloo")
        if members == ranks:
            mine = group
    return mine


def _build_transport(
    pp_ranks: list[int],
    placement: Placement,
    accelerator: Accelerator,
    payloads: dict[str, Any],
    common: dict[str, Any],
) -> Transport | None:
    """Connect this rank with its neighbours.

    Args:
        pp_ranks: global ranks of its pipeline.
        placement: where stages live.
        accelerator: this rank's device, which decides between gloo and NCCL.
        payloads: shape and type of all messages, for gloo.
        common: arguments that every transport takes.
    """
    if len(pp_ranks) == 1:
        return None
    group = _new_gloo_group(pp_ranks)
    assert group is not None
    pp_rank = pp_ranks.index(dist.get_rank())
    peers = [pp_ranks[position] for position in placement.neighbours_of(pp_rank)]
    device = accelerator.device
    if accelerator.backend != "nccl":
        return GlooTransport(group, peers=peers, device=device, **payloads, **common)
    outgoing, incoming = _nccl_channels(pp_ranks, placement, accelerator)
    return NcclTransport(
        group, outgoing=outgoing, incoming=incoming, peers=peers, device=device, **common
    )


def _nccl_channels(
    pp_ranks: list[int], placement: Placement, accelerator: Accelerator
) -> tuple[dict[int, dist.ProcessGroup], dict[int, dist.ProcessGroup]]:
    """Make a communicator per directed channel, all ranks in one order, and connect each."""
    device = accelerator.device
    outgoing: dict[int, dist.ProcessGroup] = {}
    incoming: dict[int, dist.ProcessGroup] = {}
    me = dist.get_rank()
    for members in _all_groups(pp_ranks):
        for position, sender in enumerate(members):
            for receiver in (members[place] for place in placement.neighbours_of(position)):
                group = dist.new_group(sorted((sender, receiver)), backend="nccl", device_id=device)
                if me == sender:
                    outgoing[receiver] = group
                    dist.send(torch.zeros(1, device=device), receiver, group=group)
                elif me == receiver:
                    incoming[sender] = group
                    dist.recv(torch.zeros(1, device=device), sender, group=group)
    accelerator.synchronize()
    return outgoing, incoming


def _build_agreement(
    places: list[dict[str, Any]],
    describe: Describe,
    transport: Transport | None,
    timeout_s: float,
) -> Agreement:
    """Connect this rank with its tensor- and context-parallel group. Collective over all ranks."""
    if transport is None:
        return Alone()
    members = dist.get_process_group_ranks(parallel_state.get_tensor_and_context_parallel_group())
    group = _new_gloo_group(members)
    if len(members) == 1 or group is None:
        return Alone()
    on_one_host = len({places[rank]["machine"] for rank in members}) == 1
    module = extension.load()
    usable: list[Any] = [None] * len(members)
    dist.all_gather_object(usable, module is not None and on_one_host, group=group)
    links: Links
    links = MemoryLinks(module, group, describe) if all(usable) else MessageLinks(group, describe)
    return connect(links, members, dist.get_rank(), transport.completions, timeout_s)
