"""Finds the best plans for a user's request, or explains why no plan is possible.

If no plan is possible, the error message names the stage that does not fit into memory, or the
limits that contradict each other. It also lists changes that would help: fewer restrictions, more
nodes, or more memory per GPU. Only changes that the search has confirmed are listed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron.adaptive.config.plan_file import plan_flags, world_size_of
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, find_gpu, known_gpu
from megatron.adaptive.planner.cost import StageSums, predict, simulated
from megatron.adaptive.planner.layer_costs import (
    OURS,
    estimate_optimizer_s,
    known_documents,
    make_estimator,
)
from megatron.adaptive.planner.model_description import Model
from megatron.adaptive.planner.plan import Plan, PlanRow, Prediction, StageMemory, plan_document
from megatron.adaptive.planner.plan_text import placement_text, seconds_text
from megatron.adaptive.planner.profile import PlanInputs, Profile
from megatron.adaptive.planner.search import Searcher
from megatron.adaptive.planner.search_options import (
    Best,
    Found,
    Objective,
    SearchOptions,
    SearchResult,
)
from megatron.adaptive.planner.trainer_rules import (
    check_slice_tokens,
    check_slices,
    trainer_refusal,
)
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.views.palette import ACTION_NAMES, chunk_color

SCHEDULES = selectable_names(lambda spec: spec.planned == "by default")
"""Names of the schedules that the planner considers by default."""

_COLOUR = "#1f77b4"
_SPEED, _PRICE = "tokens per second", "price of a million tokens"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A user's request for plans.

    Attributes:
        global_batch: Number of samples per step.
        objective: Quantity to minimize, and limits on time and price.
        options: Settings from which the search may choose. As in ``--partition``, the value of
            ``partition`` does not count embedding and head. The search itself counts them.
    """

    global_batch: int
    objective: Objective = field(default_factory=Objective)
    options: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Plans that were found for a user's request.

    Attributes:
        rows: Plans that the trainer accepts, starting with the best.
        result: Result of the search, including its lower bound on the objective.
        refused: Reasons why the trainer rejected plans that the search had found.
    """

    rows: tuple[PlanRow, ...]
    result: SearchResult
    refused: tuple[str, ...] = ()


def complete_profile(profile: Profile | None, model: Model, cluster: Cluster) -> Profile:
    """Returns a profile that also contains estimates for layers and GPUs that were not measured.

    Args:
        profile: Profile with measured times, or ``None`` if there are no measurements.
        model: Model to plan for.
        cluster: Cluster to plan for.

    Raises:
        ConfigError: A GPU is neither in the table of GPUs nor in the profile, or does not support
            the model's precision.
    """
    completed = profile or Profile()
    measured = {gpu for _, gpu, _, _ in completed.layers}
    optimizer = dict(completed.optimizer_s_per_parameter)
    for node in cluster.types:
        if node.gpu not in measured:
            gpu = find_gpu(node.gpu, f"cluster: node type {node.name}")
            gpu.peak("fp8" if model.precision.fp8 else model.precision.name)
        listed = known_gpu(node.gpu)
        if node.gpu not in optimizer and listed is not None:
            optimizer[node.gpu] = estimate_optimizer_s(model, listed)
    return replace(completed, optimizer_s_per_parameter=optimizer, estimator=make_estimator(model))


def propose(inputs: PlanInputs, request: Request) -> Proposal:
    """Finds the best plans for the user's request ``request``.

    Args:
        inputs: Model, cluster and profile of layer times.
        request: User's batch size, objective and options.

    Raises:
        ConfigError: No plan fits into memory, limits contradict each other, or an option is
            invalid. The message contains the reason and changes that would help.
    """
    searcher = searcher_for(inputs, request)
    goal = request.objective
    result = searcher.search(goal)
    if not result.plans and request.options.slice_tokens:
        if goal != Objective(least=goal.least) and searcher.search(Objective()).plans:
            raise ConfigError(_explain_limits(searcher, goal))
        raise ConfigError(_explain_rows(inputs, request))
    if not result.plans:
        asked, slices = request.options.schedules, request.options.slices
        free = replace(request, options=replace(request.options, schedules=("1f1b",)))
        if "1f1b" not in asked and 1 in slices and searcher_for(inputs, free).search(goal).plans:
            raise ConfigError(
                f"--schedules {','.join(asked)}: no plan that fits into memory meets the "
                "requirements of these schedules for the numbers of stages, layers and "
                "microbatches; add 1f1b"
            )
        whole = replace(request, options=replace(request.options, slices=(1,)))
        if 1 not in slices and searcher_for(inputs, whole).search(goal).plans:
            raise ConfigError(
                f"--sequence-slices {_list(slices)} requires several stages and a run-time rule, "
                "but no such plan fits into memory; add 1 to --sequence-slices to allow whole "
                "sequences"
            )
        if goal == Objective(least=goal.least) or not searcher.search(Objective()).plans:
            raise ConfigError(_explain_memory(inputs, request.global_batch, searcher.options))
        raise ConfigError(_explain_limits(searcher, goal))
    top = request.options.top
    rows, refused = _runnable(_rows(result.plans, inputs), inputs)
    if refused and len(rows) < top:
        more = replace(request, options=replace(request.options, top=top + _MORE))
        result = searcher_for(inputs, more).search(goal)
        rows, refused = _runnable(_rows(result.plans, inputs), inputs)
    if not rows:
        raise ConfigError(f"the trainer rejects all plans that were found: {refused[0]}")
    return Proposal(rows=rows[:top], result=result, refused=refused)


def _runnable(
    rows: Sequence[PlanRow], inputs: PlanInputs
) -> tuple[tuple[PlanRow, ...], tuple[str, ...]]:
    """Returns the plans that the trainer accepts, and the reasons why it rejects the others."""
    rules = [_refusal(row, inputs) for row in rows]
    accepted = tuple(row for row, rule in zip(rows, rules, strict=True) if not rule)
    return accepted, tuple(dict.fromkeys(rule for rule in rules if rule))


def _refusal(row: PlanRow, inputs: PlanInputs) -> str:
    """Returns why the trainer rejects the plan in ``row``, or "" if the trainer accepts it.

    Plans for a model that is not described by the trainer's arguments cannot be checked, so they
    are accepted.
    """
    document = plan_document(row.plan, inputs, row.prediction)
    return trainer_refusal(inputs.model, plan_flags(document, "the plan"), world_size_of(document))


def brief(plan: Plan) -> str:
    """Returns the most important settings of a plan as text."""
    slices = f" in {plan.slices} slices" if plan.slices > 1 else ""
    if plan.slice_tokens is not None:
        slices = f" in slices of {plan.slice_tokens} tokens"
    return (
        f"tp {plan.tp}, dp {plan.dp}, pp {plan.pp}, microbatch {plan.micro_batch}{slices},"
        f" {plan.schedule}, recompute {plan.recompute}"
    )


def _rows(entries: Sequence[Found], inputs: PlanInputs) -> tuple[PlanRow, ...]:
    """Returns the plans in ``entries`` with their predicted time, memory and price."""
    plans = [entry.plan for entry in entries]
    return tuple(PlanRow(plan=plan, prediction=predict(plan, inputs)) for plan in plans)


def searcher_for(inputs: PlanInputs, request: Request) -> Searcher:
    """Validates ``request``, and returns a searcher for this request."""
    partition = _whole_partition(request.options.partition, inputs.model)
    options = replace(request.options, partition=partition)
    check_slices(options, inputs.model)
    check_slice_tokens(options, inputs)
    _check_request(request, options, inputs)
    return Searcher(inputs, global_batch=request.global_batch, options=options)


def _whole_partition(partition: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Adds embedding and head to ``partition``, which contains the number of layers per stage.

    Like the flag ``--partition``, the argument excludes embedding and head.
    """
    if not partition:
        return ()
    try:
        whole = tuple(map(len, model.stage_layers(partition)))
    except ConfigError as error:
        raise ConfigError(f"--partition: {error}") from error
    if 0 in whole:
        raise ConfigError(
            f"--partition {format_partition(partition)}: stage {whole.index(0)} has no layer;"
            " each stage needs at least one layer"
        )
    return whole


