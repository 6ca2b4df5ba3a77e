"""Answers a planning request: the best plans under their schedules, or why there is none.

Without a plan, the error names the stage that lacks memory or the limits that contradict each
other. What would help is found by trying it: fewer restrictions, more nodes, more memory for each
GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.plan_file import plan_flags, world_size_of
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schedule_specs import selectable_names
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster, find_gpu, known_gpu
from megatron.adaptive.planner.cost import StageSums, predict, simulated
from megatron.adaptive.planner.layer_costs import OURS, estimate_optimizer_s, make_estimator
from megatron.adaptive.planner.model_description import RECOMPUTE, Model
from megatron.adaptive.planner.model_file import ANY_RUN
from megatron.adaptive.planner.plan import (
    FP8_FLAGS,
    Plan,
    PlanRow,
    StageMemory,
    placement_text,
    plan_document,
    seconds_text,
)
from megatron.adaptive.planner.profile import PlanInputs, Profile
from megatron.adaptive.planner.search import (
    Best,
    Found,
    Objective,
    Searcher,
    SearchOptions,
    SearchResult,
)
from megatron.adaptive.schedule.simulate import SimResult
from megatron.adaptive.trace.views.palette import ACTION_NAMES, chunk_color

SCHEDULES = selectable_names(lambda spec: spec.planned == "by default")
"""Orders that are weighed where none are given."""

_COLOUR = "#1f77b4"
_WORDS = {"micro_batch": "microbatch", "schedules": "schedule"}
_SPEED, _PRICE = "tokens per second", "price of a million tokens"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A question to the planner.

    Attributes:
        global_batch: samples of a step.
        objective: what is minimised, and the limits.
        options: what may be chosen; its ``partition`` counts layers as ``--partition`` does.
    """

    global_batch: int
    objective: Objective = field(default_factory=Objective)
    options: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Plans found for a request.

    Attributes:
        rows: plans, best first.
        result: of the search.
        refused: rules by which the trainer refuses other plans, as good as these or better.
    """

    rows: tuple[PlanRow, ...]
    result: SearchResult
    refused: tuple[str, ...] = ()


def complete_profile(profile: Profile | None, model: Model, cluster: Cluster) -> Profile:
    """Returns a profile that knows every GPU of a cluster, by estimates where nothing was measured.

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
            part.peak("fp8" if model.precision.fp8 else model.precision.name)
        part_of_table = known_gpu(node.gpu)
        if node.gpu not in optimizer and part_of_table is not None:
            optimizer[node.gpu] = estimate_optimizer_s(model, part_of_table)
    return replace(given, optimizer_s_per_parameter=optimizer, estimator=make_estimator(model))


def propose(inputs: PlanInputs, request: Request) -> Proposal:
    """Finds the best plans.

    Args:
        inputs: what is trained where, and how long it takes.
        request: what is asked for.

    Raises:
        ConfigError: nothing fits, limits contradict each other, or an option is wrong; says which,
            and what would help.
    """
    searcher, goal = _searcher(inputs, request), request.objective
    result = searcher.search(goal)
    if not result.found:
        asked = request.options.schedules
        free = replace(request, options=replace(request.options, schedules=("1f1b",)))
        if "1f1b" not in asked and _searcher(inputs, free).search(goal).found:
            raise ConfigError(
                f"--schedules {','.join(asked)}: no plan that fits can be run so, with"
                " these numbers of stages, layers and microbatches; add 1f1b"
            )
        if goal == Objective(least=goal.least) or not searcher.search(Objective()).found:
            raise ConfigError(_explain_memory(inputs, request.global_batch, searcher.options))
        raise ConfigError(_explain_limits(searcher, goal))
    top = request.options.top
    rows, refused = _runnable(_rows(result.found, inputs), inputs)
    if refused and len(rows) < top:
        more = replace(request, options=replace(request.options, top=top + _MORE))
        result = _searcher(inputs, more).search(goal)
        rows, refused = _runnable(_rows(result.found, inputs), inputs)
    if not rows:
        raise ConfigError(f"the trainer refuses all plans found: {refused[0]}")
    return Proposal(rows=rows[:top], result=result, refused=refused)


