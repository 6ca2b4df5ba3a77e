"""Describes the machines that the planner plans for, and reads cluster files.

A cluster is nodes by type, how many of each, and the links between them. What a cluster file leaves
out of a GPU comes from the shipped table of GPUs (``data/gpus.json``). The form of the file is
``cluster`` of ``config.schema_files``; ``docs/planner.md`` describes it. :func:`describe_cluster`
makes such a file from what Slurm, ``nvidia-smi`` and ``doctor`` print.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.config.schema_files import check_form, read_file
from megatron.adaptive.errors import ConfigError

MEMORY_MARGIN = 0.1
"""Share of each GPU's memory that plans leave alone: predicted peaks lie so far below measured ones
at most (``studies/planner.py``, memory)."""
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One part as its data sheet describes it.

    Attributes:
        name: as cluster files write it.
        memory_bytes: size on the data sheet, 10^9 bytes to the GB.
        memory_bytes_per_s: bandwidth of its memory.
        flops: dense peak of matrix products by element type (``bf16``, ``fp16``, ``tf32``,
            ``fp32``), operations per second; types that it lacks are missing.
        source: the document.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    source: str

    def peak(self, precision: str) -> float:
        """Returns the operations per second of matrix products.

        Args:
            precision: ``fp32``, ``fp16`` or ``bf16``.

        Raises:
            ConfigError: the part has no such arithmetic.
        """
        if precision not in self.flops:
            types = ", ".join(kind for kind in self.flops if kind != "tf32")
            raise ConfigError(
                f"GPU {self.name} does not compute in {precision}, only in {types}: train with"
                f" --{next(iter(self.flops))}, or leave its nodes out"
            )
        return self.flops[precision]


@functools.cache
def _table() -> tuple[Mapping[str, Gpu], Mapping[str, str]]:
    """Returns the parts by name, and the name for every way to write it."""
    file = resources.files("megatron.adaptive.planner") / "data" / "gpus.json"
    parts, names = {}, {}
    for row in json.loads(file.read_text(encoding="utf-8"))["gpus"]:
        aliases = row.pop("aliases")
        gpu = Gpu(**row)
        parts[gpu.name] = gpu
        for alias in (gpu.name, *aliases):
            names[_plain(alias)] = gpu.name
    return parts, names


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())


def gpu_names() -> tuple[str, ...]:
    """Names of the parts in the table."""
    return tuple(_table()[0])


def known_gpu(name: str) -> Gpu | None:
    """Returns a part by its name, as cluster files or drivers write it, or ``None``."""
    parts, names = _table()
    found = names.get(_plain(name))
    return None if found is None else parts[found]


def find_gpu(name: str, where: str) -> Gpu:
    """Returns a part by its name.

    Args:
        name: case, spaces and the vendor's name do not matter.
        where: what names it, for the message.

    Raises:
        ConfigError: the table has no such part.
    """
    found = known_gpu(name)
    if found is None:
        nearest = difflib.get_close_matches(name.lower(), gpu_names(), n=1, cutoff=0.4)
        hint = f"the nearest is {nearest[0]}" if nearest else f"names are {', '.join(gpu_names())}"
        raise ConfigError(
            f"{where}: GPU {name!r} is neither in the profile nor in the table of GPUs: {hint};"
            " or measure it with python -m megatron.adaptive profile"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Speed of a link, in one direction.

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
    """

    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = True
    sizes: tuple[tuple[float, float], ...] = ()
    by_pairs: tuple[tuple[int, LinkSpeed], ...] = ()

    def bandwidth(self, message_bytes: float, pairs: int = 1) -> float:
        """Returns the bytes per second that one pair gets.

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
        """Returns the seconds from the start of a message to its arrival; 0 for no message.

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
        islands: GPUs that stand side by side and their link, ascending: parts of a node, as within
            its ``intra``, then several nodes, as on one switch.
        network: what the node's way out gives; None for the cluster's default.
        price_per_hour: of the whole node, in the currency of the user.
        zone: nodes of different zones are linked by the cluster's link between zones, if it has
            one.
        slowness: how many times as long as measured its work takes.
        like: type by whose name its links are known; its own name where empty.
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
        """Name of the type in tables of links."""
        return self.like or self.name

    def island(self, gpus: int) -> tuple[int, LinkSpeed] | None:
        """Returns the least island that is divided into groups of so many neighbouring GPUs.

        Groups up to a node are looked for in its parts, larger ones on its switches; None where
        groups of that size would lie across two islands.
        """
        inner = gpus <= self.gpus
        for size, link in self.islands if gpus else ():
            if size % gpus == 0 and (size < self.gpus) == inner:
                return size, link
        return None


