"""Shapes by the planner: for the nodes that are there, from a cluster file, profiles, or both.

::

    --plan-with cluster.yaml   which node is of which type; links; speeds from data sheets
    --plan-with profile.json   measured speeds; without a cluster file nodes count as equal
    slowness of a node         a type of its own, whose layers take so many times as long

Degrees, layers of each stage, the microbatch and recompute are the plan's. What would change the
losses stays: the global batch always; the microbatch with dropout, whose numbers are drawn for a
microbatch; the tensor-parallel width with attention dropout or where it would pad the vocabulary
otherwise. Searches only; ``plan_process`` keeps them out of the manager's way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.layouts import Offer, Shape, as_asked
from megatron.adaptive.cluster.machines import Machine
from megatron.adaptive.cluster.plan_inputs import (
    PLAN_WITH,
    NodeKind,
    cluster_of,
    equal_nodes,
    profile_of,
    read_inputs,
)
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.plan import plan_flags
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.cluster import Cluster, NodeType
from megatron.adaptive.planner.model import RECOMPUTE
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.plan_file import plan_document
from megatron.adaptive.planner.presets import arguments_model
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.propose import Request, complete_profile, propose
from megatron.adaptive.planner.report import Row
from megatron.adaptive.planner.search import SearchOptions
from megatron.adaptive.schedule.registry import policy_names

__all__ = ["Planning"]

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
    """Plans the shapes of one job.

    Args:
        paths: cluster file, profiles, or both, told apart by what they hold.
        arguments: of the trainer.
        unequal: whether stages may have unequal numbers of replicas.

    Raises:
        ConfigError: a file cannot be read or breaks a rule, the profile is of another model, or an
            argument contradicts that the planner chooses.
    """

    def __init__(
        self, paths: Sequence[Path], arguments: Sequence[str], *, unequal: bool = False
    ) -> None:
        _refuse_chosen(arguments)
        self._arguments = tuple(arguments)
        self._unequal = unequal
        self._config = as_asked(arguments)
        if self._config.parallel.context_parallel_size > 1:
            raise ConfigError(
                f"--context-parallel-size {self._config.parallel.context_parallel_size}: the"
                f" planner of {PLAN_WITH} does not know it; leave one of them out"
            )
        self._model = arguments_model(arguments, "model")
        cluster, told = read_inputs(paths)
        self._where = ", ".join(map(str, paths))
        self._has_cluster = cluster is not None
        if cluster is None:
            assert told is not None  # there is at least one file
            cluster = equal_nodes(told, self._where)
        measured = None
        if told is not None:
            profile_file.check_model(told, self._model, self._where)
            gpus = {one.name: one.gpu for one in cluster.types}
            measured = profile_file.make_profile(profile_file.renamed(told, gpus)[0])
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

    def require_machines(self, machines: Sequence[Machine], where: str) -> None:
        """Refuse machines that the cluster file does not have.

        Raises:
            ConfigError: there are such; names them.
        """
        missing = [
            one.name for one in machines if self._type_of(Offer(**_names(one), slots=1)) is None
        ]
        if missing:
            raise ConfigError(
                f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in"
                f" {self._where}: add to the hosts of a node type, or have one type without hosts"
            )

    def expected(self, machines: Sequence[Machine] | None) -> list[Offer]:
        """The nodes that may come, as far as the files tell; empty where they do not.

        Args:
            machines: those of the machines file, ``None`` where nodes come by themselves.
        """
        offers: list[Offer] = []
        if machines is not None:
            for one in machines:
                named = Offer(**_names(one), slots=one.slots or 1)
                kind = self._type_of(named)
                if one.slots is None and kind is not None:
                    if not self._has_cluster:
                        return []
                    named = replace(named, slots=kind.gpus)
                offers.append(named)
        elif self._has_cluster:
            for group in self._cluster.groups:
                names = group.hosts or [f"{group.type.name} {at}" for at in range(group.count)]
                offers += [Offer(name=name, slots=group.type.gpus) for name in names]
        return offers

    def unknown(self, offers: Sequence[Offer]) -> list[str]:
        """Names of nodes that the cluster file does not have."""
        return [one.name for one in offers if self._type_of(one) is None]

    def plan(self, offers: Sequence[Offer], most_cpu_s: float = 10.0) -> Shape:
        """Find the fastest shape.

        Args:
            offers: the nodes that are there; those that the cluster file does not have are left
                out.
            most_cpu_s: after which the best plan found so far has to do.

        Raises:
            ConfigError: nothing fits; says which limit stands in the way.
        """
        nodes, cluster, profile = self._on(offers)
        equal = replace(self._options(cluster), most_cpu_s=most_cpu_s)
        found: Shape | None = None
        refused: ConfigError | None = None
        if self._unequal:
            equal = replace(equal, most_cpu_s=most_cpu_s / 2)
            with contextlib.suppress(ConfigError):  # the search below says what does not fit
                found, _ = self._fastest(self._with_unequal(equal), nodes, cluster, profile)
        try:
            other, refused = self._fastest(equal, nodes, cluster, profile)
        except ConfigError as error:
            other, refused = None, error
        shapes = [one for one in (other, found) if one is not None]
        if not shapes:
            assert refused is not None
            raise refused
        return min(shapes, key=lambda one: one.step_s or 0.0)

    def _fastest(
        self, options: SearchOptions, nodes: Sequence[str], cluster: Cluster, profile: Profile
    ) -> tuple[Shape | None, ConfigError | None]:
        """The best plan that the trainer takes, and why it does not take the first.

        Raises:
            ConfigError: there is no plan.
        """
        request = Request(
            global_batch=self._config.batch.global_batch_size,
            schedules=self._schedules(),
            options=options,
        )
        refused: ConfigError | None = None
        for row in propose(self._model, cluster, profile, request).rows:
            try:
                return self._shape(row, nodes, cluster, profile), refused
            except ConfigError as error:
                refused = refused or error
        return None, refused

    def _with_unequal(self, options: SearchOptions) -> SearchOptions:
        """Options under which the search also meets stages of unequal numbers of replicas.

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

    def _on(self, offers: Sequence[Offer]) -> tuple[list[str], Cluster, Profile]:
        """Names of the nodes by number in a cluster of them alone; it; what is known of it."""
        found: dict[NodeKind, list[str]] = {}
        for offer in offers:
            base = self._type_of(offer)
            if base is not None:
                kind = NodeKind(base, min(offer.slots, base.gpus), offer.slowness)
                found.setdefault(kind, []).append(offer.name)
        if not found:
            raise ConfigError(
                f"{', '.join(one.name for one in offers)}: no such node is in {self._where}"
            )
        order = {node.name: at for at, node in enumerate(self._cluster.types)}
        kinds = sorted(found, key=lambda kind: (order[kind.base.name], -kind.gpus, kind.slowness))
        names = [name for kind in kinds for name in found[kind]]
        cluster = cluster_of(self._cluster, {kind: len(found[kind]) for kind in kinds})
        return names, cluster, profile_of(self._profile, kinds)

    def _schedules(self) -> tuple[str, ...]:
        given = self._config.schedule.pipeline_schedule
        return (given if given in policy_names() else "1f1b",)

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
            sequence_parallel=config.parallel.sequence_parallel,
            top=_PLANS,
        )

    def _is_given(self, prefixes: Iterable[str]) -> bool:
        return any(word.startswith(tuple(prefixes)) for word in self._arguments)

    def _widths(self, cluster: Cluster) -> tuple[int, ...]:
        """Tensor-parallel widths under which losses stay as they are."""
        config = self._config
        given = config.parallel.tensor_model_parallel_size
        words = {word.partition("=")[0] for word in self._arguments}
        vocabulary = config.data.vocab_size
        if _TENSOR in words or config.model.attention_dropout or vocabulary is None:
            return (given,)

        def padded(width: int) -> tuple[int, ...]:
            # A tokenizer may have a token more than it was told.
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
        """Sizes of a microbatch under which losses stay as they are; empty for all."""
        model = self._config.model
        drops = model.attention_dropout > 0 or model.hidden_dropout > 0
        # Both draw, or weigh, by microbatch.
        if drops or self._config.data.eod_mask_loss:
            return (self._config.batch.micro_batch_size,)
        return ()

    def _shape(self, row: Row, nodes: Sequence[str], cluster: Cluster, profile: Profile) -> Shape:
        """The shape of a plan.

        Raises:
            ConfigError: the trainer refuses it.
        """
        plan = row.plan
        allowed = self._micro_batches()
        if allowed and plan.micro_batch not in allowed:
            raise ConfigError(
                f"microbatches of {plan.micro_batch} samples: losses stay as they are with"
                f" {allowed[0]}"
            )
        document = plan_document(plan, self._model, cluster, row.prediction)
        left = ["schedule", "distributed_optimizer", "overlap_grad_reduce", "sequence_parallel"]
        left += ["recompute"] if self._is_given(_RECOMPUTE) else []
        told = {key: value for key, value in document.items() if key not in left}
        flags = plan_flags(told, PLAN_WITH)
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
            takes = profile.times(kind, cluster.nodes[node].gpu, plan.tp, plan.micro_batch)
            pace[nodes[node]] = takes.forward_s + takes.backward_s
        return Shape(
            tensor=plan.tp,
            pipeline=plan.pp,
            data=plan.dp,
            partition=self._layers(plan),
            micro_batch=plan.micro_batch,
            microbatches=plan.num_microbatches,
            flags=tuple(flags),
            places=tuple((nodes[node], count) for node, count in used.items()),
            step_s=row.prediction.seconds,
            pace=pace,
            widths=() if len(set(counts)) == 1 else tuple(counts),
        )

    def _layers(self, plan: Plan) -> tuple[int, ...]:
        return tuple(self._model.counted(plan.partition))


def _names(machine: Machine) -> dict[str, Any]:
    return {"name": machine.name, "hosts": (machine.host,)}


def _refuse_chosen(arguments: Sequence[str]) -> None:
    given = {word.partition("=")[0] for word in arguments}
    for name in _CHOSEN:
        if name in given:
            raise ConfigError(
                f"{name}: with {PLAN_WITH} the planner chooses layers and stages; leave one of them"
                " out"
            )
