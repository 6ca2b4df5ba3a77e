"""From a request to plans: the search, the choice of a schedule, and why nothing was found.

Owns the rules of a request as users give it; finding plans is ``search``'s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.estimate import estimate_optimizer_s, make_estimator
from megatron.adaptive.planner.gpus import find_gpu, known_gpu
from megatron.adaptive.planner.infeasible import explain_limits, explain_memory
from megatron.adaptive.planner.microbatch_assignment import as_run
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.objective import Objective
from megatron.adaptive.planner.plan import Plan
from megatron.adaptive.planner.profile import Profile
from megatron.adaptive.planner.report import Row
from megatron.adaptive.planner.search import Searcher, SearchOptions, SearchResult

__all__ = [
    "SCHEDULES",
    "Proposal",
    "Request",
    "check_request",
    "complete_profile",
    "propose",
    "scheduled",
    "whole_partition",
]

SCHEDULES = ("1f1b", "zb-h1", "adaptive")
"""Orders that are weighed for the best pipelines; those that a run can take with one chunk."""


_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for.

    Attributes:
        global_batch: samples of a step.
        objective: what is minimised, and the limits.
        options: what may be chosen; its ``partition`` counts layers as ``--partition`` does.
        schedules: orders to choose from.
    """

    global_batch: int
    objective: Objective = field(default_factory=Objective)
    options: SearchOptions = field(default_factory=SearchOptions)
    schedules: tuple[str, ...] = SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What was found.

    Attributes:
        rows: plans, best first.
        result: of the search.
    """

    rows: tuple[Row, ...]
    result: SearchResult


def complete_profile(profile: Profile | None, model: Model, cluster: Cluster) -> Profile:
    """Return a profile that knows every GPU of a cluster, by estimates where nothing was measured.

    Args:
        profile: what was measured, ``None`` for nothing.
        model: what is planned.
        cluster: on which nodes.

    Raises:
        ConfigError: a GPU is neither in the profile nor in the table, or lacks the precision.
    """
    given = profile or Profile()
    measured = {gpu for _, gpu, _, _ in given.layers}
    optimizer = dict(given.optimizer_s_per_parameter)
    for node in cluster.types:
        if node.gpu not in measured:
            part = find_gpu(node.gpu, f"cluster: node type {node.name}")
            part.peak(model.precision.name)
        part_of_table = known_gpu(node.gpu)
        if node.gpu not in optimizer and part_of_table is not None:
            optimizer[node.gpu] = estimate_optimizer_s(model, part_of_table)
    estimator = make_estimator(model)
    if all(known_gpu(node.gpu) is not None for node in cluster.types):
        return replace(given, optimizer_s_per_parameter=optimizer, estimator=estimator)
    # Of a part that only the profile knows nothing can be estimated; of the others some sizes are.
    layers = dict(given.layers)
    for node in cluster.types:
        if node.gpu in measured:
            continue
        for tp in (tp for tp in range(1, node.gpus + 1) if model.max_tp % tp == 0):
            for size, kind in itertools.product(_SIZES, model.kinds):
                layers[kind, node.gpu, tp, size] = estimator(kind, node.gpu, tp, size)
    return replace(given, optimizer_s_per_parameter=optimizer, layers=layers)


def propose(model: Model, cluster: Cluster, profile: Profile, request: Request) -> Proposal:
    """Find the best plans.

    Args:
        model: what is trained.
        cluster: on which nodes.
        profile: see :func:`complete_profile`.
        request: what is asked for.

    Raises:
        ConfigError: nothing fits, limits contradict each other, or an option is wrong; says which,
            and what would help.
    """
    options = replace(request.options, partition=whole_partition(request.options.partition, model))
    check_request(request, options, model, cluster)
    searcher = Searcher(model, cluster, profile, global_batch=request.global_batch, options=options)
    result = searcher.search(request.objective)
    if not result.found:
        if request.objective == Objective(least=request.objective.least):
            raise ConfigError(
                explain_memory(model, cluster, profile, request.global_batch, options)
            )
        anything = searcher.search(Objective())
        if not anything.found:
            raise ConfigError(
                explain_memory(model, cluster, profile, request.global_batch, options)
            )
        raise ConfigError(explain_limits(searcher, request.objective))
    rows = [
        scheduled(found.plan, model, cluster, profile, request.schedules) for found in result.found
    ]
    goal = request.objective

    def value(row: Row) -> float:
        return goal.value(row.prediction.seconds, row.prediction.price_per_hour)

    return Proposal(rows=tuple(sorted(rows, key=value)), result=result)


def scheduled(
    plan: Plan, model: Model, cluster: Cluster, profile: Profile, schedules: Sequence[str]
) -> Row:
    """Give a pipeline the order of work that is fastest for it and fits.

    Args:
        plan: as the search found it.
        model: what is trained.
        cluster: on which nodes.
        profile: durations.
        schedules: orders to choose from; that of the search stays where none of them is possible.
    """
    row = Row(plan=plan, prediction=predict(plan, model, cluster, profile))
    if (run := as_run(plan)) != plan:
        row = Row(plan=run, prediction=predict(run, model, cluster, profile))
        plan = run
    if plan.pp == 1 or plan.chunks > 1:
        return row
    rows = [row] if plan.schedule in schedules else []
    for name in schedules:
        candidate = replace(plan, schedule=name)
        try:
            seen = predict(candidate, model, cluster, profile)
        except ScheduleError:
            continue  # not with these stages or so few microbatches
        if seen.fits:
            rows.append(Row(plan=candidate, prediction=seen))
    # The first of equal ones: what was asked for first.
    return min(rows or [row], key=lambda row: row.prediction.seconds)


def whole_partition(partition: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Turn layers as ``--partition`` counts them into all layers of each stage.

    Layers that are not counted go with the stage before them, those at the start with the first.

    Args:
        partition: counted layers of each stage; empty stays empty.
        model: whose layers they are.

    Raises:
        ConfigError: it does not sum to the model's layers.
    """
    if not partition:
        return ()
    total = sum(partition)
    if total != model.num_counted:
        raise ConfigError(
            f"--partition {format_partition(partition)} holds {total} layers, {model.name} has"
            f" {model.num_counted}: make them equal"
        )
    # Where the counted layers are, and the end; each stage ends before the first one of the next.
    counted = [index for index in range(model.num_layers) if model.layer(index).counted]
    ends, done = [], 0
    for count in partition[:-1]:
        done += count
        # With no layer of its own, the first stage has what comes before the first layer.
        ends.append(counted[done - 1] + 1 if done else counted[0])
    bounds = [0, *ends, model.num_layers]
    return tuple(end - begin for begin, end in itertools.pairwise(bounds))


