"""The plan file: what a planner decided about a run, as JSON. Its schema is in ``docs/plan.md``.

One reading serves all: the launcher turns a plan into variables of ``conf.sh``, the trainer into
its own flags; both mean the same run.
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
    *("micro_batch_size", "global_batch_size", "schedule", "recompute", "precision"),
    *("distributed_optimizer", "overlap_grad_reduce", "sequence_parallel"),
)
"""Keys that are a variable of ``conf.sh`` in capitals."""
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
}
"""Variables of ``conf.sh`` that are flags of the trainer under another name."""
_SWITCH_FLAGS = {
    "DISTRIBUTED_OPTIMIZER": "--use-distributed-optimizer",
    "OVERLAP_GRAD_REDUCE": "--overlap-grad-reduce",
    "SEQUENCE_PARALLEL": "--sequence-parallel",
}


def load_plan(path: Path) -> Any:
    """Reads a plan file, unchecked; see :func:`read_json`."""
    return read_json(path, "name a plan file, see docs/plan.md")


def plan_flags(content: Any, where: str) -> list[str]:
    """Checks a plan and turns it into flags of the trainer.

    Raises:
        ConfigError: it breaks the schema.
    """
    return run_flags(plan_variables(content, where))


def run_flags(values: Mapping[str, Any]) -> list[str]:
    """Returns the trainer's flags for variables of ``conf.sh`` that a plan may set.

    Args:
        values: variables by name, as texts or as read; absent ones and ``None`` say nothing.
    """
    flags: list[str] = []
    for name, flag in FLAGS.items():
        if values.get(name) is not None:
            flags += [flag, str(values[name])]
    if str(values.get("MODEL_CHUNKS", 1)) != "1":
        flags += ["--model-chunks", str(values["MODEL_CHUNKS"])]
    flags += _RECOMPUTE_FLAGS[values.get("RECOMPUTE") or "none"].split()
    flags += [flag for name, flag in _SWITCH_FLAGS.items() if values.get(name) in (True, "true")]
    if values.get("PRECISION") in ("fp16", "bf16"):
        flags.append(f"--{values['PRECISION']}")
    return flags


def world_size_of(content: Mapping[str, Any]) -> int | None:
    """Return the processes that a checked plan needs, ``None`` if it does not say it."""
    degrees = content.get("degrees", {})
    if "stages" in content:
        return sum(len(stage["tensor"]) for stage in content["stages"])
    if "data" not in degrees:
        return None
    return math.prod(int(degrees.get(one, 1)) for one in ("data", "tensor", "pipeline", "context"))


def plan_variables(content: Any, where: str) -> dict[str, str]:
    """Check a plan and turn it into variables of ``conf.sh``.

    Args:
        content: what the file holds.
        where: the file, for messages.

    Raises:
        ConfigError: it breaks the schema.
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
    """The ranks of each stage where they are unequal."""
    for index, stage in enumerate(stages):
        if any(width != 1 for width in stage["tensor"]):
            raise ConfigError(
                f"{where}: stages[{index}].tensor is {stage['tensor']}: the trainer runs unequal"
                " stages without tensor parallelism alone; plan again with --tp 1, or without"
                " --unequal"
            )
    samples = {one["micro_batch_size"] for one in stages if "micro_batch_size" in one}
    if len(samples) > 1:
        raise ConfigError(
            f"{where}: its stages have microbatches of {', '.join(map(str, sorted(samples)))}"
            " samples: the trainer deals out microbatches of one size; plan again"
        )
    return {"STAGE_DP_SIZES": "-".join(str(len(stage["tensor"])) for stage in stages)}


def _placement(groups: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    if len(groups) == 1 and not groups[0].get("type"):
        nodes, processes = groups[0]["nodes"], groups[0]["processes_per_node"]
        return {"NNODES": str(nodes), "NPROC_PER_NODE": str(processes)}
    for index, one in enumerate(groups):
        if not one.get("type"):
            raise ConfigError(f"{where}: placement[{index}].type is missing: name its node type")
    words = [f"{one['type']}:{one['nodes']}x{one['processes_per_node']}" for one in groups]
    return {"HOMOGENEOUS_CLUSTER": "false", "NODES": " ".join(words)}


PLAN_FLAG = "--plan"
PLAN_HELP = (
    "Plan file that stands for the flags of its degrees, partition, batch, schedule and memory; "
    "see docs/plan.md."
)


def expand_plan(argv: Sequence[str], specs: Mapping[str, FieldSpec], world_size: int) -> list[str]:
    """Put a plan's flags in the place of ``--plan FILE``.

    Args:
        argv: a command line of the trainer.
        specs: all flags by field.
        world_size: number of all processes.

    Returns:
        The command line without ``--plan``. Flags that are given as the plan has them are there
        once.

    Raises:
        ConfigError: the plan cannot be read, contradicts a flag, or is for other processes.
    """
    given = flags_in(argv)
    if PLAN_FLAG not in given:
        return list(argv)
    path = " ".join(given.pop(PLAN_FLAG))
    if not path:
        raise ConfigError(f"{PLAN_FLAG}: expected one argument, the plan file")
    content = load_plan(Path(path))
    flags = plan_flags(content, path)
    needed = world_size_of(content)
    if needed is not None and needed != world_size:
        raise ConfigError(
            f"{PLAN_FLAG} {path} is for {needed} processes, this run has {world_size}: start as"
            " many, or plan for these nodes"
        )
    for half in ("fp16", "bf16"):
        if f"--{half}" in given and content.get("precision", half) != half:
            raise ConfigError(
                f"--{half}: {PLAN_FLAG} {path} says {content['precision']}; leave one of them out"
            )
    dest_of = {name: spec.dest for spec in specs.values() for name in spec.names}
    by_dest = {dest_of.get(name, ""): words for name, words in given.items()}
    rest = flags_where(argv, lambda name: name != PLAN_FLAG)
    for name, words in flags_in(flags).items():
        said = by_dest.get(dest_of[name])
        if said is None:
            rest += [name, *words]
        elif said != words:
            raise ConfigError(
                f"{name} {' '.join(said)}: {PLAN_FLAG} {path} says {' '.join(words) or 'so'};"
                " leave one of them out"
            )
    return rest
