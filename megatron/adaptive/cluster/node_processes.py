"""Runs one node's processes: their output into the job's folder, their use sampled.

::

    <LOG_DIR>/<job>/run.json      the settings and who takes part
    <LOG_DIR>/<job>/<node>.out    what the node's processes print
    <LOG_DIR>/<job>/<node>.err    their errors and warnings
    <LOG_DIR>/<job>/<node>.gpu    what they use, sampled
    <LOG_DIR>/<job>/progress.jsonl    how far the run is

The commands come from the configuration: the trainer's flags, each node's torchrun, the container
around it. Files, folders and the port are checked before anything starts.
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
from megatron.adaptive.config.plan_file import FLAGS, run_flags
from megatron.adaptive.errors import ConfigError, SetupError
from megatron.adaptive.trace.files import BestEffortFile

_MOCK_VOCABULARY = "50303"


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Describes a node's part in the job once all have met.

    Attributes:
        node_rank: of this node.
        processes: processes of each node, by node rank.
        master_addr: where the first node listens.
        master_port: its port.
    """

    node_rank: int
    processes: tuple[int, ...]
    master_addr: str
    master_port: int


def trainer_flags(conf: LaunchConf, run_dir: Path) -> list[str]:
    """Returns the flags of ``pretrain_gpt.py``.

    Args:
        conf: the configuration.
        run_dir: folder of this job's logs, for traces and profiles.

    Raises:
        ConfigError: the model is unknown.
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
    """Checks the trainer's own rules before anything starts.

    Raises:
        ConfigError: names the variable where the rule is about one, else the trainer's flag.
    """
    if conf["LOCAL_CHECKPOINT_DIR"] and not conf["CHECKPOINT_DIR"]:
        raise ConfigError(
            f"LOCAL_CHECKPOINT_DIR={conf['LOCAL_CHECKPOINT_DIR']}: checkpoints there are on their"
            " way to CHECKPOINT_DIR, which is not given: give it, on storage that all nodes share"
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
    """Returns the Python that nodes run."""
    return conf["PYTHON"] or sys.executable


def node_command(conf: LaunchConf, place: NodePlace, run_dir: Path) -> list[str]:
    """Returns the command that starts a node's processes."""
    command = [*_profiler(conf, place.node_rank, run_dir), python_of(conf)]
    command += ["-m", "megatron.adaptive", "launch", "--world-size", str(sum(place.processes))]
    command += ["--nnodes", str(len(place.processes)), "--node-rank", str(place.node_rank)]
    command += ["--nproc-per-node", str(place.processes[place.node_rank])]
    command += ["--master-addr", place.master_addr, "--master-port", str(place.master_port)]
    command += ["--rdzv-conf", f"timeout={math.ceil(conf['MEETING_TIMEOUT_S'])}"]
    return [*command, str(SCRIPTS / "pretrain_gpt.py"), *trainer_flags(conf, run_dir)]


def _profiler(conf: LaunchConf, node_rank: int, run_dir: Path) -> list[str]:
    words = ""
    if conf["NSYS"]:
        words = "nsys profile --force-overwrite true --trace cuda,nvtx,osrt"
        words += " --capture-range cudaProfilerApi --capture-range-end stop -o"
    elif conf["NCU"]:
        words = "ncu --force-overwrite --target-processes all --profile-from-start off -o"
    return [*words.split(), str(run_dir / f"profile-node{node_rank}")] if words else []


def in_container(conf: LaunchConf, command: Sequence[str], run_dir: Path) -> list[str]:
    """Returns ``command`` as it runs inside the image; pyxis is Slurm's to start."""
    gpu = ["--nv"] if conf["DEVICE"] == "gpu" else []
    starts = {"apptainer": ["exec", *gpu, "--bind"], "enroot": ["start", "--rw", "--mount"]}
    if conf["CONTAINER"] not in starts:
        return list(command)
    *start, flag = starts[conf["CONTAINER"]]
    binds = [word for mount in mounts_of(conf, run_dir) for word in (flag, mount)]
    return [conf["CONTAINER"], *start, *binds, str(conf["IMAGE"]), *command]


def mounts_of(conf: LaunchConf, logs: Path) -> list[str]:
    """Lists the folders that the container gets, ``FROM:TO``."""
    more = [word for word in (conf["CONTAINER_MOUNTS"] or "").split(",") if word]
    return [f"{WORK_FOLDER}:{WORK_FOLDER}", f"{logs}:{logs}", *more]


def run_record(conf: LaunchConf, place: NodePlace, run_dir: Path) -> str:
    """Returns what ``run.json`` says: the job's latest start, its settings, every node's part."""
    record = {
        "started_unix_s": round(time.time(), 1),
        "conf": {name: masked_text(text) for name, text in conf.texts().items()},
        "processes": place.processes,
        "world_size": sum(place.processes),
        "master": f"{place.master_addr}:{place.master_port}",
        "flags": masked(trainer_flags(conf, run_dir)),
    }
    return json.dumps(record, indent=2) + "\n"


EXIT_STOPPED_EARLY = 75
"""A run that SIGUSR1 stopped in good order, as its time was nearly over: start it again."""

