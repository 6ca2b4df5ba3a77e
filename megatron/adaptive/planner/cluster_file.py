"""Reads cluster files: node types, how many of each, and the links between them.

The form is ``data/cluster.schema.json``; ``docs/planner.md`` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import schema
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodeGroup, NodeType
from megatron.adaptive.planner.files import quantity, read_file
from megatron.adaptive.planner.gpus import known_gpu

__all__ = ["make_cluster", "read_cluster"]


def read_cluster(path: Path, memories: Mapping[str, float] | None = None) -> Cluster:
    """Read a cluster file.

    Args:
        path: YAML, TOML or JSON.
        memories: bytes of each GPU by its name, as a profile saw them, for node types of which the
            file does not say it.

    Raises:
        ConfigError: it cannot be read or breaks a rule; names the key.
    """
    return make_cluster(read_file(path, "cluster"), str(path), memories or {})


def make_cluster(told: Any, where: str, memories: Mapping[str, float]) -> Cluster:
    """Make a cluster of what a file says.

    Args:
        told: plain lists, dicts, texts and numbers.
        where: the file, for messages.
        memories: see :func:`read_cluster`.

    Raises:
        ConfigError: it breaks a rule.
    """
    schema.check(told, "cluster", where)
    groups, hosts = [], set()
    for index, one in enumerate(told["nodes"]):
        place = f"{where}: nodes[{index}]"
        names = one.get("hosts", [])
        node = _node_type(one, place, memories)
        groups.append(NodeGroup(type=node, count=one["count"], hosts=tuple(names)))
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
    for index, one in enumerate(told.get("links", [])):
        place = f"{where}: links[{index}]"
        first, second = one["between"]
        if (first, second) in links or (second, first) in links:
            raise ConfigError(f"{place}: {first} and {second} have a link already; keep one")
        links[first, second] = _speed(one, place, shared=True)
    try:
        return Cluster(
            name=told.get("name", ""),
            groups=tuple(groups),
            network=_optional(told, "network", where),
            links=links,
            between_zones=_optional(told, "between_zones", where),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _node_type(one: Mapping[str, Any], place: str, memories: Mapping[str, float]) -> NodeType:
    gpu = known_gpu(one["gpu"])
    name = one["gpu"] if gpu is None else gpu.name
    if "memory" in one:
        memory = quantity(one["memory"], "bytes", f"{place}.memory")
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
        network=_optional(one, "network", place, joint="."),
        price_per_hour=float(one.get("price_per_hour", 0.0)),
        zone=one.get("zone", ""),
    )


def _optional(
    told: Mapping[str, Any], key: str, where: str, *, joint: str = ": "
) -> LinkSpeed | None:
    if key not in told:
        return None
    return _speed(told[key], f"{where}{joint}{key}", shared=True)


def _speed(one: Mapping[str, Any], place: str, *, shared: bool) -> LinkSpeed:
    """Read a link; ``shared`` where it does not say it itself."""
    sizes = tuple(
        (
            quantity(size, "bytes", f"{place}.sizes[{index}][0]"),
            quantity(speed, "bytes_per_s", f"{place}.sizes[{index}][1]"),
        )
        for index, (size, speed) in enumerate(one.get("sizes", []))
    )
    by_pairs = tuple(
        (more["pairs"], _speed(more, f"{place}.by_pairs[{index}]", shared=shared))
        for index, more in enumerate(one.get("by_pairs", []))
    )
    try:
        return LinkSpeed(
            bytes_per_s=quantity(one["bandwidth"], "bytes_per_s", f"{place}.bandwidth"),
            latency_s=quantity(one.get("latency", "0 s"), "s", f"{place}.latency", zero=True),
            shared=one.get("shared", shared),
            sizes=sizes,
            by_pairs=by_pairs,
        )
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(place) else f"{place}: {text}") from error
