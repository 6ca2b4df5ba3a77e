"""Boots nodes, runs a command on each node, and collects the output."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import kernel, qemu
from .packages import LabError

__all__ = ["DIED", "MACHINES", "TIMED_OUT", "Result", "run"]

MACHINES = ("uml", "qemu")
"""Kinds of nodes: User-mode Linux, or a machine emulated by QEMU."""

TIMED_OUT = 124
"""Exit status of the lab after a timeout."""
DIED = 125
"""Exit status of a node whose kernel has exited."""

_SCRIPTS = Path(__file__).parent
_GRACE_S = 10.0  # If a node fails, the other nodes have this number of seconds to finish.
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

OnLine = Callable[[int, str], None]


@dataclass(frozen=True)
class Result:
    """Result of a command on all nodes.

    Attributes:
        status: Exit status of the first node that failed, 124 after a timeout, or 0.
        statuses: Exit status of each node, in the order of ranks. The status is ``None`` if the
            command did not finish.
        output: Text that each node has written to stdout and stderr, in the order of ranks.
        duration_s: Duration of the run in seconds, including the boot.
    """

    status: int
    statuses: tuple[int | None, ...]
    output: tuple[str, ...]
    duration_s: float

    @property
    def text(self) -> str:
        """Returns the exit statuses and the output of all nodes as readable text."""
        said = [
            f"[{rank}] {line}"
            for rank, part in enumerate(self.output)
            for line in part.splitlines()
        ]
        return "\n".join([f"status {self.status}, by node {self.statuses}", *said])


@dataclass(frozen=True)
class _Boot:
    """Settings for booting the nodes of a run.

    Attributes:
        machine: Kind of the nodes, one of :data:`MACHINES`.
        kernel: Path of the program that runs a node. For QEMU, path of the folder that contains the
            kernel and the initial file system.
        folder: Folder for files that are exchanged with the nodes. It is deleted at the end.
        share: Folder that the nodes use as ``LAB_SHARE``.
        memory_mib: Memory of a node, in MiB.
    """

    machine: str
    kernel: Path
    folder: Path
    share: Path
    memory_mib: int


@dataclass
class _Node:
    """Tracks the process, the output and the exit status of a running node."""

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    on_line: OnLine | None
    said: list[str] = field(default_factory=list)
    status: int | None = None
    read_bytes: int = 0

    def look(self) -> None:
        """Reads new output of the node, and its exit status if it has finished."""
        ended = self.process.poll() is not None
        self.read()
        file = self.folder / f"status.{self.rank}"
        if file.exists():
            self.status = int(file.read_text())
        elif ended:
            self.status = DIED

    def read(self, *, last: bool = False) -> None:
        """Reads the complete lines that the node has written since the last call.

        If ``last``, also reads an incomplete last line.
        """
        with (self.folder / f"output.{self.rank}").open("rb") as output:
            output.seek(self.read_bytes)
            new = output.read()
        end = len(new) if last else new.rfind(b"\n") + 1
        self.read_bytes += end
        for line in new[:end].decode(errors="replace").splitlines():
            self.say(line)

    def say(self, line: str) -> None:
        """Adds ``line`` to the node's output, and passes it to ``on_line``."""
        self.said.append(line)
        if self.on_line is not None:
            self.on_line(self.rank, line)

    def end(self) -> None:
        """Kills the node and all of its programs, and waits until the node has exited."""
        # The process of the node may have exited already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def conclude(self) -> None:
        """Reads the remaining output, and adds the console's output if the node did not finish."""
        self.read(last=True)
        if self.status in (None, DIED):
            console = (self.folder / f"console.{self.rank}").read_text(errors="replace")
            how = "did not finish" if self.status is None else "died"
            self.say(f"(the node {how}; end of its console: {console[-1500:].strip() or 'empty'})")


def run(
    command: Sequence[str],
    *,
    nodes: int = 2,
    timeout_s: float = 300.0,
    env: Mapping[str, str] | None = None,
    memory_mib: int = 1024,
    share: Path | None = None,
    on_line: OnLine | None = None,
    machine: str = "uml",
) -> Result:
    """Runs ``command`` on every node, and waits until all nodes have finished.

    Args:
        command: Program and its arguments.
        nodes: Number of nodes.
        timeout_s: Timeout in seconds. It includes the boot, but not the first compilation of the
            kernel.
        env: Environment variables, in addition to those of this process.
        memory_mib: Memory of each node in MiB. It also holds the files that the node writes.
        share: Existing folder that nodes use as ``LAB_SHARE``. If it is ``None``, a new folder is
            created, and deleted at the end.
        on_line: Function that is called with the rank and the text of each line that a node writes.
        machine: Kind of the nodes, one of :data:`MACHINES`.

    Raises:
        LabError: Nodes cannot run on this machine.
    """
    program = qemu.prepare() if machine == "qemu" else kernel.prepare()
    with tempfile.TemporaryDirectory(prefix="rdma-lab-") as name:
        folder = (share or Path(name, "share")).resolve()
        boot = _Boot(machine, program, Path(name), folder, memory_mib)
        if share is None:
            boot.share.mkdir()
        if any(character.isspace() for character in f"{boot.folder}{boot.share}"):
            raise LabError(f"the RDMA lab cannot use a folder with a space: {boot.share}")
        _write_files(boot, nodes, command, env or {})
        started: list[_Node] = []
        begin_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            processors = _processors(boot.machine)
            for rank, links in enumerate(_links(nodes, stack)):
                process = _start(boot, rank, nodes, links, processors[rank % len(processors)])
                node = _Node(rank, process, boot.folder, on_line)
                started.append(node)
                stack.callback(node.end)
            first_failure = _watch(started, begin_s + timeout_s)
        duration_s = time.monotonic() - begin_s
        for node in started:
            node.conclude()
    finished = all(node.status is not None for node in started)
    return Result(
        status=first_failure or (0 if finished else TIMED_OUT),
        statuses=tuple(node.status for node in started),
        output=tuple("".join(f"{line}\n" for line in node.said) for node in started),
        duration_s=duration_s,
    )


