"""What was measured of a model with cut points, as the planner wants it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.adaptive.modules.segments import SegmentSample
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.files import check_schema
from megatron.adaptive.planner.measured_module import module_model
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.profiling.links import link_rows, reduce_rows
from megatron.adaptive.profiling.running_pipeline import Sample, spread_of
from megatron.adaptive.schedule.action import ActionKind

__all__ = ["ModuleProfile", "Part"]

_ELEMENT_BYTES = 4  # in which the sizes of messages are told
_UNMEASURED = LinkSpeed(bytes_per_s=10e9, latency_s=10e-6)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What was measured on one kind of device.

    Attributes:
        gpu: its name.
        cut_points: names of the cut points, in order.
        samples: of every piece and size of microbatch.
        tied_parameters: numbers that several pieces share.
        tied_segments: the first and the last of these pieces.
        element_bytes: of most parameters.
        optimizer_s: of a step of the optimizer, for each parameter.
        is_random: whether the model draws random numbers.
    """

    gpu: str
    cut_points: tuple[str, ...]
    samples: tuple[SegmentSample, ...]
    tied_parameters: int
    tied_segments: tuple[int, ...]
    element_bytes: int
    optimizer_s: float
    is_random: bool = False


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """A measured model with cut points.

    Attributes:
        name: of the model.
        parts: by kind of device; the first is rank 0's.
        nodes: what each rank told of its node.
        names: node type of each rank.
        links, reductions: as measured; empty where they were not.
        seconds: that measuring took.
    """

    name: str
    parts: tuple[Part, ...]
    nodes: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]
    links: tuple[Any, ...]
    reductions: tuple[Any, ...]
    seconds: float

    @property
    def cut_points(self) -> tuple[str, ...]:
        """Names of the cut points, in the order of the forward."""
        return self.parts[0].cut_points

    @property
    def samples(self) -> tuple[SegmentSample, ...]:
        """Pieces as rank 0's device runs them."""
        return self.parts[0].samples

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Sizes that were measured on all kinds of devices, ascending."""
        sizes = [{one.micro_batch for one in part.samples} for part in self.parts]
        return tuple(sorted(set.intersection(*sizes)))

    @property
    def summary(self) -> str:
        """One line for people."""
        sizes = ", ".join(map(str, self.micro_batch_sizes))
        return (
            f"{len(self.cut_points) + 1} segments of {self.name} with microbatches of {sizes} "
            f"sample{'' if sizes == '1' else 's'} measured in {self.seconds:.1f} s"
        )

    def weights(self, micro_batch: int) -> tuple[float, ...]:
        """Seconds of forward and backward of each piece on rank 0's device."""
        return tuple(
            one.forward_s + one.backward_s for one in self.samples if one.micro_batch == micro_batch
        )

    def document(self, *, split: bool = True) -> dict[str, Any]:
        """Return what a profile file holds; see ``docs/planner.md``.

        Args:
            split: tell backwards by inputs and by weights apart, where both were measured.
        """
        sigmas = [_sigma(part.samples) for part in self.parts]
        facts = {
            name: dict(node["facts"]) for name, node in zip(self.names, self.nodes, strict=True)
        }
        told = {
            "format": profile_file.FORMAT,
            "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "model": self._model(),
            "nodes": facts,
            "layers": [
                _layer_row(part.gpu, one, split) for part in self.parts for one in part.samples
            ],
            "links": link_rows(self.links),
            "all_reduce": reduce_rows(self.reductions),
            "optimizer_s_per_parameter": {part.gpu: part.optimizer_s for part in self.parts},
            "action_sigma": max(sigmas),
        }
        check_schema(told, "profile", "profile")
        return told

    def write(self, path: str | Path) -> None:
        """Write a profile file for ``python -m megatron.adaptive plan``.

        Raises:
            ConfigError: the file cannot be written.
        """
        profile_file.write(self.document(), Path(path))

    def _model(self) -> dict[str, Any]:
        part = self.parts[0]
        largest = max(one.micro_batch for one in part.samples)
        pieces = [
            {
                "kind": _kind(one.segment),
                "parameters": one.parameters,
                "output_elements": one.output_bytes / largest / _ELEMENT_BYTES,
                "activation_bytes": one.kept_bytes / largest,
                "workspace_bytes": one.workspace_bytes / largest,
            }
            for one in part.samples
            if one.micro_batch == largest
        ]
        told: dict[str, Any] = {"name": self.name, "precision": "fp32", "layers": pieces}
        if part.tied_segments:
            told["tied_parameters"] = part.tied_parameters
            told["tied_layers"] = list(part.tied_segments)
        return told

    @cached_property
    def model(self) -> Model:
        """The pieces as the planner sees them: parameters, gradients and Adam in their own type."""
        return module_model(self._model(), self.name, self.parts[0].element_bytes)

    def times(self, *, split: bool) -> Profile:
        """The durations as the planner sees them.

        Args:
            split: of backwards in two halves.
        """
        return profile_file.make_profile(self.document(split=split))

    @cached_property
    def cluster(self) -> Cluster:
        """The job's nodes; memory is what a process may use."""
        profile = self.times(split=False)
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for name, node in zip(self.names, self.nodes, strict=True):
            groups.setdefault(name, []).append(node)
        made = [
            NodePool(
                type=NodeType(
                    name=name,
                    gpu=nodes[0]["facts"]["gpu"],
                    gpus=nodes[0]["processes"],
                    memory_bytes=min(one["limit"] for one in nodes),
                    intra=profile.intra_links.get(name, _UNMEASURED),
                ),
                count=len({one["machine"] for one in nodes}),
            )
            for name, nodes in groups.items()
        ]
        return Cluster(groups=tuple(made), network=_UNMEASURED, links=profile.links)

    @property
    def order(self) -> tuple[int, ...]:
        """Numbers of the cluster's nodes in the order of the ranks."""
        types: Sequence[str] = list(dict.fromkeys(self.names))
        machines = dict.fromkeys(
            (types.index(name), str(node["machine"]))
            for name, node in zip(self.names, self.nodes, strict=True)
        )
        ordered = sorted(machines, key=lambda one: one[0])  # stable: as ranks meet them
        return tuple(ordered.index(one) for one in machines)


def _kind(segment: int) -> str:
    return f"cut-{segment}"


def _layer_row(gpu: str, one: SegmentSample, split: bool) -> dict[str, Any]:
    both = one.split_s if split and one.split_s is not None else (one.backward_s, 0.0)
    return {
        "kind": _kind(one.segment),
        "gpu": gpu,
        "tp": 1,
        "micro_batch": one.micro_batch,
        "forward_s": one.forward_s,
        "backward_input_s": both[0],
        "backward_weight_s": both[1],
        "kept_bytes": one.kept_bytes,
        "parameters": one.parameters,
    }


def _sigma(samples: Sequence[SegmentSample]) -> float:
    """Spread of the durations of the same work."""
    lanes: dict[tuple[ActionKind, int], list[int]] = {}
    for index, one in enumerate(samples):
        for kind, row in zip((ActionKind.F, ActionKind.B), one.durations_s, strict=True):
            lanes[kind, index] = [max(1, round(value * 1e9)) for value in row]
    return spread_of([Sample(pp_rank=0, durations_ns=lanes)])
