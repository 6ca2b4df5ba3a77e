"""The plan file: what a planner decided about a run, as JSON. Its schema is in ``docs/plan.md``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.adaptive.errors import ConfigError

__all__ = ["PLAN_FORMAT", "plan_variables", "read_plan"]

PLAN_FORMAT = 1
_DEGREES = {
    "tensor": "TENSOR_MP_SIZE",
    "pipeline": "PIPELINE_MP_SIZE",
    "data": "DP_SIZE",
    "chunks": "MODEL_CHUNKS",
}
_KEYS = (
    *("format", "degrees", "placement", "partition", "micro_batch_size", "global_batch_size"),
    "schedule",
)
_PLACE_KEYS = ("type", "nodes", "processes_per_node")


def read_plan(path: Path) -> dict[str, str]:
    """Read a plan file.

    Returns:
        What it says, as variables of ``conf.sh``.

    Raises:
        ConfigError: the file is missing, no JSON, or breaks the schema; names the key.
    """
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"PLAN={path}: {error.strerror}; name a plan file") from error
    except ValueError as error:
        raise ConfigError(f"PLAN={path}: no JSON ({error}); see docs/plan.md") from error
    return plan_variables(told, str(path))


def plan_variables(told: Any, where: str) -> dict[str, str]:
    """Check a plan and turn it into variables of ``conf.sh``.

    Raises:
        ConfigError: it breaks the schema.
    """
    plan = _object(told, where, "the plan", _KEYS)
    if plan.get("format") != PLAN_FORMAT:
        raise ConfigError(
            f"PLAN={where}: format is {plan.get('format')!r}: this version reads {PLAN_FORMAT}"
        )
    values: dict[str, str] = {}
    degrees = _object(plan.get("degrees", {}), where, "degrees", tuple(_DEGREES))
    for key, name in _DEGREES.items():
        if key in degrees:
            values[name] = str(_count(degrees[key], where, f"degrees.{key}"))
    for key in ("micro_batch_size", "global_batch_size"):
        if key in plan:
            values[key.upper()] = str(_count(plan[key], where, key))
    if "partition" in plan:
        layers = plan["partition"]
        if not isinstance(layers, list) or not layers:
            raise _wrong(where, "partition", layers, "a list of the layers of each stage")
        counts = [_count(one, where, f"partition[{i}]", least=0) for i, one in enumerate(layers)]
        values["PARTITION"] = "-".join(map(str, counts))
    if "schedule" in plan:
        if not isinstance(plan["schedule"], str):
            raise _wrong(where, "schedule", plan["schedule"], "the name of a schedule")
        values["SCHEDULE"] = plan["schedule"]
    if "placement" in plan:
        values |= _placement(plan["placement"], where)
    return values


def _placement(told: Any, where: str) -> dict[str, str]:
    if not isinstance(told, list) or not told:
        raise _wrong(where, "placement", told, "a list of groups of equal nodes")
    words = []
    for index, one in enumerate(told):
        name = f"placement[{index}]"
        group = _object(one, where, name, _PLACE_KEYS)
        nodes = _count(group.get("nodes"), where, f"{name}.nodes")
        processes = _count(group.get("processes_per_node"), where, f"{name}.processes_per_node")
        kind = group.get("type", "")
        if not isinstance(kind, str) or (not kind and len(told) > 1):
            raise _wrong(where, f"{name}.type", kind, "the name of a node type")
        words.append((kind, nodes, processes))
    if len(words) == 1 and not words[0][0]:
        _, nodes, processes = words[0]
        return {"NNODES": str(nodes), "NPROC_PER_NODE": str(processes)}
    text = " ".join(f"{kind}:{nodes}x{processes}" for kind, nodes, processes in words)
    return {"HOMOGENEOUS_CLUSTER": "false", "NODES": text}


def _object(told: Any, where: str, name: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(told, dict):
        raise _wrong(where, name, told, "an object")
    for key in told:
        if key not in keys:
            nearest = difflib.get_close_matches(key, keys, n=1)
            hint = f"the nearest is {nearest[0]}" if nearest else f"keys are {', '.join(keys)}"
            raise ConfigError(f"PLAN={where}: {name} has no key {key!r}: {hint}")
    return told


def _count(value: Any, where: str, name: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(where, name, value, f"a whole number from {least} on")
    return value


def _wrong(where: str, name: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(f"PLAN={where}: {name} is {value!r}: it must be {rule}; see docs/plan.md")
