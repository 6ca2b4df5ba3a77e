"""Plans layouts for the available nodes, based on a cluster file and profiles.

::

    --plan-with cluster.yaml   node types, links between nodes, speeds from data sheets
    --plan-with profile.json   measured speeds
    slowness of a node         factor by which layers take longer than expected for its node type

The plan sets the parallel sizes, the number of layers per stage, the microbatch size and the
recomputation. The plan does not change settings that affect the losses: the global batch size, the
tensor-parallel size and, if dropout is used, the microbatch size, because dropout draws its random
numbers per microbatch. A node that is slow, or that runs fewer processes than its type allows, is
described by a separate node type. The new type has the links of the original type, and its
durations are multiplied by the node's slowness.

For a script with a ``Pipeline``, the plan is based on measurements that the ranks take at the first
start. The plan does not change the microbatch size if the script sets it, or if the model draws
random numbers. A node that was absent when the model was measured is treated like the first
measured node. Choices are made in this order::

    model.json + available nodes ──> largest number of processes that some layout can use
                                     ──> the requested pipeline size, or the next larger one,
                                         or the next smaller one
                                         ──> microbatch size and partition with the shortest
                                             predicted step time

The planner runs in a separate process, so that a long search does not block the manager. This
process is started once, and imports its modules while machines are still joining. A plan that
arrives after the timeout is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.job_state_file import say
from megatron.adaptive.cluster.layout_rule import (
    WORTH_A_MORPH,
    Chooser,
    Offer,
    ParallelLayout,
    parse_requested,
)
from megatron.adaptive.cluster.membership import read_machines
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.flag_checks import check_unequal_stages
from megatron.adaptive.config.plan_file import plan_flags
from megatron.adaptive.config.schema_files import read_file
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import (
    MEMORY_MARGIN,
    Cluster,
    NodePool,
    NodeType,
    make_cluster,
)
from megatron.adaptive.planner.job_shape import Running, choose_option, least_largest_of
from megatron.adaptive.planner.measured_module import MeasuredModule, measured_cluster, node_numbers
from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.model_file import arguments_model, usual_attention
from megatron.adaptive.planner.plan import PlanRow, plan_document
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import Request, complete_profile, propose
from megatron.adaptive.planner.search_options import SearchOptions
from megatron.adaptive.schedule.catalog import policy_names

PLAN_WITH = "--plan-with"
_ANY_NUMBER = 1 << 20


def node_kind(base: NodeType, gpus: int, slowness: float) -> NodeType:
    """Returns a node type like ``base``, but with ``gpus`` GPUs, and slower by ``slowness``."""
    name = base.name
    if slowness != 1.0 or gpus != base.gpus:
        name += f" x {gpus}"
        name += f" slow {slowness:.4g}" if slowness != 1.0 else ""
    return replace(base, name=name, like=base.name, gpus=gpus, slowness=slowness)


def read_inputs(paths: Sequence[Path]) -> tuple[Cluster, dict[str, Any] | None]:
    """Reads one cluster file and any number of profiles from ``paths``.

    The type of each file is detected from its content.

    Returns:
        The cluster, and a profile merged from all profiles, or ``None`` if there are no profiles.

    Raises:
        ConfigError: A file is missing or invalid, or there is not exactly one cluster file.
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
                f"{PLAN_WITH} {path} must be a cluster file, which lists nodes, or a profile, "
                "which lists layers (see docs/planner.md)"
            )
    if not clusters:
        raise ConfigError(
            f"{PLAN_WITH} {', '.join(map(str, paths))} lacks a cluster file, the file that "
            "describes nodes and links; add it (see docs/planner.md)"
        )
    if len(clusters) > 1:
        raise ConfigError(
            f"{PLAN_WITH} contains two cluster files, {clusters[0][0]} and {clusters[1][0]}, but "
            "a job runs on one cluster; remove one of them"
        )
    profile = profile_file.merge(profiles) if profiles else None
    memories = {} if profile is None else profile_file.of_nodes(profile, "memory_bytes")
    where, document = clusters[0]
    return make_cluster(document, where, memories), profile


