"""Reads the measured runs of Sailor: OPT-350M on nodes of three unlike GPU types.

Source: Strati et al.: Sailor, SOSP 2025 (arXiv 2504.17096), as a folder of ``model.json``,
``clusters.json``, ``network.json``, ``profiles.csv``, ``layer_memory.csv`` and
``measured_mit.json``.

Forwards and backwards were measured by GPU type, width and microbatch, links by the number of
simultaneous pairs. Links that the set itself calls doubtful are left out; what they would have
said is taken from the next smaller number of pairs of the same types.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planning.published.deepspeed import DEEPSPEED
from benchmarks.planning.published.files import read_csv, read_json
from megatron.adaptive.planner.calibrate import MeasuredRun
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.model import LayerKind, Model, Precision
from megatron.adaptive.planner.plan import Plan, Replica, StagePlace
from megatron.adaptive.planner.profile import LayerTimes, Profile

_SIZES_BYTES = tuple(2.0**power * 1e6 for power in range(10))
"""Where the fitted curves are taken, 1 to 512 MB; below 1 MB they must not be."""

_RUNTIME = replace(DEEPSPEED, parameter_copies_bytes=8.0, context_bytes=3e9)
"""Memory as the set's own rule has it: 24 bytes for each parameter in fp32, 16 of them weight,
gradient and two moments, and about 3 GB of the platform: contexts, libraries, NCCL's buffers and
fragments that the allocator keeps. It is the one number here that comes from the measured runs."""

_LOSS_COPIES = 3
"""Of the logits, while the loss is computed: shifted, their softmax, and their gradient."""


def read_sailor(folder: Path) -> list[MeasuredRun]:
    """All runs; ``doubt`` tells which figures the set itself calls unsound.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    measured = read_json(folder / "measured_mit.json")["plans"]
    memory = read_csv(folder / "layer_memory.csv")
    rows = read_csv(folder / "profiles.csv")
    model = _model(read_json(folder / "model.json")["models"]["OPT-350"], memory)
    profile = _profile(model, rows, memory)
    cluster = _cluster(
        read_json(folder / "clusters.json")["clusters"]["mit"]["node_types"],
        read_json(folder / "network.json")["links"],
    )
    return [_run(plan, model, cluster, profile) for plan in measured]


def _run(given: Mapping[str, Any], model: Model, cluster: Cluster, profile: Profile) -> MeasuredRun:
    doubts = " ".join(given["doubts"])
    copied = "digit for digit" in doubts
    unsound = copied or "leave the memory out" in doubts
    return MeasuredRun(
        name=str(given["id"]),
        plan=_plan(given, cluster),
        model=model,
        cluster=cluster,
        profile=profile,
        runtime=_RUNTIME,
        seconds=None if copied else float(given["measured_s"]),
        peak_bytes=None if unsound else float(given["peak_memory_bytes"]),
        doubt=doubts if unsound else "",
    )


def _model(described: Mapping[str, Any], memory: list[dict[str, str]]) -> Model:
    """Parameters of the widths that were profiled tell which part tensor parallelism divides."""
    counted = {(int(row["tp"]), int(row["layer_index"])): row for row in memory}
    kinds = {}
    for row in memory:
        if row["tp"] != "1":
            continue
        index = int(row["layer_index"])
        one, two = (float(counted[tp, index]["parameters"]) for tp in (1, 2))
        name = f"{row['layer_kind']}.{index}"
        kinds[name] = LayerKind(
            name=name,
            parameters=2 * (one - two),
            replicated_parameters=one - 2 * (one - two),
            output_elements=float(row["output_bytes"]) / 4,
            workspace_bytes=_LOSS_COPIES
            * float(row["output_bytes"])
            * (row["layer_kind"] == "head"),
        )
    return Model(
        name="OPT-350",
        kinds=kinds,
        layers=tuple(kinds),
        tokens_per_sample=int(described["sequence_length"]),
        precision=Precision.named("fp32"),
    )


