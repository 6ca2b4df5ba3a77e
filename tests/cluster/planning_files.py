"""Writes files that describe a cluster with two node types and the layer times of these types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAST_S, SLOW_S = 0.004, 0.008
"""Duration in seconds of a layer's forward pass, and of its backward pass, on each node type."""


def cluster_file(folder: Path, hosts: Mapping[str, str], gpus: int = 1, **more: Any) -> Path:
    """Writes a cluster file and returns its path.

    Args:
        folder: Folder to which the file is written.
        hosts: Names of the nodes of each type, which are single letters. If the string is empty,
            the file contains four nodes without names.
        gpus: Number of GPUs on each node.
        more: Additional keys of each type.
    """
    nodes = []
    for name, letters in hosts.items():
        named = {"hosts": list(letters)} if letters else {}
        node = {"type": name, "gpu": f"{name}-gpu", "count": len(letters) or 4, **named}
        node |= {"gpus_per_node": gpus, "memory": "16 GB"}
        nodes.append({**node, "link": {"bandwidth": "10 GB/s", "latency": "20 us"}, **more})
    profile = {"format": 1, "nodes": nodes, "network": {"bandwidth": "10 GB/s", "latency": "50 us"}}
    path = folder / "cluster.json"
    path.write_text(json.dumps(profile))
    return path


def profile_file(folder: Path, layer_s: Mapping[str, float]) -> Path:
    """Writes a profile and returns its path.

    Args:
        folder: Folder to which the file is written.
        layer_s: Duration of one layer's forward pass in seconds, keyed by node type.
    """
    rows = []
    for name, seconds in layer_s.items():
        for kind, part in (("embedding", 0.02), ("transformer", 1.0), ("head", 0.05)):
            takes = {"forward_s": part * seconds, "backward_input_s": part * seconds}
            rows.append({"kind": kind, "gpu": f"{name}-gpu", "tp": 1, "micro_batch": 1, **takes})
    nodes = {name: {"gpu": f"{name}-gpu", "memory_bytes": 16e9} for name in layer_s}
    path = folder / "profile.json"
    profile = {"format": 1, "model": {"name": "tiny"}, "nodes": nodes, "layers": rows}
    path.write_text(json.dumps(profile))
    return path