def cluster_of(cluster: Cluster, counts: Mapping[NodeType, int]) -> Cluster:
    """Returns a copy of ``cluster`` with the node types and node counts in ``counts``.

    Args:
        cluster: Cluster that defines the links between the node types.
        counts: Number of nodes per type. Nodes are numbered in the order of this mapping.
    """
    groups = tuple(NodePool(type=kind, count=count) for kind, count in counts.items())
    types = {kind.like for kind in counts}
    links = {pair: link for pair, link in cluster.links.items() if types.issuperset(pair)}
    return replace(cluster, groups=groups, links=links)


_PLANS = 6
"""Number of plans to try, from best to worst, because the trainer may reject some plans."""
_UNEQUAL_PLANS = 4 * _PLANS
_CHOSEN = (
    "--plan",
    "--partition",
    "--model-chunks",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
_RECOMPUTE = ("--recompute", "--checkpoint-activations")


class Planning:
    """Plans the layouts of one job that runs the trainer.

    Args:
        paths: Paths of the cluster file and the profiles, in any order.
        arguments: Command-line arguments of the trainer.
        unequal: Whether stages may have different numbers of replicas.

    Raises:
        ConfigError: A file is missing or invalid, the profile belongs to a different model, an
            argument sets a value that the planner has to choose, or the planner does not support a
            setting.
    """

    def __init__(
        self, paths: Sequence[Path], arguments: Sequence[str], *, unequal: bool = False
    ) -> None:
        for name in _CHOSEN:
            if name in {argument.partition("=")[0] for argument in arguments}:
                raise ConfigError(
                    f"{name} cannot be combined with {PLAN_WITH}, because the planner chooses "
                    "layers and stages; remove one of them"
                )
        self._arguments = tuple(arguments)
        self._unequal = unequal
        self._config = parse_requested(arguments)
        cluster, document = read_inputs(paths)
        attention = usual_attention(on_gpus=cluster.has_known_gpus)
        self._model = arguments_model(arguments, "model", attention=attention)
        self._check_supported()
        self._where = ", ".join(map(str, paths))
        cluster = cluster.with_memory(1 - MEMORY_MARGIN)
        measured = None
        if document is not None:
            profile_file.check_model(document, self._model, self._where)
            gpus = {node_type.name: node_type.gpu for node_type in cluster.types}
            measured = profile_file.make_profile(profile_file.renamed(document, gpus)[0])
        self._cluster = cluster
        self._profile = complete_profile(measured, self._model, cluster)
        self._types = {host: group.type for group in cluster.groups for host in group.hosts}
        others = [group.type for group in cluster.groups if not group.hosts]
        if len(others) > 1:
            raise ConfigError(
                f"{self._where}: node types {', '.join(other.name for other in others)} have no "
                "hosts; at most one node type may omit its hosts, so that the type of each host is "
                "known; list the hosts of the others"
            )
        self._other = others[0] if others else None

    def _check_supported(self) -> None:
        """Raises an error if the planner does not support the settings of the job."""
        context_ranks = self._config.parallel.context_parallel_size
        if context_ranks > 1:
            raise ConfigError(
                f"--context-parallel-size {context_ranks} cannot be combined with {PLAN_WITH}, "
                "because the planner does not support it; remove one of them"
            )
        if self._model.has_experts or self._config.model.mtp_num_layers:
            raise ConfigError(
                f"{PLAN_WITH} does not support experts or multi-token prediction layers; remove "
                f"{PLAN_WITH}, so that the job chooses its layouts without the planner"
            )
        if self._unequal:
            try:
                check_unequal_stages(self._config)
            except ConfigError as error:
                reason = str(error).rpartition("; ")[0]
                raise ConfigError(
                    f"--unequal: {reason}; remove --unequal, or change the other flag"
                ) from None

    def check(self, machines: Path | None) -> None:
        """Checks that a plan exists if all known machines join.

        Args:
            machines: Path of the machines file, or ``None`` if nodes join by themselves. The check
                then uses the machines of the cluster file.

        Raises:
            ConfigError: The machines file is invalid or lists machines that are missing from the
                cluster file, or no plan is possible.
        """
        self.plan(self._named_by_cluster() if machines is None else self._named_by_file(machines))

    def _named_by_cluster(self) -> list[Offer]:
        return [
            Offer(name=name, slots=group.type.gpus)
            for group in self._cluster.groups
            for name in group.hosts
            or [f"{group.type.name} {index}" for index in range(group.count)]
        ]

    def _named_by_file(self, path: Path) -> list[Offer]:
        """Returns the nodes in the machines file ``path``.

        Nodes without ``slots`` have no limit on the number of processes.
        """
        offers = [
            Offer(name=machine.name, hosts=(machine.host,), slots=machine.slots or _ANY_NUMBER)
            for machine in read_machines(path)
        ]
        if missing := self.unknown(offers):
            raise ConfigError(
                f"--machines {path}: {missing} {'are' if ',' in missing else 'is'} not in "
                f"{self._where}; add {'them' if ',' in missing else 'it'} to the hosts of a node "
                "type, or leave the hosts of one type empty"
            )
        return offers

    def unknown(self, offers: Sequence[Offer]) -> str:
        """Returns the names of the nodes in ``offers`` that the cluster file does not contain."""
        return ", ".join(offer.name for offer in offers if self._type_of(offer) is None)

    def plan(self, offers: Sequence[Offer], most_cpu_s: float = 10.0) -> ParallelLayout:
        """Returns the layout with the shortest predicted step time for the nodes in ``offers``.

        Args:
            offers: Available nodes. Nodes that are missing from the cluster file are ignored.
            most_cpu_s: Maximum CPU time of the search in seconds. After that time, the best plan
                found so far is returned.

        Raises:
            ConfigError: No plan fits. The message contains the limit that rules out all plans.
        """
        nodes, inputs = self._inputs_for(offers)
        equal = replace(self._options(), most_cpu_s=most_cpu_s)
        unequal_layout: ParallelLayout | None = None
        refused: ConfigError | None = None
        if self._unequal:
            equal = replace(equal, most_cpu_s=most_cpu_s / 2)
            with contextlib.suppress(ConfigError):  # The search below reports why no layout fits.
                unequal_layout, _ = self._fastest(self._with_unequal(equal), nodes, inputs)
        try:
            equal_layout, refused = self._fastest(equal, nodes, inputs)
        except ConfigError as error:
            equal_layout = None
            refused = error
        layouts = [layout for layout in (equal_layout, unequal_layout) if layout is not None]
        if not layouts:
            assert refused is not None
            raise refused
        return min(layouts, key=lambda layout: layout.step_s or 0.0)

    def _fastest(
        self, options: SearchOptions, nodes: Sequence[str], inputs: PlanInputs
    ) -> tuple[ParallelLayout | None, ConfigError | None]:
        """Returns the best layout that the trainer accepts, and why it rejected a better one.

        The layout is ``None`` if the trainer rejects all plans. The error is ``None`` if the
        trainer accepts the best plan.
        """
        wished = self._config.schedule.pipeline_schedule
        options = replace(options, schedules=(wished if wished in policy_names() else "1f1b",))
        request = Request(global_batch=self._config.batch.global_batch_size, options=options)
        refused: ConfigError | None = None
        for row in propose(inputs, request).rows:
            try:
                return self._layout(row, nodes, inputs), refused
            except ConfigError as error:
                refused = refused or error
        return None, refused

    def _with_unequal(self, options: SearchOptions) -> SearchOptions:
        """Returns options for a search that also tries different numbers of replicas per stage.

        The search treats a stage with fewer replicas as if it used larger microbatches. During
        training, all microbatches have the same size, and are distributed over a stage's replicas.
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

    def _inputs_for(self, offers: Sequence[Offer]) -> tuple[list[str], PlanInputs]:
        """Returns the names of the nodes in the planner's order, and the inputs for the planner."""
        names_by_kind: dict[NodeType, list[str]] = {}
        for offer in offers:
            base = self._type_of(offer)
            if base is not None:
                kind = node_kind(base, min(offer.slots, base.gpus), offer.slowness)
                names_by_kind.setdefault(kind, []).append(offer.name)
        if not names_by_kind:
            raise ConfigError(
                f"none of the nodes {', '.join(offer.name for offer in offers)} is listed in "
                f"{self._where}"
            )
        order = {node.name: index for index, node in enumerate(self._cluster.types)}
        kinds = sorted(
            names_by_kind, key=lambda kind: (order[kind.like], -kind.gpus, kind.slowness)
        )
        names = [name for kind in kinds for name in names_by_kind[kind]]
        cluster = cluster_of(self._cluster, {kind: len(names_by_kind[kind]) for kind in kinds})
        return names, PlanInputs(self._model, cluster, self._profile)

    def _options(self) -> SearchOptions:
        config = self._config
        recompute = config.recompute.recompute_granularity
        sharded = config.parallel.use_distributed_optimizer
        return SearchOptions(
            tp=(config.parallel.tensor_model_parallel_size,),
            micro_batch=self._micro_batches(),
            recompute=RECOMPUTE if not self._is_given(_RECOMPUTE) else (recompute or "none",),
            # Sharding the optimizer state has no effect with a single replica, so also search for
            # layouts without sharding.
            distributed_optimizer=(False, True) if sharded else (False,),
            overlap_reduce=config.parallel.overlap_grad_reduce,
            sequence_parallel=(config.parallel.sequence_parallel,),
            context_ranks=(1,),
            top=_PLANS,
        )

    def _is_given(self, prefixes: Iterable[str]) -> bool:
        return any(argument.startswith(tuple(prefixes)) for argument in self._arguments)

    def _micro_batches(self) -> tuple[int, ...]:
        """Returns the microbatch sizes that lead to the same losses as the user's size.

        The result is empty if the losses do not depend on the microbatch size.
        """
        model = self._config.model
        drops = model.attention_dropout > 0 or model.hidden_dropout > 0
        # Dropout draws random numbers per microbatch, and a masked loss is averaged over the tokens
        # of a microbatch. A different microbatch size would therefore change the losses.
        if drops or self._config.data.eod_mask_loss:
            return (self._config.batch.micro_batch_size,)
        return ()

    def _layout(self, row: PlanRow, nodes: Sequence[str], inputs: PlanInputs) -> ParallelLayout:
        """Converts the plan in ``row`` to a layout, which contains flags for the trainer.

        Raises:
            ConfigError: The plan would change the losses, or the trainer rejects the flags.
        """
        plan = row.plan
        allowed = self._micro_batches()
        if allowed and plan.micro_batch not in allowed:
            raise ConfigError(
                f"a layout with {plan.micro_batch} samples per microbatch would change the losses; "
                f"only {allowed[0]} samples per microbatch leave them unchanged"
            )
        document = plan_document(plan, inputs, row.prediction)
        excluded_keys = [
            "schedule",
            "distributed_optimizer",
            "overlap_grad_reduce",
            "sequence_parallel",
        ]
        excluded_keys += ["recompute"] if self._is_given(_RECOMPUTE) else []
        document = {key: value for key, value in document.items() if key not in excluded_keys}
        flags = plan_flags(document, PLAN_WITH)
        counts = [len(stage_place.replicas) for stage_place in plan.places]
        world_size = plan.tp * sum(counts)
        parse([*self._arguments, *flags], world_size=world_size, last_wins=True)
        used: dict[int, int] = {}
        for stage_place in plan.places:
            for replica in stage_place.replicas:
                used[replica.node] = used.get(replica.node, 0) + replica.tp
        kind = max(set(self._model.layers), key=self._model.layers.count)
        pace = {}
        for node in used:
            on = inputs.cluster.nodes[node]
            layer_times = inputs.profile.times(kind, on.gpu, plan.tp, plan.micro_batch)
            pace[nodes[node]] = (layer_times.forward_s + layer_times.backward_s) * on.slowness
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


def plan_script(path: Path, offers: Sequence[Offer]) -> ParallelLayout:
    """Returns the best layout for a script whose model has already been measured.

    Args:
        path: Path of the file with the measured costs.
        offers: Available nodes.

    Raises:
        ConfigError: No layout fits. The message contains the limit that rules out all layouts.
    """
    module = MeasuredModule.read(path)
    if module is None:
        raise ConfigError(f"{path}: the model has not been measured yet")
    first: ConfigError | None = None
    for count in range(sum(offer.slots for offer in offers), 0, -1):
        places = _places(offers, count)
        for size in _sizes(module, count):
            try:
                option = choose_option(
                    _running(module, places),
                    pipeline_sizes=(size,) if size else (),
                    micro_batches=(module.micro_batch_size,) if module.micro_batch_size else (),
                    partition=lambda stages: _partition(module, stages),
                    least=module.least,
                    most=module.most,
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
                step_s=option.seconds,
                pace={offer.name: offer.slowness for offer, _ in places},
                unit="segments",
            )
    assert first is not None
    raise first


def _running(module: MeasuredModule, places: Sequence[tuple[Offer, int]]) -> Running:
    unsplit = module.profile(split=False)
    # Several nodes may share a machine. The planner treats equally slow nodes of a machine as one
    # node.
    hosts: dict[tuple[str, float], int] = {}
    on_host: dict[str, int] = {}
    for offer, count in places:
        host = _host(offer)
        hosts[host, offer.slowness] = hosts.get((host, offer.slowness), 0) + count
        on_host[host] = on_host.get(host, 0) + count
    base = measured_cluster(module.hosts, unsplit)
    types = {host_entry.type.name: host_entry.type for host_entry in base.groups}
    type_by_host = {host_entry.host: types[host_entry.type] for host_entry in module.hosts}
    other = types[module.hosts[0].type]
    kinds = [
        node_kind(type_by_host.get(host, other), count, slowness)
        for (host, slowness), count in hosts.items()
    ]
    # Processes on a host share its memory, so divide the memory by the current number of processes.
    processes_on_host: dict[NodeType, int] = {}
    for (host, _), kind in zip(hosts, kinds, strict=True):
        processes_on_host[kind] = max(processes_on_host.get(kind, 0), on_host[host])
    shared = {host_entry.type for host_entry in module.hosts if host_entry.shares_memory}
    kinds = [
        replace(
            kind, memory_bytes=kind.memory_bytes * types[kind.like].gpus / processes_on_host[kind]
        )
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
        whole=unsplit,
        split=split,
        cap=module.cap,
    )


def _host(offer: Offer) -> str:
    """Returns the host name that the node ``offer`` reports.

    The result is the last entry of ``hosts``, or the node's name if ``hosts`` is empty.
    """
    return offer.hosts[-1] if offer.hosts else offer.name


def _places(offers: Sequence[Offer], count: int) -> list[tuple[Offer, int]]:
    """Assigns ``count`` processes to nodes, filling one machine after the other.

    ``offers`` are the available nodes. Returns pairs of a node and its number of processes. On each
    machine, the slowest nodes come last.
    """
    hosts: dict[str, list[Offer]] = {}
    for offer in offers:
        hosts.setdefault(_host(offer), []).append(offer)
    placed = []
    slow_last = [sorted(group, key=lambda offer: offer.slowness) for group in hosts.values()]
    for offer in chain.from_iterable(slow_last):
        assigned = min(count, offer.slots)
        if assigned:
            placed.append((offer, assigned))
        count -= assigned
    return placed


def _sizes(module: MeasuredModule, count: int) -> list[int]:
    """Returns the pipeline sizes to try, from best to worst. The size 0 stands for all sizes."""
    requested = module.pipeline_size
    if requested is None:
        return [0]
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    return sorted(sizes, key=lambda size: (size < requested, abs(size - requested)))


def _partition(module: MeasuredModule, stages: int) -> tuple[int, ...] | None:
    if module.partition is not None and len(module.partition) == stages:
        return module.partition
    return None if module.weights is None else least_largest_of(module.weights, stages)


_FIRST_S = 180.0
"""Timeout in seconds for the first plan on a machine, including the compilation of search code."""
_SEARCH = 0.5
"""Fraction of a plan's timeout that the search may use. The rest is for preparing the search."""


class PlannerChooser(Chooser):
    """Chooses layouts with the planner.

    If the planner exceeds its timeout, the simple rule of :class:`Chooser` chooses the trainer's
    layout. If the job runs a script, the first layout uses all processes to measure the model, and
    only later layouts are planned. The chooser must be closed after use.

    Args:
        paths: Paths of the cluster file and the profiles, in any order.
        arguments: Command-line arguments of the trainer.
        within_s: Timeout for each plan in seconds.
        unequal: Whether stages may have different numbers of replicas.
        model: Path of the file with the measured costs of a script's model, or ``None`` if the job
            runs the trainer.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        arguments: Sequence[str],
        within_s: float,
        *,
        unequal: bool = False,
        model: Path | None = None,
    ) -> None:
        self._within_s = within_s
        self._model = model
        self._known: dict[tuple[object, ...], tuple[ParallelLayout | None, str]] = {}
        self._given = tuple(paths), tuple(arguments), unequal
        self._pool = multiprocessing.get_context("spawn").Pool(1, _begin)

    def check(self, machines: Path | None) -> str:
        """Checks the input files, and that a plan exists if all known machines join.

        The call blocks until the check is complete.

        Args:
            machines: Path of the machines file, or ``None`` if nodes join by themselves. The check
                then uses the machines of the cluster file.

        Returns:
            Reason why the check was not completed, such as a timeout, or an empty string.

        Raises:
            ConfigError: A file is invalid, or no plan is possible.
        """
        try:
            self._ask(_FIRST_S, _answer, self._given, "check", machines)
        except SetupError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Terminates the planner's process. Safe to call more than once."""
        self._pool.terminate()

    def _plan(self, offers: Sequence[Offer], within_s: float) -> tuple[ParallelLayout | None, str]:
        """Waits until the planner's process has chosen a layout for the nodes in ``offers``.

        Returns:
            The layout and a string. The string is a warning that lists ignored nodes, or empty. If
            no layout fits, the layout is ``None``, and the string is the reason.
        """
        try:
            layout: ParallelLayout
            if self._model is not None:
                layout = self._ask(within_s, plan_script, self._model, offers)
                return layout, ""
            layout = self._ask(within_s, _answer, self._given, "plan", offers, within_s * _SEARCH)
            unknown: str = self._ask(within_s, _answer, self._given, "unknown", offers)
        except ConfigError as error:
            return None, str(error)
        return layout, unknown and f"{unknown} (not in the cluster file of {PLAN_WITH})"

    def _ask(self, within_s: float, answer: Callable[..., Any], *arguments: Any) -> Any:
        pending = self._pool.apply_async(answer, arguments)
        try:
            return pending.get(within_s)
        except multiprocessing.TimeoutError:
            raise SetupError(f"the planner found no plan within {within_s:g} s") from None
        except AdaptiveError as error:
            raise ConfigError(str(error)) from None
        # Errors of other types are bugs in the planner. Print a traceback, and let the job
        # continue.
        except Exception as error:
            traceback.print_exc()
            raise SetupError(f"the planner failed: {error!r}") from None

    async def choose(
        self, arguments: Sequence[str], offers: Sequence[Offer]
    ) -> ParallelLayout | None:
        key = tuple[object, ...](offers)
        limit_s = self._within_s
        if self._model is not None:
            module = MeasuredModule.read(self._model)
            if module is None:
                count = sum(offer.slots for offer in offers)
                measuring = ParallelLayout(
                    tensor=1, pipeline=count, data=1, partition=(), micro_batch=0, flags=()
                )
                return measuring if count else None
            key = (module.signature, module.micro_batch_size, *offers)
            limit_s = max(
                _FIRST_S,
                limit_s,
                # If the job runs a script, only the planner can choose a layout, so wait longer.
            )
        if key not in self._known:
            try:
                answer = await asyncio.to_thread(self._plan, offers, limit_s)
            except SetupError as error:
                if self._model is not None:
                    self.why = str(error)
                    return None
                say(f"warning: the layout is chosen without the planner: {error}")
                self.why = ""
                return await super().choose(arguments, offers)
            self._known[key] = answer
            if answer[0] is not None and answer[1]:
                say(f"warning: machines left out: {answer[1]}")
        layout, text = self._known[key]
        self.why = "" if layout is not None else text
        return layout

    def is_better(self, layout: ParallelLayout, running: ParallelLayout) -> bool:
        if self._model is None:
            return super().is_better(layout, running)
        if running.is_to_be_measured or layout.is_to_be_measured:
            return False
        if layout.world_size != running.world_size:
            return layout.world_size > running.world_size
        if layout.step_s is None or running.step_s is None:
            return False
        return layout.step_s < (1 - WORTH_A_MORPH) * running.step_s


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the manager handles Ctrl-C.


_planning = functools.cache(Planning)


def _answer(setup: tuple[Any, ...], name: str, *values: Any) -> Any:
    """Calls the method ``name`` of :class:`Planning` and returns the result.

    This function runs in the planner's process. ``setup`` contains the arguments of the
    constructor, and ``values`` contains the arguments of the method.
    """
    paths, arguments, unequal = setup
    return getattr(_planning(paths, arguments, unequal=unequal), name)(*values)
