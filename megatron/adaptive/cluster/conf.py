"""The configuration of a launch: ``conf.sh`` and plan, read and checked against all rules.

A value comes from the command line (``--set NAME=VALUE``), else the plan, else ``conf.sh``, else
its default. Rules of the trainer itself are checked by the trainer's own parser.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.settings import PASSED_ON, SETTINGS, check_names, read_value
from megatron.adaptive.cluster.source import read_variables
from megatron.adaptive.config.partition import parse_partition, parse_widths
from megatron.adaptive.config.plan import read_plan
from megatron.adaptive.errors import ConfigError

__all__ = ["LaunchConf", "NodeGroup", "load_conf", "make_conf"]

_GROUP = re.compile(r"([A-Za-z][\w.-]*):([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes that are equal, in the order of the ranks.

    Attributes:
        kind: name of the node type, empty where all nodes are equal.
        nodes: how many, ``None`` if they are counted when they meet.
        processes: processes on each, ``None`` if each node counts its GPUs.
        partition: Slurm's partition, empty for its default.
        gres: Slurm's name of the GPUs, ``none`` to ask for none.
    """

    kind: str = ""
    nodes: int | None = None
    processes: int | None = None
    partition: str = ""
    gres: str = ""


@dataclass(frozen=True, kw_only=True)
class LaunchConf:
    """A checked configuration.

    Attributes:
        folder: what relative paths start from: the folder of ``conf.sh``.
        values: every variable of ``settings.py`` by name; ``None`` where there is no value.
        groups: the nodes.
        environment: variables for every process.
    """

    folder: Path
    values: Mapping[str, Any]
    groups: tuple[NodeGroup, ...]
    environment: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def nodes(self) -> int | None:
        """Number of nodes, ``None`` if it is not said."""
        counts = [group.nodes for group in self.groups]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def processes(self) -> tuple[int, ...] | None:
        """Processes of each node by node rank, ``None`` if it is not said."""
        counts: list[int] = []
        for group in self.groups:
            if group.nodes is None or group.processes is None:
                return None
            counts += [group.processes] * group.nodes
        return tuple(counts)

    @property
    def world_size(self) -> int | None:
        """Number of all processes, ``None`` if it is not said."""
        if self.processes is not None:
            return sum(self.processes)
        size: int | None = self.values["WORLD_SIZE"]
        return size

    def path(self, name: str) -> Path:
        """Return the path that variable ``name`` holds, absolute."""
        return Path(self.folder, self.values[name]).absolute()

    def texts(self) -> dict[str, str]:
        """Return the variables that have a value as texts, those for processes included.

        What a plan says is among them in its own variables, so ``PLAN`` is not.
        """
        texts = {}
        for name, value in self.values.items():
            if value is not None and name != "PLAN":
                texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        return {**texts, **self.environment}


def load_conf(
    path: Path | None, changes: Sequence[str] = (), plan: Path | None = None
) -> LaunchConf:
    """Read ``conf.sh`` and check it.

    Args:
        path: the file; ``None`` for defaults alone.
        changes: ``NAME=VALUE`` texts that win over the file and the plan.
        plan: a plan file in place of the one that ``PLAN`` names.

    Raises:
        ConfigError: a name is unknown or a value breaks a rule.
    """
    variables = {} if path is None else read_variables(path)
    where = "the command line" if path is None else str(path)
    check_names(variables, where)
    given = _changes(changes)
    check_names(given, "--set")
    folder = Path.cwd() if path is None else path.resolve().parent
    if plan is not None:
        given["PLAN"] = str(plan.absolute())
    return make_conf({**variables, **given}, folder, fixed=frozenset(given))