def check_request(request: Request, options: SearchOptions, model: Model, cluster: Cluster) -> None:
    """Refuse what contradicts itself before anything is searched.

    Args:
        request: what is asked for.
        options: its options, the partition over all layers.
        model: what is trained.
        cluster: on which nodes.

    Raises:
        ConfigError: two options contradict each other, the model or the nodes.
    """
    if request.global_batch < 1:
        raise ConfigError(f"--global-batch-size {request.global_batch}: give at least 1")
    stages = len(options.partition)
    if stages and options.pp and options.pp != (stages,):
        raise ConfigError(
            f"--partition has {stages} stages and --pp is {_words(options.pp)}: they contradict"
            " each other; leave one out"
        )
    least = math.prod(min(values) for values in (options.tp, options.dp, options.pp) if values)
    if least > cluster.num_gpus:
        words = [
            f"--{name} {_words(values)}"
            for name, values in (("tp", options.tp), ("dp", options.dp), ("pp", options.pp))
            if values
        ]
        raise ConfigError(
            f"{' and '.join(words)} need {least} GPUs, the cluster has {cluster.num_gpus}: they"
            " contradict each other; lower one"
        )
    _check_batch(request.global_batch, options)
    for tp in options.tp:
        if model.max_tp % tp:
            raise ConfigError(
                f"--tp {tp}: heads and feed-forward width of {model.name} do not divide by it; they"
                f" do by {model.max_tp} and its divisors"
            )
        if all(node.gpus % tp for node in cluster.types):
            counts = ", ".join(f"{node.gpus} on {node.name}" for node in cluster.types)
            raise ConfigError(
                f"--tp {tp}: it must divide the GPUs of a node, which are {counts}; change it"
            )


def _check_batch(global_batch: int, options: SearchOptions) -> None:
    for name, values in (("dp", options.dp), ("micro-batch-sizes", options.micro_batch)):
        if values and all(global_batch % value for value in values):
            raise ConfigError(
                f"--global-batch-size {global_batch}: no --{name} of {_words(values)} divides it;"
                " change one of them"
            )
    if options.dp and options.micro_batch:
        units = [dp * size for dp in options.dp for size in options.micro_batch]
        if all(global_batch % unit for unit in units):
            raise ConfigError(
                f"--global-batch-size {global_batch}: --dp {_words(options.dp)} and"
                f" --micro-batch-sizes {_words(options.micro_batch)} together do not divide it;"
                " change one of them"
            )


def _words(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
