"""Reads environment variables, and lists the variables that other nodes receive.

Most modules read the values of environment variables from an :class:`Environment`, which this
module creates. The module also detects which optional packages are installed. ``train elastic``
cannot pass flags to a user's script, so it passes its instructions (a :class:`JobOrder`) in an
environment variable.

Processes receive secret values (:func:`is_secret`) only in their environment. Over ssh, secrets are
sent through standard input. On Slurm, ``sbatch`` forwards them. Files, pages, logs and command
lines show :data:`MASK` instead of a secret.
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
    "WANDB_",
    "MLFLOW_",
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
"""Prefixes of the variables in ``conf.sh`` that all processes receive.

Worker nodes receive these variables in a reply from the master. Slurm jobs receive them in a
settings file. Secret values are never included.
"""
OVER_SSH = (*_EVERYWHERE, "PYTHON", "TORCH")
"""Prefixes of the variables that ``train elastic`` passes to agents on other machines over ssh."""

_CHECKOUT = Path(__file__).resolve().parents[3]
IS_CHECKOUT = (_CHECKOUT / "pretrain_gpt.py").is_file()
WORK_FOLDER = _CHECKOUT if IS_CHECKOUT else Path.cwd()
"""Folder that contains ``conf.sh``, ``runs``, ``logs`` and ``data``.

This folder is the checkout of this project, or the current folder if the project is installed from
a wheel.
"""
SCRIPTS = _CHECKOUT if IS_CHECKOUT else Path(sys.prefix, "share", "megatron-adaptive")
"""Folder that contains ``pretrain_gpt.py`` and ``examples``.

