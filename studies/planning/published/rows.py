"""Reads data sets of measured runs in which each row is a run.

A folder in this format contains

* ``measured_NAME.csv``: one run per row, with columns ``tp``, ``dp``, ``pp``,
  ``microbatch_size``, ``num_microbatches``, ``partition``, ``measured_s``, ``status`` (``ok`` if
  the run has a time), and ``model`` if partition and batch do not identify the model;
* ``cluster.json``: the nodes of cluster ``NAME`` in the order of their ranks;
* ``model.json``: layers, sizes and batch size of every model;
* ``layer_times.csv``: the forward time of one sample for each layer, by model, GPU and
  tensor-parallel size.

Times of larger microbatches and of backward passes are derived from the parts of a forward pass:

::

    forward(tp)  = launch(tp) + work * sharded(tp) + exchange(tp)
    forward(b)   = launch + b * (work * sharded + exchange)
    backward(b)  = launch + b * (2 * work * sharded + exchange)

* launch: the time in which the CPU launches a transformer layer. It is estimated as the shortest
  time of the data set's transformer layers whose matrix multiplications take almost none of the
  time. The same program ran all models of a data set.
* work: the remaining time at tensor-parallel size 1. A backward pass takes twice this time.
* sharded: 1 divided by the tensor-parallel size, rounded up to whole tiles of 64 columns per rank.
* exchange: the remaining time at larger sizes, for all-reduces of activations. A backward pass has
  the same number of all-reduces.

Source of the first set in this format: Li, Wang, Xing, Zhang: AMP, NeurIPS 2022 (arXiv 2210.07297).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import (
    Cluster,
    LinkSpeed,
    NodePool,
    NodeType,
    find_gpu,
    known_gpu,
)
from megatron.adaptive.planner.model_description import LayerKind, Model, Precision
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import LayerTimes, Profile
from studies.planning.published.deepspeed import runtime_of
from studies.planning.published.files import MeasuredRun, part, read_csv, read_json

_TILE = 64

_ETHERNET = 0.92
"""Fraction of the nominal speed that NCCL reaches over Ethernet. In the measurements published with
Sailor (SOSP 2025), NCCL reached 0.115 of 0.125 GB/s and 2.86 of 3.125 GB/s."""

_REACHED = 0.8
"""Fraction of a GPU's memory bandwidth that operations on long vectors reach."""

_OPTIMIZER_BYTES = 52
"""Number of bytes per parameter that a mixed-precision Adam step reads and writes. These are 6 for
converting the gradient to fp32 (2 + 4), 4 for the norm, and 8 for clipping. Adam itself needs 28:
it reads the gradient, the weight and two moments, and writes the weight and the moments. Converting
the weight to fp16 needs 6 (4 + 2)."""

_LAUNCHED = 0.05
"""Maximum fraction of a layer's forward time that matrix multiplications may take, if the time is
to count as the time to launch its kernels."""


def read_rows(folder: Path, name: str) -> list[MeasuredRun]:
    """Reads ``measured_NAME.csv``, and returns its runs that have a time.

    Raises:
        ConfigError: A file is missing, cannot be read, or does not describe the runs.
    """
    rows = read_csv(folder / f"measured_{name}.csv")
    models = read_json(folder / "model.json")
    nodes = part(read_json(folder / "cluster.json"), ("clusters", name, "nodes"), folder)
    times = _times(folder)
    cluster, order = _cluster(nodes)
    runtime = runtime_of(models)
    known: dict[str, tuple[Model, Profile]] = {}
    found = []
    for row in rows:
        if row["status"] != "ok":
            continue
        model = row.get("model") or _model_of(row, models["models"], times, folder)
        if model not in known:
            described = part(models, ("models", model), folder)
            set_times = _SetTimes(models["models"], model, times)
            gpus = tuple(dict.fromkeys(node.gpu for node in cluster.types))
            layers = times.get((model, gpus[0], 1))
            if layers is None:
                raise ConfigError(f"{folder}: layer_times.csv lacks {model} on {gpus[0]} with tp=1")
            known[model] = _model(model, described, layers), _profile(set_times, gpus)
        made, profile = known[model]
        found.append(
            MeasuredRun(
                plan=_plan(row, cluster, order),
                model=made,
                cluster=cluster,
                profile=profile,
                runtime=runtime,
                seconds=float(row["measured_s"]),
            )
        )
    return found


