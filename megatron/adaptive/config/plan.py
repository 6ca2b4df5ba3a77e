"""The plan file: what a planner decided about a run, as JSON. Its schema is in ``docs/plan.md``.

One reading serves all: the launcher turns a plan into variables of ``conf.sh``, the trainer into
its own flags; both mean the same run.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.config.flags import FieldSpec
from megatron.adaptive.config.outside import read_json
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
_KEYS = (
    *("format", "degrees", "placement", "partition", "micro_batch_size", "global_batch_size"),
    *("schedule", "recompute", "distributed_optimizer", "overlap_grad_reduce"),
    *("sequence_parallel", "precision", "model", "prediction", "stages"),
)


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in choices), f"one of {', '.join(choices)}"


def _from(least: int) -> tuple[Callable[[Any], bool], str]:
    rule = f"a whole number from {least} on"
    return (lambda value: type(value) is int and value >= least), rule


_COUNT = _from(1)
_SWITCH: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, bool),
    "true or false",
)
_TEXT: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, str),
    "the name of a schedule",
)
_SIMPLE = {
    "micro_batch_size": _COUNT,
    "global_batch_size": _COUNT,
    "schedule": _TEXT,
    "recompute": _one_of("none", "selective", "full"),
    "precision": _one_of("fp32", "fp16", "bf16"),
    "distributed_optimizer": _SWITCH,
    "overlap_grad_reduce": _SWITCH,
    "sequence_parallel": _SWITCH,
}
"""Keys that are a variable of ``conf.sh`` in capitals: whether a value will do, and the rule."""
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
_SETTING = "PLAN="
_STAGE_KEYS = ("tensor", "nodes", "micro_batch_size")
_PLACE_KEYS = ("type", "nodes", "processes_per_node")


def load_plan(path: Path, setting: str = _SETTING) -> Any:
    """Read a plan file, unchecked.

    Args:
        path: the file.
        setting: what names it, for messages.

    Raises:
        ConfigError: the file is missing or no JSON.
    """
    try:
        return read_json(path, "name a plan file, see docs/plan.md")
    except ConfigError as error:
        raise ConfigError(f"{setting}{error}") from None


def plan_flags(content: Any, where: str) -> list[str]:
    """Checks a plan and turns it into flags of the trainer.

    Raises:
        ConfigError: it breaks the schema.
    """
    return run_flags(plan_variables(content, where, "--plan "))


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


def plan_variables(content: Any, where: str, setting: str = _SETTING) -> dict[str, str]:
    """Check a plan and turn it into variables of ``conf.sh``.

    Args:
        content: what the file holds.
        where: the file.
        setting: what names it, for messages.

    Raises:
        ConfigError: it breaks the schema.
    """
    where = f"{setting}{where}"
    plan = _object(content, where, "the plan", _KEYS)
    if plan.get("format") != PLAN_FORMAT:
        raise ConfigError(
            f"{where}: format is {plan.get('format')!r}: this version reads {PLAN_FORMAT}"
        )
    values: dict[str, str] = {}
    degrees = _object(plan.get("degrees", {}), where, "degrees", tuple(_DEGREES))
    for key, name in _DEGREES.items():
        if key in degrees:
            values[name] = str(_fitting(degrees[key], _COUNT, where, f"degrees.{key}"))
    if "stages" in plan:
        values |= _stages(plan["stages"], where)
        values.pop("DP_SIZE", None)
    for key, rule in _SIMPLE.items():
        if key in plan:
            value = _fitting(plan[key], rule, where, key)
            values[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    if "partition" in plan:
        layers = _filled(
            plan["partition"], where, "partition", "a list of the layers of each stage"
        )
        counts = [_fitting(n, _from(0), where, f"partition[{i}]") for i, n in enumerate(layers)]
        values["PARTITION"] = "-".join(map(str, counts))
    if "placement" in plan:
        values |= _placement(plan["placement"], where)
    return values


def _stages(content: Any, where: str) -> dict[str, str]:
    """The ranks of each stage where they are unequal."""
    sizes, samples = [], set()
    for index, one in enumerate(_filled(content, where, "stages", "a list of the stages")):
        name = f"stages[{index}]"
        stage = _object(one, where, name, _STAGE_KEYS)
        rule = "a list of the widths of its replicas"
        widths = _filled(stage.get("tensor"), where, f"{name}.tensor", rule)
        if any(width != 1 for width in widths):
            raise ConfigError(
                f"{where}: {name}.tensor is {widths}: the trainer runs unequal stages without"
                " tensor parallelism alone; plan again with --tp 1, or without --unequal"
            )
        sizes.append(len(widths))
        if "micro_batch_size" in stage:
            given = stage["micro_batch_size"]
            samples.add(_fitting(given, _COUNT, where, f"{name}.micro_batch_size"))
    if len(samples) > 1:
        raise ConfigError(
            f"{where}: its stages have microbatches of {', '.join(map(str, sorted(samples)))}"
            " samples: the trainer deals out microbatches of one size; plan again"
        )
    return {"STAGE_DP_SIZES": "-".join(map(str, sizes))}


def _placement(content: Any, where: str) -> dict[str, str]:
    words = []
    rule = "a list of groups of equal nodes"
    for index, one in enumerate(_filled(content, where, "placement", rule)):
        name = f"placement[{index}]"
        group = _object(one, where, name, _PLACE_KEYS)
        nodes, processes = (
            _fitting(group.get(key), _COUNT, where, f"{name}.{key}")
            for key in ("nodes", "processes_per_node")
        )
        kind = group.get("type", "")
        if not isinstance(kind, str) or (not kind and len(content) > 1):
            raise _wrong(where, f"{name}.type", kind, "the name of a node type")
        words.append((kind, nodes, processes))
    if len(words) == 1 and not words[0][0]:
        _, nodes, processes = words[0]
        return {"NNODES": str(nodes), "NPROC_PER_NODE": str(processes)}
    text = " ".join(f"{kind}:{nodes}x{processes}" for kind, nodes, processes in words)
    return {"HOMOGENEOUS_CLUSTER": "false", "NODES": text}


def _object(content: Any, where: str, name: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise _wrong(where, name, content, "an object")
    for key in content:
        if key not in keys:
            nearest = difflib.get_close_matches(key, keys, n=1)
            hint = f"the nearest is {nearest[0]}" if nearest else f"keys are {', '.join(keys)}"
            raise ConfigError(f"{where}: {name} has no key {key!r}: {hint}")
    return content


def _fitting(value: Any, rule: tuple[Callable[[Any], bool], str], where: str, name: str) -> Any:
    if not rule[0](value):
        raise _wrong(where, name, value, rule[1])
    return value


def _filled(value: Any, where: str, name: str, rule: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(where, name, value, rule)
    return value


def _wrong(where: str, name: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(f"{where}: {name} is {value!r}: it must be {rule}; see docs/plan.md")


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
    path, rest = _take(argv)
    if path is None:
        return rest
    content = load_plan(Path(path), f"{PLAN_FLAG} ")
    flags = plan_flags(content, path)
    needed = world_size_of(content)
    if needed is not None and needed != world_size:
        raise ConfigError(
            f"{PLAN_FLAG} {path} is for {needed} processes, this run has {world_size}: start as"
            " many, or plan for these nodes"
        )
    dest_of = {name: spec.dest for spec in specs.values() for name in spec.names}
    given = {dest_of[word]: words for word, words in flags_in(rest).items() if word in dest_of}
    half = next((name for name in ("fp16", "bf16") if name in given), None)
    if content.get("precision", half) not in (half, None) and half is not None:
        raise ConfigError(
            f"--{half}: {PLAN_FLAG} {path} says {content['precision']}; leave one of them out"
        )
    added: list[str] = []
    for word, words in flags_in(flags).items():
        said = given.get(dest_of[word])
        if said is None:
            added += [word, *words]
        elif said != words:
            raise ConfigError(
                f"{word} {' '.join(said)}: {PLAN_FLAG} {path} says {' '.join(words) or 'so'};"
                " leave one of them out"
            )
    return [*rest, *added]


def _take(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Part ``--plan FILE`` from the rest."""
    rest: list[str] = []
    path: str | None = None
    words = iter(argv)
    for word in words:
        if word != PLAN_FLAG and not word.startswith(f"{PLAN_FLAG}="):
            rest.append(word)
            continue
        value = word.partition("=")[2] or next(words, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{PLAN_FLAG}: expected one argument, the plan file")
        if path is not None and path != value:
            raise ConfigError(f"{PLAN_FLAG} is given twice: a run has one plan; keep one")
        path = value
    return path, rest


def flags_in(argv: Sequence[str]) -> dict[str, list[str]]:
    """Returns flags with the words that follow them; the last of equal ones."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return found
