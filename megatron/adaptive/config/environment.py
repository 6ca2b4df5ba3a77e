"""Reads environment variables, lists those that other nodes get, and finds installed packages.

Only this module reads environment variables; other modules take an :class:`Environment`. A user's
script, whose flags this program does not know, gets a :class:`JobOrder` in one variable.

Secret values (:func:`is_secret`) reach processes only through their environment: over ssh by
standard input, on Slurm by the environment that ``sbatch`` passes on. Files, pages, logs and
command lines show :data:`MASK` instead.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.adaptive.config.input_files import open_file, parse_json
from megatron.adaptive.errors import ConfigError, SetupError

_EVERYWHERE = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "OMP_",
    "MKL_",
    "HF_",
    "TIKTOKEN_",
    "TORCH_",
    "TORCHELASTIC_",
    "PYTORCH_",
    "NVTE_",
    "TRITON_",
    "MEGATRON_ADAPTIVE_",
    "PYTHONUNBUFFERED",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
FROM_CONF = (*_EVERYWHERE, "CUDA_", "LD_LIBRARY_")
"""Prefixes of the variables of ``conf.sh`` that all processes get.

Workers get them in the master's answer, Slurm jobs in a settings file. Secrets are left out of
both; see :mod:`megatron.adaptive.config.environment`.
"""
OVER_SSH = (*_EVERYWHERE, "PYTHON", "TORCH")
"""Prefixes of the variables that the manager of ``run`` passes to agents on other machines."""

_CHECKOUT = Path(__file__).resolve().parents[3]
IS_CHECKOUT = (_CHECKOUT / "pretrain_gpt.py").is_file()
WORK_FOLDER = _CHECKOUT if IS_CHECKOUT else Path.cwd()
"""Folder of ``conf.sh``, ``runs``, ``logs`` and ``data``: the checkout, or the current folder if a
wheel is installed."""
SCRIPTS = _CHECKOUT if IS_CHECKOUT else Path(sys.prefix, "share", "megatron-adaptive")
"""Folder of ``pretrain_gpt.py`` and ``examples``, in the checkout or in the installed wheel."""

MASK = "***"
_SECRET = {
    "TOKEN",
    "SECRET",
    "SECRETS",
    "KEY",
    "APIKEY",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
}
_WORDS = re.compile(r"[^A-Z0-9]+")
_USER_INFO = re.compile(r"(?<=://)[^/\s@]*(?=@)")
_SETTING = re.compile(r"(?<![\w-])(--?)?([A-Za-z_][\w-]*)=([^\s,;]+)")


def is_secret(name: str) -> bool:
    """Returns whether a variable's name has a word such as ``TOKEN``, so that it is a secret."""
    return not _SECRET.isdisjoint(_WORDS.split(name.upper()))


def _is_secret_flag(name: str) -> bool:
    # Only the last word of the name counts: --linear-key-head-dim is no secret.
    return name.startswith("-") and is_secret(name.rpartition("-")[2])


def masked(arguments: Sequence[str]) -> list[str]:
    """Hides secrets in a command line: values of flags and variables, user names in URLs."""
    shown = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        hides = _is_secret_flag(before) and "=" not in before and not argument.startswith("--")
        shown.append(MASK if hides else _SETTING.sub(_mask, _USER_INFO.sub(MASK, argument)))
    return shown


def _mask(match: re.Match[str]) -> str:
    dashes = match[1] or ""
    name = match[2]
    hides = _is_secret_flag(f"-{name}") if dashes else is_secret(name)
    return f"{dashes}{name}={MASK}" if hides else match[0]


def masked_text(text: str) -> str:
    """Hides the secrets of a command line in one text; returns it unchanged if it has none."""
    try:
        arguments = shlex.split(text)
    except ValueError:
        arguments = text.split()
    hidden = masked(arguments)
    return text if hidden == arguments else shlex.join(hidden)