def link_in(
    links: Mapping[tuple[str, str], LinkSpeed], one: NodeType, other: NodeType
) -> LinkSpeed | None:
    """Returns the link of two types in a table, by their names in either order."""
    names = one.link_name, other.link_name
    return links.get(names) or links.get(names[::-1])


@dataclass(frozen=True, kw_only=True)
class NodePool:
    """So many nodes of one type.

    Attributes:
        type: of all of them.
        count: how many.
        hosts: their names where those are known; a part of a cluster keeps all of them.
    """

    type: NodeType
    count: int
    hosts: tuple[str, ...] = ()


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
        ConfigError: a type twice, or two types of which no link is known.
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
                raise ConfigError(f"cluster: node type {name!r} is given twice: merge the two")
        known = {*names, *(node.link_name for node in self.types)}
        for pair in self.links:
            for name in pair:
                if name not in known:
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
        """GPUs of all nodes."""
        return sum(group.count * group.type.gpus for group in self.groups)

    @property
    def has_known_gpus(self) -> bool:
        """Whether the table of GPUs lists those of all nodes."""
        return all(known_gpu(node.gpu) is not None for node in self.types)

    def with_memory(self, times: float = 1.0, more_bytes: float = 0.0) -> Cluster:
        """Returns the cluster with so many times the memory of each GPU, and so much more."""
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
        """The first node of every type, by the type's name."""
        counts = itertools.accumulate((group.count for group in self.groups), initial=0)
        return {node.name: first for node, first in zip(self.types, counts, strict=False)}

    def link_of_types(self, one: NodeType, other: NodeType) -> LinkSpeed:
        """Returns the link between two different nodes of these types.

        Raises:
            ConfigError: none is known.
        """
        if (found := link_in(self.links, one, other)) is not None:
            return found
        if one.zone != other.zone and self.between_zones is not None:
            return self.between_zones
        ways = [node.network or self.network for node in (one, other)]
        if ways[0] is None or ways[1] is None:
            raise ConfigError(
                f"cluster: no link is known between {one.name} and {other.name}: give the cluster,"
                " both types or this pair of types a network"
            )
        return min((link for link in ways if link is not None), key=lambda link: link.bytes_per_s)


def read_cluster(path: Path, memories: Mapping[str, float] | None = None) -> Cluster:
    """Reads a cluster file.

    Args:
        path: YAML, TOML or JSON.
        memories: bytes of each GPU by its name, as a profile saw them, for node types of which the
            file does not say it.

    Raises:
        ConfigError: it cannot be read or breaks a rule; names the key.
    """
    return make_cluster(read_file(path, "cluster"), str(path), memories or {})


