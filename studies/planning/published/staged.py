"""Reads data sets of measured runs that list stages and replicas on nodes of different types.

A folder in this format contains

* ``measured_NAME.json``: plans with stages (layers, and replicas by GPU and tensor-parallel size),
  time, peak memory and doubts; ``cluster`` and each plan's ``model`` are defined in other files;
* ``clusters.json``: nodes of each type;
* ``network.json``: fitted speed curves of the links by the number of simultaneous pairs;
* ``model.json``: sizes and precision;
* ``profiles.csv`` and ``layer_memory.csv``: forward and backward times, parameters, and bytes of
  kept activations of each layer by GPU, tensor-parallel size and microbatch size.

Links that the data set marks as doubtful are ignored if other links between the same types are
known. In that case the next smaller number of pairs is used. The doubt ``leave out of error
figures`` excludes a run, and the doubt ``leave the memory out`` excludes its memory.

Source of the first set in this format: Strati et al.: Sailor, SOSP 2025 (arXiv 2504.17096).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.layer_costs import Runtime
from megatron.adaptive.planner.model_description import LayerKind, Model, Precision
from megatron.adaptive.planner.plan import Plan, Replica, StagePlace
from megatron.adaptive.planner.profile import LayerTimes, Profile
from studies.planning.published.deepspeed import runtime_of
from studies.planning.published.files import MeasuredRun, part, read_csv, read_json

_SIZES_BYTES = tuple(2.0**power * 1e6 for power in range(10))
"""Message sizes in bytes, from 1 to 512 MB, at which the fitted curves are evaluated. The curves
are not valid below 1 MB.
"""

_MEMORY = {"parameter_copies_bytes": 8.0, "context_bytes": 3e9}
"""Memory in bytes that the authors of the first data set assume besides weights, gradients, Adam's
moments and activations. A parameter in fp32 takes 24 bytes, of which 16 are weight, gradient and
two moments. Contexts, libraries, NCCL's buffers and fragmentation take about 3 GB. These are the
only numbers in this module that come from measured runs."""

_LOSS_COPIES = 3
"""Number of copies of the logits for the loss: shifted logits, softmax and gradient."""


def read_staged(folder: Path, name: str) -> list[MeasuredRun]:
    """Returns the runs in ``measured_NAME.json``, without values that the data set marks as wrong.

    Raises:
        ConfigError: A file is missing, cannot be read, or does not describe the runs.
    """
    document = read_json(folder / f"measured_{name}.json")
    models = read_json(folder / "model.json")
    memory = read_csv(folder / "layer_memory.csv")
    rows = read_csv(folder / "profiles.csv")
    where = str(document.get("cluster", name))
    types = read_json(folder / "clusters.json")
    cluster = _cluster(
        part(types, ("clusters", where, "node_types"), folder),
        part(read_json(folder / "network.json"), ("links",), folder),
        folder,
    )
    precision = Precision.named(part(models, ("training", "precision"), folder))
    runtime = replace(runtime_of(models), **_MEMORY)
    # Runs that the data set excludes may be incomplete, so remove them first.
    plans = [plan for plan in part(document, ("plans",), folder) if not _is_left_out(plan)]
    made = {}
    for key in dict.fromkeys(plan["model"] for plan in plans):
        tokens = int(part(models, ("models", key, "sequence_length"), folder))
        own = [row for row in memory if row["model"] == key]
        model = _model(key, tokens, precision, own)
        made[key] = model, _profile(model, [row for row in rows if row["model"] == key], own)
    return [_run(plan, *made[plan["model"]], cluster, runtime) for plan in plans]


def _is_left_out(given: Mapping[str, Any]) -> bool:
    return "leave out of error figures" in " ".join(given.get("doubts", ()))


def _run(
    given: Mapping[str, Any], model: Model, profile: Profile, cluster: Cluster, runtime: Runtime
) -> MeasuredRun:
    unsound = "leave the memory out" in " ".join(given.get("doubts", ()))
    peak = given.get("peak_memory_bytes")
    return MeasuredRun(
        plan=_plan(given, cluster),
        model=model,
        cluster=cluster,
        profile=profile,
        runtime=runtime,
        seconds=float(given["measured_s"]),
        peak_bytes=None if unsound or peak is None else float(peak),
    )


def _model(
    name: str, tokens: int, precision: Precision, memory: Sequence[Mapping[str, str]]
) -> Model:
    """Returns the model with the layers of ``memory``.

    Comparing the parameter counts at two tensor-parallel sizes shows how many parameters are
    tensor-parallel.
    """
    counted = {(int(row["tp"]), int(row["layer_index"])): row for row in memory}
    widths = sorted({tp for tp, _ in counted})
    low, high = widths[0], widths[min(1, len(widths) - 1)]
    kinds = {}
    for row in memory:
        if int(row["tp"]) != low:
            continue
        index = int(row["layer_index"])
        one, two = (float(counted[tp, index]["parameters"]) for tp in (low, high))
        divided = (one - two) / (1 / low - 1 / high) if high > low else one * low
        name_of = f"{row['layer_kind']}.{index}"
        sent = float(row["output_bytes"])
        kinds[name_of] = LayerKind(
            name=name_of,
            parameters=divided,
            replicated_parameters=one - divided / low,
            output_elements=sent / precision.element_bytes,
            workspace_bytes=_LOSS_COPIES * sent * (row["layer_kind"] == "head"),
        )
    return Model(
        name=name, kinds=kinds, layers=tuple(kinds), tokens_per_sample=tokens, precision=precision
    )


def _profile(
    model: Model, rows: Sequence[Mapping[str, str]], memory: Sequence[Mapping[str, str]]
) -> Profile:
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
            # The time of the update was measured for the embedding, two transformer layers and the
            # output layer.
            profiled = (0, 1, 2, model.num_layers - 1)
            parts = sum(model.layer(i).held_parameters(tp) for i in profiled)
            update.setdefault(row["gpu"], []).append(float(row["optimizer_step_s"]) / parts)
    each = {gpu: sum(found) / len(found) for gpu, found in update.items()}
    return Profile(layers=layers, model=model.name, optimizer_s_per_parameter=each)


def _cluster(
    types: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]], folder: Path
) -> Cluster:
    names = [str(one["gpu"]) for one in types]
    single = {str(one["gpu"]) for one in types if int(one["nodes"]) == 1}

    def found(one: str, other: str, scope: str) -> LinkSpeed:
        pair = {(one, other), (other, one)}
        known = [x for x in links if x["scope"] == scope and (x["from_gpu"], x["to_gpu"]) in pair]
        if not known and scope == "inter_node" and one == other and one in single:
            # If the cluster has only one node of a type, the link between two such nodes is
            # unknown.
            return found(one, one, "intra_node")
        if not known:
            raise ConfigError(
                f"{folder}: network.json has no {scope} link between {one} and {other}; add"
                " its curve"
            )
        return _link([x for x in known if "doubt" not in x] or known)

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
    """Combines both directions of a link: the slower direction determines the speed."""
    by_pairs: dict[int, LinkSpeed] = {}
    for one in found:
        speed = _curve(one["log2_poly"])
        pairs = int(one["pairs"])
        known = by_pairs.get(pairs, speed)
        by_pairs[pairs] = min(speed, known, key=lambda link: link.bytes_per_s)
    first = by_pairs[min(by_pairs)]
    return LinkSpeed(
        bytes_per_s=first.bytes_per_s, sizes=first.sizes, by_pairs=tuple(sorted(by_pairs.items()))
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
    # Assign the nodes of each type to the stages in order. Each replica gets a separate node.
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
