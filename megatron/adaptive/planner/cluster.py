"""What the planner knows of the machines: types of nodes, how many, and the links between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.adaptive.errors import ConfigError

__all__ = ["Cluster", "LinkSpeed", "NodeGroup", "NodeType"]


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """How long messages take on a link, in one direction.

    Attributes:
        bytes_per_s: of large messages, for all pairs together where they share the link, else for
            each.
        latency_s: of an empty message.
        shared: whether simultaneous pairs of sender and receiver divide the bandwidth, as on the
            network card of a node; GPUs on a switch of their own do not.
        sizes: measured ``(message bytes, bytes per second)``, ascending; between them the bandwidth
            is interpolated over the logarithm of the size, outside them it is that of the nearest.
            Empty: ``bytes_per_s`` for all sizes.
        by_pairs: links measured with so many simultaneous pairs; for others the nearest smaller
            number's bandwidth is divided as ``shared`` says.

    Raises:
        ConfigError: a bandwidth that is not positive, a latency that is negative.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = True
    sizes: tuple[tuple[float, float], ...] = ()
    by_pairs: tuple[tuple[int, LinkSpeed], ...] = ()

    def __post_init__(self) -> None:
        for value in (self.bytes_per_s, *(speed for _, speed in self.sizes)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"bandwidth is {value:g} bytes/s: it must be above 0 and finite")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ConfigError(f"latency is {self.latency_s:g} s: it must not be negative")
        if any(a[0] >= b[0] for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ConfigError("bandwidth by size: sizes must ascend, each given once")

    def bandwidth(self, message_bytes: float, pairs: int = 1) -> float:
        """Bytes per second that one pair gets.

        Args:
            message_bytes: of each pair.
            pairs: how many send at the same time.
        """
        known = [one for one in self.by_pairs if one[0] <= pairs]
        if known:
            count, link = max(known, key=lambda one: one[0])
            whole = link._curve(message_bytes)
            # What was measured with several pairs is what all of them got together.
            return whole / pairs if self.shared else whole / count
        return self._curve(message_bytes) / (pairs if self.shared else 1)

    def seconds(self, message_bytes: float, pairs: int = 1) -> float:
        """From the start of a message to its arrival; 0 for no message.

        Args:
            message_bytes: of each pair.
            pairs: how many send at the same time.
        """
        if message_bytes <= 0:
            return 0.0
        return self.latency_s + message_bytes / self.bandwidth(message_bytes, pairs)

    def _curve(self, message_bytes: float) -> float:
        if not self.sizes:
            return self.bytes_per_s
        at = bisect_left(self.sizes, (message_bytes, 0.0))
        if at == 0:
            return self.sizes[0][1]
        if at == len(self.sizes):
            return self.sizes[-1][1]
        (small, slow), (large, fast) = self.sizes[at - 1], self.sizes[at]
        part = math.log(message_bytes / small) / math.log(large / small)
        return slow + (fast - slow) * part


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """Nodes that are alike.

    Attributes:
        name: unique within a cluster.
        gpu: name of its GPU, as in profiles and in the table of GPUs.
        gpus: of one node.
        memory_bytes: usable memory of each GPU.
        intra: link between two GPUs of the node.
        network: what the node's way out gives; None for the cluster's default.
        price_per_hour: of the whole node, in the currency of the user.
        zone: nodes of different zones are linked by the cluster's link between zones, if it has
            one.
    """

    name: str
    gpu: str
    gpus: int
    memory_bytes: float
    intra: LinkSpeed
    network: LinkSpeed | None = None
    price_per_hour: float = 0.0
    zone: str = ""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"node type {self.name}: {self.gpus} GPUs: it needs at least one")
        if not (math.isfinite(self.memory_bytes) and self.memory_bytes > 0):
            raise ConfigError(
                f"node type {self.name}: memory is {self.memory_bytes:g} bytes per GPU:"
                " it must be above 0"
            )
        if not (math.isfinite(self.price_per_hour) and self.price_per_hour >= 0):
            raise ConfigError(
                f"node type {self.name}: price is {self.price_per_hour:g} per hour:"
                " it must not be negative"
            )


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """So many nodes of one type.

    Attributes:
        type: of all of them.
        count: how many.
        hosts: their names where those are known; a part of a cluster keeps all of them.
    """

    type: NodeType
    count: int
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"node type {self.type.name}: {self.count} nodes: give at least one")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes at hand. Nodes are numbered from 0 in the order of the groups.

    Attributes:
        groups: nodes by type, each type once.
        network: link between two nodes of which nothing else is said; None where every type has
            its own.
        links: links that differ, by the names of both types in either order.
        between_zones: link between nodes of different zones; None where zones do not matter.
        name: for people.

    Raises:
        ConfigError: no nodes, a type twice, or two types of which no link is known.
    """

    groups: tuple[NodeGroup, ...]
    network: LinkSpeed | None = None
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)
    between_zones: LinkSpeed | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("cluster: it has no nodes: give at least one node type with a count")
        names = [group.type.name for group in self.groups]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"cluster: node type {name!r} is given twice: merge the two")
        for pair in self.links:
            for name in pair:
                if name not in names:
                    raise ConfigError(
                        f"cluster: link between {' and '.join(pair)}: no node type {name!r};"
                        f" types are {', '.join(names)}"
                    )
        if len(self.nodes) > 1:
            for i, one in enumerate(self.types):
                for other in self.types[i:]:
                    self.link_of_types(one, other)

    @property
    def types(self) -> tuple[NodeType, ...]:
        """Every node type, in order."""
        return tuple(group.type for group in self.groups)

    @cached_property
    def nodes(self) -> tuple[NodeType, ...]:
        """The type of every node."""
        return tuple(group.type for group in self.groups for _ in range(group.count))

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return sum(group.count * group.type.gpus for group in self.groups)

    @property
    def price_per_hour(self) -> float:
        """Of all nodes."""
        return sum(group.count * group.type.price_per_hour for group in self.groups)

    def link(self, one: int, other: int) -> LinkSpeed:
        """The link between the GPUs of two nodes, or of one node."""
        if one == other:
            return self.nodes[one].intra
        return self.link_of_types(self.nodes[one], self.nodes[other])

    def link_of_types(self, one: NodeType, other: NodeType) -> LinkSpeed:
        """The link between two different nodes of these types.

        Raises:
            ConfigError: none is known.
        """
        for pair in ((one.name, other.name), (other.name, one.name)):
            if pair in self.links:
                return self.links[pair]
        if one.zone != other.zone and self.between_zones is not None:
            return self.between_zones
        found = [node.network or self.network for node in (one, other)]
        if found[0] is None or found[1] is None:
            raise ConfigError(
                f"cluster: no link is known between {one.name} and {other.name}: give the cluster,"
                " both types or this pair of types a network"
            )
        return min((link for link in found if link is not None), key=lambda link: link.bytes_per_s)

    def part(self, counts: Mapping[str, int]) -> Cluster:
        """The same cluster with other numbers of nodes; types with none are left out.

        Args:
            counts: nodes of each type by name; types not named have none.
        """
        groups = tuple(
            replace(group, count=counts[group.type.name])
            for group in self.groups
            if counts.get(group.type.name, 0) > 0
        )
        names = {group.type.name for group in groups}
        links = {pair: link for pair, link in self.links.items() if names.issuperset(pair)}
        return replace(self, groups=groups, links=links)
