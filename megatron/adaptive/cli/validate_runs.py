"""Runs of one's own for ``validate``: what their traces say of plan and time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from megatron.adaptive.cli.plan_calibrate import traced_run, types_of_hosts
from megatron.adaptive.cli.plan_inputs import Inputs, read_inputs
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.calibrate import TracedRun, stage_layers
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.datasets.measured import Measured
from megatron.adaptive.planner.plan import Plan, Replica, StagePlace
from megatron.adaptive.planner.runtime import OURS
from megatron.adaptive.trace.event import KINDS
from megatron.adaptive.trace.figures import run_figures
from megatron.adaptive.trace.read import trace_files

__all__ = ["find_runs", "read_own_runs"]


def find_runs(folder: Path) -> dict[str, Path]:
    """Folders with traces: this one, those below it, and ``traces`` in those; by their name."""
    below = sorted(one for one in folder.iterdir() if one.is_dir())
    found = {}
    for place in (folder, *below):
        for traces in (place, place / "traces"):
            if trace_files(traces):
                found[place.resolve().name] = traces
    return found


def read_own_runs(found: Mapping[str, Path], options: argparse.Namespace) -> list[Measured]:
    """Read runs of our trainer.

    Args:
        found: folders of traces by name.
        options: with ``plan_inputs.add_input_arguments``'s.

    Raises:
        ConfigError: model or cluster is not given, or is not that of a run.
        TraceError: a trace is damaged, or has no complete iterations but the first two.
    """
    for name in ("model", "cluster"):
        if getattr(options, name) is None:
            raise ConfigError(f"traces of run {next(iter(found))}: give --{name} of these runs too")
    given = read_inputs(options)
    hosts = types_of_hosts(options, given.cluster)
    return [
        _measured(name, traced_run(folder, given.model, given.cluster, hosts), given, options)
        for name, folder in found.items()
    ]


def _measured(name: str, run: TracedRun, given: Inputs, options: argparse.Namespace) -> Measured:
    complete = run.trace.complete_iterations()
    if len(complete) <= run.skip:
        raise ConfigError(
            f"{run.trace.origin}: {len(complete)} complete iterations, of which the first"
            f" {run.skip} do not count: trace more"
        )
    figures = run_figures(run.trace, complete[run.skip :])
    steps = figures.kind_ns[:, :, KINDS.index("step")].max(axis=1)
    return Measured(
        name=name,
        plan=_plan(run, given, options),
        model=given.model,
        cluster=given.cluster,
        profile=given.profile,
        runtime=OURS,
        seconds=median(map(float, steps)) / 1e9,
    )


def _plan(run: TracedRun, given: Inputs, options: argparse.Namespace) -> Plan:
    headers = {rank: trace.header for rank, trace in run.trace.ranks.items()}
    first = next(iter(headers.values()))
    if len(headers) < first.world_size:
        missing = min(set(range(first.world_size)) - set(headers))
        raise ConfigError(f"{run.trace.origin}: no trace of rank {missing}: all ranks are needed")
    if not first.layers:
        raise ConfigError(
            f"{run.trace.origin}: the trace does not say how many layers its stages hold:"
            " trace the run anew"
        )
    tp = 1 + max(header.tp_rank for header in headers.values())
    dp = 1 + max(header.dp_rank for header in headers.values())
    gpus = _gpus(run, given.cluster)
    places = []
    for pp_rank in range(first.num_ranks):
        ranks = sorted(
            (header.dp_rank, rank)
            for rank, header in headers.items()
            if header.pp_rank == pp_rank and header.tp_rank == 0
        )
        replicas = tuple(Replica(node=gpus[rank][0], gpu=gpus[rank][1], tp=tp) for _, rank in ranks)
        places.append(StagePlace(replicas=replicas, micro_batch=run.micro_batch))
    return Plan(
        tp=tp,
        dp=dp,
        pp=first.num_ranks,
        chunks=first.num_chunks,
        micro_batch=run.micro_batch,
        global_batch=run.micro_batch * dp * first.num_microbatches,
        schedule=first.schedule,
        partition=tuple(len(held) for held in stage_layers(given.model, first.layers)),
        places=tuple(places),
        recompute=options.recompute,
        distributed_optimizer=options.distributed_optimizer,
        overlap_reduce=options.overlap_grad_reduce,
        sequence_parallel=options.sequence_parallel,
    )


def _gpus(run: TracedRun, cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Node and GPU of each rank: each host is the next node of its type."""
    nodes: dict[str, int] = {}
    used: dict[str, int] = {}
    places = {}
    for rank in sorted(run.trace.ranks):
        host = run.trace.ranks[rank].header.host
        if host not in nodes:
            name = run.node_of(host)
            free = [
                number
                for number, node in enumerate(cluster.nodes)
                if node.name == name and number not in nodes.values()
            ]
            if not free:
                raise ConfigError(
                    f"{run.trace.origin}: no node of type {name} is left for host {host}: give the"
                    " cluster on which it ran"
                )
            nodes[host] = free[0]
        gpu = used.get(host, 0)
        if gpu >= cluster.nodes[nodes[host]].gpus:
            raise ConfigError(
                f"{run.trace.origin}: host {host} had more ranks than its type"
                f" {run.node_of(host)} has GPUs, {gpu}: give the cluster on which it ran"
            )
        used[host] = gpu + 1
        places[rank] = (nodes[host], gpu)
    return places