def _runnable(
    rows: Sequence[PlanRow], inputs: PlanInputs
) -> tuple[tuple[PlanRow, ...], tuple[str, ...]]:
    """Returns the plans that the trainer takes, and the rules that others break."""
    rules = [_refusal(row, inputs) for row in rows]
    kept = tuple(row for row, rule in zip(rows, rules, strict=True) if not rule)
    return kept, tuple(dict.fromkeys(rule for rule in rules if rule))


def _refusal(row: PlanRow, inputs: PlanInputs) -> str:
    """Returns the rule by which the trainer's configuration refuses a plan, empty for none.

    Only models that are given by the trainer's arguments can be checked.
    """
    model = inputs.model
    words = [word for word in model.arguments if word not in ("--fp16", "--bf16", *FP8_FLAGS)]
    if not words:
        return ""
    if "--transformer-impl" not in words:
        is_engine = model.attention == "fused"
        words += ["--transformer-impl", "transformer_engine" if is_engine else "local"]
    document = plan_document(row.plan, inputs, row.prediction)
    try:
        parse(
            [*ANY_RUN, *words, *plan_flags(document, "the plan")],
            world_size=world_size_of(document) or 1,
            last_wins=True,
            installed=Installed(transformer_engine=True),
        )
    except ConfigError as error:
        return str(error).removeprefix("--plan the plan: ")
    return ""


