"""Reads ``conf.sh`` and a plan, and checks the configuration for starting a job.

A value can come from four sources, in order of precedence: the command line (``--set NAME=VALUE``),
the plan, ``conf.sh``, and the default. If the trainer restricts the possible values, the trainer's
own parser checks them later.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from megatron.adaptive.config.environment import FROM_CONF, is_secret
from megatron.adaptive.config.flags import FieldSpec, Limits, Positive, spec_of
from megatron.adaptive.config.plan_file import load_plan, plan_variables
from megatron.adaptive.errors import ConfigError, SetupError

_Port = Annotated[int, Limits(minimum=1, maximum=65535)]
_Number = Annotated[int, Limits(minimum=1, maximum=1e9)]
_Cap = Annotated[float, Limits(minimum=1)]
_Nodes = Annotated[int, Limits(minimum=1, maximum=100_000)]
_AUTO = "auto"


def _specs(table: Mapping[str, tuple[Any, ...]]) -> dict[str, FieldSpec]:
    """Returns a field specification for each variable in ``table``, keyed by name."""
    return {
        name: spec_of(name, kind, default, {"help": meaning, "choices": tuple(choices)})
        for name, (kind, default, meaning, *choices) in table.items()
    }


def _slices_of(text: str) -> int | str:
    """Parses ``text``, a number of slices per sequence or a number of tokens per slice.

    Returns an integer, or ``auto`` if the trainer should choose the number during training.

    Raises:
        ValueError: The text is neither a number nor ``auto``.
    """
    if text == _AUTO:
        return text
    try:
        number: int = spec_of("SEQUENCE_SLICES", _Number, "", {}).convert(text)
    except ValueError as error:
        raise ValueError(f"{error}; {_AUTO} is also allowed") from None
    return number


SETTINGS = _specs(
    {
        "JOB_NAME": (str, "megatron-adaptive", "name of the job"),
        "PLAN": (str, "", "plan file; see docs/plan.md"),
        "MODEL": (str, "small", "name of a model, or a file with trainer flags"),
        "GLOBAL_BATCH_SIZE": (_Number, "", "samples per step, summed over all ranks"),
        "MICRO_BATCH_SIZE": (_Number, "1", "samples per microbatch"),
        "TENSOR_MP_SIZE": (_Number, "1", "number of ranks that share each layer"),
        "PIPELINE_MP_SIZE": (_Number, "1", "number of ranks that share the layers"),
        "DP_SIZE": (_Number, "", "number of copies of the model"),
        "STAGE_DP_SIZES": (str, "", "number of ranks of each stage if they differ, such as 2-1"),
        "MODEL_CHUNKS": (_Number, "1", "number of model chunks per pipeline rank"),
        "EXPERT_MP_SIZE": (_Number, "", "number of copies that share the experts of each layer"),
        "CONTEXT_MP_SIZE": (_Number, "", "number of ranks that share each sequence"),
        "PARTITION": (str, "", "number of layers of each stage, such as 0-11-8-8"),
        "SCHEDULE": (str, "adaptive", "order of actions in the pipeline"),
        "RECOMPUTE": (str, "none", "activations to recompute", "none", "selective", "full"),
        "DISTRIBUTED_OPTIMIZER": (
            bool,
            "false",
            "shard the optimizer state over the model's copies",
        ),
        "OVERLAP_GRAD_REDUCE": (bool, "false", "reduce gradients during backward passes"),
        "SEQUENCE_PARALLEL": (bool, "false", "split the sequence outside matrix multiplications"),
        "SEQUENCE_SLICES": (str, "", "number of slices per sequence, or auto"),
        "SLICE_TOKENS": (str, "", "number of tokens per slice of packed documents, or auto"),
        "ACTIVATION_CAP": (
            _Cap,
            "",
            "maximum number of microbatches whose activations a rank stores",
        ),
        "PRECISION": (str, "", "dtype of the parameters", "fp32", "fp16", "bf16"),
        "TRAIN_ITERS": (_Number, "100", "number of iterations in the whole training run"),
        "LR": (Positive, "1e-4", "maximum learning rate"),
        "DATA": (str, "mock", "prefix of .bin and .idx files, or mock for generated samples"),
        "VOCAB_FILE": (str, "", "vocabulary file; default: vocab.json next to DATA"),
        "MERGE_FILE": (str, "", "merges file; default: merges.txt next to DATA"),
        "TRAINER_FLAGS": (
            str,
            "",
            "additional flags of pretrain_gpt.py; if a flag is repeated, the last value is used",
        ),
        "CHECKPOINT_DIR": (str, "", "folder of checkpoints, for both saving and resuming"),
        "LOCAL_CHECKPOINT_DIR": (
            str,
            "",
            "folder on each node's local disk, to which checkpoints are written first",
        ),
        "SAVE_INTERVAL": (_Number, "100", "number of iterations between checkpoints"),
        "LOG_DIR": (str, "logs", "folder with a subfolder for the logs of each job"),
        "TRACE": (bool, "false", "write traces of the pipeline"),
        "HOMOGENEOUS_CLUSTER": (bool, "true", "whether all nodes are of the same type"),
        "NNODES": (_Nodes, "", "number of nodes"),
        "NPROC_PER_NODE": (_Number, "", "number of processes on each node, usually one per GPU"),
        "WORLD_SIZE": (_Number, "", "total number of processes"),
        "NODES": (str, "", "mixed nodes, ordered by rank, such as a10:2x4 v100:1x2"),
        "DEVICE": (str, "gpu", "device on which processes compute", "gpu", "cpu"),
        "MASTER_ADDR": (str, "", "address of the first node; detected by default"),
        "MASTER_PORT": (_Port, "", "port on which the first node listens for the other nodes"),
        "IFNAME": (str, "", "network interface; detected by default"),
        "MEETING_TIMEOUT_S": (Positive, "600", "seconds for which nodes wait for each other"),
        "SLURM_PARTITION": (str, "", "Slurm partition, or TYPE=PARTITION for each node type"),
        "SLURM_GRES": (
            str,
            "gpu",
            "Slurm GRES name of the GPUs, TYPE=GRES for each node type, or none",
        ),
        "SLURM_TIME": (str, "", "time limit of the job, such as 2:00:00"),
        "SLURM_ACCOUNT": (str, "", "account to charge"),
        "SLURM_FLAGS": (str, "", "additional options of sbatch"),
        "CPUS_PER_TASK": (_Number, "", "number of CPU cores for the job on each node"),
        "REQUEUE": (bool, "true", "requeue the job after an early stop or the loss of a node"),
        "CONTAINER": (str, "none", "container runtime", "none", "pyxis", "enroot", "apptainer"),
        "IMAGE": (str, "", "container image"),
        "CONTAINER_MOUNTS": (str, "", "additional folders to mount in the container, FROM:TO,..."),
        "RELOAD_CONTAINER": (bool, "false", "recreate the container"),
        "PROFILE": (bool, "false", "run the PyTorch profiler, and write its results to LOG_DIR"),
        "NSYS": (bool, "false", "run each node's processes in Nsight Systems"),
        "NCU": (bool, "false", "run each node's processes in Nsight Compute"),
        "PYTHON": (str, "", "Python interpreter on the nodes; default: this one"),
    }
)
"""Variables of ``conf.sh``, keyed by name. A variable with an empty default is unset by default."""
for _name in ("SEQUENCE_SLICES", "SLICE_TOKENS"):
    SETTINGS[_name] = replace(SETTINGS[_name], reader=_slices_of)


def check_names(variables: Mapping[str, str], where: str) -> None:
    """Rejects unknown variables whose names begin with a capital letter.

    Names that begin with other characters are allowed, because users may define their own
    variables. ``where`` describes the source of the variables in the error message.

    Raises:
        ConfigError: A name is unknown. The message suggests the known variable with the most
            similar name.
    """
    for name in variables:
        if name in SETTINGS or name.startswith(FROM_CONF) or not name[:1].isupper():
            continue
        nearest = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.5)
        hint = f"the nearest is {nearest[0]}" if nearest else "conf.sh lists all variables"
        raise ConfigError(
            f"{where}: {name} is not a variable of the launcher ({hint}); names of your own "
            "variables must begin with a lowercase letter"
        )


def read_value(name: str, text: str) -> object:
    """Parses ``text`` as a value of the variable ``name``. An empty text selects the default.

    Returns:
        The value as ``int``, ``float``, ``bool`` or ``str``, or ``None`` if both the text and the
        default are empty.

    Raises:
        ConfigError: The text is not a valid value of the variable's type.
    """
    setting = SETTINGS[name]
    text = text.strip() or setting.default
    if not text:
        return None
    try:
        return setting.convert(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error} ({setting.help})") from None


_LIMIT_S = 20.0
# The script sources the file $1. It then prints the name and the value of each variable that the
# file has set, each followed by a NUL byte. If the value is an array, it prints a marker instead.
_SCRIPT = r"""
set -eu
cd -- "$2"
_known=" $(compgen -v | tr '\n' ' ') "
source "$1" >&2 </dev/null
for _name in $(compgen -v); do
  case $_known in *" $_name "*) continue ;; esac
  case $_name in _* | BASH* | FUNCNAME | LINENO | PIPESTATUS | REPLY) continue ;; esac
  _kind=$(declare -p "$_name" 2>/dev/null) || continue
  case $_kind in
    'declare -'[aA]*) printf '%s\0\001array\0' "$_name" ;;
    *) printf '%s\0%s\0' "$_name" "${!_name-}" ;;
  esac
