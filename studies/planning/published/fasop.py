"""Reads FASOP's published inputs and best plans: profiles of three models on two GPUs.

Source: Hwang, Lee, Oh, Yi, FASOP, HPDC 2024; github.com/AvatarHwang/FASOP at 93cb38b. Times are for
a forward pass at microbatch size 1 in fp16. FASOP doubles these times for the backward pass, and
uses a table to scale both with the microbatch size. The memory of layers follows FASOP's rule,
which is equation 1 of Korthikanti et al., arXiv 2205.05198, without sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.config.schedule import parse_partition
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.model_description import LayerKind, Model, Precision
from megatron.adaptive.planner.plan import Plan, place_ranks
from megatron.adaptive.planner.profile import LayerTimes, PlanInputs, Profile
from megatron.adaptive.planner.search import Searcher
from megatron.adaptive.planner.search_options import SearchOptions
from studies.planning.published.files import read_csv, read_json

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class FasopPlan:
    """Plan that FASOP found, in FASOP's format.

    Attributes:
        tp: Tensor-parallel size.
        dp: Number of data-parallel replicas.
        pp: Number of pipeline stages.
        micro_batch: Number of samples in a microbatch.
        placement: Type of each node, ``A`` or ``B``, as a string with one letter per node.
        partition: Number of layers of each stage. The embedding and the output layer (head) count
            as layers.
        out_of_memory: Whether the plan needs too much memory according to FASOP's rule.
    """

    tp: int
    dp: int
    pp: int
    micro_batch: int
    placement: str
    partition: tuple[int, ...] = ()
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class FasopRun(PlanInputs):
    """Inputs and results of one of FASOP's searches. The node types are ``A`` and ``B``.

    Attributes:
        name: Name of the search, such as ``gpt2XL-het``.
        global_batch: Number of samples in a step.
        plans: Plans that FASOP found, starting with the best plan.
    """

    name: str
    global_batch: int
    plans: tuple[FasopPlan, ...]

    def plan(self, one: FasopPlan) -> Plan:
        """Converts the FASOP plan ``one`` to a plan of this project."""
        free = {
            name: [i for i, node in enumerate(self.cluster.nodes) if node.name == name]
            for name in "AB"
        }
        order = [free[name].pop(0) for name in one.placement]
        return Plan(
            tp=one.tp,
            dp=one.dp,
            pp=one.pp,
            micro_batch=one.micro_batch,
            global_batch=self.global_batch,
            partition=one.partition,
            places=place_ranks(
                self.cluster, order, tp=one.tp, dp=one.dp, pp=one.pp, micro_batch=one.micro_batch
            ),
        )

    def searcher(self, options: SearchOptions) -> Searcher:
        """Returns an object of this project that searches plans for the same problem."""
        return Searcher(self, global_batch=self.global_batch, options=options)


class Fasop:
    """Published data set of FASOP, which is read from a folder.

    Args:
        folder: Folder that contains ``layer_times.csv`` and the other files of the data set.

    Raises:
        ConfigError: A file is missing or invalid.
    """

    def __init__(self, folder: Path) -> None:
        self._models: dict[str, Any] = read_json(folder / "models.json")["models"]
        self._clusters: dict[str, Any] = read_json(folder / "clusters.json")
        self._times = read_csv(folder / "layer_times.csv")
        self._scaling = read_csv(folder / "microbatch_scaling.csv")
        self._results = read_csv(folder / "results.csv")

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of FASOP's searches, except the Pareto run, which searches many clusters."""
        return tuple(name for name in self._clusters["runs"] if not name.endswith("pareto"))

    def run(self, name: str, counts: dict[str, int] | None = None) -> FasopRun:
        """Returns the inputs and results of one of FASOP's searches.

        Args:
            name: Name of the search.
            counts: Number of nodes of each type, keyed by type. By default, the numbers of the
                search are used.

        Raises:
            ConfigError: The data set does not contain a search with this name.
        """
        if name not in self._clusters["runs"]:
            raise ConfigError(
                f"FASOP has no run {name!r}; its runs are {', '.join(self._clusters['runs'])}"
            )
        told = self._clusters["runs"][name]
        nodes = counts or {key: int(value) for key, value in told["node_counts"].items()}
        plans = tuple(_plan(row) for row in self._results if row["run"] == name)
        return FasopRun(
            name=name,
            model=self.model(told["model"]),
            cluster=self._cluster(told["node_types"], nodes),
            profile=self.profile(told["model"]),
            global_batch=self._models[told["model"]]["global_batch_size"],
            plans=plans,
        )

    def model(self, name: str) -> Model:
        """Returns the model ``name`` with all layers of its profile, including the output layer."""
        told = self._models[name]
        rows = [(kind, count) for kind, count in told["layer_kinds"]]
        # A model with two embeddings has an encoder and a decoder, whose layers are separate.
        two = sum(kind == "embedding" for kind, _ in rows) == 2
        kinds: dict[str, LayerKind] = {}
        layers: list[str] = []
        half = ""
        for kind, count in rows:
            if two and kind == "embedding":
                half = "decoder" if half else "encoder"
            unique = f"{kind} of {half}" if kind == "embedding" and half else kind
            names = [unique] * count
            if two and kind != "embedding":
                # This layer also stands for the layers that follow the last layer of the encoder or
                # decoder.
                names[-1] = f"last {kind}"
            for one in names:
                kinds[one] = _kind(one, told, kind, half)
            layers += names
        table = float(told["hidden_size"] * told["vocab_size"])
        return Model(
            name=name,
            kinds=kinds,
            layers=tuple(layers),
            tokens_per_sample=told["sequence_length"],
            tied_parameters=0.0 if two else table,
            tied_layers=() if two else (0, len(layers) - 1),
            max_tp=told["attention_heads"],
            # FASOP assumes 18 bytes per parameter, of which 12 may be sharded, and reduces
            # gradients in fp16.
            precision=Precision(
                name="fp16", parameter_bytes=4, gradient_bytes=2, optimizer_bytes=12, reduce_bytes=2
            ),
        )

    def profile(self, name: str) -> Profile:
        """Returns the layer times of the model ``name``, where B takes twice as long as F."""
        scale = {
            (row["gpu"], row["layer_kind"], int(row["microbatch_size"])): float(
                row["time_multiplier"]
            )
            for row in self._scaling
            if row["model"] == name
        }
        layers = {}
        model = self.model(name)
        for row in self._times:
            if row["model"] != name:
                continue
            kind = model.layers[int(row["layer_index"])]
            gpu, tp, forward = row["gpu"], int(row["tp"]), float(row["forward_s"])
            for (where, base, micro_batch), factor in scale.items():
                if where == gpu and base == row["layer_kind"]:
                    layers[kind, gpu, tp, micro_batch] = LayerTimes(
                        forward_s=forward * factor,
                        backward_input_s=2 * forward * factor,
                        tp_included=True,
                    )
        return Profile(layers=layers, model=name)

    def _cluster(self, types: str, counts: dict[str, int]) -> Cluster:
        groups = []
        for told in self._clusters["node_types"][types]:
            count = counts.get(told["symbol"], 0)
            if count:
                groups.append(NodePool(type=_node(told), count=count))
        return Cluster(groups=tuple(groups), name=types)


