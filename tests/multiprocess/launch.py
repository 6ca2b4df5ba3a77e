"""Runs programs as ranks on this machine, with a timeout after which all processes are killed.

Each process that runs tests has one fork server, the same program that runs on the nodes of a job.
This server forks the ranks, because importing torch and megatron-core takes longer than most
programs run. Tests of the launcher, or of the imports in a user's process, start new processes
instead.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from harness.processes import environment, kill_tree
from harness.report import ROOT

WORKER = Path(__file__).with_name("worker.py")
TIMED_LAYERS = ROOT / "tests" / "support" / "timed_layers.py"
RANK = Path(__file__).with_name("forked_rank.py")
NODES = Path(__file__).with_name("forked_nodes")
PACKAGES = str(ROOT / "build/gpu-check-site")
"""Folder of packages for a Python whose own environment cannot be changed."""
SERVER = ("-m", "megatron.adaptive.cluster.rank_forkserver")
SOCKET = "TESTS_NODE_FORKSERVERS"
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
START_LIMIT_S = 120.0
GRACE_S = 2.0
TRANSFORMERS = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
)
"""Modules that programs with ``transformers`` models import, which takes seconds."""


class Forkserver:
    """Runs a server process that has imported the modules of ranks and forks programs.

    This class is not thread-safe.

    Args:
        python_path: Folders that are searched before the environment's import path.
        program: Command of the server. Required only if ranks need other imports than the ranks of
            a node.
        variables: Additional environment variables of the server.
    """

    def __init__(
        self,
        python_path: str,
        program: Sequence[str] = SERVER,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tests-forkserver-"))
        self._orders, server_end = socket.socketpair()
        self._log = self._folder / "log.txt"
        if python_path == str(ROOT) and SOCKET in os.environ:
            # If this process itself runs inside a test, the fork server of that test also forks
            # this server.
            python_path = f"{NODES}:{ROOT}"
        with server_end, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *program, str(server_end.fileno())],
                pass_fds=[server_end.fileno()],
                env=environment(PYTHONPATH=_with_packages(python_path)) | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._buffer = b""
        self._keys = itertools.count()
        self._ended: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        # Maps imported modules to the key of the server that imported them and the path of its
        # socket.
        self._nodes: dict[tuple[str, ...], tuple[str, Path]] = {}
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self, command: Sequence[str], *, output: Path, error: Path, variables: dict[str, str]
    ) -> str:
        """Forks a program, and returns the key that identifies the program on this server.

        Args:
            command: Script and its arguments, or ``-m``, a module and its arguments.
            output: Path of the file to which standard output is appended.
            error: Path of the file to which standard error is appended. May be the same as
                ``output``.
            variables: Complete environment of the program.
        """
        key = str(next(self._keys))
        settings = {"output": str(output), "error": str(error), "names": sorted(variables)}
        order = {
            "key": key,
            "variables": variables,
            "script": str(RANK),
            "arguments": [json.dumps(settings), *command],
            "folder": str(output.parent),
        }
        self._orders.sendall(json.dumps({"start": order}).encode() + b"\n")
        end_s = time.monotonic() + START_LIMIT_S
        while key not in self._pids:
            if not self._read(end_s):
                raise AssertionError(f"the fork server does not respond: {tail(self._log)}")
        return key

    def nodes(self, modules: Sequence[str] = ()) -> tuple[psutil.Process, dict[str, str]]:
        """Returns the process that forks the fork servers of nodes, and variables that select it.

        The mechanism is described in ``forked_nodes/sitecustomize.py``.

        Args:
            modules: Modules to import in addition to the modules of a node's fork server.
        """
        if tuple(modules) not in self._nodes:
            path = self._folder / f"nodes{len(self._nodes)}"
            command = [str(NODES / "sitecustomize.py"), str(path), *modules]
            files = {"output": self._log, "error": self._log, "variables": environment()}
            key = self.start(command, **files)  # type: ignore[arg-type]
            end_s = time.monotonic() + START_LIMIT_S
            while not path.exists():
                assert time.monotonic() < end_s, tail(self._log)
                time.sleep(0.01)
            self._nodes[tuple(modules)] = key, path
        key, path = self._nodes[tuple(modules)]
        variables = {"PYTHONPATH": _with_packages(f"{NODES}:{ROOT}"), SOCKET: str(path)}
        return psutil.Process(self._pids[key]), variables

    def wait(self, keys: Sequence[str], limit_s: float) -> dict[str, int]:
        """Waits until all programs ``keys`` have exited, one has failed, or ``limit_s`` has passed.

        Returns a dict that maps the key of each program that has exited to its exit status.
        """
        end_s = time.monotonic() + limit_s
        while True:
            ended = {key: self._ended[key] for key in keys if key in self._ended}
            if len(ended) == len(keys) or any(ended.values()) or not self._read(end_s):
                return ended

    def kill(self, keys: Sequence[str]) -> None:
        """Terminates the programs ``keys`` that are still running, and all their descendants."""
        left = [key for key in keys if key not in self._ended]
        families: list[psutil.Process] = []
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 10.0)):
            for key in left:
                try:
                    process = psutil.Process(self._pids[key])
                    families += process.children(recursive=True)
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
            end_s = time.monotonic() + grace_s
            while any(key not in self._ended for key in left) and self._read(end_s):
                pass
            left = [key for key in left if key not in self._ended]
        for member in families:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()

    def close(self) -> None:
        """Kills the server and removes its folder. The forked processes end with the server."""
        self._process.kill()
        self._process.wait(10)
        self._orders.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, end_s: float) -> bool:
        """Reads messages of the server.

        Returns false if the time ``end_s`` has passed or the server has exited.
        """
        if not select.select([self._orders], [], [], max(0.0, end_s - time.monotonic()))[0]:
            return False
        data = self._orders.recv(1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "started" in message:
                self._pids[message["started"]] = message["pid"]
            elif "ended" in message:
                self._ended[message["ended"]] = message["status"]
        return bool(data)


def _with_packages(python_path: str) -> str:
    """Adds the folder of packages that ``scripts/gpu_check.sh`` has installed, if it is used."""
    is_used = PACKAGES in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return f"{python_path}{os.pathsep}{PACKAGES}" if is_used else python_path


@cache
def _servers() -> dict[str, Forkserver]:
    return {}


def forkserver(python_path: str = str(ROOT), modules: Sequence[str] = ()) -> Forkserver:
    """Returns this process's fork server for ``python_path``. The first call starts the server.

    If the path contains no other ``megatron`` package, returns the server of this checkout, because
    the imports are the same. Forked ranks then add the folders of the path.

    Args:
        python_path: Folders that are searched before the environment's import path.
        modules: Modules to import in addition to the modules of a node's fork server, such as
            ``TRANSFORMERS``. A server with such modules is forked from the server of this checkout.
    """
    servers = _servers()
    if modules:
        key = " ".join(modules)
        if key not in servers or not servers[key].is_alive:
            servers[key] = Forkserver(str(ROOT), variables=forkserver().nodes(modules)[1])
        return servers[key]
    folders = [folder for folder in python_path.split(os.pathsep) if folder != str(ROOT)]
    if not any(Path(folder, "megatron").exists() for folder in folders):
        python_path = str(ROOT)
    if python_path not in servers or not servers[python_path].is_alive:
        servers[python_path] = Forkserver(python_path)
    return servers[python_path]


def free_port() -> int:
    """Returns an unused TCP port that is not in the range of ephemeral ports.

    The system could give an ephemeral port to another program before the test uses the port.
    """
    first = int(PORT_RANGE.read_text().split()[0])
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(min(10_000, first // 2), first)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def wait_until(
    holds: Callable[[], object], why: Callable[[], object], limit_s: float, every_s: float = 0.05
) -> None:
    """Calls ``holds`` every ``every_s`` seconds until it returns true.

    After ``limit_s`` seconds, fails with the text that ``why`` returns.
    """
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"timed out after {limit_s:g} s: {why()}"
        time.sleep(every_s)


def has_ended(process: psutil.Process) -> bool:
    """Returns whether ``process`` has exited, even if its parent has not waited for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def limited_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a disk of ``size``, such as ``16m``, at ``folder``, and unmounts the disk afterwards.

    Skips the test if mounting fails.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        import pytest

        pytest.skip(f"cannot mount a disk of limited size: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def forking(modules: Sequence[str] = ()) -> dict[str, str]:
    """Returns environment variables that make launchers fork their ranks from a server.

    Args:
        modules: Modules that forked ranks have imported in addition to the modules of a node's fork
            server.
    """
    return environment(**forkserver().nodes(modules)[1])


def forking_every(modules: Sequence[str] = ()) -> dict[str, str]:
    """Returns environment variables that make a Python program and all its children start as forks.

    Use these variables only for programs whose imports and memory are not tested, because a fork
    inherits both.

    Args:
        modules: Modules that forks have imported in addition to the modules of a node's fork
            server.
    """
    return {**forking(modules), "TESTS_FORK_EVERY": "1"}


def run_ranks(
    command: Sequence[str],
    *,
    world_size: int,
    log: Path,
    limit_s: float,
    python_path: str = str(ROOT),
    modules: Sequence[str] = (),
) -> int | None:
    """Runs a program as the ranks of a job, with the environment variables that ``torchrun`` sets.

    Args:
        command: Script and its arguments, or ``-m``, a module and its arguments.
        world_size: Number of ranks.
        log: Path of the file for the output of all ranks. Ranks run in the folder of this file.
        limit_s: Timeout in seconds, which is also passed to ranks as ``WATCHDOG_S``. Ranks are
            killed five seconds later.
        python_path: Folders that are searched before the environment's import path.
        modules: Modules that ranks have imported when they start, as for :func:`forkserver`.

    Returns:
        Exit status of the first rank that failed, 0 if no rank failed, or ``None`` if ranks were
        killed.
    """
    ranks = Ranks(
        command,
        world_size=world_size,
        log=log,
        limit_s=limit_s,
        python_path=python_path,
        server=forkserver(python_path, modules),
    )
    try:
        ended = ranks.wait(limit_s + 5)
    finally:
        ranks.kill()
    if failed := [status for status in ended if status]:
        return failed[0]
    return 0 if len(ended) == world_size else None


class Ranks:
    """Runs the ranks of a job while the test continues. See :func:`run_ranks`.

    Args:
        command: Command of a rank. The parameters up to ``python_path`` are those of
            :func:`run_ranks`.
        variables: Additional environment variables.
        server: Fork server, or ``None`` to use the server of this process.

    Attributes:
        server: Fork server of the ranks.
        keys: Keys of the ranks on the fork server.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        world_size: int,
        log: Path,
        limit_s: float,
        python_path: str = str(ROOT),
        variables: Mapping[str, str] | None = None,
        server: Forkserver | None = None,
    ) -> None:
        log.write_text("")
        self.server, self._store = server or forkserver(python_path), meeting()
        self.keys: list[str] = []
        common = rank_variables(world_size, limit_s, self._store.port, python_path)
        for rank in range(world_size):
            numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            whole_environment = environment(**common, **numbers, **(variables or {}))
            self.keys.append(
                self.server.start(command, output=log, error=log, variables=whole_environment)
            )

    def processes(self) -> list[psutil.Process]:
        """Returns the processes of the ranks that are still running."""
        alive = []
        for key in self.keys:
            with contextlib.suppress(psutil.NoSuchProcess):
                alive.append(psutil.Process(self.server._pids[key]))
        return alive

    def wait(self, limit_s: float) -> list[int]:
        """Waits until all ranks exit, one fails, or ``limit_s`` passes.

        Returns the exit statuses of the ranks that have exited.
        """
        return [*self.server.wait(self.keys, limit_s).values()]

    def kill(self) -> None:
        """Terminates the ranks that are still running."""
        self.server.kill(self.keys)


def meeting() -> Any:
    """Returns a store in which ranks find each other's addresses, as in a launcher's store."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def rank_variables(
    world_size: int, limit_s: float, port: int, python_path: str = str(ROOT)
) -> dict[str, str]:
    """Returns the environment variables that ``torchrun`` sets to the same values on all ranks.

    ``port`` is the port of the store. See :func:`run_ranks` for the other arguments.
    """
    return {
        "WATCHDOG_S": str(limit_s),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": _with_packages(python_path),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def torchrun(
    script: Path,
    arguments: Sequence[str],
    *,
    world_size: int,
    log: Path,
    limit_s: float,
    fresh: bool = False,
    python_path: str = str(ROOT),
) -> None:
    """Runs a script as the ranks of a job, like :func:`run_ranks`.

    Args:
        script: Path of the program of every rank.
        arguments: Arguments of the program.
        world_size: Number of ranks.
        log: Path of the file for the output of all ranks.
        limit_s: Timeout in seconds, as for :func:`run_ranks`.
        fresh: Whether torchrun starts new processes, which import all modules themselves.
            Otherwise, ranks are forked.
        python_path: Folders that forked ranks search before the environment's import path.

    Raises:
        AssertionError: A rank failed or timed out. The message contains the end of the output.
    """
    if fresh:
        status = _run_fresh(script, arguments, world_size, log, limit_s)
    else:
        status = run_ranks(
            [str(script), *arguments],
            world_size=world_size,
            log=log,
            limit_s=limit_s,
            python_path=python_path,
        )
    said = "exited with status " + str(status) if status is not None else "were killed"
    assert status == 0, f"{world_size} ranks of {script.name} {said}:\n{tail(log)}"