done
"""
_ARRAY = "\001array"


def read_variables(path: Path) -> dict[str, str]:
    """Runs the file ``path`` in bash, and returns the variables that it sets.

    The working directory is the folder of the file. bash inherits only a few environment
    variables, such as ``PATH``.

    Args:
        path: Path of the file, such as ``conf.sh``.

    Returns:
        Values of the variables as strings, keyed by name. The names are in alphabetical order.

    Raises:
        ConfigError: The file is missing, fails in bash, or sets an array.
        SetupError: bash is not installed.
    """
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {problem}; copy this project's conf.sh and change it")
    full = path.resolve()
    kept = ("PATH", "HOME", "USER", "TMPDIR", "LANG")
    clean = {name: os.environ[name] for name in kept if name in os.environ}
    try:
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", _SCRIPT, "conf", str(full), str(full.parent)],
            env=clean,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise SetupError(f"{path} requires bash, which is not installed; install bash") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{path} ran for more than {_LIMIT_S:g} s, but it must only set variables"
        ) from None
    if done.returncode:
        error_lines = done.stderr.decode(errors="replace").split("\n")
        reason = next((line for line in error_lines if str(full) in line), error_lines[0])
        raise ConfigError(
            f"{path}: bash exited with status {done.returncode} ({reason.strip()}); every "
            "command in the file must succeed"
        )
    fields = done.stdout.decode(errors="replace").split("\0")[:-1]
    variables = dict(zip(fields[::2], fields[1::2], strict=True))
    for name, value in variables.items():
        if value == _ARRAY and name.isupper():
            raise ConfigError(
                f"{path}: {name} is an array, but must be a string; put the values in quotes, "
                "separated by spaces"
            )
    return variables


_GROUP = re.compile(r"([A-Za-z][\w.-]*):([1-9]\d{0,4})x([1-9]\d{0,4})")


@dataclass(frozen=True, kw_only=True)
class LaunchGroup:
    """Group of nodes of the same type, which have consecutive ranks.

    Attributes:
        kind: Name of the node type; empty if all nodes have the same type.
        nodes: Number of nodes, or ``None`` if it is known only after the nodes have connected.
        processes: Number of processes on each node, or ``None`` to start one process per GPU.
        partition: Slurm partition of the group; empty for Slurm's default partition.
        gres: Slurm generic resource (GRES) that stands for the GPUs; ``none`` to request no GPUs.
    """

    kind: str = ""
    nodes: int | None = None
    processes: int | None = None
    partition: str = ""
    gres: str = ""


@dataclass(frozen=True, kw_only=True)
class LaunchConf:
    """Validated configuration for starting a job.

    Attributes:
        folder: Folder of ``conf.sh``, the base of relative paths.
        values: Values of the variables in ``SETTINGS``, keyed by name. The value of an unset
            variable is ``None``.
        groups: Groups of nodes of the same type, ordered by rank.
        environment: Environment variables that ``conf.sh`` sets for all processes.
    """

    folder: Path
    values: Mapping[str, Any]
    groups: tuple[LaunchGroup, ...]
    environment: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def nodes(self) -> int | None:
        """Returns the number of nodes, or ``None`` if it is not set."""
        counts = [group.nodes for group in self.groups]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def processes(self) -> tuple[int, ...] | None:
        """Returns the number of processes on each node, or ``None`` if it is not set."""
        counts: list[int] = []
        for group in self.groups:
            if group.nodes is None or group.processes is None:
                return None
            counts += [group.processes] * group.nodes
        return tuple(counts)

    @property
    def world_size(self) -> int | None:
        """Returns the total number of processes, or ``None`` if it is not set."""
        if self.processes is not None:
            return sum(self.processes)
        size: int | None = self.values["WORLD_SIZE"]
        return size

    def path(self, name: str) -> Path:
        """Returns the value of the variable ``name`` as an absolute path."""
        return Path(self.folder, self.values[name]).absolute()

    def texts(self) -> dict[str, str]:
        """Returns the values of all variables and environment variables as strings, keyed by name.

        Secrets and the variable ``PLAN`` are omitted, but the values that the plan sets are
        included.
        """
        texts = {}
        for name, value in self.values.items():
            if value is not None and name != "PLAN":
                texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        shown = {name: text for name, text in self.environment.items() if not is_secret(name)}
        return {**texts, **shown}

    @property
    def secrets(self) -> dict[str, str]:
        """Returns the secret environment variables, which must not be written to files."""
        return {name: text for name, text in self.environment.items() if is_secret(name)}


def load_conf(
    path: Path | None, changes: Sequence[str] = (), plan: Path | None = None
) -> LaunchConf:
    """Reads ``conf.sh``, applies changes, and returns the checked configuration.

    Args:
        path: Path of ``conf.sh``, or ``None`` to use only defaults.
        changes: Strings of the form ``NAME=VALUE`` that override the file and the plan.
        plan: Path of a plan file to use instead of the one that the variable ``PLAN`` names.

    Raises:
        ConfigError: A name is unknown or a value is invalid.
    """
    variables = {} if path is None else read_variables(path)
    where = "the command line" if path is None else str(path)
    check_names(variables, where)
    overrides = read_changes(changes)
    check_names(overrides, "--set")
    folder = Path.cwd() if path is None else path.resolve().parent
    if plan is not None:
        overrides["PLAN"] = str(plan.absolute())
    return make_conf({**variables, **overrides}, folder, fixed=frozenset(overrides))


def make_conf(
    variables: Mapping[str, str], folder: Path, *, fixed: frozenset[str] = frozenset()
) -> LaunchConf:
    """Creates a configuration from ``variables``, and checks it.

    Args:
        variables: Value of each variable as text, keyed by name.
        folder: Folder to which paths are relative.
        fixed: Names of variables whose values a plan must not replace.

    Raises:
        ConfigError: A value is invalid, or values contradict each other.
    """
    texts = dict(variables)
    if texts.get("PLAN", "").strip():
        plan = folder / texts["PLAN"].strip()
        _apply_plan(texts, plan_variables(load_plan(plan), str(plan)), fixed)
    values = {name: read_value(name, texts.get(name, "")) for name in SETTINGS}
    conf = LaunchConf(
        folder=folder,
        values=values,
        groups=_groups(values),
        environment={
            name: text for name, text in sorted(texts.items()) if name.startswith(FROM_CONF)
        },
    )
    _check_sizes(conf)
    _check_words(conf)
    return conf


def read_changes(changes: Sequence[str]) -> dict[str, str]:
    """Parses strings of the form ``NAME=VALUE`` from the command line, and returns them as a dict.

    Raises:
        ConfigError: A string has a different form.
    """
    values = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--set {change} must have the form NAME=VALUE")
        values[name] = value
    return values


def _apply_plan(texts: dict[str, str], plan: dict[str, str], fixed: frozenset[str]) -> None:
    """Adds the variables in ``plan`` to ``texts``, except those whose names are in ``fixed``.

    Raises an error if ``texts`` already contains a different value for an added variable.
    """
    for name, value in plan.items():
        text = texts.get(name, "").strip()
        if name in fixed:
            continue
        if text and text != value:
            raise ConfigError(
                f"{name}={text} contradicts PLAN={texts['PLAN']}, which sets {name}={value}; "
                "remove one of them"
            )
        texts[name] = value


def _groups(values: Mapping[str, Any]) -> tuple[LaunchGroup, ...]:
    if values["HOMOGENEOUS_CLUSTER"]:
        if values["NODES"] is not None:
            raise ConfigError(
                f"NODES={values['NODES']} is only for mixed nodes; set "
                "HOMOGENEOUS_CLUSTER=false, or set NNODES and NPROC_PER_NODE instead"
            )
        group = LaunchGroup(
            nodes=values["NNODES"],
            processes=values["NPROC_PER_NODE"],
            partition=values["SLURM_PARTITION"] or "",
            gres=values["SLURM_GRES"],
        )
        return (group,)
    if values["NODES"] is None:
        raise ConfigError(
            "HOMOGENEOUS_CLUSTER=false requires NODES, such as NODES='a10:2x4 v100:1x2' for two "
            "nodes with four GPUs and one node with two"
        )
    matches = []
    for text in values["NODES"].split():
        match = _GROUP.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"NODES={values['NODES']}: {text!r} must have the form TYPE:NODESxGPUS"
            )
        matches.append(match)
    kinds = [match[1] for match in matches]
    partitions = _by_kind("SLURM_PARTITION", values["SLURM_PARTITION"] or "", kinds)
    gres = _by_kind("SLURM_GRES", values["SLURM_GRES"], kinds)
    return tuple(
        LaunchGroup(
            kind=match[1],
            nodes=int(match[2]),
            processes=int(match[3]),
            partition=partitions[match[1]],
            gres=gres[match[1]],
        )
        for match in matches
    )


def _by_kind(name: str, text: str, kinds: Sequence[str]) -> dict[str, str]:
    """Parses a list such as ``TYPE=VALUE ...``, and returns the value of each type in ``kinds``.

    A single value without a type is used for all types.
    """
    if "=" not in text:
        return dict.fromkeys(kinds, text)
    values = dict(assignment.partition("=")[::2] for assignment in text.split())
    for kind in values:
        if kind not in kinds:
            raise ConfigError(
                f"{name}={text} has a value for the type {kind}, but NODES contains only the types "
                f"{', '.join(kinds)}; remove the value"
            )
    for kind in kinds:
        if not values.get(kind):
            raise ConfigError(f"{name}={text} has no value for the type {kind}; add {kind}=VALUE")
    return values


def _check_sizes(conf: LaunchConf) -> None:
    """Checks that the numbers of nodes, processes and replicas are consistent."""
    values = conf.values
    processes = conf.processes
    nodes = conf.nodes
    if values["NNODES"] is not None and nodes != values["NNODES"]:
        raise ConfigError(
            f"NNODES={values['NNODES']} does not match NODES={values['NODES']}, which has "
            f"{nodes} nodes"
        )
    if values["NPROC_PER_NODE"] is not None and not values["HOMOGENEOUS_CLUSTER"]:
        raise ConfigError(
            f"NPROC_PER_NODE={values['NPROC_PER_NODE']} cannot be combined with NODES, which "
            "sets the number of processes for each node type; remove it"
        )
    size = conf.world_size or 0
    copies = values["DP_SIZE"]
    if values["WORLD_SIZE"] not in (None, size):
        assert processes is not None
        counts = " + ".join(map(str, processes[:8])) + (" + ..." if len(processes) > 8 else "")
        raise ConfigError(
            f"WORLD_SIZE={values['WORLD_SIZE']} must be the total number of processes on all "
            f"nodes, {counts} = {size}; remove WORLD_SIZE to compute it automatically"
        )
    if values["STAGE_DP_SIZES"] is not None:
        if copies is not None:
            raise ConfigError(
                f"STAGE_DP_SIZES={values['STAGE_DP_SIZES']} and DP_SIZE={copies} cannot be "
                "combined, because DP_SIZE sets one size for all stages; remove one of them"
            )
        return
    names = ["TENSOR_MP_SIZE", "PIPELINE_MP_SIZE"]
    if values["CONTEXT_MP_SIZE"] is not None:
        names.append("CONTEXT_MP_SIZE")
    model = math.prod(values[name] for name in names)
    factors = " x ".join(str(values[name]) for name in names)
    product = f"{' x '.join(names)} = {factors} = {model}"
    if size and size % model:
        raise ConfigError(f"WORLD_SIZE={size} must be a multiple of {product}")
    if size and copies is not None and copies * model != size:
        raise ConfigError(
            f"DP_SIZE={copies} must be {size // model}, which is WORLD_SIZE = {size} divided by "
            f"{product}"
        )


def _check_words(conf: LaunchConf) -> None:
    values = conf.values
    for name in ("TRAINER_FLAGS", "SLURM_FLAGS"):
        try:
            shlex.split(values[name] or "")
        except ValueError as error:
            raise ConfigError(f"{name}={values[name]}: {error}; close the quotes") from error
    if values["CONTAINER"] != "none" and values["IMAGE"] is None:
        raise ConfigError(f"CONTAINER={values['CONTAINER']} requires IMAGE, the image to run")
    if values["NSYS"] and values["NCU"]:
        raise ConfigError(
            "NSYS=true and NCU=true cannot be combined, because only one profiler can be "
            "attached; set one of them to false"
        )
