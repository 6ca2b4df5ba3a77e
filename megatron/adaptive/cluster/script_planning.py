"""Shapes for a script with a ``Pipeline``, from what its ranks measured at the first start.

::

    model.json + nodes that are there ──> as many processes as any layout takes
                                          ──> pipeline size that was wished for, or the next to it
                                              ──> the least predicted step: microbatch, partition

The global batch stays. The microbatch does where the script gives it, or its model draws random
numbers, which depend on it. Nodes that were not there when the model was measured count as the
first one that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.adaptive.cluster.layouts import Offer, ParallelLayout
from megatron.adaptive.cluster.planning import NodeKind, cluster_of, profile_of
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, LinkSpeed, NodePool, NodeType
from megatron.adaptive.planner.measured_module import MeasuredHost, MeasuredModule
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.running import Option, Running, choose_option, least_largest_of

__all__ = ["ScriptPlanning"]

_UNMEASURED = LinkSpeed(bytes_per_s=10e9, latency_s=10e-6)


class ScriptPlanning:
    """Plans layouts of one measured module.

    Args:
        path: of what was measured.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def unknown(self, offers: Sequence[Offer]) -> str:
        """Returns nodes that cannot be planned with: none."""
        return ""

    def plan(
        self, offers: Sequence[Offer], most_cpu_s: float = 0.0, *, timed: bool = True
    ) -> ParallelLayout:
        """Finds the best layout.

        Args:
            offers: the nodes that are there.
            most_cpu_s: is not needed: there is little to look at.
            timed: time whole steps; else the busiest stage alone decides, at once.

        Raises:
            ConfigError: nothing fits; says which limit stands in the way.
        """
        module = MeasuredModule.read(self._path)
        if module is None:
            raise ConfigError(f"{self._path}: the model was not measured yet")
        first: ConfigError | None = None
        for count in range(sum(one.slots for one in offers), 0, -1):
            places = _places(offers, count)
            for size in _sizes(module, count):
                try:
                    option = choose_option(
                        self._running(module, places),
                        pipeline_sizes=(size,) if size else (),
                        micro_batches=_micro_batches(module),
                        partition=lambda stages: _partition(module, stages),
                        most=module.most,
                        timed=timed,
                    )[0]
                except ConfigError as error:
                    first = first or error
                    continue
                return _layout(module, option, places, timed=timed)
        assert first is not None
        raise first

    def _running(self, module: MeasuredModule, places: Sequence[tuple[Offer, int]]) -> Running:
        whole = module.profile(split=False)
        # Of one machine, nodes that are as slow as each other go together.
        hosts: dict[tuple[str, float], int] = {}
        on_host: dict[str, int] = {}
        for offer, count in places:
            host = _host(offer)
            hosts[host, offer.slowness] = hosts.get((host, offer.slowness), 0) + count
            on_host[host] = on_host.get(host, 0) + count
        types = _types(module.hosts, whole)
        known = {one.host: types[one.type] for one in module.hosts}
        other = types[module.hosts[0].type]
        kinds = [
            NodeKind(known.get(host, other), count, slowness)
            for (host, slowness), count in hosts.items()
        ]
        sharing = {
            kind: max(
                on_host[host] for (host, _), of in zip(hosts, kinds, strict=True) if of == kind
            )
            for kind in kinds
        }
        counts = {kind: kinds.count(kind) for kind in kinds}
        starts: dict[NodeKind, int] = {}
        for kind in counts:
            starts[kind] = sum(counts[other] for other in starts)
        order = []
        for kind in kinds:
            order.append(starts[kind])
            starts[kind] += 1
        groups = tuple(NodePool(type=one, count=1) for one in types.values())
        base = Cluster(groups=groups, network=_UNMEASURED, links=whole.links)
        split = None if module.split is None else module.profile(split=True)
        return Running(
            model=module.model,
            cluster=_with_memory(cluster_of(base, counts), sharing, module.hosts),
            order=tuple(order),
            batch=module.batch_size,
            schedule=module.schedule,
            chunks=module.chunks,
            whole=profile_of(whole, list(counts)),
            split=None if split is None else profile_of(split, list(counts)),
            cap=module.cap,
        )


def _host(offer: Offer) -> str:
    """Returns the machine of a node: its own name for itself, which comes last."""
    return offer.hosts[-1] if offer.hosts else offer.name


def _places(offers: Sequence[Offer], count: int) -> list[tuple[Offer, int]]:
    """Places processes on the first nodes, those of one machine together, its slow ones last."""
    hosts: dict[str, list[Offer]] = {}
    for offer in offers:
        hosts.setdefault(_host(offer), []).append(offer)
    found = []
    slow_last = [sorted(group, key=lambda one: one.slowness) for group in hosts.values()]
    for offer in (one for group in slow_last for one in group):
        here = min(count, offer.slots)
        if here:
            found.append((offer, here))
        count -= here
    return found


def _sizes(module: MeasuredModule, count: int) -> list[int]:
    """Lists pipeline sizes in the order in which they are tried; 0 for all together."""
    wish = module.pipeline_size
    if wish is None:
        return [0]
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    return sorted(sizes, key=lambda size: (size < wish, abs(size - wish)))


def _micro_batches(module: MeasuredModule) -> tuple[int, ...]:
    return () if module.micro_batch_size is None else (module.micro_batch_size,)


def _partition(module: MeasuredModule, stages: int) -> tuple[int, ...] | None:
    if module.partition is not None and len(module.partition) == stages:
        return module.partition
    return None if module.weights is None else least_largest_of(module.weights, stages)


def _types(hosts: Sequence[MeasuredHost], whole: Profile) -> dict[str, NodeType]:
    """Returns the types of nodes by name; of several nodes the one with the least memory counts."""
    found: dict[str, NodeType] = {}
    for host in sorted(hosts, key=lambda one: one.memory_bytes):
        if host.type not in found:
            found[host.type] = NodeType(
                name=host.type,
                gpu=host.gpu,
                gpus=host.processes,
                memory_bytes=host.memory_bytes,
                intra=whole.intra_links.get(host.type, _UNMEASURED),
            )
    return found


def _with_memory(
    cluster: Cluster, sharing: dict[NodeKind, int], hosts: Sequence[MeasuredHost]
) -> Cluster:
    """Divides the memory of a host among the processes that it has now.

    Args:
        cluster: with a group for each kind of nodes.
        sharing: processes on a host of each kind, in the same order.
        hosts: as they were measured.
    """
    shared = {one.type for one in hosts if one.shares_memory}
    groups = [
        replace(
            group,
            type=replace(
                group.type,
                memory_bytes=kind.base.memory_bytes * kind.base.gpus / sharing[kind]
                if kind.base.name in shared
                else kind.base.memory_bytes,
            ),
        )
        for group, kind in zip(cluster.groups, sharing, strict=True)
    ]
    return replace(cluster, groups=tuple(groups))


def _layout(
    module: MeasuredModule, option: Option, places: Sequence[tuple[Offer, int]], *, timed: bool
) -> ParallelLayout:
    return ParallelLayout(
        tensor=1,
        pipeline=option.pipeline_size,
        data=option.replicas,
        partition=option.partition,
        micro_batch=option.micro_batch_size,
        microbatches=module.batch_size // (option.replicas * option.micro_batch_size),
        flags=(),
        places=tuple((offer.name, count) for offer, count in places),
        step_s=option.seconds if timed else None,
        pace={offer.name: offer.slowness for offer, _ in places},
        unit="segments",
    )
