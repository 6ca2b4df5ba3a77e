"""Stores a measured module with cut points in a running job, to plan anew when machines change.

Its ranks write it once, before the first layout; whoever plans reads it. JSON, whole or not there.
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
"""Bytes of an element, in which a profile gives the sizes of messages between pieces."""
_FORMER_HOST_KEYS = ("cores",)
_UNMEASURED = LinkSpeed(bytes_per_s=10e9, latency_s=10e-6)


@dataclass(frozen=True, kw_only=True)
class MeasuredHost:
    """Describes a node as its processes found it.

    Attributes:
        host: its own name.
        type: of nodes, as in the profile.
        gpu: its device, as in the profile.
        processes: that it had.
        memory_bytes: that each of them may use.
        shares_memory: whether fewer processes have more of it each.
    """

    host: str
    type: str
    gpu: str
    processes: int
    memory_bytes: float
    shares_memory: bool


@dataclass(frozen=True, kw_only=True)
class MeasuredModule:
    """Holds what layouts of a module are planned with.

    Attributes:
        signature: of the model and of what the script gave; another one is another module.
        name: of the model.
        whole: a profile with whole backwards.
        split: one with split backwards, ``None`` where the schedule splits none.
        element_bytes: of most parameters.
        hosts: the nodes that it was measured on.
        batch_size: samples of a step over all replicas.
        most: samples of the largest microbatch that was measured.
        schedule: order of work.
        chunks: stages of each process.
        cap: most activations that a process keeps under a rule, ``None`` for the rule's own.
        pipeline_size: processes of a pipeline that are wished for.
        micro_batch_size: samples of a microbatch, where they must stay.
        partition: segments of each stage, for pipelines of so many stages.
        weights: what each segment costs, where the user says so.
        is_random: whether the model draws random numbers, which depend on the microbatch.
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

    @cached_property
    def model(self) -> Model:
        """Its pieces."""
        return module_model(self.whole["model"], self.name, self.element_bytes)

    def profile(self, *, split: bool) -> Profile:
        """Its durations.

        Args:
            split: of backwards in two halves.
        """
        return make_profile(self.split if split and self.split is not None else self.whole)

    def costs(self, micro_batch_size: int) -> tuple[float, ...]:
        """Returns seconds of each piece, on the device of the first node.

        Args:
            micro_batch_size: samples; those nearest to it that were measured count.
        """
        rows = [row for row in self.whole["layers"] if row["gpu"] == self.hosts[0].gpu]
        sizes = {row["micro_batch"] for row in rows}
        nearest = min(sizes, key=lambda size: (abs(size - micro_batch_size), size))
        parts = ("forward_s", "backward_input_s", "backward_weight_s")
        takes = {
            row["kind"]: sum(row[part] for part in parts)
            for row in rows
            if row["micro_batch"] == nearest
        }
        return tuple(takes[layer["kind"]] for layer in self.whole["model"]["layers"])

    def write(self, path: Path) -> None:
        """Replaces the file.

        Raises:
            OSError: it cannot be written.
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
        """Reads the file; ``None`` where there is none, or of an earlier version of this program.

        Raises:
            ConfigError: it is damaged, or of a later version.
        """
        try:
            read = parse_json(read_whole(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}): remove it, and the model is measured anew"
            ) from None
        names = {one.name for one in fields(cls)}
        if not isinstance(read, dict):
            return None
        written = read.pop("format", None)
        if isinstance(written, int) and written > FORMAT:
            raise ConfigError(
                f"{path} has format {written}, but this program reads {FORMAT}: use the program"
                " that wrote it, or remove the file, and the model is measured anew"
            )
        if written != FORMAT or set(read) != names:
            return None
        for name in ("partition", "weights"):
            read[name] = None if read[name] is None else tuple(read[name])
        hosts = tuple(
            MeasuredHost(**{key: one[key] for key in one if key not in _FORMER_HOST_KEYS})
            for one in read["hosts"]
        )
        return cls(**{**read, "hosts": hosts})


def measured_cluster(hosts: Sequence[MeasuredHost], profile: Profile) -> Cluster:
    """Returns the cluster of some hosts; of each type the one with the least memory counts.

    Args:
        hosts: its nodes.
        profile: of links between them.
    """
    counts = Counter(host.type for host in hosts)
    # The last of a type stays, at the place of the first.
    least_last = sorted(hosts, key=lambda one: -one.memory_bytes)
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
    """Returns the number of each node in a cluster, which has the nodes of a kind together.

    Args:
        kinds: of the nodes.
    """
    first = list(dict.fromkeys(kinds))
    together = sorted(range(len(kinds)), key=lambda node: first.index(kinds[node]))
    return tuple(together.index(node) for node in range(len(kinds)))


def module_model(layers: Mapping[str, Any], name: str, element_bytes: int) -> Model:
    """Returns the pieces of a module: parameters, gradients and Adam in their own type.

    Args:
        layers: the model of its profile.
        name: of it.
        element_bytes: of most parameters.
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