def make_cluster(document: Any, where: str, memories: Mapping[str, float]) -> Cluster:
    """Makes a cluster of the contents of a file.

    Args:
        document: plain lists, dicts, texts and numbers.
        where: the file, for messages.
        memories: see :func:`read_cluster`.

    Raises:
        ConfigError: it breaks a rule.
    """
    document = check_form(document, "cluster", where)
    groups, hosts = [], set()
    for index, one in enumerate(document["nodes"]):
        place = f"{where}: nodes[{index}]"
        names = one.get("hosts", [])
        node = _node_type(one, place, memories)
        groups.append(NodePool(type=node, count=one["count"], hosts=tuple(names)))
        if names and len(names) != one["count"]:
            raise ConfigError(
                f"{place}.hosts names {len(names)} nodes, but count is {one['count']}: make them"
                " equal"
            )
        for host in names:
            if host in hosts:
                raise ConfigError(f"{place}.hosts: {host} is named twice: its GPUs exist once")
            hosts.add(host)
    links: dict[tuple[str, str], LinkSpeed] = {}
    for index, one in enumerate(document.get("links", [])):
        place = f"{where}: links[{index}]"
        first, second = one["between"]
        if (first, second) in links or (second, first) in links:
            raise ConfigError(f"{place}: {first} and {second} have a link already; keep one")
        links[first, second] = _speed(one, place)
    for group in groups:
        for size, link in group.type.islands:
            # All nodes of the type stand in it, however many a group has.
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


def _node_type(one: Mapping[str, Any], place: str, memories: Mapping[str, float]) -> NodeType:
    gpu = known_gpu(one["gpu"])
    name = one["gpu"] if gpu is None else gpu.name
    if "memory" in one:
        memory = one["memory"]
    elif name in memories:
        memory = memories[name]
    elif gpu is not None:
        memory = gpu.memory_bytes
    else:
        raise ConfigError(
            f"{place}.memory is missing: GPU {name!r} is neither in the profile nor in the table"
            " of GPUs; give the memory of each GPU, as in 40 GB"
        )
    return NodeType(
        name=one.get("type", name),
        gpu=name,
        gpus=one["gpus_per_node"],
        memory_bytes=memory,
        intra=_speed(one["link"], f"{place}.link", shared=False),
        islands=_islands(one, place),
        network=_speed(one.get("network"), f"{place}.network"),
        price_per_hour=float(one.get("price_per_hour", 0.0)),
        zone=one.get("zone", ""),
    )


def _islands(node: Mapping[str, Any], place: str) -> tuple[tuple[int, LinkSpeed], ...]:
    """Makes the islands of a node type of their checked form."""
    found: list[tuple[int, LinkSpeed]] = []
    each, before = node["gpus_per_node"], 1
    for index, one in enumerate(node.get("islands", ())):
        where = f"{place}.islands[{index}]"
        inner = "gpus" in one
        if inner == ("nodes" in one):
            raise ConfigError(f"{where}: give either gpus, for parts of a node, or nodes")
        size = one["gpus"] if inner else one["nodes"] * each
        if size <= before or size % before or (inner and (size == each or each % size)):
            raise ConfigError(
                f"{where}: {size} GPUs do not nest: each island holds several of the one before,"
                f" and a node of {each} GPUs several of its parts"
            )
        link = {key: value for key, value in one.items() if key not in ("gpus", "nodes")}
        found.append((size, _speed(link, where, shared=not inner)))
        before = size if inner else max(size, each)
    return tuple(found)


def _speed(one: Any, place: str, *, shared: bool = True) -> Any:
    """Makes a link of its checked form, if any; ``shared`` where it does not say it itself."""
    if one is None:
        return None
    rails, share = one.get("rails", 1), 1 / one.get("oversubscription", 1.0)
    if rails > 1 or share < 1:
        # A GPU sends over one of the rails; several GPUs share as many as they are.
        speed = one["bandwidth"] * share
        one = {key: value for key, value in one.items() if key not in ("rails", "oversubscription")}
        if "sizes" in one or "by_pairs" in one:
            raise ConfigError(
                f"{place}: sizes and by_pairs hold what was measured: leave them out, or rails and"
                " oversubscription"
            )
        more = [{"pairs": count, "bandwidth": count * speed} for count in range(2, rails + 1)]
        one |= {"bandwidth": speed, "by_pairs": more}
    sizes = tuple((size, speed) for size, speed in one.get("sizes", ()))
    if any(a[0] >= b[0] for a, b in itertools.pairwise(sizes)):
        raise ConfigError(f"{place}.sizes must ascend, each given once: put them in order")
    return LinkSpeed(
        bytes_per_s=one["bandwidth"],
        latency_s=one.get("latency", 0.0),
        shared=one.get("shared", shared),
        sizes=sizes,
        by_pairs=tuple(
            (more["pairs"], _speed(more, f"{place}.by_pairs[{index}]", shared=shared))
            for index, more in enumerate(one.get("by_pairs", ()))
        ),
    )


