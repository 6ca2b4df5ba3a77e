"""Stores a module's measurements in a file, so that a job can be replanned if its nodes change.

The ranks write the file once, before they choose the first layout, and the planner reads it. The
JSON file is replaced atomically, so a reader never sees an incomplete file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import parse_json, read_whole
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.model_description import Model, Precision
from megatron.adaptive.planner.model_file import listed_model
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.profile_file import make_profile

FORMAT = 1
MESSAGE_ELEMENT_BYTES = 4
"""Size in bytes that profiles assume for each element of a message between two pieces of a module.
"""
_FORMER_HOST_KEYS = ("cores",)
"""Keys that earlier versions wrote to the file for each host. This version ignores them."""
_UNMEASURED = LinkSpeed(bytes_per_s=10e9, latency_s=10e-6)


@dataclass(frozen=True, kw_only=True)
class MeasuredHost:
    """Properties of a node, measured by the job's processes on this node.

    Attributes:
        host: Host name of the node.
        type: Name of the node type in the profile.
        gpu: Name of the node's GPU or CPU in the profile.
        processes: Number of the job's processes on the node.
        memory_bytes: Memory in bytes that each process may use.
        shares_memory: Whether the node's processes share memory. If so, each process may use more
            memory if there are fewer processes.
    """

    host: str
    type: str
    gpu: str
    processes: int
    memory_bytes: float
    shares_memory: bool


@dataclass(frozen=True, kw_only=True)
class MeasuredModule:
    """Measurements of a module, and the settings that every layout of the job must keep.

    Attributes:
        signature: Hash of the model and the script's settings. If the hash in the file differs from
            the hash of the running script, the file belongs to a different module.
        name: Name of the model.
        whole: Contents of a profile file in which the times of backward passes include the weight
            gradients.
        split: Contents of a profile file with separate times of weight gradients, or ``None`` if
            the schedule does not compute weight gradients in a separate pass.
        element_bytes: Size in bytes of an element of the most common parameter dtype.
        hosts: Nodes on which the module was measured.
        batch_size: Number of samples per step over all replicas.
        most: Largest microbatch size that was measured, in samples.
        schedule: Name of the pipeline schedule.
        chunks: Number of stages per process.
        cap: Maximum amount of activations that a process may hold under a run-time scheduling rule,
            or ``None`` for the rule's default. The unit is the size of one microbatch's activations
            in all stages of the process.
        pipeline_size: Number of processes per pipeline, as set by the user, or ``None`` if the
            number may change.
        micro_batch_size: Number of samples per microbatch, as set by the user, or ``None`` if the
            number may change.
        partition: Number of pieces in each stage, as set by the user, or ``None`` to choose a
            partition. A piece is a part of the module between two cut points. The partition is only
            used for pipelines with this number of stages.
        weights: Cost of each piece, as set by the user, or ``None`` to use the measured costs.
        is_random: Whether the model draws random numbers that depend on the microbatch.
    """

    signature: str
    name: str
    whole: Mapping[str, Any]
    split: Mapping[str, Any] | None
    element_bytes: int
    hosts: tuple[MeasuredHost, ...]
    batch_size: int
    most: int
    schedule: str
    chunks: int
    cap: float | None = None
    pipeline_size: int | None = None
    micro_batch_size: int | None = None
    partition: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None
    is_random: bool = False

    @property
    def least(self) -> int:
        """Smallest measured microbatch size, in samples. Smaller microbatches may fail."""
        sizes: set[int] = {row["micro_batch"] for row in self.whole["layers"]}
        return min(sizes)

    @cached_property
    def model(self) -> Model:
        """Model in which each layer is a piece of the module (a part between two cut points)."""
        return module_model(self.whole["model"], self.name, self.element_bytes)

    def profile(self, *, split: bool) -> Profile:
        """Returns the profile that contains the measured times.

        Args:
            split: Whether to return the profile with separate times of weight gradients, if it
                exists.
        """
        return make_profile(self.split if split and self.split is not None else self.whole)

    def costs(self, micro_batch_size: int) -> tuple[float, ...]:
        """Returns the time of each piece of the module on the first node's device, in seconds.

        Args:
            micro_batch_size: Number of samples per microbatch. The nearest measured size is used.
        """
        rows = [row for row in self.whole["layers"] if row["gpu"] == self.hosts[0].gpu]
        sizes = {row["micro_batch"] for row in rows}
        nearest = min(sizes, key=lambda size: (abs(size - micro_batch_size), size))
        parts = ("forward_s", "backward_input_s", "backward_weight_s")
        seconds = {
            row["kind"]: sum(row[part] for part in parts)
            for row in rows
            if row["micro_batch"] == nearest
        }
        return tuple(seconds[layer["kind"]] for layer in self.whole["model"]["layers"])

    def write(self, path: Path) -> None:
        """Writes the measurements to the file ``path``. An existing file is replaced atomically.

        Raises:
            OSError: The file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(self)}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> MeasuredModule | None:
        """Reads the measurements from the file ``path``.

        Returns:
            Measurements, or ``None`` if the file does not exist or was written by an earlier
            version of this program.

        Raises:
            ConfigError: The file is damaged, or was written by a later version of this program.
        """
        try:
            content = parse_json(read_whole(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); remove it to measure the model again"
            ) from None
        names = {field.name for field in fields(cls)}
        if not isinstance(content, dict):
            return None
        written = content.pop("format", None)
        if isinstance(written, int) and written > FORMAT:
            raise ConfigError(
                f"{path} has format {written}, but this program reads format {FORMAT}; use the"
                " program version that wrote the file, or remove the file to measure the model"
                " again"
            )
        if written != FORMAT or set(content) != names:
            return None
        for name in ("partition", "weights"):
            content[name] = None if content[name] is None else tuple(content[name])
        hosts = tuple(
            MeasuredHost(**{key: host[key] for key in host if key not in _FORMER_HOST_KEYS})
            for host in content["hosts"]
        )
        return cls(**{**content, "hosts": hosts})