def why_not(inputs: PlanInputs, request: Request, best: PlanRow) -> list[str]:
    """Returns a line for each neighbour of a plan: how much slower its best is, or what it lacks.

    A neighbour has twice or the next smaller part of one degree or of the microbatch, or another
    recompute or schedule; everything else is chosen anew within the request.

    Args:
        inputs: what is trained where, and how long it takes.
        request: what was asked for.
        best: the plan.
    """
    plan, whole = best.plan, replace(request.options, top=1, most_cpu_s=_NEIGHBOUR_CPU_S)
    choices: list[tuple[str, str, Any]] = []
    for name in ("tp", "dp", "pp", "micro_batch"):
        value = getattr(plan, name)
        less = next((value // by for by in range(2, value + 1) if value % by == 0), 0)
        choices += [(name, str(one), (one,)) for one in (less, 2 * value) if one]
    choices += [("recompute", one, (one,)) for one in RECOMPUTE if one != plan.recompute]
    if plan.pp > 1:
        others = [one for one in whole.schedules if one != plan.schedule]
        choices += [("schedules", one, (one,)) for one in others]
    roomy = replace(inputs, cluster=inputs.cluster.with_memory(more_bytes=_NO_LIMIT))
    lines = []
    for name, word, value in choices:
        choice = {"schedules": (plan.schedule, "1f1b"), name: value}
        changed = replace(request, options=replace(whole, **choice))
        words = f"  {_WORDS.get(name, name)} {word}:"
        try:
            found = _searcher(inputs, changed).search().found
            far = found or _searcher(roomy, changed).search().found
        except ConfigError as error:
            lines.append(f"{words} {str(error).partition(': ')[2] or error}")
            continue
        if not far:
            lines.append(f"{words} no plan uses whole nodes and divides the batch so")
            continue
        seen = predict(far[0].plan, inputs)
        lack = max(stage.memory.missing_bytes for stage in seen.stages)
        slower = seen.seconds / best.prediction.seconds - 1
        how = f"{slower:+.1%}" if found else f"does not fit, by {lack / _GB:.1f} GB"
        lines.append(f"{words} {how} ({_brief(far[0].plan)})")
    return lines


def _brief(plan: Plan) -> str:
    return (
        f"tp {plan.tp}, dp {plan.dp}, pp {plan.pp}, microbatch {plan.micro_batch},"
        f" {plan.schedule}, recompute {plan.recompute}"
    )


def _rows(found: Sequence[Found], inputs: PlanInputs) -> tuple[PlanRow, ...]:
    return tuple(PlanRow(plan=one.plan, prediction=predict(one.plan, inputs)) for one in found)


def _searcher(inputs: PlanInputs, request: Request) -> Searcher:
    """Returns what searches for plans of a request, once that is checked."""
    partition = _whole_partition(request.options.partition, inputs.model)
    options = replace(request.options, partition=partition)
    _check_request(request, options, inputs)
    return Searcher(inputs, global_batch=request.global_batch, options=options)


def _whole_partition(partition: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Turns layers as ``--partition`` counts them into all layers of each stage."""
    if not partition:
        return ()
    try:
        whole = tuple(map(len, model.stage_layers(partition)))
    except ConfigError as error:
        raise ConfigError(f"--partition: {error}") from error
    if 0 in whole:
        raise ConfigError(
            f"--partition {format_partition(partition)}: stage {whole.index(0)} holds no layer:"
            " give each one"
        )
    return whole


def find_front(inputs: PlanInputs, request: Request) -> tuple[PlanRow, ...]:
    """Finds the plans that no other beats in both time and price of a step, fastest first.

    Args:
        inputs: what is trained where, and how long it takes.
        request: what is asked for; which of time and cost is least does not matter.

    Raises:
        ConfigError: the cluster has no prices, or no plan keeps the limits.
    """
    if not any(node.price_per_hour for node in inputs.cluster.types):
        raise ConfigError(
            "--pareto weighs speed against price, but no node type has one: give price_per_hour in"
            " the cluster file"
        )
    found, _ = pareto(_searcher(inputs, request), request.objective)
    if not found:
        raise ConfigError("--pareto: no plan fits and keeps the limits; plan without it to see why")
    rows, refused = _runnable(_rows(found, inputs), inputs)
    if not rows:
        raise ConfigError(f"--pareto: the trainer refuses all plans found: {refused[0]}")
    return rows


def pareto(
    searcher: Searcher, objective: Objective | None = None
) -> tuple[tuple[Found, ...], float]:
    """Finds the front of seconds and price per step over all parts of a cluster.

    One table of bounds serves all parts: a state of the search knows the nodes that it stands on.
    So every part is looked at in one pass over the shapes, and only what no known plan beats in
    both time and cost is searched.

    Args:
        searcher: for the model, the whole cluster and the options.
        objective: limits on time and price; which of the two is least does not matter.

    Returns:
        Plans by rising time and falling price per step, which is their ``value``; and by how much
        of a plan's time or cost a plan that was not searched to the end may at most lie below the
        front, 0 if all were.
    """
    front = _Points(objective or Objective())
    shapes = searcher.shapes()
    for shape in shapes:
        searcher.visit(shape, front, 1, finish=False)
    missed = [searcher.visit(shape, front, searcher.options.most_leaves) for shape in shapes]
    slack = max([0.0, *(front.slack(*one) for some in missed for one in some)])
    return tuple(front.points), slack


class _Points(Best):
    """The front so far, by rising time; goals are put in order by their seconds."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(0, objective)
        self.points: list[Found] = []

    def value(self, seconds: float, price: float) -> float:
        return seconds

    def most_seconds(self, price: float) -> float:
        most = self.objective.most_seconds(price, math.inf)
        hourly = price / 3600
        for one in self.points:
            # Beaten by this point from the moment that both its time and its cost are reached.
            reached = one.value / hourly if hourly else math.inf
            most = min(most, max(one.seconds, reached))
        return most

    def add(self, key: Any, plan: Plan, seconds: float, price: float) -> None:
        value = seconds * price / 3600
        if any(one.seconds <= seconds and one.value <= value for one in self.points):
            return
        kept = [one for one in self.points if one.seconds < seconds or one.value < value]
        found = Found(plan=plan, seconds=seconds, price_per_hour=price, value=value)
        self.points = sorted([*kept, found], key=lambda one: one.seconds)

    def slack(self, seconds: float, price: float) -> float:
        """Returns the part of the time by which a bound lies below the front."""
        most = self.most_seconds(price)
        return max(0.0, 1 - seconds / most) if math.isfinite(most) else 0.0


def write_front(rows: Sequence[PlanRow], inputs: PlanInputs, folder: Path) -> None:
    """Writes the front as chart, picture and plan files.

    Args:
        rows: the plans, fastest first.
        inputs: what is trained where, and how long it takes.
        folder: gets ``front.html``, ``front.png``, ``front.json`` and ``plan-N.json``.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    documents = [plan_document(row.plan, inputs, row.prediction) for row in rows]
    files = {f"plan-{number}": document for number, document in enumerate(documents, start=1)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**files, "front": documents}.items():
            text = json.dumps(content, indent=2) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        write_page(rows, inputs, folder / "front.html")
        prices, speeds = _prices(rows), [row.prediction.tokens_per_s for row in rows]
        _write_picture(prices, speeds, _title(rows, inputs), folder / "front.png")
    except OSError as error:
        raise ConfigError(f"--pareto {folder}: {error.strerror}; name another folder") from error


def _prices(rows: Sequence[PlanRow]) -> list[float]:
    """Returns the price of a million tokens with each plan."""
    seen = [row.prediction for row in rows]
    return [one.price_per_hour / 3600 / one.tokens_per_s * 1e6 for one in seen]


def _title(rows: Sequence[PlanRow], inputs: PlanInputs) -> str:
    return f"{inputs.model.name}, {rows[0].plan.global_batch} samples for a step"


def write_page(rows: Sequence[PlanRow], inputs: PlanInputs, path: Path) -> None:
    """Writes a page that needs nothing but itself.

    It has a point for each plan, by speed and price or, without prices, memory of the fullest GPU;
    then, of the first plan, the memory of each rank and the simulated step.

    Args:
        rows: the plans, best first.
        inputs: what is trained where, and how long it takes.
        path: the file.

    Raises:
        ConfigError: it cannot be written.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    plan, seen = rows[0].plan, rows[0].prediction
    priced = all(row.prediction.price_per_hour for row in rows)
    across = _prices(rows) if priced else [row.prediction.peak_bytes / _GB for row in rows]
    figure: Any = make_subplots(
        rows=3,
        subplot_titles=("plans", f"memory: {_brief(plan)}", "its step, simulated"),
        row_heights=[0.3, 0.3, 0.4],
    )
    dots = go.Scatter(
        x=across,
        y=[row.prediction.tokens_per_s for row in rows],
        text=[f"{placement_text(row.plan, inputs.cluster)}; {_brief(row.plan)}" for row in rows],
        mode="lines+markers" if priced else "markers",
        line={"shape": "hv", "color": _COLOUR},
        hovertemplate="%{text}<br>%{y:,.0f} tokens/s<br>%{x:.4g}<extra></extra>",
        name="plans",
    )
    figure.add_trace(dots, row=1, col=1)
    ranks = list(range(plan.pp))
    for part in [name for name in vars(seen.stages[0].memory) if name != "limit_bytes"]:
        held = [getattr(stage.memory, part) / _GB for stage in seen.stages]
        name = part.removesuffix("_bytes")
        figure.add_trace(go.Bar(x=ranks, y=held, name=name), row=2, col=1)
    limits = [stage.memory.limit_bytes / _GB for stage in seen.stages]
    line = {"x": ranks, "y": limits, "mode": "lines+markers", "name": "limit"}
    figure.add_trace(go.Scatter(**line, line={"color": "black", "dash": "dot"}), row=2, col=1)
    if plan.uniform and 3 * plan.pp * plan.chunks * plan.num_microbatches <= _MOST_BARS:
        _add_timeline(figure, simulated(plan, StageSums.of(plan, inputs, OURS)))
    figure.update_xaxes(title_text=_PRICE if priced else "GB on the fullest GPU", row=1, col=1)
    figure.update_xaxes(title_text="pipeline rank", dtick=1, row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=3, col=1)
    figure.update_yaxes(title_text=_SPEED, row=1, col=1)
    figure.update_yaxes(title_text="GB", row=2, col=1)
    figure.update_yaxes(title_text="rank", autorange="reversed", dtick=1, row=3, col=1)
    figure.update_layout(
        title=_title(rows, inputs), template="plotly_white", barmode="stack", height=1200
    )
    try:
        figure.write_html(str(path), include_plotlyjs=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file") from error


def _add_timeline(figure: Any, step: SimResult) -> None:
    """Adds a bar for each action, in the colours of the trace views."""
    import plotly.graph_objects as go

    chunks = step.placement.num_chunks
    bars: dict[tuple[str, int], list[tuple[int, float, float, int]]] = {}
    for rank, spans in enumerate(step.spans):
        for span in spans:
            action = span.action
            bar = (rank, span.start_s, span.end_s - span.start_s, action.microbatch)
            bars.setdefault((action.kind.value, action.chunk), []).append(bar)
    for (kind, chunk), found in sorted(bars.items()):
        at, base, length, microbatch = zip(*found, strict=True)
        bar = go.Bar(
            y=at,
            base=base,
            x=length,
            customdata=microbatch,
            orientation="h",
            marker={"color": f"#{chunk_color(kind, chunk, chunks)}"},
            name=ACTION_NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else ""),
            hovertemplate="microbatch %{customdata}: %{x:.4g} s<extra>%{fullData.name}</extra>",
        )
        figure.add_trace(bar, row=3, col=1)


def _write_picture(prices: list[float], speeds: list[float], title: str, path: Path) -> None:
    """Writes the same as PNG."""
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
    """Refuses contradictory requests before anything is searched."""
    model, cluster = inputs.model, inputs.cluster
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
        flags = _flags({"tp": options.tp, "dp": options.dp, "pp": options.pp})
        raise ConfigError(
            f"{flags} need {least} GPUs, the cluster has {cluster.num_gpus}: they"
            " contradict each other; lower one"
        )
    units = [dp * size for dp in options.dp or (1,) for size in options.micro_batch or (1,)]
    if all(request.global_batch % unit for unit in units):
        flags = _flags({"dp": options.dp, "micro-batch-sizes": options.micro_batch})
        raise ConfigError(
            f"--global-batch-size {request.global_batch}: {flags} does not divide it; change one"
            " of them"
        )
    spreads = options.expert_ranks
    if spreads and not set(spreads) & set(model.expert_ranks):
        has = f"has none that they divide by: give of {_words(model.expert_ranks)}"
        raise ConfigError(
            f"--expert-parallel-size {_words(spreads)}: {model.name}"
            f" {has if model.has_experts else 'has no experts; leave it out'}"
        )
    for shared in options.context_ranks:
        if not model.divides_sequence(1, shared, False):
            raise ConfigError(
                f"--context-parallel-size {shared}: it shares sequences of causal attention without"
                f" experts and local windows, of a multiple of {2 * shared} tokens; {model.name}"
                f" has others or {model.sequence}: change it"
            )
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


def _flags(given: Mapping[str, tuple[int, ...]]) -> str:
    return " and ".join(f"--{name} {_words(values)}" for name, values in given.items() if values)


def _words(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


_GB = 1e9
_TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_CLOSE = 1e-3
_LIMITS = {
    "most_seconds_per_step": "--time-limit",
    "most_price_per_hour": "--max-price",
    "most_price_per_step": "--budget",
}
_NO_LIMIT = 1e15
_MORE = 16
"""Plans that are looked for besides, where the trainer refuses some."""
_MOST_BARS = 20_000
"""Actions of a step up to which the page draws them."""
_NEAR = 0.01
_FEW_LEVELS = 500
_MOST_CPU_S = 2.0
_NEIGHBOUR_CPU_S = 0.5


def _explain_memory(inputs: PlanInputs, global_batch: int, options: SearchOptions) -> str:
    """Names the stage of the nearest plan that lacks memory, and what would make it fit.

    Args:
        inputs: what is trained where, and how long it takes.
        global_batch: samples of a step.
        options: the restrictions under which nothing fits.
    """

    model, cluster = inputs.model, inputs.cluster

    def found(cluster: Cluster, options: SearchOptions) -> Plan | None:
        """Searches with all that saves memory."""
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
        searcher = Searcher(
            replace(inputs, cluster=cluster), global_batch=global_batch, options=lean
        )
        rows = searcher.search().found
        return rows[0].plan if rows else None

    def lacking(plan: Plan) -> tuple[int, StageMemory]:
        """Returns the stage that lacks most."""
        stages = predict(plan, inputs).stages
        stage = max(range(len(stages)), key=lambda at: stages[at].memory.missing_bytes)
        return stage, stages[stage].memory

    nearest = found(cluster.with_memory(more_bytes=_NO_LIMIT), options)
    if nearest is None:
        return (
            f"no plan for {model.name} on {cluster.num_gpus} GPUs with a global batch of"
            f" {global_batch}: no widths that are allowed use nodes whole and divide the batch;"
            " allow others with --tp, --dp, --pp, --micro-batch-sizes and --partition, or change"
            " --global-batch-size"
        )
    stage, memory = lacking(nearest)
    least = 0.0
    while memory.missing_bytes - least > _NEAR * memory.missing_bytes:
        middle = (least + memory.missing_bytes) / 2
        if (plan := found(cluster.with_memory(more_bytes=middle), options)) is None:
            least = middle
        else:
            nearest, (stage, memory) = plan, lacking(plan)
    remedies = list(_remedies(found, cluster, options))
    remedies.append(f"GPUs of {math.ceil(memory.total_bytes / _GB)} GB")
    node = cluster.nodes[nearest.places[stage].replicas[0].node]
    return (
        f"{model.name} fits nowhere on this cluster: at best ({_brief(nearest)})"
        f" stage {stage} on {node.name} needs {memory.total_bytes / _GB:.1f} GB of"
        f" {memory.limit_bytes / _GB:.1f} GB, it lacks {memory.missing_bytes / _GB:.1f} GB;"
        f" what would fit: {', or '.join(remedies)}"
    )


def _remedies(
    found: Callable[[Cluster, SearchOptions], Plan | None], cluster: Cluster, options: SearchOptions
) -> Iterator[str]:
    """Yields changes that make a plan fit, the smallest of each kind."""
    free = SearchOptions()
    names = {
        "recompute": "any --recompute",
        "distributed_optimizer": "--distributed-optimizer",
        "sequence_parallel": "--sequence-parallel",
        "micro_batch": "any --micro-batch-sizes",
        "partition": "no --partition",
        "tp": "any --tp",
        "dp": "any --dp",
        "pp": "any --pp",
    }
    for name, words in names.items():
        wider = replace(options, **{name: getattr(free, name)})
        if wider != options and found(cluster, wider):
            yield words
            break
    for index, group in enumerate(cluster.groups):
        for times in _TIMES:
            groups = list(cluster.groups)
            groups[index] = replace(group, count=group.count * times)
            try:
                larger = replace(cluster, groups=tuple(groups))
            except ConfigError:
                break  # no link is known between nodes of a type that there is one of
            if found(larger, options):
                yield f"{group.count * times} nodes of {group.type.name} in place of {group.count}"
                break


def _explain_limits(searcher: Searcher, objective: Objective) -> str:
    """Names the limits that no plan keeps, where plans without limits exist."""
    limits: dict[str, Any] = {name: getattr(objective, name) for name in _LIMITS}
    given = {name: limit for name, limit in limits.items() if limit < math.inf}
    for names in (*combinations(given, 1), *combinations(given, 2)):
        if searcher.search(Objective(**{name: given[name] for name in names})).found:
            continue
        flags = " and ".join(_LIMITS[name] for name in names)
        least = ", and ".join(
            _least(searcher, name, {one: given[one] for one in names if one != name})
            for name in names
        )
        if len(names) == 1:
            return f"{flags} cannot be kept: {least}; raise it"
        return f"{flags} contradict each other: where the other is kept, {least}; raise one of them"
    flags = ", ".join(_LIMITS[name] for name in given)
    return f"{flags} cannot be kept together, though any two can: raise one of them"


def _least(searcher: Searcher, name: str, others: dict[str, Any]) -> str:
    """Returns the least that plans within other limits take of what one limits."""
    if name == "most_price_per_step":
        cheapest = searcher.search(replace(Objective(**others), least="cost")).found[0]
        return f"a step costs at least {cheapest.value:.4g}"
    fastest = searcher.search(Objective(**others)).found[0]
    if name == "most_seconds_per_step":
        return f"a step takes at least {seconds_text(fastest.seconds)}"
    low = 0.0
    high = most = fastest.price_per_hour
    while high - low > _CLOSE * most:
        middle = (low + high) / 2
        found = searcher.search(Objective(**{**others, name: middle})).found
        low, high = (low, found[0].price_per_hour) if found else (middle, high)
    return f"nodes cost at least {high:g} per hour"
