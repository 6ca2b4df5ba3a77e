"""Runs one node's processes, writes their output to files, and samples their resource use.

::

    <LOG_DIR>/<job>/run.json      settings and nodes of the job
    <LOG_DIR>/<job>/<node>.out    standard output of the node's processes
    <LOG_DIR>/<job>/<node>.err    standard error of the node's processes
    <LOG_DIR>/<job>/<node>.gpu    samples of the resources that the processes use
    <LOG_DIR>/<job>/progress.jsonl    progress of the run

Each node runs torchrun, which starts the trainer, inside a container if the user has configured a
container. Files, folders and the port are checked before any process is started.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from megatron.adaptive.cluster.conf import LaunchConf
from megatron.adaptive.cluster.inventory import ResourceSampler
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import (
    MASK,
    SCRIPTS,
    WORK_FOLDER,
    is_secret,
    masked,
    masked_text,
)
from megatron.adaptive.config.model import model_flags
from megatron.adaptive.config.parent_process import ending_with_this_process
from megatron.adaptive.config.plan_file import FLAGS, run_flags
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.trace.files import BestEffortFile

_FIRST_NODE_LONGER_S = 10
"""Time in seconds by which the first node waits longer than the others to connect."""
_MOCK_VOCABULARY = "50303"


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Position of a node in the job, which is known once all nodes have connected.

    Attributes:
        node_rank: Index of this node among the job's nodes, counted from 0.
        processes: Number of processes on each node, indexed by node rank.
        master_addr: Address of the first node (node rank 0).
        master_port: Port on which torchrun on the first node listens.
    """

    node_rank: int
    processes: tuple[int, ...]
    master_addr: str
    master_port: int


def trainer_flags(conf: LaunchConf, run_dir: Path) -> list[str]:
    """Returns the flags of ``pretrain_gpt.py`` that correspond to the configuration ``conf``.

    Args:
        conf: Configuration of the launch.
        run_dir: Folder of this job's logs, to which traces and profiles are written.

    Raises:
        ConfigError: The model is unknown.
    """
    flags = model_flags(conf["MODEL"], conf.folder)
    flags += run_flags(conf.values)
    if conf["TRAIN_ITERS"] is not None:
        flags += ["--train-iters", str(conf["TRAIN_ITERS"])]
    flags += ["--lr", repr(conf["LR"]), "--log-interval", "1", "--eval-iters", "0"]
    flags += ["--progress-dir", str(run_dir)]
    flags += _data_flags(conf)
    if conf["CHECKPOINT_DIR"]:
        folder = str(conf.path("CHECKPOINT_DIR"))
        flags += ["--save", folder, "--load", folder, "--save-interval", str(conf["SAVE_INTERVAL"])]
        if conf["LOCAL_CHECKPOINT_DIR"]:
            flags += ["--save-local", str(conf.path("LOCAL_CHECKPOINT_DIR"))]
    if conf["TRACE"]:
        flags += ["--trace-dir", str(run_dir / "traces")]
    if conf["PROFILE"] or conf["NSYS"] or conf["NCU"]:
        flags.append("--profile")
    if conf["PROFILE"]:
        flags += ["--use-pytorch-profiler", "--tensorboard-dir", str(run_dir / "profile")]
    return flags + shlex.split(conf["TRAINER_FLAGS"] or "")


def _data_flags(conf: LaunchConf) -> list[str]:
    if conf["DATA"] == "mock":
        return f"--mock-data --tokenizer-type NullTokenizer --vocab-size {_MOCK_VOCABULARY}".split()
    data = conf.path("DATA")
    flags = ["--data-path", str(data), "--tokenizer-type", "GPT2BPETokenizer"]
    for name, flag, default in (
        ("VOCAB_FILE", "--vocab-file", "vocab.json"),
        ("MERGE_FILE", "--merge-file", "merges.txt"),
    ):
        flags += [flag, str(conf.path(name) if conf[name] else data.parent / default)]
    return flags


