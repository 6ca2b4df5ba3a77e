"""Describes clusters (node types, GPUs and links) and reads cluster files.

GPU properties that a cluster file omits are taken from this package's table of GPUs
(``data/gpus.json``). The file format is defined by the schema ``cluster`` in
``config.schema_files`` and described in ``docs/planner.md``. The module ``discover_cluster``
creates such files.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from megatron.adaptive.config.schema_files import check_form, read_file
from megatron.adaptive.errors import ConfigError

MEMORY_MARGIN = 0.1
"""Fraction of each GPU's memory that plans leave free. In measurements, the actual peak memory
exceeded the prediction by at most this fraction (``memory`` in ``studies/planner.py``)."""
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU model and its properties according to its data sheet.

    Attributes:
        name: Name of the GPU in cluster files.
        memory_bytes: Memory size in bytes. A GB on the data sheet counts as 10^9 bytes.
        memory_bytes_per_s: Memory bandwidth in bytes per second.
        flops: Peak FLOP/s of dense matrix multiplications, keyed by dtype: ``bf16``, ``fp16``,
            ``tf32`` or ``fp32``. Unsupported dtypes are omitted.
        source: Title of the data sheet from which the values are taken.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    source: str

    def peak(self, precision: str) -> float:
        """Returns the peak FLOP/s of matrix multiplications with the dtype ``precision``.

        Args:
            precision: Dtype, such as ``bf16``.

        Raises:
            ConfigError: The GPU does not support the dtype.
        """
        if precision not in self.flops:
            types = ", ".join(kind for kind in self.flops if kind != "tf32")
            raise ConfigError(
                f"GPU {self.name} does not support {precision}, only {types}; train with"
                f" --{next(iter(self.flops))}, or exclude its nodes"
            )
        return self.flops[precision]


@functools.cache
def _table() -> tuple[Mapping[str, Gpu], Mapping[str, str]]:
    """Returns all known GPUs, keyed by name, and a dict that maps accepted spellings to names."""
    file = resources.files("megatron.adaptive.planner") / "data" / "gpus.json"
    parts, names = {}, {}
    for row in json.loads(file.read_text(encoding="utf-8"))["gpus"]:
        aliases = row.pop("aliases")
        gpu = Gpu(**row)
        parts[gpu.name] = gpu
        for alias in (gpu.name, *aliases):
            names[plain_name(alias)] = gpu.name
    return parts, names


def plain_name(name: str) -> str:
    """Returns ``name`` in lower case, without spaces, hyphens and brand names of GPUs."""
    return _NOISE.sub("", name.lower())


def gpu_names() -> tuple[str, ...]:
    """Returns the names of all GPUs in this package's table."""
    return tuple(_table()[0])


def known_gpu(name: str) -> Gpu | None:
    """Returns the GPU that a cluster file or a driver calls ``name``, or ``None`` if unknown."""
    parts, names = _table()
    listed_name = names.get(plain_name(name))
    return None if listed_name is None else parts[listed_name]


