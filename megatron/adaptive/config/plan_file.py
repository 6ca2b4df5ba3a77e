"""Reads plan files, which contain the planner's decisions about a run as JSON.

``docs/plan.md`` describes the schema of plan files. This module converts a plan to variables of
``conf.sh``, and these variables to flags of the trainer. Both the launcher and the trainer use this
code, so a plan has the same effect in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.config.command_parser import flags_in, flags_where
from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.input_files import read_json
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.config.schema_files import check_form
from megatron.adaptive.errors import ConfigError

PLAN_FORMAT = 1
_DEGREES = {
    "tensor": "TENSOR_MP_SIZE",
    "pipeline": "PIPELINE_MP_SIZE",
    "data": "DP_SIZE",
    "chunks": "MODEL_CHUNKS",
    "expert": "EXPERT_MP_SIZE",
    "context": "CONTEXT_MP_SIZE",
}
_SETTINGS = (
    "micro_batch_size",
    "global_batch_size",
    "schedule",
    "recompute",
    "precision",
    "distributed_optimizer",
    "overlap_grad_reduce",
    "sequence_parallel",
    "sequence_slices",
    "slice_tokens",
    "activation_cap",
)
"""Keys of a plan that are also variables of ``conf.sh``, where their names are in upper case."""
_RECOMPUTE_FLAGS = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
FLAGS = {
    "TENSOR_MP_SIZE": "--tensor-model-parallel-size",
    "PIPELINE_MP_SIZE": "--pipeline-model-parallel-size",
    "EXPERT_MP_SIZE": "--expert-model-parallel-size",
    "CONTEXT_MP_SIZE": "--context-parallel-size",
    "MICRO_BATCH_SIZE": "--micro-batch-size",
    "GLOBAL_BATCH_SIZE": "--global-batch-size",
    "SCHEDULE": "--pipeline-schedule",
    "PARTITION": "--partition",
    "STAGE_DP_SIZES": "--stage-data-parallel-sizes",
    "SEQUENCE_SLICES": "--sequence-slices",
    "SLICE_TOKENS": "--slice-tokens",
    "ACTIVATION_CAP": "--activation-cap",
}
"""Maps each variable of ``conf.sh`` to the trainer flag that receives its value."""
_SWITCH_FLAGS = {
    "DISTRIBUTED_OPTIMIZER": "--use-distributed-optimizer",
    "OVERLAP_GRAD_REDUCE": "--overlap-grad-reduce",
    "SEQUENCE_PARALLEL": "--sequence-parallel",
}

_LENGTHS_FLAG = "--variable-seq-lengths"
"""Flag for runs with documents of various lengths. Only such runs use slices of fixed length."""


def load_plan(path: Path) -> Any:
    """Reads the plan file ``path`` as JSON. The contents are not checked against the schema."""
    return read_json(path, "pass a plan file (see docs/plan.md)")


def plan_flags(content: Any, where: str) -> list[str]:
    """Checks a plan against the schema, and converts it to flags of the trainer.

    Args:
        content: Contents of the plan file.
        where: Path of the plan file, shown in error messages.

    Raises:
        ConfigError: The plan does not match the schema.
    """
    return run_flags(plan_variables(content, where))


def run_flags(values: Mapping[str, Any]) -> list[str]:
    """Returns the trainer flags for ``conf.sh`` variables that a plan may set.

    Args:
        values: Values of the variables as text, numbers or booleans, keyed by name. ``None`` means
            that the variable is absent.
    """
    flags: list[str] = []
    for name, flag in FLAGS.items():
        if values.get(name) is not None:
            flags += [flag, str(values[name])]
    if str(values.get("MODEL_CHUNKS", 1)) != "1":
        flags += ["--model-chunks", str(values["MODEL_CHUNKS"])]
    flags += _RECOMPUTE_FLAGS[values.get("RECOMPUTE") or "none"].split()
    flags += [flag for name, flag in _SWITCH_FLAGS.items() if values.get(name) in (True, "true")]
    if values.get("SLICE_TOKENS") is not None:
        flags.append(_LENGTHS_FLAG)
    if values.get("PRECISION") in ("fp16", "bf16"):
        flags.append(f"--{values['PRECISION']}")
    return flags


def world_size_of(content: Mapping[str, Any]) -> int | None:
    """Returns the number of processes that a plan needs, or ``None`` if it is not specified."""
    degrees = content.get("degrees", {})
    if "stages" in content:
        return sum(len(stage["tensor"]) for stage in content["stages"])
    if "data" not in degrees:
        return None
    names = ("data", "tensor", "pipeline", "context")
    return math.prod(int(degrees.get(name, 1)) for name in names)


def plan_variables(content: Any, where: str) -> dict[str, str]:
    """Checks a plan against the schema, and converts it to variables of ``conf.sh``.

    Args:
        content: Contents of the plan file.
        where: Path of the plan file, shown in error messages.

    Raises:
        ConfigError: The plan does not match the schema.
    """
    plan = check_form(content, "plan", where)
    degrees = plan.get("degrees", {})
    values = {name: str(degrees[key]) for key, name in _DEGREES.items() if key in degrees}
    if "stages" in plan:
        values |= _stages(plan["stages"], where)
        values.pop("DP_SIZE", None)
    for key in _SETTINGS:
        if key in plan:
            value = plan[key]
            values[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    if "partition" in plan:
        values["PARTITION"] = format_partition(plan["partition"])
    if "placement" in plan:
        values |= _placement(plan["placement"], where)
    return values


def _stages(stages: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    """Returns the ``conf.sh`` variable that contains each stage's number of ranks."""
    for index, stage in enumerate(stages):
        if any(width != 1 for width in stage["tensor"]):
            raise ConfigError(
                f"{where}: stages[{index}].tensor is {stage['tensor']}, but the trainer supports "
                "unequal stages only without tensor parallelism; plan again with --tp 1 or "
                "without --unequal"
            )
    samples = {stage["micro_batch_size"] for stage in stages if "micro_batch_size" in stage}
    if len(samples) > 1:
        raise ConfigError(
            f"{where}: stages have microbatches of {', '.join(map(str, sorted(samples)))} "
            "samples, but the trainer requires microbatches of the same size; plan again"
        )
    return {"STAGE_DP_SIZES": "-".join(str(len(stage["tensor"])) for stage in stages)}