def check_trainer(conf: LaunchConf, world_size: int, run_dir: Path) -> None:
    """Checks with the trainer's own parser that the trainer accepts the configuration ``conf``.

    Raises:
        ConfigError: The trainer would reject a flag. The message names the ``conf.sh`` variable
            that sets the flag or, if there is none, the flag.
    """
    if conf["LOCAL_CHECKPOINT_DIR"] and not conf["CHECKPOINT_DIR"]:
        raise ConfigError(
            f"LOCAL_CHECKPOINT_DIR={conf['LOCAL_CHECKPOINT_DIR']} requires CHECKPOINT_DIR, "
            "because local checkpoints are copied there; set CHECKPOINT_DIR to a folder in storage "
            "that all nodes share"
        )
    try:
        parse(trainer_flags(conf, run_dir), world_size=world_size, last_wins=True)
    except ConfigError as error:
        text = str(error).replace("--num-layers is", f"--num-layers of MODEL={conf['MODEL']} is")
        for name in (*FLAGS, "MODEL_CHUNKS"):
            flag = run_flags({name: "2"})[0]
            if flag not in (conf["TRAINER_FLAGS"] or ""):
                text = re.sub(rf"{flag} (?=\d)", f"{name}=", text)
                text = re.sub(rf"{flag}(?![\w-])", name, text)
        raise ConfigError(text) from None


def python_of(conf: LaunchConf) -> str:
    """Returns the path of the Python interpreter on all nodes."""
    return conf["PYTHON"] or sys.executable


def node_command(conf: LaunchConf, node: NodePlace, run_dir: Path) -> list[str]:
    """Returns the command that starts the processes of ``node``."""
    command = [*_profiler(conf, node.node_rank, run_dir), python_of(conf)]
    command += [
        "-m",
        "megatron.adaptive",
        "job",
        "launch",
        "--world-size",
        str(sum(node.processes)),
    ]
    command += ["--nnodes", str(len(node.processes)), "--node-rank", str(node.node_rank)]
    command += ["--nproc-per-node", str(node.processes[node.node_rank])]
    command += ["--master-addr", node.master_addr, "--master-port", str(node.master_port)]
    # Let the first node wait longer than the others. Otherwise, it might time out first, and Slurm
    # might end the job before a node that cannot reach the first node has reported the reason.
    longer_s = _FIRST_NODE_LONGER_S if node.node_rank == 0 else 0
    limit_s = math.ceil(conf["MEETING_TIMEOUT_S"]) + longer_s
    command += ["--rdzv-conf", f"timeout={limit_s}"]
    return [*command, str(SCRIPTS / "pretrain_gpt.py"), *trainer_flags(conf, run_dir)]


def _profiler(conf: LaunchConf, node_rank: int, run_dir: Path) -> list[str]:
    arguments = ""
    if conf["NSYS"]:
        arguments = "nsys profile --force-overwrite true --trace cuda,nvtx,osrt"
        arguments += " --capture-range cudaProfilerApi --capture-range-end stop -o"
    elif conf["NCU"]:
        arguments = "ncu --force-overwrite --target-processes all --profile-from-start off -o"
    return [*arguments.split(), str(run_dir / f"profile-node{node_rank}")] if arguments else []


def in_container(conf: LaunchConf, command: Sequence[str], run_dir: Path) -> list[str]:
    """Returns a command that runs ``command`` in the container.

    Returns ``command`` itself if there is no container, or if Slurm starts the container with the
    pyxis plugin.
    """
    gpu = ["--nv"] if conf["DEVICE"] == "gpu" else []
    starts = {"apptainer": ["exec", *gpu, "--bind"], "enroot": ["start", "--rw", "--mount"]}
    if conf["CONTAINER"] not in starts:
        return list(command)
    *start, flag = starts[conf["CONTAINER"]]
    binds = [word for mount in mounts_of(conf, run_dir) for word in (flag, mount)]
    return [conf["CONTAINER"], *start, *binds, str(conf["IMAGE"]), *command]


def mounts_of(conf: LaunchConf, logs: Path) -> list[str]:
    """Returns the folders to mount in the container, each as ``PATH_ON_NODE:PATH_IN_CONTAINER``."""
    extra_mounts = [mount for mount in (conf["CONTAINER_MOUNTS"] or "").split(",") if mount]
    return [f"{WORK_FOLDER}:{WORK_FOLDER}", f"{logs}:{logs}", *extra_mounts]


