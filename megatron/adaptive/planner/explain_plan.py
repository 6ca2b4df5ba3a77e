"""Explains a plan: parts of its step time, memory of its ranks, and why other plans are slower.

A plan is compared with its neighbours, which differ from it in one setting. A plan with packed
documents is also compared with plans that pack rows up to the length of the longest document.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.adaptive.config.input_files import aligned
from megatron.adaptive.config.sequence_slices import LEAST_TOKENS
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.chunk_partition import with_row_cap
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.layer_costs import known_documents
from megatron.adaptive.planner.model_description import RECOMPUTE
from megatron.adaptive.planner.plan import Plan, PlanRow, Prediction
from megatron.adaptive.planner.plan_text import seconds_text
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import NO_LIMIT_BYTES, Request, brief, searcher_for
from megatron.adaptive.planner.trainer_rules import orders_rows
from megatron.adaptive.schedule import catalog

_PARTS = {
    "compute": "compute of stage {stage}",
    "tp": "communication between the tensor-, context- and expert-parallel ranks of stage {stage}",
    "transfer": "transfers between stages",
    "reduction": "gradient reduction of stage {stage}",
    "embedding": "gradients of the tied embeddings",
    "optimizer": "the optimizer step of stage {stage}",
    "bubble": "idle time of the pipeline",
    "jitter": "waiting because some actions randomly take longer",
    "beside": "work outside of the pipeline, the reductions and the optimizer",
}
_WORDS = {"micro_batch": "microbatch", "schedules": "schedule", "slice_tokens": "tokens of a slice"}
_PACKED_SLICES = (1, 4, 8, 16)
"""Numbers of slices per packed row that are compared with slices of a fixed length."""
_WORTH = 0.02
"""Minimum fraction of the step time that packed rows must save to be recommended in a hint."""
_GB = 1e9
_BAR = 30
"""Length in characters of the bar for a whole step."""
_NEIGHBOUR_CPU_S = 0.5
"""Maximum CPU time, in seconds per node type, of the search for one neighbour of a plan."""


def explain(row: PlanRow, inputs: PlanInputs) -> str:
    """Returns a text with the parts of the step time, a table of all ranks, and the bottleneck."""
    plan, prediction = row.plan, row.prediction
    lines = [f"a step of {seconds_text(prediction.seconds)}:"]
    for name, seconds in prediction.parts.items():
        share = seconds / prediction.seconds if prediction.seconds else 0.0
        bar = "█" * round(_BAR * share)
        lines.append(f"  {name:11} {seconds_text(seconds):>9}  {share:6.1%}  {bar}".rstrip())
    lines.append("")
    lines.append(_stage_table(plan, prediction, inputs))
    name = max(prediction.parts, key=lambda key: prediction.parts[key])
    slowest = max(
        range(plan.pp),
        key=lambda i: prediction.stages[i].forward_s + prediction.stages[i].backward_s,
    )
    description = _PARTS[name].format(stage=slowest)
    share = prediction.parts[name] / prediction.seconds if prediction.seconds else 0.0
    reason = f"{name} ({description}): {share:.0%} of the step"
    if (number := prediction.limiting_node) is not None:
        node = inputs.cluster.nodes[number].name
        reason = f"the network link of node {number} ({node}), which is busy during the whole step"
    return "\n".join([*lines, "", f"held back by {reason}"])


def _stage_table(plan: Plan, prediction: Prediction, inputs: PlanInputs) -> str:
    """Returns a table with the times and memory of each pipeline rank."""
    head = ["stage", "on", "layers", "forward", "backward", "send", "bubble"]
    head += ["weights", "gradients", "optimizer", "activations", "other", "total", "of GB"]
    lines = [head]
    counted = inputs.model.counted(plan.partition)
    placement = catalog.placement_for(plan.schedule, plan.pp, plan.chunks)
    for rank, (stage_place, stage) in enumerate(zip(plan.places, prediction.stages, strict=True)):
        names = dict.fromkeys(
            inputs.cluster.nodes[replica.node].name for replica in stage_place.replicas
        )
        layers = [counted[placement.stage_of(rank, chunk)] for chunk in range(plan.chunks)]
        memory = stage.memory
        *parts, limit_bytes = vars(memory).values()
        sizes = (*parts, memory.total_bytes, limit_bytes)
        times = (stage.forward_s, stage.backward_s, stage.send_s)
        lines.append(
            [
                str(rank),
                "+".join(names),
                "+".join(map(str, layers)),
                *map(seconds_text, times),
                f"{stage.bubble:.1%}",
                *(f"{value / _GB:.2f}" for value in sizes),
            ]
        )
    return "\n".join(aligned(lines))


def why_not(inputs: PlanInputs, request: Request, best: PlanRow) -> list[str]:
    """Compares a plan with its neighbours, and returns one line of text per neighbour.

    A neighbour differs from the plan in one setting. A parallel size or the microbatch size is
    doubled or divided by its smallest divisor, or the recomputation setting or the schedule is
    changed. All other settings except the slice length are chosen again within the limits of the
    request. Each line states how much slower the best plan with the change is, or by how much it
    exceeds the memory.

    Args:
        inputs: Model, cluster and profile of layer times.
        request: User's request for which the plan was found.
        best: Plan to compare with its neighbours.
    """
    plan = best.plan
    options = replace(request.options, top=1, most_cpu_s=_NEIGHBOUR_CPU_S)
    choices: list[tuple[str, int | str]] = []
    sizes = ("tp", "dp", "pp", *["micro_batch"] * (plan.slice_tokens is None))
    for name in sizes:
        value = getattr(plan, name)
        less = next((value // by for by in range(2, value + 1) if value % by == 0), 0)
        choices += [(name, other) for other in (less, 2 * value) if other]
    choices += [("slices", number) for number in _near_slices(plan)]
    choices += [("slice_tokens", number) for number in _near_tokens(plan, inputs)]
    choices += [("recompute", kind) for kind in RECOMPUTE if kind != plan.recompute]
    if plan.pp > 1:
        others = [schedule for schedule in options.schedules if schedule != plan.schedule]
        if plan.slice_tokens is not None:
            others = list(filter(orders_rows, others))
            options = replace(options, slice_tokens=(plan.slice_tokens,))
        choices += [("schedules", schedule) for schedule in others]
    roomy = replace(inputs, cluster=inputs.cluster.with_memory(more_bytes=NO_LIMIT_BYTES))
    lines = []
    for name, value in choices:
        choice: dict[str, Any] = {"schedules": (plan.schedule, "1f1b"), name: (value,)}
        changed = replace(request, options=replace(options, **choice))
        title = f"  {_WORDS.get(name, name)} {value}:"
        try:
            fitting = searcher_for(inputs, changed).search().plans
            plans = fitting or searcher_for(roomy, changed).search().plans
        except ConfigError as error:
            # Remove the flag at the beginning of a message, because the title of the line already
            # names it.
            flag = f"--{name.replace('_', '-')} {value}: "
            lines.append(f"{title} {str(error).removeprefix(flag)}")
            continue
        if not plans:
            lines.append(f"{title} no plan that uses whole nodes divides the batch evenly")
            continue
        prediction = predict(plans[0].plan, inputs)
        lack = max(stage.memory.missing_bytes for stage in prediction.stages)
        slower = prediction.seconds / best.prediction.seconds - 1
        result = f"{slower:+.1%}" if fitting else f"{lack / _GB:.1f} GB short of memory"
        lines.append(f"{title} {result} ({brief(plans[0].plan)})")
    return [*lines, *_packed_lines(best, inputs)]


def _packed_lines(best: PlanRow, inputs: PlanInputs) -> list[str]:
    """Compares a plan whose slices have a fixed length with plans that pack rows.

    The rows are packed up to the length of the longest document.

    Returns:
        One line of text for each number of slices per row. The first line is about uncut rows.
    """
    lines = []
    for slices, prediction in packed_predictions(best.plan, inputs).items():
        slower = prediction.seconds / best.prediction.seconds - 1
        result = f"{slower:+.1%}" if prediction.fits else "does not fit"
        lines.append(f"  {_packed_title(slices, inputs)}: {result}")
    return lines


def packed_predictions(plan: Plan, inputs: PlanInputs) -> dict[int, Prediction]:
    """Predicts the steps of a plan if rows are packed to the length of the longest document.

    The rows are cut into slices of equal cost. The number of layers of each stage stays the same,
    and the limit on activations is chosen again.

    Args:
        plan: Plan to change.
        inputs: Model, cluster, profile and documents.

    Returns:
        Predictions, keyed by the number of slices per row. The dict is empty for plans without
        ``slice_tokens``.
    """
    if plan.slice_tokens is None:
        return {}
    documents = known_documents(inputs)
    predictions = {}
    for slices in _PACKED_SLICES:
        packed = replace(inputs, documents=replace(documents, packed_slices=slices))
        changed = with_row_cap(replace(plan, cap=None), packed)
        predictions[slices] = predict(changed, packed)
    return predictions


def packed_advice(best: PlanRow, inputs: PlanInputs) -> str:
    """Returns a hint to pack rows if this makes the plan faster, otherwise an empty string."""
    fitting = {
        slices: prediction.seconds
        for slices, prediction in packed_predictions(best.plan, inputs).items()
        if prediction.fits
    }
    slices = min(fitting, key=fitting.__getitem__, default=0)
    if not slices or fitting[slices] > best.prediction.seconds * (1 - _WORTH):
        return ""
    gain = 1 - fitting[slices] / best.prediction.seconds
    flags = f"--pack-to {known_documents(inputs).config.model.seq_length}"
    return (
        f"{_packed_title(slices, inputs)} would take {gain:.1%} less time with the same layers per"
        f" stage; use {flags}{f' --sequence-slices {slices}' * (slices > 1)} instead of"
        " --slice-tokens"
    )


def _packed_title(slices: int, inputs: PlanInputs) -> str:
    title = "whole" if slices == 1 else f"in {slices} slices"
    return f"rows of up to {known_documents(inputs).config.model.seq_length} tokens, {title}"


def _near_tokens(plan: Plan, inputs: PlanInputs) -> tuple[int, ...]:
    """Returns half and twice the plan's slice length in tokens, if these lengths are allowed."""
    if plan.slice_tokens is None:
        return ()
    tokens, longest = plan.slice_tokens, known_documents(inputs).longest
    return tuple(n for n in (tokens // 2, 2 * tokens) if LEAST_TOKENS <= n <= longest)


def _near_slices(plan: Plan) -> tuple[int, ...]:
    """Returns half and twice the plan's number of slices, or an empty tuple for whole sequences."""
    return (plan.slices // 2, 2 * plan.slices) if plan.slices > 1 else ()