def _placement(groups: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    if len(groups) == 1 and not groups[0].get("type"):
        nodes = groups[0]["nodes"]
        processes = groups[0]["processes_per_node"]
        return {"NNODES": str(nodes), "NPROC_PER_NODE": str(processes)}
    for index, group in enumerate(groups):
        if not group.get("type"):
            raise ConfigError(f"{where}: placement[{index}].type is missing; add the node type")
    kinds = [f"{group['type']}:{group['nodes']}x{group['processes_per_node']}" for group in groups]
    return {"HOMOGENEOUS_CLUSTER": "false", "NODES": " ".join(kinds)}


PLAN_FLAG = "--plan"
PLAN_HELP = (
    "Plan file that sets the flags of parallel sizes, partition, batch size, schedule and "
    "recomputation; see docs/plan.md."
)


def expand_plan(argv: Sequence[str], specs: Mapping[str, FieldSpec], world_size: int) -> list[str]:
    """Replaces ``--plan FILE`` in a command line with the flags of the plan.

    Args:
        argv: Command line of the trainer.
        specs: Specifications of the flags, keyed by field name.
        world_size: Number of processes of the job.

    Returns:
        Command line with the flags of the plan instead of ``--plan``. Flags that are already
        present with the same value are not repeated.

    Raises:
        ConfigError: The plan cannot be read, contradicts a flag, or needs a different number of
            processes.
    """
    typed = flags_in(argv)
    if PLAN_FLAG not in typed:
        return list(argv)
    path = " ".join(typed.pop(PLAN_FLAG))
    if not path:
        raise ConfigError(f"{PLAN_FLAG}: expected one argument, the plan file")
    content = load_plan(Path(path))
    flags = plan_flags(content, path)
    needed = world_size_of(content)
    if needed is not None and needed != world_size:
        raise ConfigError(
            f"{PLAN_FLAG} {path} needs {needed} processes, but this run has {world_size}; start "
            f"{needed} processes or plan for these nodes"
        )
    for half in ("fp16", "bf16"):
        if f"--{half}" in typed and content.get("precision", half) != half:
            raise ConfigError(
                f"--{half} contradicts {PLAN_FLAG} {path}, whose precision is "
                f"{content['precision']}; remove one of them"
            )
    dest_of = {name: spec.dest for spec in specs.values() for name in spec.names}
    by_dest = {dest_of.get(name, ""): values for name, values in typed.items()}
    rest = flags_where(argv, lambda name: name != PLAN_FLAG)
    for name, planned in flags_in(flags).items():
        values = by_dest.get(dest_of[name])
        if values is None:
            rest += [name, *planned]
        elif values != planned:
            raise ConfigError(
                f"{name} {' '.join(values)} contradicts {PLAN_FLAG} {path}, which sets "
                f"{' '.join(planned) or 'it without a value'}; remove one of them"
            )
    return rest