def run_record(conf: LaunchConf, node: NodePlace, run_dir: Path) -> str:
    """Returns the content of ``run.json``: start time, settings and number of processes."""
    record = {
        "started_unix_s": round(time.time(), 1),
        "conf": {name: masked_text(text) for name, text in conf.texts().items()},
        "processes": node.processes,
        "world_size": sum(node.processes),
        "master": f"{node.master_addr}:{node.master_port}",
        "flags": masked(trainer_flags(conf, run_dir)),
    }
    return json.dumps(record, indent=2) + "\n"


EXIT_STOPPED_EARLY = 75
"""Exit status of a run that saved and exited because of SIGUSR1, for example near Slurm's time
limit.

The caller should restart the run.
"""

_STOPPED = re.compile(rb"^training ends: signal SIGUSR1")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 1.0
_OUTPUTS = ("out", "err")
_SHORTEST_SECRET = 8
"""Minimum length of secrets to mask. Shorter values, such as ``1``, also occur in other output."""


def run_node(
    conf: LaunchConf,
    node: NodePlace,
    run_dir: Path,
    *,
    name: str,
    variables: Mapping[str, str],
    echo: bool,
) -> int:
    """Starts this node's processes, waits until they exit, and returns the exit status.

    Forwards SIGINT, SIGTERM and SIGHUP to torchrun, and SIGUSR1 directly to the ranks.

    Args:
        conf: Configuration of the launch.
        node: Place of this node in the job.
        run_dir: Folder of the job's logs.
        name: Name of the node. The names of its log files begin with this name.
        variables: Environment variables for the processes, in addition to those of this process.
        echo: Whether to also print the output of the processes on the terminal.

    Returns:
        Exit status, or :data:`EXIT_STOPPED_EARLY` if the run saved and exited because of SIGUSR1.

    Raises:
        ConfigError: The log folder cannot be written.
    """
    make_folder(run_dir)
    if node.node_rank == 0:
        (run_dir / "run.json").write_text(run_record(conf, node, run_dir))
    command = in_container(conf, node_command(conf, node, run_dir), run_dir)
    environment = _environment(conf, variables)
    hidden = _secret_values(environment)
    # Child processes also ignore SIGUSR1. Otherwise, this signal would kill ranks that have not
    # installed their handlers yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    begin = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} node {node.node_rank} starts\n".encode()
    files = [BestEffortFile(run_dir / f"{name}.{end}", "lines", lambda: begin) for end in _OUTPUTS]
    with contextlib.closing(files[0]) as out, contextlib.closing(files[1]) as err:
        for file in (out, err):
            file.begin()
        # Start the job in a separate session. Otherwise the job would receive Ctrl-C twice: from
        # the terminal, and from this process, which forwards the signal.
        job = subprocess.Popen(
            command,
            env=environment,
            cwd=WORK_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # If this process is killed, the kernel sends SIGTERM to the job, so that the ranks save
            # a checkpoint and exit. The kernel does not do so for set-user-ID programs, such as the
            # starter of some versions of Apptainer.
            preexec_fn=ending_with_this_process(signal.SIGTERM),
        )
        samples = run_dir / f"{name}.gpu"
        status, is_stopped = _watch_job(job, out, err, samples, hidden=hidden, echo=echo)
    if status == 0 and is_stopped:
        # After a non-zero status, srun kills the job on all other nodes, so first give these nodes
        # time to exit.
        time.sleep(_GRACE_S)
        return EXIT_STOPPED_EARLY
    return 128 - status if status < 0 else status


def _secret_values(environment: Mapping[str, str]) -> tuple[bytes, ...]:
    return tuple(
        value.encode()
        for name, value in environment.items()
        if is_secret(name) and len(value) >= _SHORTEST_SECRET
    )