def _batch(row: Mapping[str, str]) -> int:
    return int(row["microbatch_size"]) * int(row["num_microbatches"]) * int(row["dp"])


def _model_of(row: Mapping[str, str], models: Mapping[str, Any], times: Times, folder: Path) -> str:
    """Returns the name of the model with the layer count and the batch size of ``row``."""
    layers = sum(map(int, row["partition"].split("-")))
    counts = {name: len(found) for (name, _, _), found in times.items()}
    fits = [
        name
        for name, one in models.items()
        if counts.get(name) == layers and int(one["global_batch_size"]) == _batch(row)
    ]
    if len(fits) != 1:
        raise ConfigError(
            f"{folder}: {len(fits)} models of model.json have {layers} layers and a batch of"
            f" {_batch(row)}; add the name of the model in a column 'model'"
        )
    return fits[0]


Times = Mapping[tuple[str, str, int], list[tuple[str, float]]]
"""Kind and forward time in seconds of each layer, keyed by model, GPU and tensor-parallel size."""


def _times(folder: Path) -> Times:
    times: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
    for row in read_csv(folder / "layer_times.csv"):
        key = (row["model"], row["gpu"], int(row["tp"]))
        times.setdefault(key, []).append((row["layer_kind"], float(row["forward_s"])))
    return times


class _SetTimes:
    """Splits the forward times of a model's layers into launching, computing and all-reduces.

    Args:
        models: Descriptions of all models in the data set, keyed by name.
        model: Name of the model whose times are split.
        times: Forward times of the layers of all models.
    """

    def __init__(self, models: Mapping[str, Any], model: str, times: Times) -> None:
        self.models, self.model, self.times = models, model, times

    def of(self, gpu: str, tp: int) -> Iterator[tuple[str, float, float, float]]:
        """Yields each layer's kind, and its forward, launch and all-reduce time in seconds."""
        launch = self._launch(tp)
        for kind, seconds in self.times[self.model, gpu, tp]:
            fixed = exchange = 0.0
            if width := _width(self.models[self.model], kind):
                fixed = min(launch, seconds)
                exchange = min(self._exchange(gpu, tp, kind, width), seconds - fixed)
            yield kind, seconds, fixed, exchange

    def _mean(self, model: str, gpu: str, tp: int, kind: str) -> float:
        return fmean(seconds for one, seconds in self.times[model, gpu, tp] if one == kind)

    def _launch(self, tp: int) -> float:
        """Returns the time to launch the kernels of a layer in seconds, or 0 if it is unknown.

        This is the shortest forward time of all layers that need little computation.
        """
        found = []
        for (model, gpu, width), layers in self.times.items():
            described, card = self.models[model], known_gpu(gpu)
            for kind in {one for one, _ in layers} if width == tp and card else ():
                hidden = _width(described, kind)
                sent = _sizes(described, _SENT).get(kind, math.inf)
                if not hidden or not card:
                    continue
                products = 2 * _parameters(described)[kind] * sent / hidden / tp
                seconds = self._mean(model, gpu, tp, kind)
                if products / card.peak("fp16") <= _LAUNCHED * seconds:
                    found.append(seconds)
        return min(found, default=0.0)

    def _exchange(self, gpu: str, tp: int, kind: str, hidden: int) -> float:
        """Returns the duration of all-reduces in the forward pass of a layer, in seconds.

        This is the part of the forward time that remains after subtracting launching and computing.
        """
        sharded = math.ceil(hidden / tp / _TILE) / math.ceil(hidden / _TILE)

        def left(width: int) -> float:
            return max(0.0, self._mean(self.model, gpu, width, kind) - self._launch(width))

        return 0.0 if tp == 1 else max(0.0, left(tp) - left(1) * sharded)


def _width(described: Mapping[str, Any], kind: str) -> int:
    """Returns the hidden size of transformer layers of the kind ``kind``, or 0 for other kinds."""
    if not kind.startswith("transformer"):
        return 0
    return int(described["hidden_size" + kind.removeprefix("transformer")])


