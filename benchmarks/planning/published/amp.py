"""Reads the measured runs of AMP: 16 GPUs on AWS, a GPT-2 and an image generator.

Source: Li, Wang, Xing, Zhang: AMP, NeurIPS 2022 (arXiv 2210.07297), as a folder of ``model.json``,
``cluster.json``, ``layer_times.csv`` and ``measured_*.csv``.

The profile has one number per layer and tensor-parallel width: the forward of one sample. What a
larger microbatch and a backward take follows from what that number is made of:

::

    forward(tp)  = launch(tp) + work * sharded(tp) + exchange(tp)
    forward(b)   = launch + b * (work * sharded + exchange)
    backward(b)  = launch + b * (2 * work * sharded + exchange)

* launch: the time in which the CPU launches a transformer layer. The generator's wide layers hold
  81 tokens, for which a V100 computes 0.03 ms; they take 2 ms, which is all launching. Both models
  were run by the same program, so this is the launch time of every transformer layer.
* work: what is left at width 1. A backward computes twice as much.
* sharded: 1 over the width, as long as a rank keeps whole tiles of a matrix product, 64 columns;
  the generator's narrow layers have 16 and gain nothing.
* exchange: what is left at larger widths, the all-reduces of activations. A backward has as many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.planning.published.deepspeed import DEEPSPEED
from benchmarks.planning.published.files import read_csv, read_json
from megatron.adaptive.planner.calibrate import MeasuredRun
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.model import LayerKind, Model, Precision
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import LayerTimes, Profile

SETS = ("homogeneous", "het_model")
"""The measured sets: GPT-2 on T4, and an image generator of unlike layers on V100."""

_FILES = {"homogeneous": ("gpt2", "T4"), "het_model": ("transgan", "V100")}
_LAUNCH = ("transgan", "V100", "transformer_wide")
_WIDTHS = {"transformer": 1024, "transformer_wide": 1024, "transformer_narrow": 16}
_TILE = 64

_ETHERNET = 0.92
"""Part of the nominal speed that NCCL reaches over Ethernet: 0.115 of 0.125 GB/s and 2.86 of 3.125
GB/s in the measurements published with Sailor (SOSP 2025)."""

_MEMORY_BYTES_PER_S = {"T4": 320e9, "V100": 900e9}
"""Vendor's figures: data sheets of the NVIDIA T4 and of the V100 SXM2."""

_REACHED = 0.8
"""Part of a GPU's memory bandwidth that passes over long vectors reach."""

_OPTIMIZER_BYTES = 52
"""Bytes that a mixed-precision Adam step reads and writes for each parameter: gradient to fp32 (2 +
4), its norm (4), clipping (8), Adam (gradient, weight and two moments read, three written: 28),
weight to fp16 (4 + 2)."""

_PRECISION = Precision(name="fp16", gradient_bytes=2, reduce_bytes=4)