def find_front(inputs: PlanInputs, request: Request) -> tuple[PlanRow, ...]:
    """Returns the plans on the Pareto front of time and price per step, starting with the fastest.

    Args:
        inputs: Model, cluster and profile of layer times.
        request: User's request. Its quantity to minimize is ignored.

    Raises:
        ConfigError: The cluster has no prices, or no plan satisfies the limits.
    """
    if not any(node.price_per_hour for node in inputs.cluster.types):
        raise ConfigError(
            "--pareto compares speed and price, but no node type has a price; set "
            "price_per_hour in the cluster file"
        )
    front, _ = pareto(searcher_for(inputs, request), request.objective)
    if not front:
        raise ConfigError(
            "--pareto: no plan fits into memory and satisfies the limits; plan without "
            "--pareto to see why"
        )
    rows, refused = _runnable(_rows(front, inputs), inputs)
    if not rows:
        raise ConfigError(f"--pareto: the trainer rejects all plans that were found: {refused[0]}")
    return rows


def pareto(
    searcher: Searcher, objective: Objective | None = None
) -> tuple[tuple[Found, ...], float]:
    """Finds the Pareto front of time and price per step, where plans may use parts of a cluster.

    A plan on a part of the cluster can be faster or cheaper than a plan on the whole cluster. The
    search divides the pipelines of each shape (combination of parallel sizes) into levels, one per
    set of nodes, so a single pass over the shapes covers all parts of the cluster. Levels are
    skipped if a known plan is better in both time and price. Example::

        plan    nodes    step     price per step
        1       4        10 ms    8
        2       2        18 ms    7
        3       1        40 ms    9                 not on the front: plan 1 beats it in both

    Args:
        searcher: Searcher for the model, the whole cluster and the options.
        objective: Limits on time and price, or ``None`` for no limits. Its quantity to minimize is
            ignored.

    Returns:
        Plans with ascending step time and descending price per step, where ``Found.value`` is the
        price. The second value is the maximum fraction of the step time by which skipped plans may
        be faster than the front, or 0 if no plans were skipped.
    """
    front = _Points(objective or Objective())
    shapes = searcher.shapes()
    for shape in shapes:
        searcher.visit(shape, front, 1, finish=False)
    missed: list[tuple[float, float]] = []
    for shape in shapes:
        missed += searcher.visit(shape, front, searcher.options.most_leaves)
    slacks = [front.slack(seconds, price) for seconds, price in missed]
    return tuple(front.points), max([0.0, *slacks])