def measured_cluster(hosts: Sequence[MeasuredHost], profile: Profile) -> Cluster:
    """Creates a cluster from the hosts on which a module was measured.

    The memory size of a node type is the memory size of its host with the least memory.

    Args:
        hosts: Nodes of the cluster, as measured.
        profile: Profile with the links between the nodes.
    """
    counts = Counter(host.type for host in hosts)
    # If a key occurs several times, the dictionary keeps its first position and its last value. The
    # types therefore keep their order, and each type gets the values of its host with the least
    # memory.
    least_last = sorted(hosts, key=lambda host: -host.memory_bytes)
    smallest = {host.type: host for host in (*hosts, *least_last)}
    groups = tuple(
        NodePool(
            type=NodeType(
                name=name,
                gpu=host.gpu,
                gpus=host.processes,
                memory_bytes=host.memory_bytes,
                intra=profile.intra_links.get(name, _UNMEASURED),
            ),
            count=counts[name],
        )
        for name, host in smallest.items()
    )
    return Cluster(groups=groups, network=_UNMEASURED, links=profile.links)


def node_numbers(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Returns the index of each node after reordering so that equal kinds are adjacent.

    For example, nodes of the kinds a, b and a get the indices 0, 2 and 1.

    Args:
        kinds: Kind of each node, as any hashable value.
    """
    first = list(dict.fromkeys(kinds))
    together = sorted(range(len(kinds)), key=lambda node: first.index(kinds[node]))
    return tuple(together.index(node) for node in range(len(kinds)))


def module_model(layers: Mapping[str, Any], name: str, element_bytes: int) -> Model:
    """Converts a module to a planner model that has one layer per piece between two cut points.

    Gradients and optimizer state are assumed to have the data type of the parameters.

    Args:
        layers: Value of the key ``model`` in the module's profile.
        name: Name of the model.
        element_bytes: Size in bytes of an element of the most common parameter dtype.
    """
    precision = Precision(
        name="fp32" if element_bytes == 4 else f"{8 * element_bytes} bit",
        element_bytes=MESSAGE_ELEMENT_BYTES,
        parameter_bytes=element_bytes,
        gradient_bytes=element_bytes,
        optimizer_bytes=2 * element_bytes,
        reduce_bytes=element_bytes,
    )
    return listed_model(dict(layers), name, precision)