def read_amp(folder: Path, name: str) -> list[MeasuredRun]:
    """Runs of a set that gave a time.

    Args:
        folder: with the files named above.
        name: one of ``SETS``.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    model_name, gpu = _FILES[name]
    times = _times(folder)
    described = read_json(folder / "model.json")["models"][model_name]
    model = _model(model_name, described, times[model_name, gpu, 1])
    profile = _profile(model_name, gpu, times)
    cluster = _cluster(read_json(folder / "cluster.json")["clusters"][name]["nodes"])
    batch = int(described["global_batch_size"])
    return [
        MeasuredRun(
            name=f"{row['amp_rank']}",
            plan=_plan(row, batch, cluster),
            model=model,
            cluster=cluster,
            profile=profile,
            runtime=DEEPSPEED,
            seconds=float(row["measured_s"]),
        )
        for row in read_csv(folder / f"measured_{name}.csv")
        if row["status"] == "ok"
    ]


Times = Mapping[tuple[str, str, int], list[tuple[str, float]]]
"""Kind and forward of every layer, by model, GPU and tensor-parallel width."""


def _times(folder: Path) -> Times:
    times: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
    for row in read_csv(folder / "layer_times.csv"):
        key = (row["model"], row["gpu"], int(row["tp"]))
        times.setdefault(key, []).append((row["layer_kind"], float(row["forward_s"])))
    return times


def _mean(times: Times, model: str, gpu: str, tp: int, kind: str) -> float:
    return fmean(seconds for one, seconds in times[model, gpu, tp] if one == kind)


def _profile(model: str, gpu: str, times: Times) -> Profile:
    layers = {}
    for tp in sorted(one for name, card, one in times if (name, card) == (model, gpu)):
        launch = _mean(times, *_LAUNCH[:2], tp, _LAUNCH[2])
        for index, (kind, seconds) in enumerate(times[model, gpu, tp]):
            fixed = exchange = 0.0
            if kind in _WIDTHS:
                fixed = min(launch, seconds)
                exchange = _exchange(times, model, gpu, tp, kind)
            work = seconds - fixed
            exchange = min(exchange, work)
            layers[_name(index, kind), gpu, tp, 1] = LayerTimes(
                forward_s=seconds,
                backward_input_s=fixed + 2 * (work - exchange) + exchange,
                tp_included=True,
                launch_s=fixed,
            )
    each = _OPTIMIZER_BYTES / (_REACHED * _MEMORY_BYTES_PER_S[gpu])
    return Profile(layers=layers, model=model, optimizer_s_per_parameter={gpu: each})


def _exchange(times: Times, model: str, gpu: str, tp: int, kind: str) -> float:
    """Seconds of the all-reduces in a forward: what neither launching nor computing explains."""
    tiles = math.ceil(_WIDTHS[kind] / _TILE)
    sharded = math.ceil(_WIDTHS[kind] / tp / _TILE) / tiles

    def left(width: int) -> float:
        launch = _mean(times, *_LAUNCH[:2], width, _LAUNCH[2])
        return max(0.0, _mean(times, model, gpu, width, kind) - launch)

    return 0.0 if tp == 1 else max(0.0, left(tp) - left(1) * sharded)


def _name(index: int, kind: str) -> str:
    return f"{kind}.{index}"


def _model(name: str, described: Mapping[str, Any], layers: list[tuple[str, float]]) -> Model:
    sizes = _parameters(described)
    replicated = described.get("parameters_per_layer_from_shapes", {})
    # The projection is whole on every tensor-parallel rank.
    whole = {key: float(value) for key, value in replicated.items() if key != "note"}
    sent = _sent(described, [kind for kind, _ in layers])
    kinds = {}
    for index, (kind, _) in enumerate(layers):
        kinds[_name(index, kind)] = LayerKind(
            name=_name(index, kind),
            parameters=0.0 if kind in whole else sizes.get(kind, 0.0),
            replicated_parameters=whole.get(kind, 0.0),
            output_elements=sent[index],
        )
    tied = [i for i, (kind, _) in enumerate(layers) if kind in ("embedding", "head")]
    return Model(
        name=name,
        kinds=kinds,
        layers=tuple(kinds),
        tokens_per_sample=int(described.get("sequence_length", 1)),
        tied_parameters=sizes.get("embedding", 0.0) if len(tied) > 1 else 0.0,
        tied_layers=tuple(tied) if len(tied) > 1 else (),
        precision=_PRECISION,
    )


def _parameters(described: Mapping[str, Any]) -> dict[str, float]:
    given = described["parameters_per_layer"]
    sizes = {key: float(value) for key, value in given.items() if isinstance(value, (int, float))}
    if given.get("head") == "tied to embedding":
        sizes["head"] = sizes["embedding"]
    return sizes


def _sent(described: Mapping[str, Any], kinds: list[str]) -> list[float]:
    """Elements that each layer hands on; those that are not described hand on what they got."""
    shapes = described.get("boundary_activation_elements_per_sample_from_shapes")
    given = shapes or described["boundary_activation_elements_per_sample"]
    sizes = {key: float(value) for key, value in given.items() if isinstance(value, (int, float))}
    sent = []
    # A generator's image grows somewhere in the layers between; they are given their end's size.
    last = sizes.get(kinds[0], min(sizes.values()))
    for i, kind in enumerate(kinds):
        if kind == "other":
            after = [one for one in kinds[i:] if one in sizes]
            last = sizes[after[0]] if after else last
        last = sizes.get(kind, last)
        sent.append(last)
    return sent


def _cluster(nodes: list[Mapping[str, Any]]) -> Cluster:
    first = nodes[0]
    network = LinkSpeed(bytes_per_s=_ETHERNET * float(first["inter_node_bits_per_s"]) / 8)
    kind = NodeType(
        name=str(first["instance"]),
        gpu=str(first["gpu"]),
        gpus=int(first["gpus_per_node"]),
        memory_bytes=float(first["memory_gb_per_gpu"]) * 2**30,
        intra=LinkSpeed(bytes_per_s=float(first["intra_node_bits_per_s"]) / 8, shared=False),
    )
    return Cluster(groups=(NodePool(type=kind, count=len(nodes)),), network=network)


def _plan(row: Mapping[str, str], batch: int, cluster: Cluster) -> Plan:
    tp, dp, pp = (int(row[key]) for key in ("tp", "dp", "pp"))
    size = int(row["microbatch_size"])
    order = range(len(cluster.nodes))
    return Plan(
        tp=tp,
        dp=dp,
        pp=pp,
        micro_batch=size,
        global_batch=batch,
        partition=tuple(int(part) for part in row["partition"].split("-")),
        places=place_ranks(cluster, order, tp=tp, dp=dp, pp=pp, micro_batch=size),
    )