def _profile(model: Model, rows: list[dict[str, str]], memory: list[dict[str, str]]) -> Profile:
    kept = {
        (int(row["tp"]), int(row["layer_index"])): float(row["activation_kept_bytes"])
        for row in memory
    }
    layers = {}
    update: dict[str, list[float]] = {}
    for row in rows:
        tp, index, size = (int(row[key]) for key in ("tp", "layer_index", "microbatch_size"))
        layers[model.layers[index], row["gpu"], tp, size] = LayerTimes(
            forward_s=float(row["forward_s"]),
            backward_input_s=float(row["backward_s"]),
            tp_included=True,
            kept_bytes=kept[tp, index] * size,
        )
        if index == 0:
            # Measured on embedding, two transformer layers and head.
            profiled = (0, 1, 2, model.num_layers - 1)
            parts = sum(model.layer(i).held_parameters(tp) for i in profiled)
            update.setdefault(row["gpu"], []).append(float(row["optimizer_step_s"]) / parts)
    each = {gpu: sum(found) / len(found) for gpu, found in update.items()}
    return Profile(layers=layers, model=model.name, optimizer_s_per_parameter=each)


def _cluster(types: list[Mapping[str, Any]], links: list[Mapping[str, Any]]) -> Cluster:
    sound = [link for link in links if "doubt" not in link]
    names = [str(one["gpu"]) for one in types]

    def found(one: str, other: str, scope: str) -> LinkSpeed:
        pair = {(one, other), (other, one)}
        return _link(
            x for x in sound if x["scope"] == scope and (x["from_gpu"], x["to_gpu"]) in pair
        )

    groups = tuple(
        NodePool(
            type=NodeType(
                name=str(one["gpu"]),
                gpu=str(one["gpu"]),
                gpus=int(one["gpus_per_node"]),
                memory_bytes=float(one["memory_bytes_per_gpu"]),
                intra=found(str(one["gpu"]), str(one["gpu"]), "intra_node"),
            ),
            count=int(one["nodes"]),
        )
        for one in types
    )
    between = {
        (one, other): found(one, other, "inter_node")
        for i, one in enumerate(names)
        for other in names[i:]
    }
    return Cluster(groups=groups, links=between)


def _link(found: Iterable[Mapping[str, Any]]) -> LinkSpeed:
    """Both directions of a link as one, the slower at each number of pairs."""
    by_pairs: dict[int, LinkSpeed] = {}
    for one in found:
        speed = _curve(one["log2_poly"])
        pairs = int(one["pairs"])
        known = by_pairs.get(pairs, speed)
        by_pairs[pairs] = min(speed, known, key=lambda link: link.bytes_per_s)
    first = by_pairs[min(by_pairs)]
    return LinkSpeed(
        bytes_per_s=first.bytes_per_s,
        sizes=first.sizes,
        by_pairs=tuple(sorted(by_pairs.items())),
    )


def _curve(poly: list[float]) -> LinkSpeed:
    a, b, c = poly
    sizes = []
    for size in _SIZES_BYTES:
        x = math.log2(size / 1e6)
        sizes.append((size, 1e9 * (a * x * x + b * x + c)))
    return LinkSpeed(bytes_per_s=max(speed for _, speed in sizes), sizes=tuple(sizes))


def _plan(given: Mapping[str, Any], cluster: Cluster) -> Plan:
    size, pp = int(given["microbatch_size"]), int(given["pp"])
    # Nodes of a type are taken in order, over all stages: each replica is a node of its own.
    free = {
        one.name: [i for i, node in enumerate(cluster.nodes) if node.name == one.name]
        for one in cluster.types
    }
    places = []
    for stage in given["stages"]:
        replicas = [
            Replica(node=free[part["gpu"]].pop(0), gpu=0, tp=int(part["tp"]))
            for part in stage["replicas"]
            for _ in range(int(part["count"]))
        ]
        places.append(StagePlace(replicas=tuple(replicas), micro_batch=size))
    return Plan(
        tp=int(given["tp"]),
        dp=int(given["dp"]),
        pp=pp,
        micro_batch=size,
        global_batch=int(given["global_batch_size"]),
        partition=tuple(int(part) for part in given["partition"].split("-")),
        places=tuple(places),
    )