class _Points(Best):
    """Collects the plans on the Pareto front, sorted by step time.

    Levels (sets of nodes) with a low bound of the step time are searched first.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(0, objective)
        self.points: list[Found] = []

    def value(self, seconds: float, price: float) -> float:
        return seconds

    def most_seconds(self, price: float) -> float:
        most = self.objective.most_seconds(price, math.inf)
        hourly = price / 3600
        for point in self.points:
            # A new plan is only useful if it is faster or cheaper than this point. At its price per
            # hour, the new plan is cheaper if its step takes less than ``as_expensive_s``.
            as_expensive_s = point.value / hourly if hourly else math.inf
            most = min(most, max(point.seconds, as_expensive_s))
        return most

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        value = seconds * price / 3600
        if any(point.seconds <= seconds and point.value <= value for point in self.points):
            return
        kept = [point for point in self.points if point.seconds < seconds or point.value < value]
        kept.append(Found(plan=plan, seconds=seconds, price_per_hour=price, value=value))
        self.points = sorted(kept, key=lambda point: point.seconds)

    def slack(self, seconds: float, price: float) -> float:
        """Returns the fraction by which ``seconds`` is below the Pareto front's time at ``price``.

        ``seconds`` is a lower bound of a step time, and ``price`` is a price per hour. The result
        is 0 if the front has a shorter step time at this price.
        """
        most = self.most_seconds(price)
        return max(0.0, 1 - seconds / most) if math.isfinite(most) else 0.0


def write_front(rows: Sequence[PlanRow], inputs: PlanInputs, folder: Path) -> None:
    """Writes the plans on a Pareto front as an HTML page, a PNG image and plan files.

    Args:
        rows: Plans with their predictions, starting with the fastest.
        inputs: Model, cluster and profile of layer times.
        folder: Folder for the files ``front.html``, ``front.png``, ``front.json`` and
            ``plan-N.json``.

    Raises:
        ConfigError: The folder is not writable.
    """
    documents = [plan_document(row.plan, inputs, row.prediction) for row in rows]
    files = {f"plan-{number}": document for number, document in enumerate(documents, start=1)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**files, "front": documents}.items():
            text = json.dumps(content, indent=2) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        write_page(rows, inputs, folder / "front.html")
        prices = _prices(rows)
        speeds = [row.prediction.tokens_per_s for row in rows]
        _write_picture(prices, speeds, _title(rows, inputs), folder / "front.png")
    except OSError as error:
        raise ConfigError(f"--pareto {folder}: {error.strerror}; choose another folder") from error


def _prices(rows: Sequence[PlanRow]) -> list[float]:
    """Returns the price of each plan per million tokens."""
    predictions = [row.prediction for row in rows]
    return [
        prediction.price_per_hour / 3600 / prediction.tokens_per_s * 1e6
        for prediction in predictions
    ]


def _title(rows: Sequence[PlanRow], inputs: PlanInputs) -> str:
    """Returns the chart title, which names the model and the number of samples per step."""
    return f"{inputs.model.name}, {rows[0].plan.global_batch} samples per step"


def write_page(rows: Sequence[PlanRow], inputs: PlanInputs, path: Path) -> None:
    """Writes a self-contained HTML page with charts of plans to the file ``path``.

    The first chart shows the speed and price of all plans. If nodes have no prices, the highest
    memory use of a GPU replaces the price. Two more charts describe the first plan: the memory of
    each rank, and a simulated step.

    Args:
        rows: Plans with their predictions, starting with the best.
        inputs: Model, cluster and profile of layer times.
        path: Path of the file to write.

    Raises:
        ConfigError: The file cannot be written.
    """
    from plotly.subplots import make_subplots

    plan = rows[0].plan
    figure: Any = make_subplots(
        rows=3,
        subplot_titles=("plans", f"memory: {brief(plan)}", "its step, simulated"),
        row_heights=[0.3, 0.3, 0.4],
    )
    _add_plans(figure, rows, inputs)
    _add_memory(figure, rows[0].prediction)
    stages = StageSums.of(plan, inputs, OURS)
    if plan.uniform and 3 * plan.pp * plan.chunks * stages.num_items <= _MOST_BARS:
        _add_timeline(figure, simulated(plan, stages))
    figure.update_xaxes(title_text="seconds", row=3, col=1)
    figure.update_yaxes(title_text="rank", autorange="reversed", dtick=1, row=3, col=1)
    figure.update_layout(
        title=_title(rows, inputs), template="plotly_white", barmode="stack", height=1200
    )
    try:
        figure.write_html(str(path), include_plotlyjs=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; choose another file") from error


def _add_plans(figure: Any, rows: Sequence[PlanRow], inputs: PlanInputs) -> None:
    """Adds a point for each plan to the first chart of the report page ``figure``."""
    import plotly.graph_objects as go

    has_prices = all(row.prediction.price_per_hour for row in rows)
    across = _prices(rows) if has_prices else [row.prediction.peak_bytes / _GB for row in rows]
    dots = go.Scatter(
        x=across,
        y=[row.prediction.tokens_per_s for row in rows],
        text=[f"{placement_text(row.plan, inputs.cluster)}; {brief(row.plan)}" for row in rows],
        mode="lines+markers" if has_prices else "markers",
        line={"shape": "hv", "color": _COLOUR},
        hovertemplate="%{text}<br>%{y:,.0f} tokens/s<br>%{x:.4g}<extra></extra>",
        name="plans",
    )
    figure.add_trace(dots, row=1, col=1)
    title = _PRICE if has_prices else "GB on the fullest GPU"
    figure.update_xaxes(title_text=title, row=1, col=1)
    figure.update_yaxes(title_text=_SPEED, row=1, col=1)


def _add_memory(figure: Any, prediction: Prediction) -> None:
    """Adds the memory and the memory limit of each rank to the second chart of ``figure``."""
    import plotly.graph_objects as go

    ranks = list(range(len(prediction.stages)))
    for part in [name for name in vars(prediction.stages[0].memory) if name != "limit_bytes"]:
        sizes = [getattr(stage.memory, part) / _GB for stage in prediction.stages]
        name = part.removesuffix("_bytes")
        figure.add_trace(go.Bar(x=ranks, y=sizes, name=name), row=2, col=1)
    limits = [stage.memory.limit_bytes / _GB for stage in prediction.stages]
    line = {"x": ranks, "y": limits, "mode": "lines+markers", "name": "limit"}
    figure.add_trace(go.Scatter(**line, line={"color": "black", "dash": "dot"}), row=2, col=1)
    figure.update_xaxes(title_text="pipeline rank", dtick=1, row=2, col=1)
    figure.update_yaxes(title_text="GB", row=2, col=1)


def _add_timeline(figure: Any, step: SimResult) -> None:
    """Adds a bar for each action of the simulated ``step`` to the third chart of ``figure``."""
    import plotly.graph_objects as go

    chunks = step.placement.num_chunks
    bars: dict[tuple[str, int], list[tuple[int, float, float, int]]] = {}
    for rank, spans in enumerate(step.spans):
        for span in spans:
            action = span.action
            bar = (rank, span.start_s, span.end_s - span.start_s, action.microbatch)
            bars.setdefault((action.kind.value, action.chunk), []).append(bar)
    for (kind, chunk), actions in sorted(bars.items()):
        ranks, starts, lengths, microbatches = zip(*actions, strict=True)
        bar = go.Bar(
            y=ranks,
            base=starts,
            x=lengths,
            customdata=microbatches,
            orientation="h",
            marker={"color": f"#{chunk_color(kind, chunk, chunks)}"},
            name=ACTION_NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else ""),
            hovertemplate="microbatch %{customdata}: %{x:.4g} s<extra>%{fullData.name}</extra>",
        )
        figure.add_trace(bar, row=3, col=1)


def _write_picture(prices: list[float], speeds: list[float], title: str, path: Path) -> None:
    """Writes a chart of plans with the given prices and speeds to the PNG file ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(prices, speeds, where="post", color=_COLOUR, linewidth=1)
    axes.plot(prices, speeds, "o", color=_COLOUR, markersize=4)
    axes.set(title=title, xlabel=_PRICE, ylabel=_SPEED)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(str(path), format="png")


