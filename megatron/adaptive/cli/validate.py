"""Implements ``plan validate``, which shows how well the planner predicts traced runs.

    python -m megatron.adaptive plan validate --data DIR --model MODEL --cluster CLUSTER
        [--profile PROFILE] [--rows] [--json]

``DIR`` is a folder with the traces of a run, or a folder that contains several such folders. The
runs must have trained ``MODEL`` on the cluster described by the file ``CLUSTER``. To compare
predictions with published runs, use ``studies/planner.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron.adaptive.cli.common import show
from megatron.adaptive.cli.plan_inputs import add_input_arguments, read_inputs, traced_runs
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser
from megatron.adaptive.config.input_files import aligned
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.calibrate import TracedRun, accuracy
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.plan import Plan, Replica, StagePlace
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.trace.read import trace_files
from megatron.adaptive.trace.trace_format import KINDS

_SET = "own runs"


def main(argv: Sequence[str]) -> int:
    """Predicts the step time of each run in a folder, and prints the prediction errors."""
    options = _parser().parse_args(argv)
    rows = _compared(_find_runs(options.data), options)
    errors = accuracy([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows])
    if options.json:
        plain = [{name: row[name] for name in row if name != "plan"} for row in rows]
        print(json.dumps([{"set": _SET, **errors, "rows": plain}], indent=2))
        return 0
    show("\n".join(_table(errors)))
    if options.rows:
        show("\n" + "\n".join(_rows(rows)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} plan validate", description="Compare predicted with measured step times."
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with traced runs")
    add("--rows", action="store_true", help="also print each run")
    add("--json", action="store_true", help="print JSON")
    add_input_arguments(parser, required=False)
    group = parser.add_argument_group("settings of the runs that their traces do not contain")
    add = group.add_argument
    text = "recomputation in the runs (%(default)s)"
    add("--recompute", choices=RECOMPUTE, default="none", help=text)
    for name in ("distributed-optimizer", "overlap-grad-reduce", "sequence-parallel"):
        add(f"--{name}", action="store_true", help="set if the runs used this flag")
    return parser


def _table(errors: Mapping[str, float]) -> list[str]:
    shares = [name.endswith("error") or name == "regret" for name in errors]
    cells = [
        f"{value:.1%}" if share else f"{value:.4g}"
        for value, share in zip(errors.values(), shares, strict=True)
    ]
    return [
        *aligned([["set", *(name.replace("_", " ") for name in errors)], [_SET, *cells]], 1),
        "",
        "errors: relative to the measured time; rank correlation: between the predicted and the",
        "measured order; place of best: place of the fastest run in the predicted order; regret:",
        "how much slower the run with the shortest predicted time is than the fastest run",
    ]


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    table = ["run tp dp pp size partition measured predicted error".split()]
    for row in rows:
        plan = row["plan"]
        measured = row["measured_s"]
        predicted = row["predicted_s"]
        table.append(
            [
                row["run"],
                str(plan.tp),
                str(plan.dp),
                str(plan.pp),
                str(plan.micro_batch),
                format_partition(plan.partition),
                f"{measured:.4g}",
                f"{predicted:.4g}",
                f"{predicted / measured - 1:+.1%}",
            ]
        )
    return aligned(table, 1)


def _find_runs(folder: Path) -> dict[str, Path]:
    """Finds traced runs in ``folder``, in its subfolders, and in their ``traces`` folders.

    Returns:
        Trace folder of each run, keyed by the name of the run's folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; pass the folder with the traced runs")
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    traces_by_run = {}
    for run_folder in (folder, *below):
        for traces in (run_folder, run_folder / "traces"):
            if trace_files(traces):
                traces_by_run[run_folder.resolve().name] = traces
    if not traces_by_run:
        raise ConfigError(
            f"{folder}: neither the folder nor its subfolders contain traces; to compare "
            'published runs, use "studies/planner.py --data"'
        )
    return traces_by_run


