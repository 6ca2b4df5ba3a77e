"""Creates cluster files from the output of Slurm, ``nvidia-smi`` and ``doctor --json``.

No single tool reports all properties of a cluster, so the outputs of several tools are combined.
Slurm reports all nodes with their GPUs and switches. ``nvidia-smi`` and ``doctor`` report the
memory and links of a single node. Such a report is used for all nodes in Slurm's output that have
the same GPU and the same number of GPUs. Values that no tool reports are assumed, and listed as
assumptions.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.adaptive.config.input_files import parse_json
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import known_gpu, plain_name

_NVLINK_GB_PER_S = {"p100": 20.0, "b200": 50.0}
"""Bandwidth of one NVLink in one direction in GB/s, keyed by GPU. GPUs that are not listed have 25
GB/s. Source: NVIDIA's architecture whitepapers."""
_LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Bandwidth of one PCI Express lane in one direction in GB/s, keyed by generation."""
_PCIE_SHARE = 0.8
"""Fraction of the PCI Express bandwidth that a copy between two GPUs achieves."""
_ASSUMED_LINK = {"bandwidth": "25 GB/s", "latency": "8 us"}
_ASSUMED_NETWORK = {"bandwidth": "100 Gbit/s", "latency": "10 us"}
_DOWN = ("DOWN", "DRAIN", "FAIL", "UNKNOWN", "FUTURE", "NOT_RESPONDING")


def describe_cluster(texts: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Creates the contents of a cluster file from the outputs of tools.

    Args:
        texts: Outputs to combine, as pairs of the output's source (for error messages) and its
            text. Supported are the outputs of ``scontrol show node``, ``scontrol show topology``,
            ``sinfo -N -o "%N %G %T"``, ``nvidia-smi -q``, ``nvidia-smi topo -m`` and ``doctor
            --json``.

    Returns:
        Contents of a cluster file, and a list of the assumptions that were made for missing values.

    Raises:
        ConfigError: A text is not the output of one of these tools, or no node with a known GPU is
            up.
    """
    outputs = _ToolOutputs()
    assumed = list[str]()
    for where, raw in texts:
        text = re.sub(r"\x1b\[[0-9;]*m", "", raw)
        try:
            outputs.add(text, where)
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"{where} is not the output of a supported tool ({reason}); pass a file with the"
                f" output of {_TOOLS}"
            ) from error
    entries = outputs.entries(assumed)
    if not entries:
        names = ", ".join(where for where, _ in texts)
        raise ConfigError(f"{names}: no node with GPUs is up; pass the outputs of nodes with GPUs")
    nodes = _grouped(entries, outputs.switches)
    document: dict[str, Any] = {"format": 1, "nodes": nodes}
    without = [group["gpu"] for group in nodes if "network" not in group]
    if without and sum(group["count"] for group in nodes) > 1:
        document["network"] = _ASSUMED_NETWORK
        assumed.append(f"the network of {', '.join(without)} is {_ASSUMED_NETWORK['bandwidth']}")
    if any("nodes" in island for group in nodes for island in group.get("islands", ())):
        assumed.append("the network is equally fast within a switch and between switches")
    return document, list(dict.fromkeys(assumed))