def _check_request(request: Request, options: SearchOptions, inputs: PlanInputs) -> None:
    """Checks that a request is free of contradictions and fits the model and the cluster.

    Args:
        request: User's request, with a partition that excludes embedding and head.
        options: Options of the request, with a partition that includes embedding and head.
        inputs: Model, cluster and profile of layer times.

    Raises:
        ConfigError: The request contradicts itself, or does not fit the model or the cluster.
    """
    cluster = inputs.cluster
    if request.global_batch < 1:
        raise ConfigError(f"--global-batch-size must be at least 1, got {request.global_batch}")
    stages = len(options.partition)
    if stages and options.pp and options.pp != (stages,):
        raise ConfigError(
            f"--partition has {stages} stages, but --pp is {_list(options.pp)}; --partition"
            " requires exactly one stage per pipeline rank. Remove one of the two flags. With"
            " several chunks per rank, the planner chooses the partition; save such a plan with"
            " --output"
        )
    least = math.prod(min(values) for values in (options.tp, options.dp, options.pp) if values)
    if least > cluster.num_gpus:
        flags = _flags({"tp": options.tp, "dp": options.dp, "pp": options.pp})
        raise ConfigError(
            f"{flags}: at least {least} GPUs are needed, but the cluster has"
            f" {cluster.num_gpus}; use smaller sizes"
        )
    units = [dp * size for dp in options.dp or (1,) for size in options.micro_batch or (1,)]
    if all(request.global_batch % unit for unit in units):
        flags = _flags({"dp": options.dp, "micro-batch-sizes": options.micro_batch})
        raise ConfigError(
            f"--global-batch-size {request.global_batch} is not divisible by {flags}; change one"
            " of them"
        )
    _check_ranks(options, inputs.model, cluster)


