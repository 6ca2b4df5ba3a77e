"""What the planner of a job reads: a cluster file, profiles, or both; and nodes as it takes them.

A node that is slow, or has fewer processes than its type, is a kind of its own beside its type:
links are those of the type, durations are so many times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodeGroup, NodeType
from megatron.adaptive.planner.cluster_file import make_cluster
from megatron.adaptive.planner.files import read_file
from megatron.adaptive.planner.gpus import known_gpu
from megatron.adaptive.planner.profile import LayerTimes, Profile

__all__ = ["PLAN_WITH", "NodeKind", "cluster_of", "equal_nodes", "profile_of", "read_inputs"]

PLAN_WITH = "--plan-with"
_ANY_NUMBER = 1 << 20
# Without a cluster file, for links that the profile does not hold.
_WITHIN = LinkSpeed(bytes_per_s=10e9, latency_s=1e-5, shared=False)
_BETWEEN = LinkSpeed(bytes_per_s=1.25e9, latency_s=3e-5)


@dataclass(frozen=True)
class NodeKind:
    """Nodes that a plan takes for equal.

    Attributes:
        base: their type.
        gpus: processes of each.
        slowness: how many times as long as their type's their work takes.
    """

    base: NodeType
    gpus: int
    slowness: float

    @property
    def is_base(self) -> bool:
        """Whether they are as their type is."""
        return self.slowness == 1.0 and self.gpus == self.base.gpus

    @property
    def node(self) -> NodeType:
        """The type that stands for them in a plan."""
        if self.is_base:
            return self.base
        name = f"{self.base.name} x {self.gpus}"
        name += f" slow {self.slowness:.4g}" if self.slowness != 1.0 else ""
        return replace(self.base, name=name, gpu=self.gpu, gpus=self.gpus)

    @property
    def gpu(self) -> str:
        """The name that their durations go by."""
        gpu = self.base.gpu
        return gpu if self.slowness == 1.0 else f"{gpu} slow {self.slowness:.4g}"


def read_inputs(paths: Sequence[Path]) -> tuple[Cluster | None, dict[str, Any] | None]:
    """Read a cluster file, profiles, or both, told apart by what they hold.

    Returns:
        The cluster, and the profiles as one; ``None`` for what was not given.

    Raises:
        ConfigError: a file cannot be read or breaks a rule.
    """
    clusters: list[tuple[str, Any]] = []
    profiles: list[tuple[str, dict[str, Any]]] = []
    for path in paths:
        told = read_file(path, "cluster or profile")
        if isinstance(told, dict) and "layers" in told:
            profiles.append((str(path), profile_file.load(path)))
        elif isinstance(told, dict) and isinstance(told.get("nodes"), list):
            clusters.append((str(path), told))
        else:
            raise ConfigError(
                f"{PLAN_WITH} {path}: neither a cluster file, which lists nodes, nor a profile,"
                " which lists layers; see docs/planner.md"
            )
    if len(clusters) > 1:
        raise ConfigError(
            f"{PLAN_WITH}: {clusters[0][0]} and {clusters[1][0]} are cluster files: a job runs on"
            " one cluster; leave one out"
        )
    profile = None
    if profiles:
        profile = profile_file.merge(profiles) if len(profiles) > 1 else profiles[0][1]
    if not clusters:
        return None, profile
    memories = {} if profile is None else profile_file.measured_memory(profile)
    where, told = clusters[0]
    return make_cluster(told, where, memories), profile


def equal_nodes(told: Mapping[str, Any], where: str) -> Cluster:
    """Return a cluster of equal nodes, of as many processes as each may have.

    Args:
        told: a profile, which says of which part.
        where: the file.

    Raises:
        ConfigError: it is of several parts, or does not say their memory.
    """
    gpus = list(dict.fromkeys(row["gpu"] for row in told["layers"]))
    if len(gpus) > 1:
        raise ConfigError(
            f"{where}: it holds measurements of {', '.join(gpus)}: name a cluster file too, which"
            " says which node has which"
        )
    part = known_gpu(gpus[0])
    gpu = gpus[0] if part is None else part.name
    memory = profile_file.measured_memory(told).get(gpu)
    if memory is None and part is None:
        raise ConfigError(
            f"{where}: it does not say the memory of {gpu}: name a cluster file too, which does"
        )
    named = [name for name, facts in told.get("nodes", {}).items() if facts.get("gpu") == gpus[0]]
    node = NodeType(
        name=named[0] if named else gpu,
        gpu=gpu,
        gpus=_ANY_NUMBER,
        memory_bytes=memory if memory is not None else part.memory_bytes if part else 0.0,
        intra=_WITHIN,
    )
    return Cluster(groups=(NodeGroup(type=node, count=1),), network=_BETWEEN)


def cluster_of(cluster: Cluster, counts: Mapping[NodeKind, int]) -> Cluster:
    """Return a cluster of so many nodes of each kind.

    Args:
        cluster: by the names of their types.
        counts: of each kind, in the order of the nodes.
    """
    groups = tuple(NodeGroup(type=kind.node, count=count) for kind, count in counts.items())
    return replace(cluster, groups=groups, links=_for_pairs(cluster.links, list(counts)))


def _for_pairs(links: Mapping[Any, LinkSpeed], kinds: Sequence[NodeKind]) -> dict[Any, LinkSpeed]:
    """Links between types by the names of the kinds of node that stand for these."""
    found = {}
    for one in kinds:
        for other in kinds:
            for pair in ((one, other), (other, one)):
                link = links.get((pair[0].base.name, pair[1].base.name))
                if link is not None:
                    found[one.node.name, other.node.name] = link
                    break
    return found


def profile_of(profile: Profile, kinds: Sequence[NodeKind]) -> Profile:
    """Return what is known of durations by the names of kinds of node.

    Args:
        profile: by the names of their types.
        kinds: of the nodes that are there.
    """
    layers = dict(profile.layers)
    tables = [dict(profile.optimizer_s_per_parameter), dict(profile.launch_s), dict(profile.step_s)]
    slow: dict[str, tuple[str, float]] = {}
    for kind in kinds:
        if kind.slowness == 1.0 or kind.gpu in slow:
            continue
        slow[kind.gpu] = kind.base.gpu, kind.slowness
        for (name, gpu, tp, size), takes in profile.layers.items():
            if gpu == kind.base.gpu:
                layers[name, kind.gpu, tp, size] = _times(takes, kind.slowness)
        for table in tables:
            if kind.base.gpu in table:
                table[kind.gpu] = table[kind.base.gpu] * kind.slowness
    estimator = profile.estimator

    def estimate(name: str, gpu: str, tp: int, size: int) -> LayerTimes:
        assert estimator is not None
        base, slowness = slow.get(gpu, (gpu, 1.0))
        return _times(estimator(name, base, tp, size), slowness)

    names = {kind.node.name: kind.base.name for kind in kinds}
    return replace(
        profile,
        layers=layers,
        links=_for_pairs(profile.links, kinds),
        intra_links={
            new: profile.intra_links[old]
            for new, old in names.items()
            if old in profile.intra_links
        },
        all_reduce={
            (new, ranks): link
            for new, old in names.items()
            for (name, ranks), link in profile.all_reduce.items()
            if name == old
        },
        optimizer_s_per_parameter=tables[0],
        launch_s=tables[1],
        step_s=tables[2],
        estimator=None if estimator is None else estimate,
    )


def _times(takes: LayerTimes, slowness: float) -> LayerTimes:
    return replace(
        takes,
        forward_s=takes.forward_s * slowness,
        backward_input_s=takes.backward_input_s * slowness,
        backward_weight_s=takes.backward_weight_s * slowness,
        launch_s=takes.launch_s * slowness,
    )