def make_conf(
    variables: Mapping[str, str], folder: Path, *, fixed: frozenset[str] = frozenset()
) -> LaunchConf:
    """Check variables and make a configuration of them.

    Args:
        variables: texts by name.
        folder: what relative paths start from.
        fixed: names whose value a plan does not replace.

    Raises:
        ConfigError: a value breaks a rule.
    """
    texts = dict(variables)
    if texts.get("PLAN", "").strip():
        _apply_plan(texts, read_plan(folder / texts["PLAN"].strip()), fixed)
    values = {name: read_value(name, texts.get(name, "")) for name in SETTINGS}
    conf = LaunchConf(
        folder=folder,
        values=values,
        groups=_groups(values),
        environment={
            name: text for name, text in sorted(texts.items()) if name.startswith(PASSED_ON)
        },
    )
    _check_sizes(conf)
    _check_words(conf)
    return conf


def _changes(changes: Sequence[str]) -> dict[str, str]:
    given = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--set {change}: write NAME=VALUE")
        given[name] = value
    return given


def _apply_plan(texts: dict[str, str], plan: dict[str, str], fixed: frozenset[str]) -> None:
    """Let the plan set its variables; a file that says otherwise contradicts it."""
    for name, value in plan.items():
        said = texts.get(name, "").strip()
        if name in fixed:
            continue
        if said and said != value:
            raise ConfigError(
                f"{name}={said}: PLAN={texts['PLAN']} says {value}; leave one of them out"
            )
        texts[name] = value


def _groups(values: Mapping[str, Any]) -> tuple[NodeGroup, ...]:
    if values["HOMOGENEOUS_CLUSTER"]:
        if values["NODES"] is not None:
            raise ConfigError(
                f"NODES={values['NODES']}: it is for mixed nodes; set HOMOGENEOUS_CLUSTER=false or "
                "give NNODES and NPROC_PER_NODE"
            )
        group = NodeGroup(
            nodes=values["NNODES"],
            processes=values["NPROC_PER_NODE"],
            partition=values["SLURM_PARTITION"] or "",
            gres=values["SLURM_GRES"],
        )
        return (group,)
    if values["NODES"] is None:
        raise ConfigError(
            "HOMOGENEOUS_CLUSTER=false: mixed nodes are named in NODES, as in NODES='a10:2x4 "
            "v100:1x2' for two nodes of four GPUs and one of two"
        )
    matches = {word: _GROUP.fullmatch(word) for word in values["NODES"].split()}
    for word, match in matches.items():
        if match is None:
            raise ConfigError(f"NODES={values['NODES']}: {word!r} is not TYPE:NODESxGPUS")
    kinds = [match[1] for match in matches.values() if match]
    partitions = _by_kind("SLURM_PARTITION", values["SLURM_PARTITION"] or "", kinds)
    gres = _by_kind("SLURM_GRES", values["SLURM_GRES"], kinds)
    return tuple(
        NodeGroup(
            kind=match[1],
            nodes=int(match[2]),
            processes=int(match[3]),
            partition=partitions[match[1]],
            gres=gres[match[1]],
        )
        for match in matches.values()
        if match
    )


def _by_kind(name: str, text: str, kinds: Sequence[str]) -> dict[str, str]:
    """Read ``TYPE=VALUE ...``, or one value for all types."""
    if "=" not in text:
        return dict.fromkeys(kinds, text)
    found = dict(word.partition("=")[::2] for word in text.split())
    for kind in found:
        if kind not in kinds:
            raise ConfigError(f"{name}={text}: NODES has no type {kind}, only {', '.join(kinds)}")
    for kind in kinds:
        if not found.get(kind):
            raise ConfigError(f"{name}={text}: the type {kind} is missing; add {kind}=VALUE")
    return found


