"""What people read of plans: a table, and the explanation of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.plan import Plan, Prediction
from megatron.adaptive.planner.plan_file import placement_groups
from megatron.adaptive.schedule import registry

__all__ = ["Row", "explain", "placement_text", "table"]

_GB = 1e9
_BAR = 30


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan and what is predicted of it."""

    plan: Plan
    prediction: Prediction


def table(rows: Sequence[Row], model: Model, cluster: Cluster, tokens: float = 0.0) -> str:
    """Return plans as a table, best first.

    Args:
        rows: the plans.
        model: what is planned.
        cluster: on which nodes.
        tokens: of the whole run, for its price and time; 0 leaves them out.
    """
    priced = any(row.prediction.price_per_hour for row in rows)
    head = ["", "tp", "dp", "pp", "batch", "schedule", "recompute", "optimizer", "step", "tokens/s"]
    head += ["bubble", "memory"]
    head += (
        ["price/step"] * priced + ["run"] * bool(tokens) + ["price/run"] * (priced and tokens > 0)
    )
    lines = [head]
    for number, row in enumerate(rows, start=1):
        plan, seen = row.plan, row.prediction
        steps = tokens / (plan.global_batch * model.tokens_per_sample)
        full = max(seen.stages, key=lambda s: s.memory.total_bytes / s.memory.limit_bytes).memory
        chunks = f"x{plan.chunks}" if plan.chunks > 1 else ""
        cells = [
            *(str(number), str(plan.tp), _replicas(plan), f"{plan.pp}{chunks}"),
            f"{plan.num_microbatches}x{plan.micro_batch}",
            *(plan.schedule, plan.recompute),
            "sharded" if plan.distributed_optimizer else "whole",
            seconds_text(seen.seconds),
            f"{seen.tokens_per_s:,.0f}",
            f"{_bubble(seen):.1%}",
            f"{full.total_bytes / _GB:.1f}/{full.limit_bytes / _GB:.1f} GB",
        ]
        cells += [f"{seen.price_per_step:.4g}"] * priced
        cells += [seconds_text(steps * seen.seconds)] * bool(tokens)
        cells += [f"{steps * seen.price_per_step:,.0f}"] * (priced and tokens > 0)
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    for number, row in enumerate(rows, start=1):
        layers = format_partition(model.counted(row.plan.partition))
        places = placement_text(row.plan, cluster)
        text.insert(2 * number, f"{'':{widths[0]}}  layers {layers} on {places}")
    return "\n".join(text)


def placement_text(plan: Plan, cluster: Cluster) -> str:
    """Return the plan's nodes in the order of the ranks, as in ``2 a100 x 8, 1 v100 x 4``."""
    return ", ".join(
        f"{one['nodes']} {one['type']} x {one['processes_per_node']}"
        for one in placement_groups(plan, cluster)
    )


def seconds_text(seconds: float) -> str:
    """Return a duration with the unit that suits it."""
    for least, unit, word in ((86400, 86400, "d"), (3600, 3600, "h"), (100, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit:.4g} {word}"
    if not seconds:
        return "0"
    return f"{seconds:.4g} s" if seconds >= 0.1 else f"{seconds * 1e3:.4g} ms"


def explain(row: Row, model: Model, cluster: Cluster) -> str:
    """Return where the time of a step goes, what each stage holds, and what holds the plan back."""
    plan, seen = row.plan, row.prediction
    lines = [f"a step of {seconds_text(seen.seconds)}:"]
    for name, seconds in seen.parts.items():
        share = seconds / seen.seconds if seen.seconds else 0.0
        bar = "█" * round(_BAR * share)
        lines.append(f"  {name:11} {seconds_text(seconds):>9}  {share:6.1%}  {bar}".rstrip())
    lines.append("")
    lines.append(_stage_table(plan, seen, model, cluster))
    if seen.binding is not None:
        lines += ["", f"held back by {seen.binding.what}: {seen.binding.text}"]
    lines += list(seen.notes)
    return "\n".join(lines)


def _stage_table(plan: Plan, seen: Prediction, model: Model, cluster: Cluster) -> str:
    head = ["stage", "on", "layers", "forward", "backward", "send", "bubble"]
    head += ["weights", "gradients", "optimizer", "activations", "other", "total", "of GB"]
    lines = [head]
    counted = model.counted(plan.partition)
    placement = registry.placement_for(plan.schedule, plan.pp, plan.chunks)
    for rank, (place, stage) in enumerate(zip(plan.places, seen.stages, strict=True)):
        names = dict.fromkeys(cluster.nodes[replica.node].name for replica in place.replicas)
        layers = [counted[placement.stage_of(rank, chunk)] for chunk in range(plan.chunks)]
        memory = stage.memory
        held = (
            memory.parameter_bytes,
            memory.gradient_bytes,
            memory.optimizer_bytes,
            memory.activation_bytes,
            memory.workspace_bytes,
            memory.total_bytes,
            memory.limit_bytes,
        )
        times = (stage.forward_s, stage.backward_s, stage.send_s)
        lines.append(
            [
                *(str(rank), "+".join(names), "+".join(map(str, layers))),
                *map(seconds_text, times),
                f"{stage.bubble:.1%}",
                *(f"{value / _GB:.2f}" for value in held),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _replicas(plan: Plan) -> str:
    """How many there are, of each stage where they differ."""
    counts = [len(place.replicas) for place in plan.places]
    return str(plan.dp) if len(set(counts)) == 1 else "-".join(map(str, counts))


def _bubble(seen: Prediction) -> float:
    return sum(stage.bubble for stage in seen.stages) / len(seen.stages)
