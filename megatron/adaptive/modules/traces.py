"""Opens the trace of one rank of a pipeline of plain modules."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from megatron.adaptive.engine.tracing import Tracing
from megatron.adaptive.modules.mesh import Mesh
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.trace.clock_sync import start_clock_sync
from megatron.adaptive.trace.event import TraceHeader
from megatron.adaptive.trace.files import set_aside
from megatron.adaptive.trace.recorder import Recorder

__all__ = ["start_trace"]


def start_trace(
    trace_dir: str | None,
    mesh: Mesh,
    placement: Placement,
    *,
    schedule: str,
    num_microbatches: int,
    partition: tuple[int, ...],
    weights: tuple[float, ...],
) -> Tracing:
    """Open this rank's trace. Collective over all ranks.

    Args:
        trace_dir: the folder, ``None`` for no trace.
        mesh: the job.
        placement: where stages live.
        schedule: its name.
        num_microbatches: of a step, as far as it is known.
        partition: segments of each stage.
        weights: of each segment; may be empty.
    """
    if trace_dir is None:
        return Tracing()
    if mesh.environment.local_rank == 0:
        set_aside(trace_dir)
    dist.barrier(group=mesh.control_group)
    run = mesh.from_first(f"{mesh.environment.run_id}-{os.getpid()}")
    header = TraceHeader.create(
        run=run,
        rank=mesh.rank,
        world_size=dist.get_world_size(),
        pp_rank=mesh.pp_rank,
        dp_rank=mesh.dp_rank,
        num_ranks=placement.num_ranks,
        num_chunks=placement.num_chunks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        placement=placement.kind,
        layers=partition,
        work=weights and tuple(_stage_sums(partition, weights)),
    )
    recorder = Recorder(trace_dir, header)
    sync = start_clock_sync(
        rank=mesh.rank,
        clock_id=header.clock,
        address=mesh.environment.master_addr,
        gather=mesh.gather,
        deliver=recorder.add_clock_samples,
    )
    return Tracing(recorder, mesh.accelerator.clock(), sync)


def _stage_sums(partition: Sequence[int], weights: Sequence[float]) -> Iterator[float]:
    start = 0
    for segments in partition:
        yield sum(weights[start : start + segments])
        start += segments
