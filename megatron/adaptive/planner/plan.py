"""A plan, and what is predicted of it. The plan file belongs to ``config.plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster

__all__ = [
    "Limit",
    "Plan",
    "Prediction",
    "Replica",
    "StageMemory",
    "StagePlace",
    "StagePrediction",
    "place_ranks",
]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The GPUs that one data-parallel replica of a stage runs on: one node's, side by side.

    Attributes:
        node: number of the node in the cluster.
        gpu: the first of its GPUs, counted within the node.
        tp: how many, the tensor-parallel width.
    """

    node: int
    gpu: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """Where one pipeline rank lies.

    Attributes:
        replicas: in the order of data-parallel ranks.
        micro_batch: samples of one microbatch on each replica. Where numbers of replicas differ,
            it is the same everywhere if microbatches are dealt out to replicas (see ``dealt``),
            else ``micro_batch * len(replicas)`` is.
    """

    replicas: tuple[Replica, ...]
    micro_batch: int

    @property
    def num_gpus(self) -> int:
        """Of all replicas."""
        return sum(replica.tp for replica in self.replicas)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to run a model on a cluster.

    Attributes:
        tp: tensor-parallel width; the widest where stages differ.
        dp: data-parallel replicas; of the first stage where stages differ.
        pp: pipeline ranks.
        chunks: model chunks of each pipeline rank.
        micro_batch: samples of one microbatch of one replica; of the first stage.
        global_batch: samples of one step.
        schedule: name as for ``--pipeline-schedule``.
        partition: layers of each of ``pp * chunks`` stages in pipeline order, embedding and head
            included.
        recompute: one of ``model.RECOMPUTE``.
        distributed_optimizer: whether replicas divide the optimizer state.
        overlap_reduce: whether gradients are reduced while backwards still run.
        sequence_parallel: whether activations outside of attention and MLP are divided by ``tp``.
        places: where each pipeline rank lies, ``[pp]``.
    """

    tp: int
    dp: int
    pp: int
    micro_batch: int
    global_batch: int
    partition: tuple[int, ...]
    places: tuple[StagePlace, ...]
    chunks: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    distributed_optimizer: bool = False
    overlap_reduce: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.global_batch % (self.dp * self.micro_batch):
            raise ConfigError(
                f"global batch of {self.global_batch} samples: {self.dp} replicas with microbatches"
                f" of {self.micro_batch} do not divide it"
            )
        if len(self.places) != self.pp:
            raise ConfigError(f"{len(self.places)} places for {self.pp} pipeline ranks: give each")
        if len(self.partition) != self.pp * self.chunks:
            raise ConfigError(
                f"partition of {len(self.partition)} stages:"
                f" {self.pp} pipeline ranks with {self.chunks} chunks have {self.pp * self.chunks}"
            )

    @property
    def num_microbatches(self) -> int:
        """Of each replica in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def num_gpus(self) -> int:
        """That the plan uses."""
        return sum(place.num_gpus for place in self.places)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes in the order in which the ranks meet them."""
        seen = [replica.node for place in self.places for replica in place.replicas]
        return tuple(dict.fromkeys(seen))

    @property
    def uniform(self) -> bool:
        """Whether all stages have the same widths, as the trainer needs it."""
        return all(
            len(place.replicas) == self.dp and all(one.tp == self.tp for one in place.replicas)
            for place in self.places
        )


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on the fullest GPU of a pipeline rank.

    Attributes:
        parameter_bytes: weights.
        gradient_bytes: their gradients.
        optimizer_bytes: optimizer state and master weights.
        activation_bytes: activations in flight at the worst moment of the schedule.
        workspace_bytes: buffers and the margin for what nobody counts.
        limit_bytes: usable memory of that GPU.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    workspace_bytes: float
    limit_bytes: float

    @property
    def total_bytes(self) -> float:
        """All parts."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.workspace_bytes
        )

    @property
    def missing_bytes(self) -> float:
        """How much the GPU lacks; 0 where it fits."""
        return max(0.0, self.total_bytes - self.limit_bytes)


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One pipeline rank.

    Attributes:
        forward_s: of one microbatch, over its chunks.
        backward_s: of one microbatch, weight gradients and recompute included.
        send_s: one forward transfer to the next stage.
        tp_s: part of ``forward_s`` and ``backward_s`` that is tensor-parallel communication; 0
            where the profile contains it.
        reduce_s: its gradient reduction between replicas, that part which is not hidden.
        optimizer_s: its optimizer step.
        bubble: idle part of the pipeline's time.
        memory: on its fullest GPU.
    """

    forward_s: float
    backward_s: float
    send_s: float
    tp_s: float
    reduce_s: float
    optimizer_s: float
    bubble: float
    memory: StageMemory


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What holds a plan back.

    Attributes:
        what: ``memory``, ``compute``, ``transfer``, ``reduction``, ``bubble`` and the like.
        stage: pipeline rank, or -1 for none in particular.
        text: one sentence for people.
    """

    what: str
    stage: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan is expected to take.

    Attributes:
        seconds: of one step.
        parts: seconds by name that add up to ``seconds``: ``compute``, ``bubble``, ``transfer``,
            ``tp``, ``reduction``, ``embedding``, ``optimizer``; where the profile knows of them
            also ``jitter``, and ``beside``, what a step does beside these.
        stages: one for each pipeline rank.
        tokens_per_s: of the whole job.
        price_per_hour: of the nodes that are paid.
        estimated: whether a number of the profile was estimated, not measured.
        binding: what holds it back most.
    """

    seconds: float
    parts: Mapping[str, float]
    stages: tuple[StagePrediction, ...]
    tokens_per_s: float
    price_per_hour: float
    estimated: bool = False
    binding: Limit | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def fits(self) -> bool:
        """Whether every stage has the memory that it needs."""
        return all(stage.memory.missing_bytes == 0 for stage in self.stages)

    @property
    def price_per_step(self) -> float:
        """Price of one step."""
        return self.price_per_hour * self.seconds / 3600

    @property
    def peak_bytes(self) -> float:
        """On the fullest GPU of all."""
        return max(stage.memory.total_bytes for stage in self.stages)


def place_ranks(
    cluster: Cluster, order: Sequence[int], *, tp: int, dp: int, pp: int, micro_batch: int
) -> tuple[StagePlace, ...]:
    """Lay equal stages on nodes as the ranks of a run are numbered.

    Rank = (pipeline rank * dp + replica) * tp + its place in the layer; nodes one after the other.

    Args:
        cluster: the nodes.
        order: numbers of its nodes in the order of the ranks.
        tp: tensor-parallel width.
        dp: replicas.
        pp: pipeline ranks.
        micro_batch: samples of a microbatch.

    Raises:
        ConfigError: too few GPUs, or a tensor-parallel group would cross two nodes.
    """
    slots = [(node, gpu) for node in order for gpu in range(cluster.nodes[node].gpus)]
    if len(slots) < tp * dp * pp:
        raise ConfigError(
            f"tp {tp} x dp {dp} x pp {pp} needs {tp * dp * pp} GPUs, these nodes have {len(slots)}"
        )
    places = []
    for stage in range(pp):
        replicas = []
        for copy in range(dp):
            first = (stage * dp + copy) * tp
            node, gpu = slots[first]
            if slots[first + tp - 1][0] != node:
                raise ConfigError(
                    f"tp {tp}: a tensor-parallel group would cross nodes {node} and"
                    f" {slots[first + tp - 1][0]}: choose a tp that divides the GPUs of every node"
                )
            replicas.append(Replica(node=node, gpu=gpu, tp=tp))
        places.append(StagePlace(replicas=tuple(replicas), micro_batch=micro_batch))
    return tuple(places)