def _node(told: dict[str, Any]) -> NodeType:
    """Converts ``told``, a node type in FASOP's format. Links within a node are not shared."""
    return NodeType(
        name=told["symbol"],
        gpu=told["gpu"],
        gpus=told["gpus_per_node"],
        memory_bytes=told["usable_memory_gib_per_gpu"] * _GIB,
        intra=LinkSpeed(bytes_per_s=told["intra_node_bits_per_s"] / 8, shared=False),
        network=LinkSpeed(bytes_per_s=told["inter_node_bits_per_s"] / 8),
        price_per_hour=told["price_usd_per_hour_per_node"],
    )


def _kind(name: str, told: dict[str, Any], layer: str, half: str) -> LayerKind:
    hidden, length = told["hidden_size"], told["sequence_length"]
    heads, vocabulary = told["attention_heads"], told["vocab_size"]
    tokens = float(hidden * length)
    if layer == "embedding":
        return LayerKind(
            name=name,
            parameters=hidden * vocabulary,
            output_elements=tokens,
            activation_bytes=tokens,
            group=half,
            counted=False,
        )
    if layer == "head":
        return LayerKind(
            name=name,
            parameters=hidden * vocabulary,
            output_elements=float(length * vocabulary),
            activation_bytes=4.0 * tokens + 4.0 * length * vocabulary,
            counted=False,
        )
    scores = 5.0 * heads * length * length
    return LayerKind(
        name=name,
        parameters=12.0 * hidden * hidden,
        replicated_parameters=0.0,
        output_elements=tokens,
        activation_bytes=24 * tokens + scores,
        replicated_activation_bytes=10 * tokens,
        attention_bytes=scores,
        input_bytes=2 * tokens,
        group=half,
    )


def _plan(row: dict[str, str]) -> FasopPlan:
    return FasopPlan(
        tp=int(row["tp"]),
        dp=int(row["dp"]),
        pp=int(row["pp"]),
        micro_batch=int(row["microbatch_size"]),
        placement=row["placement"],
        partition=parse_partition(row["partition"]),
        out_of_memory=row["oom"] == "True",
    )