@dataclass(frozen=True, kw_only=True)
class _ToolOutputs:
    """Parsed outputs of the tools that describe nodes and switches.

    Attributes:
        reports: Nodes described by ``doctor --json``, as entries of a cluster file.
        slurm: Nodes described by Slurm, as entries of a cluster file.
        switches: Network level and host names of each switch.
        logs: Output texts of ``nvidia-smi -q``, one per node.
        matrices: Output texts of ``nvidia-smi topo -m``, one per node.
    """

    reports: list[dict[str, Any]] = field(default_factory=list)
    slurm: list[dict[str, Any]] = field(default_factory=list)
    switches: list[tuple[int, set[str]]] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    matrices: list[str] = field(default_factory=list)

    def add(self, text: str, where: str) -> None:
        """Parses a tool's output and adds the result to the attributes.

        Args:
            text: Output of a tool, without colour codes.
            where: Source of the text, for error messages.

        Raises:
            ValueError: The text is not the output of a known tool, or a number is invalid.
            KeyError: A field is missing.
            TypeError: A field has the wrong type.
        """
        if text.lstrip().startswith("{"):
            report = parse_json(text)
            needed = {key: report["node"][key] for key in ("gpu", "gpus_per_node")}
            self.reports.append({**report["node"], **needed, "hosts": [report["host"]]})
        elif "NodeName=" in text:
            blocks = [_FIELD.findall(block) for block in re.split(r"(?=\bNodeName=)", text)]
            self.slurm.extend(_slurm_entry(dict(fields)) for fields in blocks if fields)
        elif "SwitchName=" in text or "BlockName=" in text:
            for line in text.splitlines():
                fields = dict(_FIELD.findall(line))
                hosts = set(expand_hosts(fields.get("Nodes", "")))
                self.switches.append((int(fields.get("Level", 0)), hosts))
        elif "NODELIST" in text:
            self.slurm.extend(_sinfo_entries(text, where))
        elif "NVSMI LOG" in text:
            self.logs.append(text)
        elif _MATRIX.search(text):
            self.matrices.append(text)
        else:
            raise ValueError(f"it begins with {text.strip()[:20]!r}")

    def entries(self, assumed: list[str]) -> list[dict[str, Any]]:
        """Returns the nodes that are up and have GPUs, as entries of a cluster file.

        Assumptions about missing values are appended to ``assumed``.
        """
        logs_and_matrices = itertools.zip_longest(self.logs, self.matrices, fillvalue="")
        reports = self.reports + [describe_node(log, matrix) for log, matrix in logs_and_matrices]
        if not self.slurm:
            return [report for report in reports if report["gpus_per_node"]]
        up = {
            node["hosts"][0]: {key: value for key, value in node.items() if key != "state"}
            for node in self.slurm
            if not any(word in node["state"].upper() for word in _DOWN)
        }
        entries = [_with_report(node, reports, assumed) for node in up.values()]
        return [entry for entry in entries if entry["gpus_per_node"]]


_FIELD = re.compile(r"(\w+)=(\S*)")
_TOOLS = "scontrol show node or topology, sinfo -N, nvidia-smi -q or topo -m, or doctor --json"
_MATRIX = re.compile(r"^\s*GPU0\s", re.MULTILINE)


def _slurm_entry(fields: Mapping[str, str]) -> dict[str, Any]:
    """Creates the cluster file entry of a node from the fields of Slurm's output.

    The GPU name in the entry may be empty, or may name only a family such as ``a100``.
    """
    host = fields["NodeName"]
    gres = fields.get("Gres", "")
    gpu, count = "", 0
    for word in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *middle = word.split(":")
        if kind == "gpu" and (number := middle[-1] if middle else "1").isdigit():
            gpu = ":".join(middle[:-1])
            count += int(number)
    if count and known_gpu(gpu) is None:
        features = fields.get("ActiveFeatures", "").split(",")
        gpu = next((feature for feature in features if known_gpu(feature)), gpu)
    state = fields.get("State", "")
    return {"gpu": gpu, "gpus_per_node": count, "hosts": [host], "state": state}


def _sinfo_entries(text: str, where: str) -> list[dict[str, Any]]:
    """Creates a cluster file entry for each node in ``text``, the output of ``sinfo -N``."""
    head, *lines = (line.split() for line in text.splitlines() if line.strip())
    if "GRES" not in head:
        raise ConfigError(f"{where} has no column GRES; run 'sinfo -N -o \"%N %G %T\"'")
    return [
        _slurm_entry({"NodeName": host, "Gres": row["GRES"], "State": row.get("STATE", "")})
        for row in (dict(zip(head, line, strict=False)) for line in lines)
        for host in expand_hosts(row["NODELIST"])
    ]


def expand_hosts(text: str) -> list[str]:
    """Returns the host names in ``text``, a Slurm host list.

    For example, ``a[01-03,7],b`` expands to a01, a02, a03, a7 and b.
    """
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        head, _, rest = part.partition("[")
        inside, _, tail = rest.partition("]")
        for span in inside.split(",") if rest else [""]:
            low, _, high = span.partition("-")
            numbers = range(int(low), int(high or low) + 1) if low else [None]
            names = [head + ("" if n is None else str(n).zfill(len(low))) for n in numbers]
            hosts += [name + more for name in names for more in expand_hosts(tail) or [""]]
    return hosts