_NVLINK_GB_PER_S = {"p100": 20.0, "b200": 50.0}
"""Of one NVLink in one direction; 25 where not said. Source: NVIDIA's architecture whitepapers."""
_LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of one lane by generation of PCI Express, in one direction."""
_PCIE_SHARE = 0.8
"""Of the lanes' bandwidth that copies between two GPUs reach."""
_ASSUMED_LINK = {"bandwidth": "25 GB/s", "latency": "8 us"}
_ASSUMED_NETWORK = {"bandwidth": "100 Gbit/s", "latency": "10 us"}
_DOWN = ("DOWN", "DRAIN", "FAIL", "UNKNOWN", "FUTURE", "NOT_RESPONDING")


def describe_cluster(texts: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Describes a cluster by what tools print about it.

    Args:
        texts: where each is from, and what it says: ``scontrol show node`` or ``show topology``,
            ``sinfo -N -o "%N %G %T"``, ``nvidia-smi -q`` and ``topo -m`` of a node, or
            ``doctor --json``.

    Returns:
        The contents of a cluster file, and what it assumes because no text says it.

    Raises:
        ConfigError: a text is none of these, or no GPU is known.
    """
    reports: list[dict[str, Any]] = []
    slurm: list[dict[str, Any]] = []
    switches: list[tuple[int, set[str]]] = []
    logs, matrices, assumed = list[str](), list[str](), list[str]()
    for where, raw in texts:
        text = re.sub(r"\x1b\[[0-9;]*m", "", raw)
        try:
            if text.lstrip().startswith("{"):
                report = parse_json(text)
                needed = {key: report["node"][key] for key in ("gpu", "gpus_per_node")}
                reports.append({**report["node"], **needed, "hosts": [report["host"]]})
            elif "NodeName=" in text:
                fields = [_FIELD.findall(block) for block in re.split(r"(?=\bNodeName=)", text)]
                slurm += [_slurm_entry(dict(one)) for one in fields if one]
            elif "SwitchName=" in text or "BlockName=" in text:
                for line in text.splitlines():
                    one = dict(_FIELD.findall(line))
                    hosts = set(expand_hosts(one.get("Nodes", "")))
                    switches.append((int(one.get("Level", 0)), hosts))
            elif "NODELIST" in text:
                slurm += _sinfo_entries(text, where)
            elif "NVSMI LOG" in text:
                logs.append(text)
            elif _MATRIX.search(text):
                matrices.append(text)
            else:
                raise ValueError(f"it begins with {text.strip()[:20]!r}")
        except (ValueError, KeyError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(f"{where}: {what}: it must be the output of {_TOOLS}") from error
    for at in range(max(len(logs), len(matrices))):
        log, matrix = (found[at] if at < len(found) else "" for found in (logs, matrices))
        reports.append(describe_node(log, matrix))
    states = [(one.pop("state").upper(), one) for one in slurm]
    up = {one["hosts"][0]: one for state, one in states if not any(word in state for word in _DOWN)}
    entries = [_with_report(one, reports, assumed) for one in up.values()] if slurm else reports
    entries = [one for one in entries if one["gpus_per_node"]]
    if not entries:
        names = ", ".join(where for where, _ in texts)
        raise ConfigError(
            f"{names}: no node with GPUs is up: give the outputs of nodes that have some"
        )
    document: dict[str, Any] = {"format": 1, "nodes": _grouped(entries, switches)}
    without = [one["gpu"] for one in document["nodes"] if "network" not in one]
    if without and sum(one["count"] for one in document["nodes"]) > 1:
        document["network"] = _ASSUMED_NETWORK
        assumed.append(f"the network of {', '.join(without)} is {_ASSUMED_NETWORK['bandwidth']}")
    if any("nodes" in island for one in document["nodes"] for island in one.get("islands", ())):
        assumed.append("the network is as fast within switches as above them")
    return document, list(dict.fromkeys(assumed))


_FIELD = re.compile(r"(\w+)=(\S*)")
_TOOLS = (
    "scontrol show node or topology, sinfo -N, nvidia-smi -q or topo -m, or doctor --json; write"
    " what one of them prints on a node into a file, and give that"
)
_MATRIX = re.compile(r"^\s*GPU0\s", re.MULTILINE)


def _slurm_entry(fields: Mapping[str, str]) -> dict[str, Any]:
    """Makes an entry of a node as Slurm knows it: its GPU may be but a family, or missing."""
    host, gres = fields["NodeName"], fields.get("Gres", "")
    gpu, count = "", 0
    for word in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *middle = word.split(":")
        if kind == "gpu" and (number := middle[-1] if middle else "1").isdigit():
            gpu, count = ":".join(middle[:-1]), count + int(number)
    if count and known_gpu(gpu) is None:
        features = [one for one in fields.get("ActiveFeatures", "").split(",") if known_gpu(one)]
        gpu = features[0] if features else gpu
    state = fields.get("State", "")
    return {"gpu": gpu, "gpus_per_node": count, "hosts": [host], "state": state}


def _sinfo_entries(text: str, where: str) -> list[dict[str, Any]]:
    head, *lines = (line.split() for line in text.splitlines() if line.strip())
    if "GRES" not in head:
        raise ConfigError(f'{where}: no column GRES: ask for sinfo -N -o "%N %G %T"')
    return [
        _slurm_entry({"NodeName": host, "Gres": row["GRES"], "State": row.get("STATE", "")})
        for row in (dict(zip(head, line, strict=False)) for line in lines)
        for host in expand_hosts(row["NODELIST"])
    ]


def expand_hosts(text: str) -> list[str]:
    """Returns the names of Slurm's list of hosts, such as ``a[01-03,7],b``."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        head, _, rest = part.partition("[")
        inside, _, tail = rest.partition("]")
        for one in inside.split(",") if rest else [""]:
            low, _, high = one.partition("-")
            numbers = range(int(low), int(high or low) + 1) if low else [None]
            names = [head + ("" if n is None else str(n).zfill(len(low))) for n in numbers]
            found += [name + more for name in names for more in expand_hosts(tail) or [""]]
    return found


def describe_node(log: str, matrix: str) -> dict[str, Any]:
    """Describes a node by ``nvidia-smi -q`` and ``topo -m``, either of which may be empty."""
    names = re.findall(r"Product Name\s*: (.+)", log)
    entry: dict[str, Any] = {"gpu": names[0].strip() if names else "", "gpus_per_node": len(names)}
    memory = re.search(r"FB Memory Usage\s+Total\s*: (\d+) MiB", log)
    if memory is not None:
        entry["memory"] = f"{memory[1]} MiB"
    known = known_gpu(entry["gpu"])
    entry["gpu"] = entry["gpu"] if known is None else known.name
    generation = re.search(r"PCIe Generation\s+Max\s*: (\d)", log)
    lanes = re.search(r"Link Width\s+Max\s*: (\d+)x", log)
    if generation is not None and lanes is not None:
        each = _LANE_GB_PER_S.get(int(generation[1]), _LANE_GB_PER_S[4])
        entry["link"] = {
            "bandwidth": f"{each * int(lanes[1]) * _PCIE_SHARE:.3g} GB/s",
            "latency": "8 us",
        }
    rows = [line.split() for line in matrix.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    # The heading begins with GPU0 too, and has no X for a GPU itself.
    ways = [row[1:] for row in rows if "X" in row]
    count = len(ways)
    entry["gpus_per_node"] = entry["gpus_per_node"] or count
    speed = _NVLINK_GB_PER_S.get(entry["gpu"], 25.0)
    for size in (size for size in range(count, 1, -1) if count % size == 0):
        pairs = itertools.permutations(range(count), 2)
        inside = [ways[a][b] for a, b in pairs if a // size == b // size]
        if all(re.fullmatch(r"NV\d+", way) for way in inside):
            link = {"bandwidth": f"{speed * min(int(way[2:]) for way in inside):g} GB/s"}
            link["latency"] = "3 us"
            if size == count:
                entry["link"] = link
            else:
                entry["islands"] = [{"gpus": size, **link}]
            break
    return entry


def _with_report(
    node: dict[str, Any], reports: Sequence[Mapping[str, Any]], assumed: list[str]
) -> dict[str, Any]:
    """Returns Slurm's node with what a report of it, or of a node alike, adds."""
    if not (gpus := node["gpus_per_node"]):
        return node
    family = _plain(node["gpu"])
    alike = [
        one
        for one in reports
        if one["gpus_per_node"] == gpus
        and (not one["gpu"] or _plain(one["gpu"]).startswith(family))
    ]
    alike.sort(key=lambda one: node["hosts"][0] not in one.get("hosts", ()))
    for one in alike[:1]:
        node = {**one, "gpu": one["gpu"] or node["gpu"], "hosts": node["hosts"]}
    known = known_gpu(node["gpu"])
    if not node["gpu"] or (known is None and "memory" not in node):
        raise ConfigError(
            f"Slurm does not say which GPU {node['hosts'][0]} has, only"
            f" {node['gpu'] or 'how many'!r}: give nvidia-smi -q or doctor --json of such a node"
        )
    if known is not None:
        if not alike and _plain(node["gpu"]) != _plain(known.name):
            assumed.append(f"{node['gpu']} is {known.name}")
        node["gpu"] = known.name
    if "link" not in node:
        assumed.append(f"GPUs of a node of {node['gpu']} are {_ASSUMED_LINK['bandwidth']} apart")
    return node


def _grouped(
    entries: Sequence[Mapping[str, Any]], switches: Sequence[tuple[int, set[str]]]
) -> list[dict[str, Any]]:
    """Returns equal nodes as groups, those of a switch one after the other."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for entry in entries:
        plain = {"link": _ASSUMED_LINK, **entry}
        hosts = plain.pop("hosts", [""])
        groups.setdefault(json.dumps(plain, sort_keys=True), (plain, []))[1].extend(hosts)

    def above(host: str, least: int) -> list[tuple[int, int]]:
        """Returns the switches from a level on that hold a host, the highest first."""
        numbered = enumerate(switches)
        return sorted(
            (-level, i) for i, (level, held) in numbered if level >= least and host in held
        )

    found = []
    for at, (one, names) in enumerate(groups.values()):
        count, hosts = len(names), [host for host in names if host]
        hosts.sort(key=lambda host: above(host, 0))
        speed = one.get("network", _ASSUMED_NETWORK)
        islands = list(one.get("islands", ()))
        for least in sorted({level for level, _ in switches}):
            sizes = set(Counter(tuple(above(host, least)) for host in hosts).values())
            if len(sizes) == 1 and 1 < (size := sizes.pop()) < count:
                islands.append({"nodes": size, **speed})
        alike = [other["gpu"] for other, _ in groups.values()].count(one["gpu"]) > 1
        entry = {"type": f"{one['gpu']}-{at + 1}" if alike else one["gpu"], **one, "count": count}
        entry |= {"islands": islands} if islands else {}
        found.append(entry | ({"hosts": hosts} if len(hosts) == count else {}))
    return found
