"""Reads environment variables, lists those that other nodes get, and finds installed packages.

The one place that reads environment variables. Everybody else is given an :class:`Environment`. A
script of the user's, which has flags of its own, is given a :class:`JobOrder` in one of them.

Values of secrets (:func:`is_secret`) reach processes through their environment alone: over ssh by
standard input, on Slurm by the environment that ``sbatch`` takes along. Files, pages, logs and
command lines hold a mark in their place.
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
    *("NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "HF_", "TIKTOKEN_", "TORCH_", "TORCHELASTIC_"),
    *("PYTORCH_", "NVTE_", "TRITON_", "MEGATRON_ADAPTIVE_", "PYTHONUNBUFFERED"),
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
FROM_CONF = (*_EVERYWHERE, "CUDA_", "LD_LIBRARY_")
"""Beginnings of variables of ``conf.sh`` that all processes get: by the master's answer to workers,
by Slurm's settings file; secrets not so, see :mod:`megatron.adaptive.config.environment`."""
OVER_SSH = (*_EVERYWHERE, "PYTHON", "TORCH")
"""Beginnings of variables of the manager of ``run`` that its agents on other machines get."""

_CHECKOUT = Path(__file__).resolve().parents[3]
IS_CHECKOUT = (_CHECKOUT / "pretrain_gpt.py").is_file()
WORK_FOLDER = _CHECKOUT if IS_CHECKOUT else Path.cwd()
"""Folder of ``conf.sh``, ``runs``, ``logs`` and ``data``: the checkout, or the current one where a
wheel is installed."""
SCRIPTS = _CHECKOUT if IS_CHECKOUT else Path(sys.prefix, "share", "megatron-adaptive")
"""Folder of ``pretrain_gpt.py`` and ``examples``, as the checkout and the wheel have them."""