def describe_node(log: str, matrix: str) -> dict[str, Any]:
    """Creates the cluster file entry of a node from the outputs of ``nvidia-smi``.

    Args:
        log: Output of ``nvidia-smi -q``, or an empty string.
        matrix: Output of ``nvidia-smi topo -m``, or an empty string.
    """
    names = re.findall(r"Product Name\s*: (.+)", log)
    entry: dict[str, Any] = {"gpu": names[0].strip() if names else "", "gpus_per_node": len(names)}
    memory = re.search(r"FB Memory Usage\s+Total\s*: (\d+) MiB", log)
    if memory is not None:
        entry["memory"] = f"{memory[1]} MiB"
    listed = known_gpu(entry["gpu"])
    entry["gpu"] = entry["gpu"] if listed is None else listed.name
    generation = re.search(r"PCIe Generation\s+Max\s*: (\d)", log)
    lanes = re.search(r"Link Width\s+Max\s*: (\d+)x", log)
    if generation is not None and lanes is not None:
        each = _LANE_GB_PER_S.get(int(generation[1]), _LANE_GB_PER_S[4])
        entry["link"] = {
            "bandwidth": f"{each * int(lanes[1]) * _PCIE_SHARE:.3g} GB/s",
            "latency": "8 us",
        }
    rows = [line.split() for line in matrix.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    # Skip the heading of the table. It also begins with GPU0, but does not contain X, which marks
    # the diagonal of the matrix.
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
    """Adds the values of a report to ``node``, the entry of a node from Slurm's output.

    Args:
        node: Entry of the node, from Slurm's output.
        reports: Entries from ``doctor`` and ``nvidia-smi``. A report about this node takes
            precedence over one about a node with the same GPUs.
        assumed: List to which assumptions about the node are appended.

    Raises:
        ConfigError: The node's GPU is unknown.
    """
    if not (gpus := node["gpus_per_node"]):
        return node
    family = plain_name(node["gpu"])
    alike = [
        report
        for report in reports
        if report["gpus_per_node"] == gpus
        and (not report["gpu"] or plain_name(report["gpu"]).startswith(family))
    ]
    alike.sort(key=lambda report: node["hosts"][0] not in report.get("hosts", ()))
    for report in alike[:1]:
        node = {**report, "gpu": report["gpu"] or node["gpu"], "hosts": node["hosts"]}
    listed = known_gpu(node["gpu"])
    if not node["gpu"] or (listed is None and "memory" not in node):
        raise ConfigError(
            f"Slurm does not report the GPU model of node {node['hosts'][0]}, only "
            f"{node['gpu'] or 'the number of GPUs'!r}; also pass the output of nvidia-smi -q or "
            "doctor --json from this node or a similar one"
        )
    if listed is not None:
        if not alike and plain_name(node["gpu"]) != plain_name(listed.name):
            assumed.append(f"{node['gpu']} is {listed.name}")
        node["gpu"] = listed.name
    if "link" not in node:
        speed = _ASSUMED_LINK["bandwidth"]
        assumed.append(f"the link between two {node['gpu']} GPUs of a node is {speed}")
    return node


def _grouped(
    entries: Sequence[Mapping[str, Any]], switches: Sequence[tuple[int, set[str]]]
) -> list[dict[str, Any]]:
    """Combines each set of identical nodes into one entry of a cluster file.

    Within an entry, hosts on the same switch are adjacent.

    Args:
        entries: Entries of single nodes, in the format of a cluster file.
        switches: Network level and host names of each switch.
    """
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for entry in entries:
        plain = {"link": _ASSUMED_LINK, **entry}
        hosts = plain.pop("hosts", [""])
        groups.setdefault(json.dumps(plain, sort_keys=True), (plain, []))[1].extend(hosts)

    def above(host: str, least: int) -> list[tuple[int, int]]:
        """Returns (-level, index) of each switch above ``host``, with the highest level first.

        Switches below level ``least`` are omitted.
        """
        numbered = enumerate(switches)
        return sorted(
            (-level, i) for i, (level, held) in numbered if level >= least and host in held
        )

    grouped = []
    for number, (plain_entry, names) in enumerate(groups.values()):
        count = len(names)
        hosts = [host for host in names if host]
        hosts.sort(key=lambda host: above(host, 0))
        speed = plain_entry.get("network", _ASSUMED_NETWORK)
        islands = list(plain_entry.get("islands", ()))
        for least in sorted({level for level, _ in switches}):
            sizes = set(Counter(tuple(above(host, least)) for host in hosts).values())
            if len(sizes) == 1 and 1 < (size := sizes.pop()) < count:
                islands.append({"nodes": size, **speed})
        alike = [other["gpu"] for other, _ in groups.values()].count(plain_entry["gpu"]) > 1
        entry = {
            "type": f"{plain_entry['gpu']}-{number + 1}" if alike else plain_entry["gpu"],
            **plain_entry,
            "count": count,
        }
        entry |= {"islands": islands} if islands else {}
        grouped.append(entry | ({"hosts": hosts} if len(hosts) == count else {}))
    return grouped