def _check_ranks(options: SearchOptions, model: Model, cluster: Cluster) -> None:
    """Checks that the model and the nodes can be divided among the requested numbers of ranks.

    Raises:
        ConfigError: A number of ranks does not divide the number of experts, the sequence length,
            the number of heads, or the number of GPUs of a node.
    """
    spreads = options.expert_ranks
    if spreads and not set(spreads) & set(model.expert_ranks):
        reason = f"allows only {_list(model.expert_ranks)}"
        raise ConfigError(
            f"--expert-parallel-size {_list(spreads)}: {model.name}"
            f" {reason if model.has_experts else 'has no experts; remove the flag'}"
        )
    for shared in options.context_ranks:
        if not model.divides_sequence(1, shared, False):
            raise ConfigError(
                f"--context-parallel-size {shared} requires causal attention, no experts, no "
                f"local windows, and sequences of a multiple of {2 * shared} tokens; {model.name} "
                f"(sequences of {model.sequence} tokens) does not meet these requirements; change "
                "the size or the model"
            )
    for tp in options.tp:
        if model.max_tp % tp:
            raise ConfigError(
                f"--tp {tp} must divide the number of heads and the feed-forward width of "
                f"{model.name}; use {model.max_tp} or one of its divisors"
            )
        if all(node.gpus % tp for node in cluster.types):
            counts = ", ".join(f"{node.gpus} on {node.name}" for node in cluster.types)
            raise ConfigError(
                f"--tp {tp} must divide the number of GPUs of a node ({counts}); use another size"
            )