def _run_fresh(
    script: Path, arguments: Sequence[str], world_size: int, log: Path, limit_s: float
) -> int | None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    # The launcher itself is forked even if its ranks are not forked.
    job = start([*command, script, *arguments], log, {**forking(), "WATCHDOG_S": str(limit_s)})
    try:
        return job.wait(limit_s + 5)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_tree(job)


def start(
    command: Sequence[str | Path], log: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a program in a new session, and returns its process.

    Args:
        command: Program and its arguments.
        log: Path of a new file for the output. The program runs in the folder of this file.
        variables: Complete environment of the program.
    """
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            env=variables,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_forked(
    command: Sequence[str],
    *,
    folder: Path,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs a program like ``subprocess.run``, but forked from a process that has imported torch.

    Args:
        command: Script and its arguments, or ``-m``, a module and its arguments.
        folder: Working directory.
        limit_s: Timeout in seconds, after which the program is killed.
        variables: Environment variables in addition to :func:`environment`.
        modules: Modules that the program has imported when it starts, as for :func:`forkserver`.

    Raises:
        AssertionError: The program timed out. The message contains the end of the output.
    """
    server = forkserver(modules=modules)
    with tempfile.TemporaryDirectory(prefix="tests-output-") as name:
        output, error = Path(name, "output"), Path(name, "error")
        output.touch()
        error.touch()
        whole_environment = environment(**(variables or {}), FORKED_FOLDER=str(folder))
        key = server.start(command, output=output, error=error, variables=whole_environment)
        try:
            ended = server.wait([key], limit_s)
        finally:
            server.kill([key])
        said = output.read_text(errors="replace"), error.read_text(errors="replace")
    assert key in ended, f"{command} took longer than {limit_s:g} s:\n{''.join(said)[-12_000:]}"
    return subprocess.CompletedProcess([*command], ended[key], *said)


SMALL_GPT = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --eval-iters 1 "
    "--tokenizer-type NullTokenizer --vocab-size 255"
)
"""Flags of the model for ``worker.py``, except the numbers of layers and iterations.

With the end-of-document token, 255 tokens give 256 rows, which every tensor-parallel size divides.
"""
_FOUR = """
{"attention":{"n_heads_in_group":2},"ffn":{"ffn_hidden_size":48}},
{"attention":{"n_heads_in_group":null,"no_op":true},"ffn":{"ffn_mult":2.0}},
{"attention":{"n_heads_in_group":null,"replace_with_linear":true},"mlp":{"ffn_hidden_size":32}},
{"attention":{"num_query_groups":4},"ffn":{"ffn_mult":null,"no_op":true}}
""".replace("\n", "")
UNLIKE_LAYERS = f'--heterogeneous-layers-config-encoded-json {{"block_configs":[{_FOUR},{_FOUR}]}}'
"""Flag for a model with four kinds of layers, each of which is used twice."""