def find_gpu(name: str, where: str) -> Gpu:
    """Returns the GPU called ``name`` from this package's table.

    Args:
        name: Name of the GPU. Case, spaces and the vendor's name are ignored.
        where: File or flag that contains the name, for the error message.

    Raises:
        ConfigError: The table contains no GPU with this name.
    """
    gpu = known_gpu(name)
    if gpu is None:
        nearest = difflib.get_close_matches(name.lower(), gpu_names(), n=1, cutoff=0.4)
        names = ", ".join(gpu_names())
        hint = f"the nearest is {nearest[0]}" if nearest else f"known names are {names}"
        raise ConfigError(
            f"{where}: GPU {name!r} is neither in the profile nor in the built-in table of GPUs"
            f' ({hint}); correct the name, or measure the GPU with "python -m megatron.adaptive'
            ' profile"'
        )
    return gpu


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Speed of a link in one direction.

    Attributes:
        bytes_per_s: Bandwidth for large messages in bytes per second: the total of all pairs of
            GPUs if ``shared`` is true, otherwise the bandwidth of each pair.
        latency_s: Time in seconds to send an empty message.
        shared: Whether pairs of GPUs that send at the same time share the bandwidth. For example,
            they share the network card of a node, but not a switch between the GPUs of a node.
        sizes: Measured pairs of message size in bytes and bandwidth in bytes per second, in
            ascending order. Between two sizes, the bandwidth is interpolated over the logarithm of
            the size. Outside of the measured range, the nearest size is used. Empty if
            ``bytes_per_s`` applies to all sizes.
        by_pairs: Speeds of the link that were measured while several pairs sent at the same time.
            Each entry contains the number of pairs and the speed. For a number of pairs without an
            entry, the entry with the next smaller number is used.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = True
    sizes: tuple[tuple[float, float], ...] = ()
    by_pairs: tuple[tuple[int, LinkSpeed], ...] = ()

    def bandwidth(self, message_bytes: float, pairs: int = 1) -> float:
        """Returns the bandwidth of one pair of sender and receiver, in bytes per second.

        Args:
            message_bytes: Size in bytes of each pair's message.
            pairs: Number of pairs that send at the same time.
        """
        measured = [entry for entry in self.by_pairs if entry[0] <= pairs]
        if measured:
            count, link = max(measured, key=lambda entry: entry[0])
            whole = link._curve(message_bytes)
            # A speed measured with several pairs is the total bandwidth of these pairs. If the link
            # is shared, ``pairs`` pairs divide this total. Otherwise, each pair keeps the share
            # that it had in the measurement.
            return whole / pairs if self.shared else whole / count
        return self._curve(message_bytes) / (pairs if self.shared else 1)

    def total_bandwidth(self, message_bytes: float) -> float:
        """Returns the highest bandwidth of all pairs together, in bytes per second.

        Args:
            message_bytes: Size in bytes of each pair's message.
        """
        links = (self, *(link for _, link in self.by_pairs))
        return max(link._curve(message_bytes) for link in links)

    def seconds(self, message_bytes: float, pairs: int = 1) -> float:
        """Returns the time in seconds to send a message, or 0 for an empty message.

        Args:
            message_bytes: Size in bytes of each pair's message.
            pairs: Number of pairs that send at the same time.
        """
        if message_bytes <= 0:
            return 0.0
        return self.latency_s + message_bytes / self.bandwidth(message_bytes, pairs)

    def _curve(self, message_bytes: float) -> float:
        """Returns the bandwidth in bytes per second for messages of ``message_bytes`` bytes."""
        if not self.sizes:
            return self.bytes_per_s
        index = bisect_left(self.sizes, (message_bytes, 0.0))
        if index == 0:
            return self.sizes[0][1]
        if index == len(self.sizes):
            return self.sizes[-1][1]
        (small, slow), (large, fast) = self.sizes[index - 1], self.sizes[index]
        part = math.log(message_bytes / small) / math.log(large / small)
        return slow + (fast - slow) * part


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """Type of a node: its GPUs, their memory, links and price.

    Attributes:
        name: Name of the type, unique within a cluster.
        gpu: Name of the GPU model, as in profiles and in this package's table of GPUs.
        gpus: Number of GPUs per node.
        memory_bytes: Usable memory of each GPU in bytes.
        intra: Speed of the link between two GPUs of the node.
        islands: Groups of neighbouring GPUs with a fast link. Each entry contains the number of
            GPUs in a group and the link. The entries are sorted by number of GPUs: parts of a node
            come first, then groups of several nodes, such as the nodes on one switch.
        network: Speed of the node's network link, or ``None`` for the cluster's default.
        price_per_hour: Price of the whole node per hour, in the user's currency.
        zone: Name of the node's availability zone. The cluster may define a separate link between
            nodes in different zones.
        slowness: Factor by which all durations from the profile are multiplied on this node, or 1
            if the node is as fast as the nodes in the profile.
        like: Name of another node type whose entries in the cluster's tables of links also apply to
            this type. If empty, this type has entries of its own.
    """

    name: str
    gpu: str
    gpus: int
    memory_bytes: float
    intra: LinkSpeed
    islands: tuple[tuple[int, LinkSpeed], ...] = ()
    network: LinkSpeed | None = None
    price_per_hour: float = 0.0
    zone: str = ""
    slowness: float = 1.0
    like: str = ""

    @property
    def link_name(self) -> str:
        """Name of this node type in tables of links."""
        return self.like or self.name

    def island(self, gpus: int) -> tuple[int, LinkSpeed] | None:
        """Returns the smallest island that can be divided evenly into groups of ``gpus`` GPUs.

        An island is a group of GPUs with a fast link. If ``gpus`` GPUs fit on one node, only
        islands within a node are considered, otherwise only islands of several nodes.

        Returns:
            Number of GPUs in the island and its link speed, or ``None`` if no island qualifies.
        """
        is_inner = gpus <= self.gpus
        for size, link in self.islands if gpus else ():
            if size % gpus == 0 and (size < self.gpus) == is_inner:
                return size, link
        return None


