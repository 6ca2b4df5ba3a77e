"""Describes plans as text, and compares plan files."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.adaptive.config.input_files import aligned
from megatron.adaptive.config.plan_file import plan_variables
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.plan import Plan, PlanRow, flops_share, gpus_used, placement_groups
from megatron.adaptive.planner.profile import PlanInputs

_COMPARED = {"step_s": "step, s", "tokens_per_s": "tokens/s", "price_per_step": "price/step"}


def compare_text(files: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a table that compares the settings, time, memory and price of plans.

    Args:
        files: Names and contents of plan files. The plans must include predictions.

    Raises:
        ConfigError: A plan does not match the schema, or has no prediction.
    """
    for name, document in files:
        plan_variables(document, name)
        prediction = document.get("prediction")
        keys = {"parts_s", "memory_bytes", *_COMPARED}
        if not isinstance(prediction, dict) or not keys <= set(prediction):
            raise ConfigError(f'{name} contains no prediction; write it with "plan --output"')
    predictions = [document["prediction"] for _, document in files]
    lines = [["", *(name for name, _ in files)]]
    settings = [_settings(document) for _, document in files]
    for key in dict.fromkeys(itertools.chain(*settings)):
        values = [setting.get(key, "-") for setting in settings]
        if len(set(values)) > 1:
            lines.append([key, *values])
    lines += _figure_lines(predictions)
    text = aligned(lines, left=1)
    for (name, _), prediction in zip(files[1:], predictions[1:], strict=True):
        text.append(f"{name} is {_reason(prediction, predictions[0], files[0][0])}")
    return "\n".join(text)