def _compared(
    traces_by_run: Mapping[str, Path], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns a row for each run, with its plan and its predicted and measured step times."""
    for name in ("model", "cluster"):
        if getattr(options, name) is None:
            raise ConfigError(
                f"the traces of run {next(iter(traces_by_run))} do not describe the {name}; pass "
                f"--{name}"
            )
    inputs = read_inputs(options)
    runs = traced_runs(traces_by_run.values(), options, inputs.model, inputs.cluster)
    rows = []
    for name, run in zip(traces_by_run, runs, strict=True):
        steps = run.figures().kind_ns[:, :, KINDS.index("step")].max(axis=1)
        plan = _plan(run, inputs, options)
        prediction = predict(plan, inputs)
        rows.append(
            {
                "run": name,
                "measured_s": median(map(float, steps)) / 1e9,
                "predicted_s": prediction.seconds,
                "parts_s": dict(prediction.parts),
                "predicted_peak_bytes": prediction.peak_bytes,
                "plan": plan,
            }
        )
    return rows


def _plan(run: TracedRun, inputs: PlanInputs, options: argparse.Namespace) -> Plan:
    headers = {rank: trace.header for rank, trace in run.trace.ranks.items()}
    first = next(iter(headers.values()))
    if len(headers) < first.world_size:
        missing = min(set(range(first.world_size)) - set(headers))
        raise ConfigError(
            f"{run.trace.origin}: the trace of rank {missing} is missing; traces of all ranks are "
            "required"
        )
    stage_layers = inputs.model.stage_layers(run.layers)
    gpus = _gpus(run, inputs.cluster)
    places = []
    for pp_rank in range(first.num_ranks):
        ranks = sorted(
            (header.dp_rank, rank)
            for rank, header in headers.items()
            if header.pp_rank == pp_rank and header.tp_rank == 0
        )
        replicas = tuple(
            Replica(node=gpus[rank][0], gpu=gpus[rank][1], tp=run.tp) for _, rank in ranks
        )
        places.append(StagePlace(replicas=replicas, micro_batch=run.micro_batch))
    return Plan(
        tp=run.tp,
        dp=run.dp,
        pp=first.num_ranks,
        chunks=first.num_chunks,
        micro_batch=run.micro_batch,
        global_batch=run.micro_batch * run.dp * first.num_microbatches,
        schedule=first.schedule,
        partition=tuple(map(len, stage_layers)),
        places=tuple(places),
        recompute=options.recompute,
        distributed_optimizer=options.distributed_optimizer,
        overlap_reduce=options.overlap_grad_reduce,
        sequence_parallel=options.sequence_parallel,
    )


def _gpus(run: TracedRun, cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Returns the node index and the GPU index of each rank, keyed by rank.

    Each host is assigned to the first unused node of the cluster that has the host's node type.
    """
    nodes: dict[str, int] = {}
    used: dict[str, int] = {}
    places = {}
    for rank in sorted(run.trace.ranks):
        host = run.trace.ranks[rank].header.host
        if host not in nodes:
            name = run.hosts[host].name
            free = [
                number
                for number, node in enumerate(cluster.nodes)
                if node.name == name and number not in nodes.values()
            ]
            if not free:
                raise ConfigError(
                    f"{run.trace.origin}: the run had more hosts of type {name} than the cluster "
                    f"file contains, so no node is left for {host}; pass the file of the cluster "
                    "on which the run was executed"
                )
            nodes[host] = free[0]
        gpu = used.get(host, 0)
        if gpu >= cluster.nodes[nodes[host]].gpus:
            raise ConfigError(
                f"{run.trace.origin}: host {host} had more ranks than the {gpu} GPUs of its type "
                f"{run.hosts[host].name}; pass the file of the cluster on which the run was "
                "executed"
            )
        used[host] = gpu + 1
        places[rank] = (nodes[host], gpu)
    return places