def link_in(
    links: Mapping[tuple[str, str], LinkSpeed], node_type: NodeType, other: NodeType
) -> LinkSpeed | None:
    """Returns the link between two node types from ``links``, or ``None`` if it is not listed."""
    names = node_type.link_name, other.link_name
    return links.get(names) or links.get(names[::-1])


@dataclass(frozen=True, kw_only=True)
class NodePool:
    """All nodes of one type in a cluster.

    Attributes:
        type: Type of all these nodes.
        count: Number of nodes.
        hosts: Host names of the nodes, if known. All names are kept even if ``count`` is reduced.
    """

    type: NodeType
    count: int
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes that a job may use.

    Nodes have indices that start at 0 and follow the order of the groups.

    Attributes:
        groups: Nodes by type. Each type occurs once.
        network: Default link between two nodes, or ``None`` if the cluster has no default.
        links: Links that differ from the default. Each key contains the names of both node types,
            in any order.
        between_zones: Link between nodes in different zones, or ``None`` if links do not depend on
            zones.
        name: Name of the cluster, shown to the user.

    Raises:
        ConfigError: A node type occurs twice, the link between two types is unknown, or a link
            contains an unknown type.
    """

    groups: tuple[NodePool, ...]
    network: LinkSpeed | None = None
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)
    between_zones: LinkSpeed | None = None
    name: str = ""

    def __post_init__(self) -> None:
        names = [group.type.name for group in self.groups]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"cluster: node type {name!r} occurs twice; merge the entries")
        known_names = {*names, *(node.link_name for node in self.types)}
        for pair in self.links:
            for name in pair:
                if name not in known_names:
                    raise ConfigError(
                        f"cluster: the link between {' and '.join(pair)} refers to the unknown node"
                        f" type {name!r}; the node types are {', '.join(names)}"
                    )
        if len(self.nodes) > 1:
            for i, node_type in enumerate(self.types):
                for other in self.types[i:]:
                    self.link_of_types(node_type, other)

    @property
    def types(self) -> tuple[NodeType, ...]:
        """All node types, in the order of the groups."""
        return tuple(group.type for group in self.groups)

    @cached_property
    def nodes(self) -> tuple[NodeType, ...]:
        """Type of every node, in the order of the nodes' indices."""
        return tuple(group.type for group in self.groups for _ in range(group.count))

    @property
    def num_gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return sum(group.count * group.type.gpus for group in self.groups)

    @property
    def has_known_gpus(self) -> bool:
        """Whether the table of GPUs contains the GPUs of all nodes."""
        return all(known_gpu(node.gpu) is not None for node in self.types)

    def with_memory(self, times: float = 1.0, more_bytes: float = 0.0) -> Cluster:
        """Returns a copy of the cluster with changed memory sizes of all GPUs.

        Args:
            times: Factor by which the memory size is multiplied.
            more_bytes: Number of bytes to add after the multiplication.
        """
        groups = tuple(
            replace(
                group,
                type=replace(group.type, memory_bytes=group.type.memory_bytes * times + more_bytes),
            )
            for group in self.groups
        )
        return replace(self, groups=groups)

    @cached_property
    def first(self) -> dict[str, int]:
        """Index of the first node of each type, keyed by type name."""
        counts = itertools.accumulate((group.count for group in self.groups), initial=0)
        return {node.name: first for node, first in zip(self.types, counts, strict=False)}

    def link_of_types(self, node_type: NodeType, other: NodeType) -> LinkSpeed:
        """Returns the link between two different nodes with the types ``node_type`` and ``other``.

        Raises:
            ConfigError: The cluster has no link between the two types.
        """
        if (link := link_in(self.links, node_type, other)) is not None:
            return link
        if node_type.zone != other.zone and self.between_zones is not None:
            return self.between_zones
        networks = [node.network or self.network for node in (node_type, other)]
        if networks[0] is None or networks[1] is None:
            raise ConfigError(
                f"cluster: the speed between nodes of types {node_type.name} and {other.name} is"
                " missing; add the key network to the cluster or to both node types, or add a link"
                " between these types"
            )
        return min(networks[0], networks[1], key=lambda network: network.bytes_per_s)