def _check_sizes(conf: LaunchConf) -> None:
    """Check what the numbers of nodes, processes and copies must be together."""
    values, processes = conf.values, conf.processes
    nodes = conf.nodes
    if values["NNODES"] is not None and nodes != values["NNODES"]:
        raise ConfigError(f"NNODES={values['NNODES']}: NODES={values['NODES']} are {nodes}")
    if values["NPROC_PER_NODE"] is not None and not values["HOMOGENEOUS_CLUSTER"]:
        raise ConfigError(
            f"NPROC_PER_NODE={values['NPROC_PER_NODE']}: NODES says it for each node type; "
            "leave it out"
        )
    if values["WORLD_SIZE"] is not None and processes is not None:
        size = sum(processes)
        if values["WORLD_SIZE"] != size:
            counts = " + ".join(map(str, processes[:8])) + (" + ..." if len(processes) > 8 else "")
            raise ConfigError(
                f"WORLD_SIZE={values['WORLD_SIZE']}: it must be the sum of all nodes' processes, "
                f"{counts} = {size}; leave it out to have it computed"
            )
    size = conf.world_size or 0
    if values["STAGE_DP_SIZES"] is not None:
        _check_stage_sizes(values, size)
        return
    model = values["TENSOR_MP_SIZE"] * values["PIPELINE_MP_SIZE"]
    names = "TENSOR_MP_SIZE x PIPELINE_MP_SIZE"
    product = f"{names} = {values['TENSOR_MP_SIZE']} x {values['PIPELINE_MP_SIZE']} = {model}"
    if size and size % model:
        raise ConfigError(f"WORLD_SIZE={size}: it must be a multiple of {product}")
    copies = values["DP_SIZE"]
    if size and copies is not None and copies * model != size:
        raise ConfigError(
            f"DP_SIZE={copies}: {product} times DP_SIZE must be WORLD_SIZE = {size}, so DP_SIZE "
            f"must be {size // model}"
        )
    _check_batch(values, copies or (size // model if size else 0))


def _check_stage_sizes(values: Mapping[str, Any], size: int) -> None:
    """The ranks of unequal stages are those of the job."""
    text = values["STAGE_DP_SIZES"]
    try:
        sizes = parse_widths(text)
    except ValueError as error:
        raise ConfigError(f"STAGE_DP_SIZES={text}: {error}") from error
    if values["DP_SIZE"] is not None:
        raise ConfigError(
            f"STAGE_DP_SIZES={text}: DP_SIZE={values['DP_SIZE']} is for stages that are all alike; "
            "leave one of them out"
        )
    ranks = sum(sizes) * values["TENSOR_MP_SIZE"]
    if size and ranks != size:
        raise ConfigError(f"STAGE_DP_SIZES={text}: its {ranks} ranks must be WORLD_SIZE = {size}")


def _check_batch(values: Mapping[str, Any], copies: int) -> None:
    batch = values["GLOBAL_BATCH_SIZE"]
    each = values["MICRO_BATCH_SIZE"] * copies
    if batch is not None and copies and batch % each:
        raise ConfigError(
            f"GLOBAL_BATCH_SIZE={batch}: it must be a multiple of MICRO_BATCH_SIZE x DP_SIZE = "
            f"{values['MICRO_BATCH_SIZE']} x {copies} = {each}"
        )


def _check_words(conf: LaunchConf) -> None:
    values = conf.values
    for name in ("TRAINER_FLAGS", "SLURM_FLAGS"):
        try:
            shlex.split(values[name] or "")
        except ValueError as error:
            raise ConfigError(f"{name}={values[name]}: {error}; close the quotes") from error
    stages = values["PIPELINE_MP_SIZE"] * values["MODEL_CHUNKS"]
    if values["PARTITION"] is not None:
        try:
            layers = parse_partition(values["PARTITION"])
        except ValueError as error:
            raise ConfigError(f"PARTITION={values['PARTITION']}: {error}") from error
        if len(layers) != stages:
            raise ConfigError(
                f"PARTITION={values['PARTITION']}: it has {len(layers)} stages, but "
                f"PIPELINE_MP_SIZE x MODEL_CHUNKS = {stages}"
            )
    if values["CONTAINER"] != "none" and values["IMAGE"] is None:
        raise ConfigError(f"CONTAINER={values['CONTAINER']}: IMAGE must name the image it runs")
    if values["NSYS"] and values["NCU"]:
        raise ConfigError("NSYS=true: NCU=true as well; only one profiler can hold a process")