def _figure_lines(predictions: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns table rows with predicted values, and their differences from the first plan."""
    lines = []
    figures = [
        {
            **{title: float(prediction[key]) for key, title in _COMPARED.items()},
            "fullest GPU, GB": max(prediction["memory_bytes"]) / _GB,
        }
        for prediction in predictions
    ]
    for title, base in figures[0].items():
        numbers = [figure[title] for figure in figures]
        changes = [f" ({value / base - 1:+.1%})" if base else "" for value in numbers[1:]]
        shown = [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in numbers]
        cells = [number + change for number, change in zip(shown, ["", *changes], strict=True)]
        if any(numbers):
            lines.append([title, *cells])
    return lines


def _reason(prediction: Mapping[str, Any], first: Mapping[str, Any], first_name: str) -> str:
    """Describes how and why the step time of a plan differs from the first plan's.

    Args:
        prediction: Prediction of the plan, in the form of a plan file.
        first: Prediction of the first plan, in the form of a plan file.
        first_name: Name of the file with the first plan.
    """
    parts, base = prediction["parts_s"], first["parts_s"]
    gains = {key: parts.get(key, 0.0) - base.get(key, 0.0) for key in {**base, **parts}}
    largest = sorted(gains.items(), key=lambda pair: -abs(pair[1]))[:3]
    differences = ", ".join(
        f"{key} {'+' if gain > 0 else '-'}{seconds_text(abs(gain))}"
        for key, gain in largest
        if abs(gain) > _LEAST_SHARE * first["step_s"]
    )
    word = "slower" if prediction["step_s"] > first["step_s"] else "faster"
    return f"{word} than {first_name}: {differences or 'no part of the step differs much'}"


def _settings(document: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings in ``document``, the contents of a plan file, as text keyed by name."""
    settings = {**document.get("degrees", {})}
    for key, value in document.items():
        if key == "placement":
            value = ", ".join(
                f"{group['nodes']} {group.get('type', 'nodes')} x {group['processes_per_node']}"
                for group in value
            )
        if key not in ("degrees", "prediction", "format", "stages"):
            settings[key] = format_partition(value) if key == "partition" else value
    return {key: str(value) for key, value in settings.items()}


_GB = 1e9
_LEAST_SHARE = 0.001
"""Minimum difference between two plans in a part of the step time, as a fraction of the step time.
Smaller differences are not listed as reasons.
"""


def table(rows: Sequence[PlanRow], inputs: PlanInputs, tokens: float = 0.0) -> str:
    """Returns a text table with one row per plan.

    Args:
        rows: Plans with their predictions, starting with the best. The list must not be empty.
        inputs: Model, cluster and profile of layer times.
        tokens: Number of tokens in the whole training run, used to compute the run's duration and
            price. If 0, the columns with these values are omitted.
    """
    has_prices = any(row.prediction.price_per_hour for row in rows)
    is_shown = {
        "ep": inputs.model.has_experts,
        "cp": any(row.plan.context_ranks > 1 for row in rows),
        "slices": any(row.plan.slices > 1 for row in rows),
        "slice": any(row.plan.slice_tokens is not None for row in rows),
        "price/step": has_prices,
        "run": tokens > 0,
        "price/run": has_prices and tokens > 0,
    }
    columns = [_columns(row, inputs, tokens) for row in rows]
    titles = [title for title in columns[0] if is_shown.get(title, True)]
    lines = [["", *titles]]
    for number, column in enumerate(columns, start=1):
        lines.append([str(number), *(column[title] for title in titles)])
    text = aligned(lines)
    indent = " " * len(str(len(rows)))
    for number, row in enumerate(rows, start=1):
        layers = format_partition(inputs.model.counted(row.plan.partition))
        places = placement_text(row.plan, inputs.cluster)
        text.insert(2 * number, f"{indent}  layers {layers} on {places}")
    return "\n".join(text)


def _columns(row: PlanRow, inputs: PlanInputs, tokens: float) -> dict[str, str]:
    """Returns the cells of the table row for the plan in ``row``, keyed by column title."""
    plan, prediction = row.plan, row.prediction
    steps = tokens / inputs.step_tokens(plan.global_batch)
    is_packed = plan.slice_tokens is not None
    batch = f"{plan.num_microbatches}" + (" docs" if is_packed else f"x{plan.micro_batch}")
    memories = [stage.memory for stage in prediction.stages]
    fullest = max(memories, key=lambda memory: memory.total_bytes / memory.limit_bytes)
    chunks = f"x{plan.chunks}" if plan.chunks > 1 else ""
    replicas = "-".join(str(len(stage_place.replicas)) for stage_place in plan.places)
    share = flops_share(plan, inputs, prediction)
    return {
        "tp": str(plan.tp),
        "dp": str(plan.dp) if plan.uniform else replicas,
        "pp": f"{plan.pp}{chunks}",
        "ep": str(plan.expert_ranks),
        "cp": str(plan.context_ranks),
        "batch": batch,
        "schedule": plan.schedule,
        "slices": str(plan.slices),
        "slice": f"{plan.slice_tokens} tokens",
        "recompute": plan.recompute,
        "optimizer": "sharded" if plan.distributed_optimizer else "whole",
        "step": seconds_text(prediction.seconds),
        "tokens/s": f"{prediction.tokens_per_s:,.0f}",
        "per GPU": f"{prediction.tokens_per_s / sum(gpus_used(plan).values()):,.0f}",
        "MFU": "-" if share is None else f"{share:.1%}",
        "bubble": f"{statistics.fmean(stage.bubble for stage in prediction.stages):.1%}",
        "memory": f"{fullest.total_bytes / _GB:.1f}/{fullest.limit_bytes / _GB:.1f} GB",
        "price/step": f"{prediction.price_per_step:.4g}",
        "run": seconds_text(steps * prediction.seconds),
        "price/run": f"{steps * prediction.price_per_step:,.0f}",
    }


def placement_text(plan: Plan, cluster: Cluster) -> str:
    """Describes the plan's nodes in rank order, for example as ``2 a100 x 8, 1 v100 x 4``."""
    return ", ".join(
        f"{group['nodes']} {group['type']} x {group['processes_per_node']}"
        for group in placement_groups(plan, cluster)
    )


def seconds_text(seconds: float) -> str:
    """Formats a duration as text with a suitable unit, from days to milliseconds."""
    for least, unit, word in ((86400, 86400, "d"), (3600, 3600, "h"), (100, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit:.4g} {word}"
    if not seconds:
        return "0"
    return f"{seconds:.4g} s" if seconds >= 0.1 else f"{seconds * 1e3:.4g} ms"
