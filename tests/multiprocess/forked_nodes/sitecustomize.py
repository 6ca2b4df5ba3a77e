"""Makes Python programs run as forks of a process that has already imported their modules.

The fork server of a node, ``torchrun`` and each rank need seconds of CPU time for imports. If this
folder is in ``PYTHONPATH``, every Python process imports this module when the process starts. A
process that is about to run one of these programs sends its file descriptors to a server of the
tests. If ``TESTS_FORK_EVERY`` is set, processes with any other program do the same. The server
forks a child that runs the program. The original process forwards signals to the child, and exits
with the child's status. If the original process is killed, the server kills the child. Without a
server, the process runs its program itself.

Usage: ``sitecustomize.py SOCKET [MODULE ...]`` imports additional modules and runs the server in a
process forked by ``launch.Forkserver``. The server also serves processes on nodes that have
separate namespaces.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any

MODULE = "megatron.adaptive.cluster.rank_forkserver"
SCRIPTS = (
    "pretrain_gpt.py",
    "slow_rank.py",
    "gpt_steps.py",
    "gpu_check/steps.py",
    "watched.py",
    "pipeline_script.py",
)
PROGRAMS = [["-m", "megatron.adaptive", "train", "rank"], ["-m", "megatron.adaptive", "profile"]]
LAUNCHERS = [
    ["-m", "torch.distributed.run"],
    ["-m", "megatron.adaptive", "job", "launch"],
    ["-m", "pytest"],  # Some programs under test run tests themselves.
]
SOCKET = "TESTS_NODE_FORKSERVERS"
EVERY = "TESTS_FORK_EVERY"
NAMESPACES = ("net", "uts", "mnt", "pid")
PR_SET_NAME = 15
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ask(files: list[int], command: list[str]) -> None:
    """Asks the server for a fork, and exits with the status of the fork.

    Returns if there is no server.

    Args:
        files: File descriptors of this process. The last two are the standard output and error.
        command: Script and its arguments, or an empty list to request a node's fork server.
    """
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(os.environ[SOCKET])
        except OSError:
            return
        limits = {n: resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)}
        request = {"pid": os.getpid(), "variables": dict(os.environ), "folder": os.getcwd()}
        request |= {"words": command, "limits": limits, "started": started("self")}
        socket.send_fds(link, [json.dumps(request).encode() + b"\n"], files)
        if not command:
            os.close(files[0])
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: link.send(bytes([number])) and None)
        status = int(link.recv(64) or 1)
    _end(status)


def started(pid: int | str) -> str:
    """Returns the start time of process ``pid`` in clock ticks since boot, or "" if it is gone.

    Process IDs are reused, so only the ID and the start time together identify a process.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def fork_of(path: str, pid: int) -> int | None:
    """Returns the ID of the process that was forked for process ``pid``.

    Returns ``None`` if no process was forked.

    Args:
        path: Path of the server's socket.
        pid: ID of the process that may have requested a fork.
    """
    try:
        with open(f"{path}-{pid}") as file:
            asked_at, forked, forked_at = file.read().split()
    except (OSError, ValueError):
        return None
    is_same = asked_at == started(pid) and forked_at == started(forked)
    return int(forked) if is_same else None


def _end(status: int) -> None:
    """Exits with ``status``. If ``status`` is negative, kills this process with the same signal."""
    if status < 0:
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_trainer(command: list[str]) -> bool:
    """Returns whether ``command``, the words after ``python -u``, starts a rank of a job."""
    by_name = bool(command) and command[0].endswith(SCRIPTS)
    return by_name or any(command[: len(program)] == program for program in PROGRAMS)


def is_launcher(command: list[str]) -> bool:
    """Returns whether ``command``, the words after ``python``, starts a launcher of ranks."""
    by_name = bool(command) and command[0].endswith("/torchrun")
    return by_name or any(command[: len(launcher)] == launcher for launcher in LAUNCHERS)


def is_program(command: list[str]) -> bool:
    """Returns whether ``command`` runs a module, a script or inline code.

    Returns false for processes of ``multiprocessing``, because a fork would not inherit their file
    descriptors.
    """
    if not command:
        return False
    is_code = command[0] == "-c" and "multiprocessing" not in command[1]
    return is_code or command[0] == "-m" or command[0].endswith(".py")