def _watch_job(
    job: subprocess.Popen[bytes],
    out: BestEffortFile,
    err: BestEffortFile,
    samples: Path,
    *,
    hidden: Sequence[bytes],
    echo: bool,
) -> tuple[int, bool]:
    """Copies the output of ``job``, samples resources and forwards signals until ``job`` exits.

    Returns:
        Exit status of the job, and whether the run saved and exited because of SIGUSR1.
    """
    sampler = ResourceSampler(os.getpid(), samples)
    stopped = threading.Event()
    with _signals_to(job), contextlib.closing(sampler):
        threads = [
            _in_thread(_copy, job.stdout, out, sys.stdout if echo else None, stopped, hidden),
            _in_thread(_copy, job.stderr, err, sys.stderr if echo else None, stopped, hidden),
        ]
        status = job.wait()
        for thread in threads:
            thread.join(10.0)
    return status, stopped.is_set()


def _environment(conf: LaunchConf, variables: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **conf.environment, **variables}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{WORK_FOLDER}:{path}" if path else str(WORK_FOLDER)
    if conf["DEVICE"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


@contextlib.contextmanager
def _signals_to(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forwards signals to ``job``. When the context ends, kills ``job`` if it is still running."""
    former = {number: signal.signal(number, lambda n, _: job.send_signal(n)) for number in _SIGNALS}
    former[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda n, _: _signal_ranks(job.pid, n))
    try:
        yield
    finally:
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        for number, handler in former.items():
            signal.signal(number, handler)


def _signal_ranks(pid: int, number: int) -> None:
    """Signals each rank among the descendants of process ``pid``, but not the rank's children."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if _is_rank(process) and parent is not None and not _is_rank(parent):
                    process.send_signal(number)


def _is_rank(process: psutil.Process) -> bool:
    return "LOCAL_RANK" in process.environ()


def _in_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _copy(
    source: IO[bytes],
    target: BestEffortFile,
    terminal: IO[str] | None,
    stopped: threading.Event,
    hidden: Sequence[bytes],
) -> None:
    """Copies lines from ``source`` to ``target``, and to ``terminal`` if it is not ``None``.

    Sets ``stopped`` when a line reports that the run exited because of SIGUSR1. Replaces the
    secrets in ``hidden`` by a mask, because a library may print a secret, for example in an address
    that it could not open.
    """
    for line in source:
        for secret in hidden:
            line = line.replace(secret, MASK.encode())
        if _STOPPED.match(line):
            stopped.set()
        target.append(line)
        if terminal is not None:
            with contextlib.suppress(OSError):
                terminal.write(line.decode(errors="replace"))
                terminal.flush()


def check_files(conf: LaunchConf) -> None:
    """Checks that the data files exist, and that the container image exists if it is a file.

    Raises:
        ConfigError: A file is missing.
    """
    if conf["DATA"] != "mock":
        for ending in (".bin", ".idx"):
            path = Path(f"{conf.path('DATA')}{ending}")
            if not path.is_file():
                raise ConfigError(
                    f"DATA={conf['DATA']}: {path} does not exist; create it with "
                    '"python -m megatron.adaptive data preprocess", or set DATA=mock'
                )
    image = conf["IMAGE"] or ""
    is_file = {"apptainer": "://" not in image, "pyxis": image.startswith(("/", "./"))}.get(
        conf["CONTAINER"], False
    )
    if is_file and not conf.path("IMAGE").exists():
        raise ConfigError(
            f"IMAGE={image}: {conf.path('IMAGE')} does not exist, but "
            f"CONTAINER={conf['CONTAINER']} requires it; set IMAGE to an existing image file"
        )


def make_folder(folder: Path) -> None:
    """Creates the log folder ``folder`` if it is missing, and checks that it is writable.

    Raises:
        ConfigError: The folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"LOG_DIR={folder}: {error.strerror}; choose another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"LOG_DIR={folder} is not writable by this user; choose another folder")


def check_port(port: int) -> None:
    """Checks that ``port`` is free on this machine.

    Raises:
        SetupError: Another program listens on the port, or this user is not allowed to use it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise SetupError(
                f"MASTER_PORT={port}: {error.strerror} on {socket.gethostname()}; set MASTER_PORT "
                "to another port, because another program may listen on this port"
            ) from error