class CaseRuns:
    """Runs ``worker.py``, and stores the results of all ranks for each case.

    All cases with the same world size run in one job, because starting processes takes longer than
    training. The job starts when the first of its cases is requested.

    Args:
        cases_of: Function that takes a world size and returns its cases.
        new_folder: Function that creates a folder with the given name, such as
            ``tmp_path_factory.mktemp``.
        limit_s: Timeout of a job, in seconds.
    """

    def __init__(
        self,
        cases_of: Callable[[int], Sequence[dict[str, Any]]],
        new_folder: Callable[[str], Path],
        limit_s: float,
    ) -> None:
        self._cases_of = cases_of
        self._new_folder = new_folder
        self._limit_s = limit_s
        self.folders: dict[int, Path] = {}
        self._results: dict[int, dict[str, Any]] = {}
        self._errors: dict[int, str] = {}

    def __call__(self, size: int, name: str) -> dict[str, Any]:
        """Returns the results of the case ``name``, which has ``size`` ranks.

        Raises AssertionError if the case did not finish.
        """
        if size not in self.folders:
            self._train(size)
        results = self._results.get(size, {})
        reason = self._errors.get(size, "The job was interrupted, for example by a test's timeout.")
        assert name in results, f"{name} has no result. {reason}"
        result: dict[str, Any] = results[name]
        return result

    def _train(self, size: int) -> None:
        folder = self.folders[size] = self._new_folder(f"ranks{size}")
        cases_file, results_file = folder / "cases.json", folder / "results.json"
        cases_file.write_text(json.dumps(self._cases_of(size)))
        arguments, log = [str(cases_file), str(results_file)], folder / "output.txt"
        try:
            torchrun(WORKER, arguments, world_size=size, log=log, limit_s=self._limit_s)
        except AssertionError as failure:
            self._errors[size] = str(failure)
        self._results[size] = json.loads(results_file.read_text()) if results_file.exists() else {}


def tail(path: Path, limit: int = 12_000) -> str:
    """Returns the last ``limit`` characters of the file ``path``."""
    text = path.read_text(errors="replace")
    return text if len(text) <= limit else f"...{text[-limit:]}"