def _profile(times: _SetTimes, gpus: Sequence[str]) -> Profile:
    layers, updates = {}, {}
    for model, gpu, tp in times.times:
        if model != times.model or gpu not in gpus:
            continue
        for index, (kind, seconds, fixed, exchange) in enumerate(times.of(gpu, tp)):
            layers[_name(index, kind), gpu, tp, 1] = LayerTimes(
                forward_s=seconds,
                backward_input_s=fixed + 2 * (seconds - fixed - exchange) + exchange,
                tp_included=True,
                launch_s=fixed,
            )
        moved = find_gpu(gpu, "layer_times.csv").memory_bytes_per_s
        updates[gpu] = _OPTIMIZER_BYTES / (_REACHED * moved)
    return Profile(layers=layers, model=times.model, optimizer_s_per_parameter=updates)


def _name(index: int, kind: str) -> str:
    return f"{kind}.{index}"


def _model(name: str, described: Mapping[str, Any], layers: list[tuple[str, float]]) -> Model:
    sizes = _parameters(described)
    replicated = described.get("parameters_per_layer_from_shapes", {})
    # These projections are replicated on each tensor-parallel rank.
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
        precision=replace(
            Precision.named(described["precision"].split()[0]),
            gradient_bytes=2,
            reduce_bytes=4 if "fp32 gradient" in described["precision"] else 2,
        ),
    )


_SENT = "boundary_activation_elements_per_sample"


def _sizes(described: Mapping[str, Any], key: str) -> dict[str, float]:
    """Returns the numbers under ``key`` in the description of a model, keyed by kind of layer.

    If there are numbers that were computed from shapes, they are preferred.
    """
    given = described.get(f"{key}_from_shapes") or described[key]
    return {name: float(value) for name, value in given.items() if isinstance(value, (int, float))}


def _parameters(described: Mapping[str, Any]) -> dict[str, float]:
    given = described["parameters_per_layer"]
    sizes = {key: float(value) for key, value in given.items() if isinstance(value, (int, float))}
    if given.get("head") == "tied to embedding":
        sizes["head"] = sizes["embedding"]
    return sizes


def _sent(described: Mapping[str, Any], kinds: list[str]) -> list[float]:
    """Returns the number of elements that each layer sends to the next layer.

    A layer of unknown size sends as many elements as the previous layer.
    """
    sizes, sent = _sizes(described, _SENT), []
    # In an image generator, layers of unknown output size enlarge the image. Use the final size for
    # all of them.
    last = sizes.get(kinds[0], min(sizes.values()))
    for i, kind in enumerate(kinds):
        if kind == "other":
            after = [one for one in kinds[i:] if one in sizes]
            last = sizes[after[0]] if after else last
        last = sizes.get(kind, last)
        sent.append(last)
    return sent


def _cluster(nodes: Sequence[Mapping[str, Any]]) -> tuple[Cluster, list[int]]:
    """Returns the cluster, and each node's index in the cluster, in the order of ``nodes``."""
    kinds: list[Mapping[str, Any]] = []
    members: list[list[int]] = []
    for number, node in enumerate(nodes):
        if node not in kinds:
            kinds.append(node)
            members.append([])
        members[kinds.index(node)].append(number)
    groups = []
    for index, (kind, numbers) in enumerate(zip(kinds, members, strict=True)):
        name = str(kind.get("instance", kind["gpu"]))
        alike = [str(one.get("instance", one["gpu"])) for one in kinds].count(name)
        node = NodeType(
            name=name if alike == 1 else f"{name} {index}",
            gpu=str(kind["gpu"]),
            gpus=int(kind["gpus_per_node"]),
            memory_bytes=float(kind["memory_gb_per_gpu"]) * 2**30,
            intra=LinkSpeed(bytes_per_s=float(kind["intra_node_bits_per_s"]) / 8, shared=False),
            network=LinkSpeed(bytes_per_s=_ETHERNET * float(kind["inter_node_bits_per_s"]) / 8),
        )
        groups.append(NodePool(type=node, count=len(numbers)))
    places = {number: at for at, number in enumerate(itertools.chain.from_iterable(members))}
    return Cluster(groups=tuple(groups)), [places[number] for number in range(len(nodes))]


def _plan(row: Mapping[str, str], cluster: Cluster, order: Sequence[int]) -> Plan:
    tp, dp, pp = (int(row[key]) for key in ("tp", "dp", "pp"))
    size = int(row["microbatch_size"])
    return Plan(
        tp=tp,
        dp=dp,
        pp=pp,
        micro_batch=size,
        global_batch=_batch(row),
        partition=tuple(int(part) for part in row["partition"].split("-")),
        places=place_ranks(cluster, order, tp=tp, dp=dp, pp=pp, micro_batch=size),
    )