_STOPPED = re.compile(rb"^training ends: signal SIGUSR1")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 1.0
_OUTPUTS = ("out", "err")
_SHORTEST_SECRET = 8
"""A shorter value, such as the 1 of a switch, is found in every other line."""


def run_node(
    conf: LaunchConf,
    place: NodePlace,
    run_dir: Path,
    *,
    name: str,
    variables: Mapping[str, str],
    echo: bool,
) -> int:
    """Starts a node's processes and waits for their end.

    Signals that end a program are passed on to them, SIGUSR1 to the ranks among them.

    Args:
        conf: the configuration.
        place: this node's part.
        run_dir: folder of the job's logs.
        name: of the node, for its files.
        variables: environment of the processes besides this one's.
        echo: whether to print their output here as well.

    Returns:
        Exit status: :data:`EXIT_STOPPED_EARLY` if the run was stopped in good order.

    Raises:
        ConfigError: the folder cannot be written.
    """
    make_folder(run_dir)
    if place.node_rank == 0:
        (run_dir / "run.json").write_text(run_record(conf, place, run_dir))
    command = in_container(conf, node_command(conf, place, run_dir), run_dir)
    environment = _environment(conf, variables)
    hidden = tuple(
        value.encode()
        for name, value in environment.items()
        if is_secret(name) and len(value) >= _SHORTEST_SECRET
    )
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the processes too, until they handle it
    begin = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} node {place.node_rank} starts\n".encode()
    files = [BestEffortFile(run_dir / f"{name}.{end}", "lines", lambda: begin) for end in _OUTPUTS]
    with contextlib.closing(files[0]) as out, contextlib.closing(files[1]) as err:
        for file in (out, err):
            file.begin()
        # A session of its own: signals reach it once, from here.
        job = subprocess.Popen(
            command,
            env=environment,
            cwd=WORK_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        sampler = ResourceSampler(os.getpid(), run_dir / f"{name}.gpu")
        stopped = threading.Event()
        with _signals_to(job), contextlib.closing(sampler):
            threads = [
                _in_thread(_copy, job.stdout, out, sys.stdout if echo else None, stopped, hidden),
                _in_thread(_copy, job.stderr, err, sys.stderr if echo else None, stopped, hidden),
            ]
            status = job.wait()
            for thread in threads:
                thread.join(10.0)
    if status == 0 and stopped.is_set():
        # Nodes that end a moment later must not be taken for those left behind.
        time.sleep(_GRACE_S)
        return EXIT_STOPPED_EARLY
    return 128 - status if status < 0 else status


def _environment(conf: LaunchConf, variables: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **conf.environment, **variables}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{WORK_FOLDER}:{path}" if path else str(WORK_FOLDER)
    if conf["DEVICE"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


@contextlib.contextmanager
def _signals_to(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes signals on to the processes, and leave none of them behind."""
    former = {number: signal.signal(number, lambda n, _: job.send_signal(n)) for number in _SIGNALS}
    former[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda n, _: _tell_ranks(job.pid, n))
    try:
        yield
    finally:
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        for number, handler in former.items():
            signal.signal(number, handler)


def _tell_ranks(pid: int, number: int) -> None:
    """Sends a signal to the ranks below ``pid``, not to what they or torchrun started besides."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if _is_rank(process) and parent is not None and not _is_rank(parent):
                    process.send_signal(number)


def _is_rank(process: psutil.Process) -> bool:
    return "LOCAL_RANK" in process.environ()


def _in_thread(work: Callable[..., None], *given: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=given, daemon=True)
    thread.start()
    return thread


def _copy(
    source: IO[bytes],
    target: BestEffortFile,
    terminal: IO[str] | None,
    stopped: threading.Event,
    hidden: Sequence[bytes],
) -> None:
    """Copies lines into a file, and to the terminal if there is one; sees how the run ended.

    Secrets that a library prints, as in an address that it could not open, are hidden.
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
    """Checks that data and image are there.

    Raises:
        ConfigError: one is not.
    """
    if conf["DATA"] != "mock":
        for ending in (".bin", ".idx"):
            path = Path(f"{conf.path('DATA')}{ending}")
            if not path.is_file():
                raise ConfigError(
                    f"DATA={conf['DATA']}: there is no file {path}; make it with python -m "
                    "megatron.adaptive preprocess-data, or set DATA=mock"
                )
    image = conf["IMAGE"] or ""
    is_file = {"apptainer": "://" not in image, "pyxis": image.startswith(("/", "./"))}.get(
        conf["CONTAINER"], False
    )
    if is_file and not conf.path("IMAGE").exists():
        raise ConfigError(
            f"IMAGE={image}: there is no {conf.path('IMAGE')}; CONTAINER={conf['CONTAINER']} "
            "needs it"
        )


def make_folder(folder: Path) -> None:
    """Makes an absolute folder in ``LOG_DIR``, and checks that it can be written.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"LOG_DIR={folder}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"LOG_DIR={folder}: this user may not write there; name another folder")


def check_port(port: int) -> None:
    """Checks that a port of this machine is free.

    Raises:
        SetupError: another program listens on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise SetupError(
                f"MASTER_PORT={port}: {error.strerror} on {socket.gethostname()}; another program "
                "listens there: set another MASTER_PORT"
            ) from error