_LAUNCHER = "start the program with torchrun or unset the variable"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Holds the checked values of the variables that a launcher sets.

    Attributes:
        rank: Index of this process among all processes.
        world_size: Number of processes of the job.
        local_rank: Index of this process among those of its node.
        local_world_size: Number of processes of this node.
        node_rank: Index of this node (``GROUP_RANK``).
        master_addr: Address at which rank 0 listens.
        master_port: Port at which rank 0 listens, ``None`` without a launcher.
        run_id: The job's id from torchrun (``TORCHELASTIC_RUN_ID``), otherwise ``none``.
        restart_count: Number of the job's restarts so far (``TORCHELASTIC_RESTART_COUNT``).
        omp_num_threads: Number of threads of CPU kernels, ``None`` if not limited.
        cuda_device_max_connections: Number of hardware queues of a GPU, ``None`` if not set.
        is_launched: Whether a launcher set the rank; otherwise this is rank 0 of 1.
        socket_interface: Network interface for gloo (``GLOO_SOCKET_IFNAME``), ``None`` if not set.
        has_agent_store: Whether the launcher serves the rendezvous store
            (``TORCHELASTIC_USE_AGENT_STORE``); otherwise rank 0 does.
        copies: Rule that ``run`` sets for copies of the training state in memory
            (``MEGATRON_ADAPTIVE_COPIES``), ``None`` for no copies.
        node: Name of this node in a job of ``run`` (``MEGATRON_ADAPTIVE_NODE``), otherwise
            ``None``.
        lease: Number of ``run``'s lease of the checkpoint folder (``MEGATRON_ADAPTIVE_LEASE``),
            otherwise ``None``.
        job: Order of ``run`` to a script that trains a ``Pipeline`` (``MEGATRON_ADAPTIVE_JOB``),
            see :class:`JobOrder`; otherwise ``None``.
        meeting_s: Seconds within which all ranks must meet (``MEGATRON_ADAPTIVE_MEETING_S``).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    run_id: str = "none"
    restart_count: int = 0
    omp_num_threads: int | None = None
    cuda_device_max_connections: int | None = None
    is_launched: bool = False
    socket_interface: str | None = None
    has_agent_store: bool = False
    copies: str | None = None
    node: str | None = None
    lease: int | None = None
    job: str | None = None
    meeting_s: float = 40.0

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Reads and checks the variables.

        Args:
            variables: Variables by name; by default those of this process.

        Raises:
            ConfigError: A variable is no number, is out of range, or lacks its counterpart.
        """
        source = os.environ if variables is None else variables

        def text(name: str) -> str | None:
            return source.get(name, "").strip() or None

        def number(
            name: str, default: int | None, minimum: int = 0, maximum: int | None = None
        ) -> Any:
            value = text(name) or ""
            if name == "OMP_NUM_THREADS":
                # OpenMP allows a list for nested regions; its first number is for the outermost.
                value = value.split(",")[0]
            return _number(name, value, minimum, maximum) if value else default

        rank = number("RANK", 0)
        world_size = number("WORLD_SIZE", 1, 1, _MOST_RANKS)
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if text(name) and not text(other):
                raise ConfigError(
                    f"environment variable {name} is set to {source[name]} but {other} is not: "
                    f"both are needed; {_LAUNCHER}"
                )
        # Launchers other than torchrun may set no local ids; then all processes count as one node.
        local_rank = number("LOCAL_RANK", rank)
        local_world_size = number("LOCAL_WORLD_SIZE", world_size, 1, _MOST_RANKS)
        _require_below("RANK", rank, world_size)
        _require_below("LOCAL_RANK", local_rank, local_world_size)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=number("GROUP_RANK", 0),
            master_addr=text("MASTER_ADDR") or cls.master_addr,
            master_port=number("MASTER_PORT", None, 1, 65535),
            run_id=text("TORCHELASTIC_RUN_ID") or cls.run_id,
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
            omp_num_threads=number("OMP_NUM_THREADS", None, 1),
            cuda_device_max_connections=number("CUDA_DEVICE_MAX_CONNECTIONS", None, 1),
            is_launched="RANK" in source,
            # gloo accepts a list of interfaces; messages between stages use only the first.
            socket_interface=(text("GLOO_SOCKET_IFNAME") or "").split(",")[0].strip() or None,
            has_agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            copies=text("MEGATRON_ADAPTIVE_COPIES"),
            node=text("MEGATRON_ADAPTIVE_NODE"),
            lease=number("MEGATRON_ADAPTIVE_LEASE", None, 1),
            job=text("MEGATRON_ADAPTIVE_JOB"),
            meeting_s=float(number("MEGATRON_ADAPTIVE_MEETING_S", 40, 1, 86_400)),
        )


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Says which optional packages are installed, because some settings need them.

    Attributes:
        transformer_engine: Whether Transformer Engine is installed.
        flexible_dispatch: Whether DeepEP is installed.
    """

    transformer_engine: bool
    flexible_dispatch: bool = False

    @classmethod
    def detect(cls) -> Installed:
        """Looks for the packages on Python's path without importing them."""
        return cls(
            transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
            flexible_dispatch=importlib.util.find_spec("deep_ep") is not None,
        )


_MOST_DIGITS = 18
_MOST_RANKS = 1_000_000