MASK = "***"
_SECRET = {
    *("TOKEN", "SECRET", "SECRETS", "KEY", "APIKEY", "PASSWORD", "PASSWD", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS"),
}
_WORDS = re.compile(r"[^A-Z0-9]+")
_USER_INFO = re.compile(r"(?<=://)[^/\s@]*(?=@)")
_SETTING = re.compile(r"(?<![\w-])(--?)?([A-Za-z_][\w-]*)=([^\s,;]+)")


def is_secret(name: str) -> bool:
    """Returns whether a variable's value is hidden: a word of its name is of a secret's."""
    return not _SECRET.isdisjoint(_WORDS.split(name.upper()))


def _is_secret_flag(name: str) -> bool:
    # By its last word: --linear-key-head-dim is none.
    return name.startswith("-") and is_secret(name.rpartition("-")[2])


def masked(words: Sequence[str]) -> list[str]:
    """Hides secrets in a command line: values of flags and variables, users in addresses."""
    found = []
    for before, word in zip(("", *words), words, strict=False):
        hides = _is_secret_flag(before) and "=" not in before and not word.startswith("--")
        found.append(MASK if hides else _SETTING.sub(_mask, _USER_INFO.sub(MASK, word)))
    return found


def _mask(match: re.Match[str]) -> str:
    dashes, name = match[1] or "", match[2]
    hides = _is_secret_flag(f"-{name}") if dashes else is_secret(name)
    return f"{dashes}{name}={MASK}" if hides else match[0]


def masked_text(text: str) -> str:
    """Returns a command line in one text with its secrets hidden, the same where there are none."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    hidden = masked(words)
    return text if hidden == words else shlex.join(hidden)


_LAUNCHER = "start the program with torchrun or unset the variable"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The variables that a launcher sets, checked.

    Attributes:
        rank: id among all processes.
        world_size: number of all processes.
        local_rank: id among the processes of this node.
        local_world_size: number of processes of this node.
        node_rank: id of this node (``GROUP_RANK``).
        master_addr: where rank 0 listens.
        master_port: its port, ``None`` without a launcher.
        run_id: id of the job that torchrun gives (``TORCHELASTIC_RUN_ID``), ``none`` otherwise.
        restart_count: restarts of the job so far (``TORCHELASTIC_RESTART_COUNT``).
        omp_num_threads: threads of CPU kernels, ``None`` if not limited.
        cuda_device_max_connections: hardware queues of a GPU, ``None`` if not set.
        is_launched: a launcher set the rank; otherwise this is rank 0 of 1.
        socket_interface: network interface that gloo shall use (``GLOO_SOCKET_IFNAME``),
            ``None`` if not set.
        has_agent_store: the launcher serves the store that ranks meet in
            (``TORCHELASTIC_USE_AGENT_STORE``); otherwise rank 0 does.
        copies: how copies of the state are to be kept in memory, as ``run`` orders its ranks
            (``MEGATRON_ADAPTIVE_COPIES``), ``None`` for not at all.
        node: name of this node in a job of ``run`` (``MEGATRON_ADAPTIVE_NODE``), ``None`` outside.
        lease: number of the claim of ``run`` to the folder of checkpoints
            (``MEGATRON_ADAPTIVE_LEASE``), ``None`` outside.
        job: order of ``run`` to a script that trains a ``Pipeline``
            (``MEGATRON_ADAPTIVE_JOB``), see :class:`JobOrder`; ``None`` without it.
        meeting_s: Seconds in which all ranks must meet (``MEGATRON_ADAPTIVE_MEETING_S``).
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
        """Read the variables of this process.

        Args:
            variables: used in place of the process's own.

        Raises:
            ConfigError: a variable is no number, out of range, or comes without its counterpart.
        """
        given = os.environ if variables is None else variables

        def text(name: str) -> str | None:
            return given.get(name, "").strip() or None

        def number(
            name: str, default: int | None, minimum: int = 0, maximum: int | None = None
        ) -> Any:
            word = text(name) or ""
            if name == "OMP_NUM_THREADS":
                # OpenMP allows a list for nested regions: the first number counts here.
                word = word.split(",")[0]
            return _number(name, word, minimum, maximum) if word else default

        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1, 1, _MOST_RANKS)
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if text(name) and not text(other):
                raise ConfigError(
                    f"environment variable {name} is set to {given[name]} but {other} is not: "
                    f"both are needed; {_LAUNCHER}"
                )
        # Other launchers give no local ids: then every process counts as on one node.
        local_rank = number("LOCAL_RANK", rank)
        local_world_size = number("LOCAL_WORLD_SIZE", world_size, 1, _MOST_RANKS)
        for name, value, limit in (
            ("RANK", rank, world_size),
            ("LOCAL_RANK", local_rank, local_world_size),
        ):
            if value >= limit:
                raise ConfigError(
                    f"environment variable {name} is {value}: it must be below "
                    f"{name.replace('RANK', 'WORLD_SIZE')} = {limit}; {_LAUNCHER}"
                )
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
            is_launched="RANK" in given,
            # gloo takes a list for several rails; messages between stages have one.
            socket_interface=(text("GLOO_SOCKET_IFNAME") or "").split(",")[0].strip() or None,
            has_agent_store=given.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            copies=text("MEGATRON_ADAPTIVE_COPIES"),
            node=text("MEGATRON_ADAPTIVE_NODE"),
            lease=number("MEGATRON_ADAPTIVE_LEASE", None, 1),
            job=text("MEGATRON_ADAPTIVE_JOB"),
            meeting_s=float(number("MEGATRON_ADAPTIVE_MEETING_S", 40, 1, 86_400)),
        )


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Optional packages that decide which settings are possible; none of them is imported."""

    transformer_engine: bool
    flexible_dispatch: bool = False

    @classmethod
    def detect(cls) -> Installed:
        """Look for the packages on Python's path."""
        return cls(
            transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
            flexible_dispatch=importlib.util.find_spec("deep_ep") is not None,
        )


_MOST_DIGITS = 18
_MOST_RANKS = 1_000_000


def _number(name: str, text: str, minimum: int, maximum: int | None) -> int:
    """Reads a variable's number; raises ConfigError if it is none or out of range."""
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


_FILES_OF_RANK, _FILES_OF_PEER = 128, 24
"""Files and connections that a rank has open (105 alone, 150 in a pipeline of two), for each
other rank of its groups."""
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
    """Returns the job's secret where the user gave one, and keeps it from processes started later.

    Raises:
        ConfigError: it is too short, or its file cannot be read, or others can read it.
    """
    secret = os.environ.pop(SECRET_VARIABLE, "").strip()
    path, where = os.environ.get(SECRET_FILE_VARIABLE, "").strip(), SECRET_VARIABLE
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
            f"{where}: the secret is too short; make one with openssl rand -hex 32, for all nodes"
            " the same"
        )
    return secret


JOB_VARIABLE = "MEGATRON_ADAPTIVE_JOB"
EXIT_MEASURED = 79
"""Status of ranks that have measured their model and wait to be started in a shape for it."""


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """Holds where a rank saves and reports its progress, and its layout.

    Attributes:
        checkpoints: folder of checkpoints, to go on from as well.
        progress: folder of the progress file of this shape.
        model: file of what the job knows of the model.
        epoch: number of the shape.
        signature: of the model and the settings that the shape was planned for; empty where
            nothing is known of them: they are to be measured first.
        pipeline_size: processes of a pipeline.
        replicas: pipelines.
        micro_batch_size: samples of a microbatch.
        partition: segments of each stage.
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
        """The value of the variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> JobOrder:
        """Read the value of the variable.

        Raises:
            ConfigError: it was not written by this program.
        """
        try:
            values = parse_json(text)
            return cls(**{**values, "partition": tuple(values["partition"])})
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"environment variable {JOB_VARIABLE} is {text[:60]!r}: it is set by python -m"
                " megatron.adaptive run alone; unset it"
            ) from None