def read_cluster(path: Path, memories: Mapping[str, float] | None = None) -> Cluster:
    """Reads a cluster file.

    Args:
        path: Path of the file, which is YAML, TOML or JSON.
        memories: Memory sizes of GPUs in bytes from a profile, keyed by GPU name. Used for node
            types without a memory size in the file.

    Raises:
        ConfigError: The file cannot be read, or a key is invalid.
    """
    return make_cluster(read_file(path, "cluster"), str(path), memories or {})


def make_cluster(document: Any, where: str, memories: Mapping[str, float]) -> Cluster:
    """Creates a cluster from the contents of a cluster file.

    Args:
        document: Contents of the file as parsed from YAML, TOML or JSON.
        where: Path of the file, for error messages.
        memories: Memory sizes of GPUs in bytes from a profile, keyed by GPU name. Used for node
            types without a memory size in ``document``.

    Raises:
        ConfigError: The contents are invalid.
    """
    document = check_form(document, "cluster", where)
    groups = []
    hosts = set()
    for index, entry in enumerate(document["nodes"]):
        key = f"{where}: nodes[{index}]"
        names = entry.get("hosts", [])
        node = _node_type(entry, key, memories)
        groups.append(NodePool(type=node, count=entry["count"], hosts=tuple(names)))
        if names and len(names) != entry["count"]:
            raise ConfigError(
                f"{key}.hosts lists {len(names)} hosts, but count is {entry['count']}; make the "
                "numbers equal"
            )
        for host in names:
            if host in hosts:
                raise ConfigError(f"{key}.hosts contains {host} twice; list each host once")
            hosts.add(host)
    links: dict[tuple[str, str], LinkSpeed] = {}
    for index, entry in enumerate(document.get("links", [])):
        key = f"{where}: links[{index}]"
        first, second = entry["between"]
        if (first, second) in links or (second, first) in links:
            raise ConfigError(f"{key} is a second link of {first} and {second}; keep only one")
        links[first, second] = _speed(entry, key)
    for group in groups:
        for size, link in group.type.islands:
            # An island that contains all nodes of a type also contains every pair of these nodes,
            # so the pairs use the island's link.
            if size >= group.count * group.type.gpus:
                links.setdefault((group.type.name, group.type.name), link)
    try:
        return Cluster(
            name=document.get("name", ""),
            groups=tuple(groups),
            network=_speed(document.get("network"), f"{where}: network"),
            links=links,
            between_zones=_speed(document.get("between_zones"), f"{where}: between_zones"),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _node_type(entry: Mapping[str, Any], key: str, memories: Mapping[str, float]) -> NodeType:
    """Creates a node type from ``entry``, which describes it in a cluster file.

    ``key`` is the name of the entry in error messages. ``memories`` contains the memory sizes of
    GPUs from a profile, in bytes.
    """
    gpu = known_gpu(entry["gpu"])
    name = entry["gpu"] if gpu is None else gpu.name
    if "memory" in entry:
        memory = entry["memory"]
    elif name in memories:
        memory = memories[name]
    elif gpu is not None:
        memory = gpu.memory_bytes
    else:
        raise ConfigError(
            f"{key}.memory is required, because GPU {name!r} is neither in the profile nor in the"
            " built-in table of GPUs; set the memory of each GPU, such as 40 GB"
        )
    return NodeType(
        name=entry.get("type", name),
        gpu=name,
        gpus=entry["gpus_per_node"],
        memory_bytes=memory,
        intra=_speed(entry["link"], f"{key}.link", shared=False),
        islands=_islands(entry, key),
        network=_speed(entry.get("network"), f"{key}.network"),
        price_per_hour=float(entry.get("price_per_hour", 0.0)),
        zone=entry.get("zone", ""),
    )


def _islands(node: Mapping[str, Any], key: str) -> tuple[tuple[int, LinkSpeed], ...]:
    """Returns the islands (groups of GPUs with a fast link) in the file entry ``node``."""
    islands: list[tuple[int, LinkSpeed]] = []
    node_gpus = node["gpus_per_node"]
    before = 1
    for index, entry in enumerate(node.get("islands", ())):
        island_key = f"{key}.islands[{index}]"
        is_inner = "gpus" in entry
        if is_inner == ("nodes" in entry):
            raise ConfigError(
                f"{island_key} requires either gpus (for a part of a node) or nodes (for a group of"
                " nodes); set exactly one of them"
            )
        size = entry["gpus"] if is_inner else entry["nodes"] * node_gpus
        if (
            size <= before
            or size % before
            or (is_inner and (size == node_gpus or node_gpus % size))
        ):
            raise ConfigError(
                f"{island_key} has {size} GPUs; use a larger multiple of the previous island's "
                f"GPUs, and for a part of a node, a divisor of the node's {node_gpus} GPUs"
            )
        link = {name: value for name, value in entry.items() if name not in ("gpus", "nodes")}
        islands.append((size, _speed(link, island_key, shared=not is_inner)))
        before = size if is_inner else max(size, node_gpus)
    return tuple(islands)


def _speed(entry: Any, key: str, *, shared: bool = True) -> Any:
    """Creates a link from ``entry``, which describes the link in a cluster file.

    Args:
        entry: Entry with bandwidth and latency. If it is ``None``, the function returns ``None``.
        key: Name of the entry in error messages.
        shared: Whether pairs of GPUs share the link's bandwidth if the entry does not specify this.
    """
    if entry is None:
        return None
    rails = entry.get("rails", 1)
    share = 1 / entry.get("oversubscription", 1.0)
    if rails > 1 or share < 1:
        # A rail is a separate network. One pair of GPUs uses one rail, two pairs use two rails, and
        # so on until all rails are used. The total bandwidth therefore grows with the number of
        # pairs.
        speed = entry["bandwidth"] * share
        expanded = ("rails", "oversubscription")
        entry = {name: value for name, value in entry.items() if name not in expanded}
        if "sizes" in entry or "by_pairs" in entry:
            raise ConfigError(
                f"{key} combines measured speeds (sizes, by_pairs) with rails or oversubscription,"
                " which would change them; remove one or the other"
            )
        more = [{"pairs": count, "bandwidth": count * speed} for count in range(2, rails + 1)]
        entry |= {"bandwidth": speed, "by_pairs": more}
    sizes = tuple((size, speed) for size, speed in entry.get("sizes", ()))
    if any(a[0] >= b[0] for a, b in itertools.pairwise(sizes)):
        raise ConfigError(
            f"{key}.sizes must be strictly ascending; sort the sizes and remove duplicates"
        )
    return LinkSpeed(
        bytes_per_s=entry["bandwidth"],
        latency_s=entry.get("latency", 0.0),
        shared=entry.get("shared", shared),
        sizes=sizes,
        by_pairs=tuple(
            (more["pairs"], _speed(more, f"{key}.by_pairs[{index}]", shared=shared))
            for index, more in enumerate(entry.get("by_pairs", ()))
        ),
    )