def serve(path: str, *modules: str) -> None:
    """Forks a process for each request until this process is killed.

    Args:
        path: Path of the socket that receives requests.
        modules: Modules to import before the first fork.
    """
    for module in modules:
        importlib.import_module(module)
    # Without this call, garbage collection in a forked process would copy shared memory pages.
    gc.freeze()
    # Each forked process has two keys in this dict: its pidfd and the socket of its request.
    forked: dict[Any, tuple[int, socket.socket]] = {}
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            for ready in select.select([listener, *forked], [], [])[0]:
                if ready is listener:
                    pid, link = _fork(listener)
                    forked[link] = forked[os.pidfd_open(pid)] = pid, link
                elif ready in forked and isinstance(ready, int):
                    pid, link = forked.pop(ready)
                    forked.pop(link, None)
                    os.close(ready)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with link, contextlib.suppress(OSError):
                        link.send(str(status).encode())
                elif ready in forked:
                    pid, link = forked[ready]
                    numbers = _received(link)
                    if not numbers:
                        del forked[ready]
                    for number in numbers or [signal.SIGKILL]:
                        for member in [pid] if numbers else _family(pid):
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(member, number)


def _received(link: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return link.recv(64)
    return b""


def _family(pid: int) -> list[int]:
    """Returns ``pid`` and the process IDs of all descendants of the process."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def _fork(listener: socket.socket) -> tuple[int, socket.socket]:
    link, _ = listener.accept()
    data, files, _, _ = socket.recv_fds(link, 1 << 18, 3)
    while not data.endswith(b"\n"):
        data += link.recv(1 << 18)
    peer = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    pid = os.fork()
    if pid == 0:
        listener.close()
        link.close()
        _become(peer, json.loads(data), *files)
    for file in files:
        os.close(file)
    return pid, link


def _enter(peer: int) -> None:
    """Makes this process enter all namespaces of the process ``peer``.

    A new PID namespace applies only to children of this process. If it differs, this function
    returns in a child, and this process exits with the status of the child.
    """
    import ctypes

    from megatron.adaptive.config.parent_process import end_with_parent

    paths = {kind: f"/proc/{peer}/ns/{kind}" for kind in NAMESPACES}
    others = [
        kind for kind in paths if os.readlink(paths[kind]) != os.readlink(f"/proc/self/ns/{kind}")
    ]
    for file in [os.open(paths[kind], os.O_RDONLY) for kind in others]:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    if "pid" not in others:
        return
    end_with_parent()
    if (child := os.fork()) == 0:
        return
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    _end(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _become(peer: int, request: dict[str, Any], first: int, output: int, error: int) -> None:
    """Runs the requested script or a node's fork server in this process, and then exits."""
    from megatron.adaptive.cluster import rank_forkserver
    from megatron.adaptive.config.parent_process import end_with_parent

    status = 1
    try:
        _enter(peer)
        os.setsid()
        end_with_parent()
        for file, number in ((output, 1), (error, 2)):
            os.dup2(file, number)
            os.close(file)
        for name, limit in request["limits"].items():
            resource.setrlimit(int(name), limit)
        # Torch renames launchers, so tests use this file to find the forked process.
        with open(f"{request['variables'][SOCKET]}-{request['pid']}", "w") as record:
            record.write(f"{request['started']} {os.getpid()} {started('self')}")
        os.environ.clear()
        os.environ.update(request["variables"])
        os.chdir(request["folder"])
        if request["words"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _name(f"python-{request['pid']}")
            os.dup2(first, 0)
            os.close(first)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
            from tests.labs.one_import import run
            from tests.multiprocess.forked_rank import add_python_path

            add_python_path()
            is_script = request["words"][0] not in ("-m", "-c")
            sys.path[0] = os.path.dirname(request["words"][0]) if is_script else os.getcwd()
            status = run({"variables": {}, "words": request["words"]})
        else:
            # The name contains the ID of the requesting process, so tests can find the fork by its
            # name.
            _name(f"node-{request['pid']}")
            rank_forkserver.main(first)
            status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _name(name: str) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


if __name__ == "__main__":
    serve(*sys.argv[1:])
elif SOCKET in os.environ:
    if sys.orig_argv[1:3] == ["-m", MODULE]:
        ask([int(sys.orig_argv[3]), 1, 2], [])
    elif "LOCAL_RANK" in os.environ and is_trainer(sys.orig_argv[2:]):
        ask([0, 1, 2], sys.orig_argv[2:])
    elif is_launcher(sys.orig_argv[1:]) and "SLURM_JOB_ID" not in os.environ:
        # Under Slurm, do not fork launchers, because Slurm sends signals only to the processes of
        # its own step.
        ask([0, 1, 2], sys.orig_argv[1:])
    elif EVERY in os.environ:
        command = sys.orig_argv[2:] if sys.orig_argv[1:2] == ["-u"] else sys.orig_argv[1:]
        if is_program(command):
            ask([0, 1, 2], command)