def _flags(options: Mapping[str, tuple[int, ...]]) -> str:
    """Returns ``options`` as text, with one command-line flag and its values per option."""
    return " and ".join(f"--{name} {_list(values)}" for name, values in options.items() if values)


def _list(values: Sequence[int]) -> str:
    """Returns ``values`` separated by commas, as in the value of a flag."""
    return ",".join(map(str, values))


_GB = 1e9
_TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Factors by which the number of nodes is multiplied to find a cluster with enough memory."""
_CLOSE = 1e-3
"""Relative accuracy with which an error message states the lowest possible price."""
_LIMITS = {
    "most_seconds_per_step": "--time-limit",
    "most_price_per_hour": "--max-price",
    "most_price_per_step": "--budget",
}
NO_LIMIT_BYTES = 1e15
"""Number of bytes added to the memory of each GPU so that every model fits."""
_MORE = 16
"""Number of additional plans to search for if the trainer rejects some plans."""
_MOST_BARS = 20_000
"""Maximum number of actions in the timeline of a report page."""
_NEAR = 0.01
"""Relative accuracy with which an error message states the missing memory."""
_FEW_LEVELS = 500
"""Maximum number of levels in the search for the plan that needs the least additional memory. A
level is a combination of a set of nodes and a first stage."""
_MOST_CPU_S = 2.0
"""CPU time limit, in seconds per node type, of the search for the plan that needs the least
additional memory.
"""


def _explain_memory(inputs: PlanInputs, global_batch: int, options: SearchOptions) -> str:
    """Returns an error message with the stage that does not fit into memory, and possible remedies.

    The stage belongs to the plan that needs the least additional memory per GPU. Bisection over the
    memory size finds this plan.

    Args:
        inputs: Model, cluster and profile of layer times.
        global_batch: Number of samples per step.
        options: Options for which no plan fits into memory.
    """
    model, cluster = inputs.model, inputs.cluster

    def find(cluster: Cluster, options: SearchOptions) -> Plan | None:
        return _leanest_plan(replace(inputs, cluster=cluster), global_batch, options)

    nearest = find(cluster.with_memory(more_bytes=NO_LIMIT_BYTES), options)
    if nearest is None:
        return (
            f"no plan for {model.name} on {cluster.num_gpus} GPUs uses whole nodes and divides the"
            f" global batch of {global_batch} evenly with the allowed sizes; allow other sizes with"
            " --tp, --dp, --pp, --micro-batch-sizes and --partition, or change --global-batch-size"
        )
    stage, memory = _fullest_stage(nearest, inputs)
    least = 0.0
    while memory.missing_bytes - least > _NEAR * memory.missing_bytes:
        middle = (least + memory.missing_bytes) / 2
        if (plan := find(cluster.with_memory(more_bytes=middle), options)) is None:
            least = middle
        else:
            nearest = plan
            stage, memory = _fullest_stage(plan, inputs)
    remedies = list(_remedies(find, cluster, options))
    remedies.append(f"GPUs of {math.ceil(memory.total_bytes / _GB)} GB")
    node = cluster.nodes[nearest.places[stage].replicas[0].node]
    return (
        f"{model.name} does not fit on this cluster: in the closest plan ({brief(nearest)}),"
        f" stage {stage} on {node.name} needs {memory.total_bytes / _GB:.1f} GB but has only"
        f" {memory.limit_bytes / _GB:.1f} GB, so it is {memory.missing_bytes / _GB:.1f} GB short;"
        f" the model would fit with {', or '.join(remedies)}"
    )


def _explain_rows(inputs: PlanInputs, request: Request) -> str:
    """Returns an error message for a request with ``slice_tokens`` for which no plan was found."""
    flag = f"--slice-tokens {_list(request.options.slice_tokens)}"
    roomy = replace(inputs, cluster=inputs.cluster.with_memory(more_bytes=NO_LIMIT_BYTES))
    plans = searcher_for(roomy, request).search().plans
    if not plans:
        return (
            f"{flag}: slices require at least two stages, but no plan with two or more stages"
            f" divides the model, the nodes and the batch of {request.global_batch} documents"
            " evenly; allow other sizes with --pp, --tp, --dp, or change --global-batch-size"
        )
    stage, memory = _fullest_stage(plans[0].plan, inputs)
    return (
        f"no plan with {flag} fits into the memory of this cluster: to hold one document of"
        f" {known_documents(inputs).longest} tokens, stage {stage} of the fastest plan"
        f" ({brief(plans[0].plan)}) needs {memory.total_bytes / _GB:.1f} GB, but has only"
        f" {memory.limit_bytes / _GB:.1f} GB; use more stages, --recompute full, more memory"
        " or shorter documents"
    )


def _leanest_plan(inputs: PlanInputs, global_batch: int, options: SearchOptions) -> Plan | None:
    """Searches briefly for a plan that fits into memory.

    Returns the plan, or ``None`` if the brief search finds no such plan.
    """
    lean = replace(
        options,
        recompute=("full",) if "full" in options.recompute else options.recompute[-1:],
        micro_batch=options.micro_batch or (1,),
        top=1,
        schedules=("1f1b",),
        most_leaves=1,
        most_levels=_FEW_LEVELS,
        most_cpu_s=_MOST_CPU_S,
    )
    plans = Searcher(inputs, global_batch=global_batch, options=lean).search().plans
    return plans[0].plan if plans else None


def _fullest_stage(plan: Plan, inputs: PlanInputs) -> tuple[int, StageMemory]:
    """Returns the index of the stage that is short of the most memory, and its memory use."""
    memories = [stage.memory for stage in predict(plan, inputs).stages]
    stage = max(range(len(memories)), key=lambda number: memories[number].missing_bytes)
    return stage, memories[stage]


def _remedies(
    find: Callable[[Cluster, SearchOptions], Plan | None], cluster: Cluster, options: SearchOptions
) -> Iterator[str]:
    """Yields descriptions of changes that would make a plan fit into memory.

    Only the smallest change of each kind is described.

    Args:
        find: Function that takes a cluster and options, and returns a plan that fits into memory,
            or ``None`` if it finds no such plan.
        cluster: Cluster on which no plan fits.
        options: Options for which no plan fits.
    """
    free = SearchOptions()
    names = {
        "recompute": "all values of --recompute allowed",
        "distributed_optimizer": "--distributed-optimizer",
        "sequence_parallel": "--sequence-parallel",
        "micro_batch": "all values of --micro-batch-sizes allowed",
        "partition": "no --partition",
        "tp": "all values of --tp allowed",
        "dp": "all values of --dp allowed",
        "pp": "all values of --pp allowed",
    }
    for name, remedy in names.items():
        wider = replace(options, **{name: getattr(free, name)})
        if wider != options and find(cluster, wider):
            yield remedy
            break
    for index, group in enumerate(cluster.groups):
        for times in _TIMES:
            groups = list(cluster.groups)
            groups[index] = replace(group, count=group.count * times)
            try:
                larger = replace(cluster, groups=tuple(groups))
            except ConfigError:
                # If the cluster file contains only one node of this type, it may define no link
                # between two such nodes.
                break
            if find(larger, options):
                yield f"{group.count * times} nodes of {group.type.name} instead of {group.count}"
                break


def _explain_limits(searcher: Searcher, objective: Objective) -> str:
    """Returns an error message with the limits of ``objective`` that exclude all plans."""
    limits: dict[str, Any] = {name: getattr(objective, name) for name in _LIMITS}
    active = {name: limit for name, limit in limits.items() if limit < math.inf}
    for names in (*combinations(active, 1), *combinations(active, 2)):
        if searcher.search(Objective(**{name: active[name] for name in names})).plans:
            continue
        flags = " and ".join(_LIMITS[name] for name in names)
        least = ", and ".join(
            _least(searcher, name, {other: active[other] for other in names if other != name})
            for name in names
        )
        if len(names) == 1:
            return f"{flags} is too low: {least}; raise the limit"
        return f"{flags} conflict: within the other limit, {least}; raise one of them"
    flags = ", ".join(_LIMITS[name] for name in active)
    return f"no plan satisfies {flags} together, but any two can be satisfied; raise one of them"


def _least(searcher: Searcher, name: str, others: dict[str, Any]) -> str:
    """Describes the lowest possible value of one limit if all other limits are kept.

    Args:
        searcher: Searcher for the user's request.
        name: Name of the limit, a field of ``Objective``.
        others: Values of all other limits, keyed by name.
    """
    if name == "most_price_per_step":
        cheapest = searcher.search(replace(Objective(**others), least="cost")).plans[0]
        return f"a step costs at least {cheapest.value:.4g}"
    fastest = searcher.search(Objective(**others)).plans[0]
    if name == "most_seconds_per_step":
        return f"a step takes at least {seconds_text(fastest.seconds)}"
    low = 0.0
    high = most = fastest.price_per_hour
    while high - low > _CLOSE * most:
        middle = (low + high) / 2
        plans = searcher.search(Objective(**{**others, name: middle})).plans
        low, high = (low, plans[0].price_per_hour) if plans else (middle, high)
    return f"nodes cost at least {high:g} per hour"