def _watch(nodes: list[_Node], deadline_s: float) -> int:
    """Waits for ``nodes`` until ``deadline_s``, and returns the first nonzero exit status, or 0."""
    failure = 0
    while any(node.status is None for node in nodes) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        for node in nodes:
            if node.status is None:
                node.look()
                if node.status and not failure:
                    failure = node.status
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return failure


def _write_files(boot: _Boot, nodes: int, command: Sequence[str], env: Mapping[str, str]) -> None:
    """Writes the files that nodes read at boot, and creates files for the output of nodes.

    ``boot`` describes how nodes are started, and ``nodes`` is the number of nodes.

    The nodes run ``command`` with the environment variables ``env``.
    """
    addresses = [f"10.77.0.{rank + 1}" for rank in range(nodes)]
    variables = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        **env,
        "WORLD_SIZE": str(nodes),
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": "29500",
        "LAB_ADDRS": ",".join(addresses),
        "LAB_RDMA_DEV": "rxe0",
        "LAB_SHARE": str(boot.share),
        "LAB_CWD": os.getcwd(),
    }
    exports = (
        f"export {name}={shlex.quote(value)}\n"
        for name, value in variables.items()
        if name.isidentifier()
    )
    (boot.folder / "environment").write_text("".join(exports))
    (boot.folder / "command").write_text(shlex.join(command))
    hosts = (f"{address} node{rank}\n" for rank, address in enumerate(addresses))
    (boot.folder / "hosts").write_text("".join(hosts))
    shutil.copyfile("/proc/cpuinfo", boot.folder / "cpuinfo")
    for script in ("init.sh", "node.sh"):
        shutil.copyfile(_SCRIPTS / script, boot.folder / script)
        (boot.folder / script).chmod(0o755)
    for rank in range(nodes):
        (boot.folder / f"output.{rank}").touch()


def _links(nodes: int, stack: contextlib.ExitStack) -> list[list[socket.socket]]:
    """Connects node 0 to each of the other ``nodes - 1`` nodes.

    Returns a list for each node with the sockets of its links. ``stack`` closes the sockets.

    Each link is a pair of sockets, one of which belongs to node 0.
    """
    first: list[socket.socket] = []
    rest: list[list[socket.socket]] = []
    for _ in range(1, nodes):
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        # All links stay open until the run ends, so other nodes do not notice if a node dies.
        for end in pair:
            stack.enter_context(end)
        first.append(pair[0])
        rest.append([pair[1]])
    return [first, *rest]


def _processors(machine: str) -> list[set[int]]:
    """Returns sets of processors. Nodes of the kind ``machine`` are bound to one set after another.

    User-mode Linux has one processor, but consists of two processes on the host: the kernel and its
    programs. Only one of these processes runs at a time. On different processors, system calls
    would take two to three times as long for several seconds, and the nodes would differ in speed.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if machine != "uml":
        return [set(allowed)]
    # Shuffle the processors, because several labs may run at the same time.
    random.shuffle(allowed)
    return [{processor} for processor in allowed]


def _start(
    boot: _Boot, rank: int, nodes: int, links: list[socket.socket], processors: set[int]
) -> subprocess.Popen[bytes]:
    """Starts node ``rank`` on ``processors``. The node is killed if the calling thread exits.

    ``boot`` describes how nodes are started, and ``links`` contains the sockets of this node's
    links.
    """

    def prepare() -> None:
        os.sched_setaffinity(0, processors)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    variables = [f"lab_rank={rank}", f"lab_dir={boot.folder}", f"lab_share={boot.share}"]
    if boot.machine == "qemu":
        command = qemu.arguments(
            boot.kernel,
            rank,
            links,
            memory_mib=boot.memory_mib,
            folders={"dir": boot.folder, "share": boot.share},
            variables=[f"lab_init={boot.folder}/init.sh", *variables],
        )
    else:
        command = _user_mode_linux(boot, variables, links)
    # A node's memory is a file, which must be on a file system that allows execution.
    shm = os.statvfs("/dev/shm")
    free_mib = 0 if shm.f_flag & os.ST_NOEXEC else shm.f_bavail * shm.f_frsize >> 20
    memory = Path("/dev/shm") if free_mib > nodes * boot.memory_mib else boot.folder
    with (boot.folder / f"console.{rank}").open("w") as console:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env={**os.environ, "TMPDIR": str(memory)},
            pass_fds=[link.fileno() for link in links],
            start_new_session=True,
            preexec_fn=prepare,
        )


def _user_mode_linux(
    boot: _Boot, variables: Sequence[str], links: Sequence[socket.socket]
) -> list[str]:
    """Returns the command that starts a node as User-mode Linux.

    The node has the kernel variables ``variables`` and the sockets ``links``.
    """
    command = [str(boot.kernel), f"mem={boot.memory_mib}M"]
    command += "root=/dev/root rootfstype=hostfs rootflags=/ ro quiet panic=-1".split()
    command += [
        f"init={boot.folder}/init.sh",
        f"uml_dir={boot.folder}",
        "con=null",
        "con0=null,fd:1",
    ]
    command += variables
    command += [
        f"vec{index}:transport=fd,fd={link.fileno()},mtu=9000,depth=64"
        for index, link in enumerate(links)
    ]
    return command