def _number(name: str, text: str, minimum: int, maximum: int | None) -> int:
    """Returns a variable's number; raises ConfigError if it is no number or out of range."""
    if (
        text.isdecimal()
        and len(text) <= _MOST_DIGITS
        and minimum <= int(text) <= (int(text) if maximum is None else maximum)
    ):
        return int(text)
    limit = f"from {minimum} on" if maximum is None else f"from {minimum} to {maximum}"
    raise ConfigError(
        f"environment variable {name} is {text!r}: it must be a whole number {limit}; {_LAUNCHER}"
    )


def _require_below(name: str, rank: int, size: int) -> None:
    """Refuses a rank that is not below its world size."""
    if rank >= size:
        raise ConfigError(
            f"environment variable {name} is {rank}: it must be below "
            f"{name.replace('RANK', 'WORLD_SIZE')} = {size}; {_LAUNCHER}"
        )


_FILES_OF_RANK = 128
"""Open files and connections of a rank that runs alone, with a margin (105 were measured)."""
_FILES_OF_PEER = 24
"""Additional files and connections for each other rank in its groups (two ranks had 150)."""
_GROUP = 64
_FILES_AIMED_AT = 65_536


def require_files(world_size: int) -> None:
    """Raises this process's limit of open files to the number that a rank needs.

    Args:
        world_size: Number of ranks of the job.

    Raises:
        SetupError: The limit cannot be raised that far.
    """
    needed = _FILES_OF_RANK + _FILES_OF_PEER * (min(world_size, _GROUP) - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SetupError(
            f"this process may open {hard} files and connections (ulimit -n), and a rank of a job"
            f" of {world_size} has up to {needed}: raise the limit, as with ulimit -n"
            f" {_FILES_AIMED_AT}"
        )
    most = _FILES_AIMED_AT if hard == resource.RLIM_INFINITY else min(hard, _FILES_AIMED_AT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def too_many_files(reason: str) -> SetupError:
    """Returns the error for a process that has reached its limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SetupError(
        f"a file or connection cannot be opened ({reason}): this process may have {soft} (ulimit"
        f" -n); raise the limit, as with ulimit -n {_FILES_AIMED_AT}"
    )


SECRET_VARIABLE = "MEGATRON_ADAPTIVE_SECRET"
SECRET_FILE_VARIABLE = "MEGATRON_ADAPTIVE_SECRET_FILE"
_LEAST_SECRET = 16


def job_secret() -> str | None:
    """Returns the job's secret if the user gave one, and removes it from this environment.

    Processes that are started later do not inherit it.

    Raises:
        ConfigError: The secret is too short, or its file cannot be read or is readable by others.
    """
    secret = os.environ.pop(SECRET_VARIABLE, "").strip()
    path = os.environ.get(SECRET_FILE_VARIABLE, "").strip()
    where = SECRET_VARIABLE
    if path and not secret:
        where = f"{SECRET_FILE_VARIABLE}={path}"
        try:
            with open_file(path) as file:
                if os.fstat(file.fileno()).st_mode & 0o007:
                    raise ConfigError(f"{where}: every user can read it; chmod 600 it")
                secret = file.read(1 << 16).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"{where}: {reason}; name a file with the job's secret") from None
    elif not secret:
        return None
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"{where}: the secret is too short; make one with openssl rand -hex 32 and use the"
            " same one on all nodes"
        )
    return secret


JOB_VARIABLE = "MEGATRON_ADAPTIVE_JOB"
EXIT_MEASURED = 79
"""Exit status of ranks that measured their model and wait to be restarted in a planned shape."""


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """Holds the layout of a rank of ``run``, and where it saves checkpoints and reports progress.

    Attributes:
        checkpoints: Folder of checkpoints, to save to and to resume from.
        progress: Folder of the progress file of this shape.
        model: Path of the file with the job's measurements of the model.
        epoch: Number of the shape, counted over the job.
        signature: Signature of the model and settings that the shape was planned for; empty if
            they are still unknown and the ranks must measure them first.
        pipeline_size: Number of processes of a pipeline.
        replicas: Number of pipelines.
        micro_batch_size: Number of samples of a microbatch.
        partition: Number of segments of each stage.
    """

    checkpoints: str
    progress: str
    model: str
    epoch: int
    signature: str = ""
    pipeline_size: int = 0
    replicas: int = 0
    micro_batch_size: int = 0
    partition: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Returns the order as the value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> JobOrder:
        """Reads an order from the value of the environment variable.

        Raises:
            ConfigError: The value was not written by this program.
        """
        try:
            values = parse_json(text)
            return cls(**{**values, "partition": tuple(values["partition"])})
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"environment variable {JOB_VARIABLE} is {text[:60]!r}: only python -m"
                " megatron.adaptive run sets it; unset it"
            ) from None
