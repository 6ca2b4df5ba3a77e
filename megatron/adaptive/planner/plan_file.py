"""Writes plans: as a plan file, which trainer and launcher read, and as variables of ``conf.sh``.

Reading plan files is ``config.plan``'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.adaptive.config.model import MODELS
from megatron.adaptive.config.plan import PLAN_FORMAT, plan_variables
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.cluster import Cluster
from megatron.adaptive.planner.model import Model
from megatron.adaptive.planner.plan import Plan, Prediction

__all__ = ["conf_text", "placement_groups", "plan_document", "write_conf", "write_plan"]


def plan_document(
    plan: Plan, model: Model, cluster: Cluster, prediction: Prediction
) -> dict[str, Any]:
    """Return a plan as its file holds it.

    Plans whose stages have unequal widths also say those of each stage; the trainer runs those
    without tensor parallelism.
    """
    told: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "model": model.name,
        "precision": model.precision.name,
        "degrees": {
            "tensor": plan.tp,
            "pipeline": plan.pp,
            "data": plan.dp,
            "chunks": plan.chunks,
        },
        "placement": placement_groups(plan, cluster),
        "micro_batch_size": plan.micro_batch,
        "global_batch_size": plan.global_batch,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "distributed_optimizer": plan.distributed_optimizer,
        "overlap_grad_reduce": plan.overlap_reduce,
        "sequence_parallel": plan.sequence_parallel,
    }
    if plan.pp * plan.chunks > 1:
        told["partition"] = list(model.counted(plan.partition))
    if not plan.uniform:
        told["stages"] = [
            {
                "tensor": [replica.tp for replica in place.replicas],
                "nodes": [replica.node for replica in place.replicas],
                "micro_batch_size": place.micro_batch,
            }
            for place in plan.places
        ]
    told["prediction"] = {
        "step_s": prediction.seconds,
        "tokens_per_s": prediction.tokens_per_s,
        "price_per_step": prediction.price_per_step,
        "estimated": prediction.estimated,
        "memory_bytes": [stage.memory.total_bytes for stage in prediction.stages],
        "memory_limit_bytes": [stage.memory.limit_bytes for stage in prediction.stages],
    }
    return told


def placement_groups(plan: Plan, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the plan's nodes in the order of the ranks, equal neighbours together."""
    used: dict[int, int] = {}
    for place in plan.places:
        for replica in place.replicas:
            used[replica.node] = used.get(replica.node, 0) + replica.tp
    groups = []
    kinds = [(cluster.nodes[node].name, count) for node, count in used.items()]
    for (name, processes), members in groupby(kinds):
        nodes = len(list(members))
        groups.append({"type": name, "nodes": nodes, "processes_per_node": processes})
    return groups


def write_plan(told: Mapping[str, Any], path: Path) -> None:
    """Write a plan file.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(json.dumps(told, indent=2) + "\n", path)


def conf_text(told: Mapping[str, Any]) -> str:
    """Return a plan as variables of ``conf.sh``.

    Raises:
        ConfigError: its stages have unequal widths that the trainer cannot run.
    """
    values = plan_variables(dict(told), "the plan")
    lines = [
        "# shellcheck shell=bash disable=SC2034",
        f"# {told['model']}: {told['prediction']['step_s']:.4g} s for a step, as planned. Source it"
        " in conf.sh, or copy it there.",
    ]
    if told["model"] in MODELS:
        lines.append(f"MODEL={told['model']}")
    for name, value in values.items():
        lines.append(f"{name}='{value}'" if " " in value else f"{name}={value}")
    return "\n".join(lines) + "\n"


def write_conf(told: Mapping[str, Any], path: Path) -> None:
    """Write a plan as variables of ``conf.sh``.

    Raises:
        ConfigError: the file cannot be written, or the trainer cannot run such stages.
    """
    _write(conf_text(told), path)


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file") from error
