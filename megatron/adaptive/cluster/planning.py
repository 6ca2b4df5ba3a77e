"""Plans layouts for the nodes that are there, from a cluster file, profiles, or both.

::

    --plan-with cluster.yaml   which node is of which type; links; speeds from data sheets
    --plan-with profile.json   measured speeds; without a cluster file nodes count as equal
    slowness of a node         a type of its own, whose layers take so many times as long

Degrees, layers of each stage, the microbatch and recompute are the plan's. What would change the
losses stays: the global batch always; the microbatch with dropout, whose numbers are drawn for a
microbatch; the tensor-parallel width with attention dropout or where it would pad the vocabulary
otherwise. A node that is slow, or has fewer processes than its type, is a kind of its own beside
its type: links are those of the type, durations are so many times as long.

A script with a ``Pipeline`` is planned from what its ranks measured at the first start. The
microbatch stays where the script gives it, or its model draws random numbers; nodes that were not
there when the model was measured count as the first one that was::

    model.json + nodes that are there ──> as many processes as any layout takes
                                          ──> pipeline size that was wished for, or the next to it
                                              ──> the least predicted step: microbatch, partition

Searches only; ``plan_process`` keeps them out of the manager's way.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.layouts import Offer, ParallelLayout, as_asked
from megatron.adaptive.cluster.membership import read_machines
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.forms import read_file
from megatron.adaptive.config.plan import plan_flags
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import (
    MEMORY_MARGIN,
    Cluster,
    LinkSpeed,
    NodePool,
    NodeType,
    known_gpu,
    make_cluster,
)
from megatron.adaptive.planner.measured_module import MeasuredModule, measured_cluster, node_numbers
from megatron.adaptive.planner.model import RECOMPUTE
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.plan import PlanRow, plan_document
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import Request, complete_profile, propose
from megatron.adaptive.planner.running import Running, choose_option, least_largest_of
from megatron.adaptive.planner.search import SearchOptions
from megatron.adaptive.schedule.registry import policy_names

PLAN_WITH = "--plan-with"
_ANY_NUMBER = 1 << 20
# Without a cluster file, for links that the profile does not hold.
_WITHIN = LinkSpeed(bytes_per_s=10e9, latency_s=1e-5, shared=False)
_BETWEEN = LinkSpeed(bytes_per_s=1.25e9, latency_s=3e-5)


def node_kind(base: NodeType, gpus: int, slowness: float) -> NodeType:
    """Returns the type that stands for nodes of a type with so many processes and such a pace."""
    name = base.name
    if slowness != 1.0 or gpus != base.gpus:
        name += f" x {gpus}"
        name += f" slow {slowness:.4g}" if slowness != 1.0 else ""
    return replace(base, name=name, like=base.name, gpus=gpus, slowness=slowness)


def read_inputs(paths: Sequence[Path]) -> tuple[Cluster | None, dict[str, Any] | None]:
    """Reads a cluster file, profiles, or both, distinguished by content.

    Returns:
        The cluster, and the profiles as one; ``None`` for what was not given.

    Raises:
        ConfigError: a file cannot be read or breaks a rule.
    """
    clusters: list[tuple[str, Any]] = []
    profiles: list[tuple[str, dict[str, Any]]] = []
    for path in paths:
        document = read_file(path, "cluster or profile")
        if isinstance(document, dict) and "layers" in document:
            profiles.append((str(path), profile_file.load(path)))
        elif isinstance(document, dict) and isinstance(document.get("nodes"), list):
            clusters.append((str(path), document))
        else:
            raise ConfigError(
                f"{PLAN_WITH} {path}: neither a cluster file, which lists nodes, nor a profile,"
                " which lists layers; see docs/planner.md"
            )
    if len(clusters) > 1:
        raise ConfigError(
            f"{PLAN_WITH}: {clusters[0][0]} and {clusters[1][0]} are cluster files: a job runs on"
            " one cluster; leave one out"
        )
    profile = profile_file.merge(profiles) if profiles else None
    if not clusters:
        return None, profile
    memories = {} if profile is None else profile_file.of_nodes(profile, "memory_bytes")
    where, document = clusters[0]
    return make_cluster(document, where, memories), profile


def equal_nodes(document: Mapping[str, Any], where: str) -> Cluster:
    """Returns a cluster of equal nodes, of as many processes as each may have.

    Args:
        document: a profile, which says of which part.
        where: the file.

    Raises:
        ConfigError: it is of several parts, or does not say their memory.
    """
    gpus = list(dict.fromkeys(row["gpu"] for row in document["layers"]))
    if len(gpus) > 1:
        raise ConfigError(
            f"{where}: it holds measurements of {', '.join(gpus)}: name a cluster file too, which"
            " says which node has which"
        )
    part = known_gpu(gpus[0])
    gpu = gpus[0] if part is None else part.name
    memory = profile_file.of_nodes(document, "memory_bytes").get(gpu)
    if memory is None and part is None:
        raise ConfigError(
            f"{where}: it does not say the memory of {gpu}: name a cluster file too, which does"
        )
    named = [
        name for name, facts in document.get("nodes", {}).items() if facts.get("gpu") == gpus[0]
    ]
    node = NodeType(
        name=named[0] if named else gpu,
        gpu=gpu,
        gpus=_ANY_NUMBER,
        memory_bytes=memory if memory is not None else part.memory_bytes if part else 0.0,
        intra=_WITHIN,
    )
    return Cluster(groups=(NodePool(type=node, count=1),), network=_BETWEEN)


def cluster_of(cluster: Cluster, counts: Mapping[NodeType, int]) -> Cluster:
    """Returns a cluster of so many nodes of each kind.

    Args:
        cluster: of their types.
        counts: of each kind, in the order of the nodes.
    """
    groups = tuple(NodePool(type=kind, count=count) for kind, count in counts.items())
    types = {kind.like for kind in counts}
    links = {pair: link for pair, link in cluster.links.items() if types.issuperset(pair)}
    return replace(cluster, groups=groups, links=links)


_PLANS = 6
"""Plans to look at: the trainer may refuse one for what the planner does not know."""
_UNEQUAL_PLANS = 4 * _PLANS
_CHOSEN = (
    "--plan",
    "--partition",
    "--model-chunks",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
_TENSOR = "--tensor-model-parallel-size"
_RECOMPUTE = ("--recompute", "--checkpoint-activations")


class Planning:
    """Plans the layouts of one job.

    Args:
        paths: cluster file, profiles, or both, distinguished by content.
        arguments: of the trainer.
        unequal: whether stages may have unequal numbers of replicas.

    Raises:
        ConfigError: a file cannot be read or breaks a rule, the profile is of another model, or an
            argument contradicts that the planner chooses.
    """

    def __init__(
        self, paths: Sequence[Path], arguments: Sequence[str], *, unequal: bool = False
    ) -> None:
        for name in _CHOSEN:
            if name in {word.partition("=")[0] for word in arguments}:
                raise ConfigError(
                    f"{name}: with {PLAN_WITH} the planner chooses layers and stages; leave one of"
                    " them out"
                )
        self._arguments = tuple(arguments)
        self._unequal = unequal
        self._config = as_asked(arguments)
        if self._config.parallel.context_parallel_size > 1:
            raise ConfigError(
                f"--context-parallel-size {self._config.parallel.context_parallel_size}: the"
                f" planner of {PLAN_WITH} does not know it; leave one of them out"
            )
        self._model = arguments_model(arguments, "model")
        if self._model.has_experts or self._config.model.mtp_num_layers:
            raise ConfigError(
                f"{PLAN_WITH} with experts or layers that predict further tokens: a job that"
                " changes shape moves dense layers alone; start the run without it"
            )
        cluster, document = read_inputs(paths)
        self._where = ", ".join(map(str, paths))
        self._has_cluster = cluster is not None
        if cluster is None:
            assert document is not None  # there is at least one file
            cluster = equal_nodes(document, self._where)
        cluster = cluster.with_memory(1 - MEMORY_MARGIN)
        measured = None
        if document is not None:
            profile_file.check_model(document, self._model, self._where)
            gpus = {one.name: one.gpu for one in cluster.types}
            measured = profile_file.make_profile(profile_file.renamed(document, gpus)[0])
        self._cluster = cluster
        self._profile = complete_profile(measured, self._model, cluster)
        self._types = {host: group.type for group in cluster.groups for host in group.hosts}
        others = [group.type for group in cluster.groups if not group.hosts]
        if len(others) > 1:
            raise ConfigError(
                f"{self._where}: node types {', '.join(one.name for one in others)} have no hosts:"
                " name the nodes of all types but one, so that each node is known"
            )
        self._other = others[0] if others else None

    def check(self, machines: Path | None) -> None:
        """Checks that a plan is possible for all machines that may come, as far as they are named.

        Args:
            machines: file of machines, ``None`` where nodes come by themselves.

        Raises:
            ConfigError: the file breaks a rule, names machines that the cluster file does not
                have, or no plan is possible.
        """
        offers = self._named_by_cluster() if machines is None else self._named_by_file(machines)
        if offers:
            self.plan(offers)

    def _named_by_cluster(self) -> list[Offer]:
        return [
            Offer(name=name, slots=group.type.gpus)
            for group in (self._cluster.groups if self._has_cluster else ())
            for name in group.hosts or [f"{group.type.name} {at}" for at in range(group.count)]
        ]

    def _named_by_file(self, path: Path) -> list[Offer]:
        """Returns the nodes of a machines file; none where their slots are not known."""
        machines = read_machines(path)
        if not self._has_cluster and not all(one.slots for one in machines):
            return []
        offers = [
            Offer(name=one.name, hosts=(one.host,), slots=one.slots or _ANY_NUMBER)
            for one in machines
        ]
        if missing := self.unknown(offers):
            raise ConfigError(
                f"--machines {path}: {missing} {'are' if ',' in missing else 'is'}"
                f" not in {self._where}: add to the hosts of a node type, or have one type without"
                " hosts"
            )
        return offers

    def unknown(self, offers: Sequence[Offer]) -> str:
        """Returns names of nodes that the cluster file does not have; empty for none."""
        return ", ".join(one.name for one in offers if self._type_of(one) is None)

    def plan(self, offers: Sequence[Offer], most_cpu_s: float = 10.0) -> ParallelLayout:
        """Finds the fastest layout.

        Args:
            offers: the nodes that are there; those that the cluster file does not have are left
                out.
            most_cpu_s: after which the best plan found so far has to do.

        Raises:
            ConfigError: nothing fits; says which limit stands in the way.
        """
        nodes, inputs = self._on(offers)
        equal = replace(self._options(inputs.cluster), most_cpu_s=most_cpu_s)
        found: ParallelLayout | None = None
        refused: ConfigError | None = None
        if self._unequal:
            equal = replace(equal, most_cpu_s=most_cpu_s / 2)
            with contextlib.suppress(ConfigError):  # the search below says what does not fit
                found, _ = self._fastest(self._with_unequal(equal), nodes, inputs)
        try:
            other, refused = self._fastest(equal, nodes, inputs)
        except ConfigError as error:
            other, refused = None, error
        layouts = [one for one in (other, found) if one is not None]
        if not layouts:
            assert refused is not None
            raise refused
        return min(layouts, key=lambda one: one.step_s or 0.0)

    def _fastest(
        self, options: SearchOptions, nodes: Sequence[str], inputs: PlanInputs
    ) -> tuple[ParallelLayout | None, ConfigError | None]:
        """Finds the best plan that the trainer takes, and why it does not take the first."""
        given = self._config.schedule.pipeline_schedule
        options = replace(options, schedules=(given if given in policy_names() else "1f1b",))
        request = Request(global_batch=self._config.batch.global_batch_size, options=options)
        refused: ConfigError | None = None
        for row in propose(inputs, request).rows:
            try:
                return self._layout(row, nodes, inputs), refused
            except ConfigError as error:
                refused = refused or error
        return None, refused

    def _with_unequal(self, options: SearchOptions) -> SearchOptions:
        """Returns options under which the search also tries stages of unequal numbers of replicas.

        It gives a narrow stage larger microbatches, of which a run deals out the parts.
        """
        samples = self._config.batch.global_batch_size
        sizes = options.micro_batch and tuple(
            size
            for size in range(options.micro_batch[0], samples + 1, options.micro_batch[0])
            if samples % size == 0
        )
        return replace(
            options, unequal=True, micro_batch=sizes, tp=(1,), distributed_optimizer=(False,),
            top=_UNEQUAL_PLANS,
        )  # fmt: skip

    def _type_of(self, offer: Offer) -> NodeType | None:
        for name in (offer.name, *offer.hosts, *(host.partition(".")[0] for host in offer.hosts)):
            if name in self._types:
                return self._types[name]
        return self._other

    def _on(self, offers: Sequence[Offer]) -> tuple[list[str], PlanInputs]:
        """Returns the nodes' names by number in a cluster of them alone, and what is planned."""
        found: dict[NodeType, list[str]] = {}
        for offer in offers:
            base = self._type_of(offer)
            if base is not None:
                kind = node_kind(base, min(offer.slots, base.gpus), offer.slowness)
                found.setdefault(kind, []).append(offer.name)
        if not found:
            raise ConfigError(
                f"{', '.join(one.name for one in offers)}: no such node is in {self._where}"
            )
        order = {node.name: at for at, node in enumerate(self._cluster.types)}
        kinds = sorted(found, key=lambda kind: (order[kind.like], -kind.gpus, kind.slowness))
        names = [name for kind in kinds for name in found[kind]]
        cluster = cluster_of(self._cluster, {kind: len(found[kind]) for kind in kinds})
        return names, PlanInputs(self._model, cluster, self._profile)

    def _options(self, cluster: Cluster) -> SearchOptions:
        config = self._config
        recompute = config.recompute.recompute_granularity
        sharded = config.parallel.use_distributed_optimizer
        return SearchOptions(
            tp=self._widths(cluster),
            micro_batch=self._micro_batches(),
            recompute=RECOMPUTE if not self._is_given(_RECOMPUTE) else (recompute or "none",),
            # With one replica there is nothing to divide, so that both are looked at.
            distributed_optimizer=(False, True) if sharded else (False,),
            overlap_reduce=config.parallel.overlap_grad_reduce,
            sequence_parallel=(config.parallel.sequence_parallel,),
            context_ranks=(1,),
            top=_PLANS,
        )

    def _is_given(self, prefixes: Iterable[str]) -> bool:
        return any(word.startswith(tuple(prefixes)) for word in self._arguments)

    def _widths(self, cluster: Cluster) -> tuple[int, ...]:
        """Lists tensor-parallel widths under which losses stay as they are."""
        config = self._config
        given = config.parallel.tensor_model_parallel_size
        words = {word.partition("=")[0] for word in self._arguments}
        vocabulary = config.data.vocab_size
        if _TENSOR in words or config.model.attention_dropout or vocabulary is None:
            return (given,)

        def padded(width: int) -> tuple[int, ...]:
            # A tokenizer may have a token more than it was given.
            unit = config.model.make_vocab_size_divisible_by * width
            return tuple(-(-(vocabulary + more) // unit) * unit for more in (0, 1))

        return tuple(
            width
            for width in range(1, max(node.gpus for node in cluster.types) + 1)
            if any(node.gpus % width == 0 for node in cluster.types)
            and self._model.max_tp % width == 0
            and padded(width) == padded(given)
        )

    def _micro_batches(self) -> tuple[int, ...]:
        """Lists sizes of a microbatch under which losses stay as they are; empty for all."""
        model = self._config.model
        drops = model.attention_dropout > 0 or model.hidden_dropout > 0
        # Both draw, or weigh, by microbatch.
        if drops or self._config.data.eod_mask_loss:
            return (self._config.batch.micro_batch_size,)
        return ()

    def _layout(self, row: PlanRow, nodes: Sequence[str], inputs: PlanInputs) -> ParallelLayout:
        """Makes the layout of a plan."""
        plan = row.plan
        allowed = self._micro_batches()
        if allowed and plan.micro_batch not in allowed:
            raise ConfigError(
                f"microbatches of {plan.micro_batch} samples: losses stay as they are with"
                f" {allowed[0]}"
            )
        document = plan_document(plan, inputs, row.prediction)
        left = ["schedule", "distributed_optimizer", "overlap_grad_reduce", "sequence_parallel"]
        left += ["recompute"] if self._is_given(_RECOMPUTE) else []
        document = {key: value for key, value in document.items() if key not in left}
        flags = plan_flags(document, PLAN_WITH)
        counts = [len(place.replicas) for place in plan.places]
        world_size = plan.tp * sum(counts)
        parse([*self._arguments, *flags], world_size=world_size, last_wins=True)
        used: dict[int, int] = {}
        for place in plan.places:
            for replica in place.replicas:
                used[replica.node] = used.get(replica.node, 0) + replica.tp
        kind = max(set(self._model.layers), key=self._model.layers.count)
        pace = {}
        for node in used:
            on = inputs.cluster.nodes[node]
            takes = inputs.profile.times(kind, on.gpu, plan.tp, plan.micro_batch)
            pace[nodes[node]] = (takes.forward_s + takes.backward_s) * on.slowness
        return ParallelLayout(
            tensor=plan.tp,
            pipeline=plan.pp,
            data=plan.dp,
            partition=tuple(self._model.counted(plan.partition)),
            micro_batch=plan.micro_batch,
            microbatches=plan.num_microbatches,
            flags=tuple(flags),
            places=tuple((nodes[node], count) for node, count in used.items()),
            step_s=row.prediction.seconds,
            pace=pace,
            widths=() if len(set(counts)) == 1 else tuple(counts),
        )


class ScriptPlanning:
    """Plans layouts of one measured module.

    Args:
        path: of what was measured.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

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
                        micro_batches=(module.micro_batch_size,) if module.micro_batch_size else (),
                        partition=lambda stages: _partition(module, stages),
                        most=module.most,
                        timed=timed,
                    )[0]
                except ConfigError as error:
                    first = first or error
                    continue
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
        base = measured_cluster(module.hosts, whole)
        types = {one.type.name: one.type for one in base.groups}
        known = {one.host: types[one.type] for one in module.hosts}
        other = types[module.hosts[0].type]
        kinds = [
            node_kind(known.get(host, other), count, slowness)
            for (host, slowness), count in hosts.items()
        ]
        # The memory of a host is divided among the processes that it has now.
        most: dict[NodeType, int] = {}
        for (host, _), kind in zip(hosts, kinds, strict=True):
            most[kind] = max(most.get(kind, 0), on_host[host])
        shared = {one.type for one in module.hosts if one.shares_memory}
        kinds = [
            replace(kind, memory_bytes=kind.memory_bytes * types[kind.like].gpus / most[kind])
            if kind.like in shared
            else kind
            for kind in kinds
        ]
        counts = Counter(kinds)
        split = None if module.split is None else module.profile(split=True)
        return Running(
            model=module.model,
            cluster=cluster_of(base, counts),
            order=node_numbers(kinds),
            batch=module.batch_size,
            schedule=module.schedule,
            chunks=module.chunks,
            whole=whole,
            split=split,
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


def _partition(module: MeasuredModule, stages: int) -> tuple[int, ...] | None:
    if module.partition is not None and len(module.partition) == stages:
        return module.partition
    return None if module.weights is None else least_largest_of(module.weights, stages)