This folder is the checkout of this project, or ``share/megatron-adaptive`` in the Python
installation.
"""

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
    """Returns whether words such as ``TOKEN`` in ``name`` suggest that the variable is secret."""
    return not _SECRET.isdisjoint(_WORDS.split(name.upper()))


def _is_secret_flag(name: str) -> bool:
    # Only the last word counts, so that "key" in --linear-key-head-dim does not make it secret.
    return name.startswith("-") and is_secret(name.rpartition("-")[2])


def masked(arguments: Sequence[str]) -> list[str]:
    """Returns a copy of the command line ``arguments`` that contains no secrets.

    The values of secret flags and variables, and user names in URLs, are replaced by :data:`MASK`.
    """
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
    """Returns ``text``, a command line as a single string, without secrets."""
    try:
        arguments = shlex.split(text)
    except ValueError:
        arguments = text.split()
    hidden = masked(arguments)
    return text if hidden == arguments else shlex.join(hidden)


_LAUNCHER = "start the program with torchrun or unset the variable"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Validated values of the environment variables that a launcher sets.

    Attributes:
        rank: Index of this process among all processes of the job (``RANK``).
        world_size: Number of processes of the job (``WORLD_SIZE``).
        local_rank: Index of this process among the processes of its node (``LOCAL_RANK``).
        local_world_size: Number of processes on this node (``LOCAL_WORLD_SIZE``).
        node_rank: Index of this node among the nodes of the job (``GROUP_RANK``).
        master_addr: Address at which rank 0 listens (``MASTER_ADDR``).
        master_port: Port at which rank 0 listens (``MASTER_PORT``), or ``None`` without a launcher.
        run_id: ID that torchrun gave the job (``TORCHELASTIC_RUN_ID``), or the text ``none``.
        restart_count: Number of restarts of the job so far (``TORCHELASTIC_RESTART_COUNT``).
        omp_num_threads: Number of threads for CPU kernels (``OMP_NUM_THREADS``), or ``None`` if the
            number is not limited.
        cuda_device_max_connections: Number of hardware queues of a GPU
            (``CUDA_DEVICE_MAX_CONNECTIONS``), or ``None`` if the variable is not set.
        is_launched: Whether a launcher has set the rank. If not, this is the only process of the
            job.
        socket_interface: Network interface that gloo uses (``GLOO_SOCKET_IFNAME``), or ``None`` if
            the variable is not set.
        has_agent_store: Whether the launcher, instead of rank 0, hosts the rendezvous store
            (``TORCHELASTIC_USE_AGENT_STORE``).
        copies: Setting of ``train elastic`` for in-memory copies of the training state
            (``MEGATRON_ADAPTIVE_COPIES``), or ``None`` if no copies are made.
        node: Name of this node in a job of ``train elastic`` (``MEGATRON_ADAPTIVE_NODE``), or
            ``None`` in other jobs.
        lease: Number of the lease (``MEGATRON_ADAPTIVE_LEASE``), which gives a ``train elastic``
            job the right to write to the checkpoint folder, or ``None`` in other jobs.
        job: Instructions from ``train elastic`` for a script that trains a ``Pipeline``
            (``MEGATRON_ADAPTIVE_JOB``), as the text of a :class:`JobOrder`, or ``None`` in other
            jobs.
        meeting_s: Timeout in seconds for connecting all ranks when the job starts
            (``MEGATRON_ADAPTIVE_MEETING_S``). The default increases with the number of ranks.
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
    meeting_s: float = 41.0

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Reads and validates the environment variables that a launcher sets.

        Args:
            variables: Values of environment variables, keyed by name, or ``None`` for the variables
                of this process.

        Raises:
            ConfigError: A variable is not a number or is out of range, or only one of ``RANK`` and
                ``WORLD_SIZE`` is set.
        """
        source = os.environ if variables is None else variables

        def text(name: str) -> str | None:
            return source.get(name, "").strip() or None

        def number(
            name: str, default: int | None, minimum: int = 0, maximum: int | None = None
        ) -> Any:
            value = text(name) or ""
            if name == "OMP_NUM_THREADS":
                # OpenMP allows a list with one number per nesting level. The first number, which
                # applies to the outermost level, is used.
                value = value.split(",")[0]
            return _number(name, value, minimum, maximum) if value else default

        rank = number("RANK", 0)
        world_size = number("WORLD_SIZE", 1, 1, _MOST_RANKS)
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if text(name) and not text(other):
                raise ConfigError(
                    f"environment variable {name} is set to {source[name]}, but {other} is not "
                    f"set; {_LAUNCHER}"
                )
        # Some launchers other than torchrun do not set these variables. Without them, assume a
        # single node.
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
            # gloo accepts a list of interfaces. Only the first is used, because stages communicate
            # over a single interface.
            socket_interface=(text("GLOO_SOCKET_IFNAME") or "").split(",")[0].strip() or None,
            has_agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
            copies=text("MEGATRON_ADAPTIVE_COPIES"),
            node=text("MEGATRON_ADAPTIVE_NODE"),
            lease=number("MEGATRON_ADAPTIVE_LEASE", None, 1),
            job=text("MEGATRON_ADAPTIVE_JOB"),
            meeting_s=float(
                number("MEGATRON_ADAPTIVE_MEETING_S", _meeting_s(world_size), 1, 86_400)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Records which optional packages are installed. Some settings require one of them.

    Attributes:
        transformer_engine: Whether Transformer Engine (fused layers) is installed.
        flexible_dispatch: Whether DeepEP (faster exchange of tokens between experts) is installed.
    """

    transformer_engine: bool
    flexible_dispatch: bool = False

    @classmethod
    def detect(cls) -> Installed:
        """Detects which of the packages are on Python's path, without importing them."""
        return cls(
            transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
            flexible_dispatch=importlib.util.find_spec("deep_ep") is not None,
        )


_MOST_DIGITS = 18
_MOST_RANKS = 1_000_000


def _meeting_s(world_size: int) -> int:
    """Returns the default timeout in seconds for connecting ``world_size`` ranks.

    Ranks that start on the same machine slow each other down, so the timeout increases by one
    second for each rank.
    """
    return min(40 + world_size, 600)


def _number(name: str, text: str, minimum: int, maximum: int | None) -> int:
    """Parses ``text``, the value of environment variable ``name``, as an integer within the limits.

    Raises ConfigError if ``text`` is not an integer, or out of range.
    """
    if (
        text.isdecimal()
        and len(text) <= _MOST_DIGITS
        and minimum <= int(text) <= (int(text) if maximum is None else maximum)
    ):
        return int(text)
    limit = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    raise ConfigError(
        f"environment variable {name} must be an integer {limit}, got {text!r}; {_LAUNCHER}"
    )


def _require_below(name: str, rank: int, size: int) -> None:
    """Checks that ``rank`` is less than ``size``, the number of ranks."""
    if rank >= size:
        raise ConfigError(
            f"environment variable {name} must be below {name.replace('RANK', 'WORLD_SIZE')} = "
            f"{size}, got {rank}; {_LAUNCHER}"
        )


_FILES_OF_RANK = 128
"""Maximum number of files and connections that a rank opens in a job with a single rank.

The number includes a safety margin: in a measurement, the rank opened 105.
"""
_FILES_OF_PEER = 24
"""Maximum number of additional files and connections that a rank opens for each other rank.

In a measurement with two ranks, each rank opened 150 files and connections.
"""
_GROUP = 64
_FILES_AIMED_AT = 65_536


def require_files(world_size: int) -> None:
    """Increases this process's limit on open files if it is too low for a rank of the job.

    Args:
        world_size: Number of ranks of the job.

    Raises:
        SetupError: The system does not allow as many open files as a rank may need.
    """
    needed = _FILES_OF_RANK + _FILES_OF_PEER * (min(world_size, _GROUP) - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SetupError(
            f"in a job with {world_size} ranks, a rank may need up to {needed} open files and "
            f"connections, but this process may open only {hard} (ulimit -n); raise the limit, for "
            f'example with "ulimit -n {_FILES_AIMED_AT}"'
        )
    most = _FILES_AIMED_AT if hard == resource.RLIM_INFINITY else min(hard, _FILES_AIMED_AT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def too_many_files(reason: str) -> SetupError:
    """Returns the error to raise if this process has reached its limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SetupError(
        f"cannot open a file or connection ({reason}), because this process may have only {soft} "
        f'open (ulimit -n); raise the limit, for example with "ulimit -n {_FILES_AIMED_AT}"'
    )


SECRET_VARIABLE = "MEGATRON_ADAPTIVE_SECRET"
SECRET_FILE_VARIABLE = "MEGATRON_ADAPTIVE_SECRET_FILE"
_LEAST_SECRET = 16


def is_first_process() -> bool:
    """Returns whether this process is the first process of the job.

    Only the first process prints messages that would be the same on all processes.
    """
    return os.environ.get("RANK", "0") == "0"


def job_secret() -> str | None:
    """Returns the secret of the job, or ``None`` if the user has set no secret.

    The environment variable with the secret is removed from this process, so that child processes
    do not inherit it.

    Raises:
        ConfigError: The secret is too short, or its file cannot be read or is readable by other
            users.
    """
    secret = os.environ.pop(SECRET_VARIABLE, "").strip()
    path = os.environ.get(SECRET_FILE_VARIABLE, "").strip()
    where = SECRET_VARIABLE
    if path and not secret:
        where = f"{SECRET_FILE_VARIABLE}={path}"
        try:
            with open_file(path) as file:
                if os.fstat(file.fileno()).st_mode & 0o007:
                    raise ConfigError(
                        f'{where}: every user can read the file; run "chmod 600 {path}"'
                    )
                secret = file.read(1 << 16).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "the file is not text"
            raise ConfigError(
                f"{where}: {reason}; pass a file that contains the job's secret"
            ) from None
    elif not secret:
        return None
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f'{where}: the secret is too short; create one with "openssl rand -hex 32", and use it '
            "on all nodes"
        )
    return secret


JOB_VARIABLE = "MEGATRON_ADAPTIVE_JOB"
EXIT_MEASURED = 79
"""Exit status of ranks that have measured their model.

If ranks exit with this status, ``train elastic`` plans the parallel sizes from the measurements and
restarts the ranks.
"""


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """Holds the instructions from ``train elastic`` for the ranks of a user's script.

    ``train elastic`` may change the layout (parallel sizes, microbatch size and partition) during a
    job. In this case, it restarts the ranks with new instructions.

    Attributes:
        checkpoints: Folder for saving checkpoints and for resuming from them.
        progress: Folder of the progress file that belongs to this layout.
        model: Path of the file with measurements of the model.
        epoch: Sequence number of this layout among all layouts of the job.
        signature: Hash of the model and the settings for which this layout was planned. If it is
            empty, the ranks must measure the model before the first plan.
        pipeline_size: Number of processes per pipeline.
        replicas: Number of pipelines (data-parallel replicas).
        micro_batch_size: Number of samples per microbatch.
        partition: Number of pieces (parts of the model between cut points) in each stage.
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
        """Returns these instructions as JSON text, which :meth:`from_text` parses."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> JobOrder:
        """Parses ``text``, the value of the environment variable ``MEGATRON_ADAPTIVE_JOB``.

        Raises:
            ConfigError: ``text`` does not have the format that :meth:`to_text` writes.
        """
        try:
            values = parse_json(text)
            return cls(**{**values, "partition": tuple(values["partition"])})
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"environment variable {JOB_VARIABLE} has an invalid value, {text[:60]!r}; unset "
                'it, because only "python -m megatron.adaptive train elastic" may set it'
            ) from None
