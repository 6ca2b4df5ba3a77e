"""Emulates the nodes of a job on one machine, with namespaces, a switch and shared folders.

::

    switch ──┬── node 0   init ── run ── agent ── forkserver ── ranks
             ├── node 1   init ── run ── forkserver ── ranks
             └── node 2   ...

Each node has its own processes, host name and network. The first process of a node keeps running
after the job's process has exited, so that tests can detect leftover processes. When this program
exits, the first process and all other processes of the node exit too. The emulation requires root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

_ENTER = """
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
hostname "$2"
status=$3
shift 3
"$@" < /dev/null &
wait "$!"
echo "$?" > "$status.new"
mv "$status.new" "$status"
read -r _
"""
"""Script of a node's first process. It runs until this program closes its standard input."""
_PROGRAMS = ("ip", "unshare", "mount", "umount")
_FORKSERVER = "megatron.adaptive.cluster.rank_forkserver"
_LIMIT_S = 20.0


def why_not() -> str | None:
    """Returns the reason why this machine cannot emulate nodes, or ``None`` if it can."""
    if os.geteuid() != 0:
        return "emulating nodes requires root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"emulating nodes requires {', '.join(missing)} (packages iproute2, util-linux, mount)"
        )
    probe = f"probe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"cannot create network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class Node:
    """Emulated node, which is initially powered off.

    Args:
        number: Index of the node, counted from 0.
        slots: Number of ranks that the node can run.
        folder: Folder for the log and the exit status of the node.
        switch: Name of the switch's network namespace.
    """

    def __init__(self, number: int, slots: int, folder: Path, switch: str) -> None:
        self.name = f"node{number}"
        self.slots = slots
        self.address = f"10.57.0.{number + 2}"
        self.log = folder / f"{self.name}.txt"
        self.space = f"{switch}n{number}"
        self.is_cut = False
        self.begun_at = 0  # The output since the last start begins at this offset in the log file.
        self._folder = folder
        self._status = folder / f"{self.name}.status"
        self._switch = switch
        self._port = f"port{number}"
        self._init: subprocess.Popen[bytes] | None = None

    def plug(self) -> None:
        """Creates the network of the node. Call this method once, before the node boots."""
        name, ends = self.space, ("netns", self._switch, "type", "veth", "peer", "name", "net0")
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", self._port, *ends, "netns", name)
        _ip("-n", name, "address", "add", f"{self.address}/24", "dev", "net0")
        _ip("-n", name, "link", "set", "net0", "up")
        _ip("-n", name, "route", "add", "default", "via", "10.57.0.1")
        self.mend()

    def boot(self, command: Sequence[str], variables: dict[str, str]) -> None:
        """Runs ``command`` on the node with the environment variables ``variables``.

        First kills all processes of the node if it is running.
        """
        self.off()
        self.mend()
        self._status.unlink(missing_ok=True)
        self.begun_at = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._init = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.space, "unshare", "--uts"),
                    *("--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("bash", "-uc", _ENTER, "enter", str(self._folder), self.name),
                    *(str(self._status), *command),
                ],
                env=variables,
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def off(self) -> None:
        """Kills all processes of the node, as if the power failed."""
        init, self._init = self._init, None
        if init is None:
            return
        init.kill()  # The kernel then kills all other processes of the namespace.
        init.wait(_LIMIT_S)
        assert init.stdin is not None
        init.stdin.close()

    def cut(self, *, silently: bool) -> None:
        """Disconnects the node from the switch.

        If ``silently`` is true, the node's network interface keeps its carrier, so that the node
        does not notice the disconnection.
        """
        self.is_cut = True
        state = ("nomaster",) if silently else ("down",)
        _ip("-n", self._switch, "link", "set", self._port, *state)

    def mend(self) -> None:
        """Reconnects the node to the switch. It is safe to call this method several times."""
        self.is_cut = False
        _ip("-n", self._switch, "link", "set", self._port, "master", "net0", "up")

    @property
    def is_on(self) -> bool:
        """Returns whether the node is powered on."""
        return self._init is not None and self._init.poll() is None

    @property
    def is_running(self) -> bool:
        """Returns whether the node's part of the job is running."""
        return self.is_on and self.status is None

    @property
    def status(self) -> int | None:
        """Returns the exit status of the node's part of the job, or ``None`` while it runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    @property
    def said(self) -> str:
        """Returns the output of the node since its last start."""
        with self.log.open("rb") as log:
            log.seek(self.begun_at)
            return log.read().decode(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Returns the processes that run on the node, except its first process."""
        if self._init is None:
            return []
        processes = []
        with contextlib.suppress(psutil.Error):
            for init in psutil.Process(self._init.pid).children():
                for process in init.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if process.status() != psutil.STATUS_ZOMBIE:
                            processes.append(process)
        return processes

    def ranks(self) -> list[psutil.Process]:
        """Returns the ranks on the node, in the order in which they were forked."""
        forked = [process for process in self.processes() if _is_forkserver(process)]
        return [process for process in forked if _is_forkserver(process.parent())]

    def helpers(self) -> list[psutil.Process]:
        """Returns the processes on the node that manage, start and stop ranks."""
        ranks = {process.pid for process in self.ranks()}
        return [
            process
            for process in self.processes()
            if process.pid not in ranks and _is_ours(process)
        ]

    def close(self) -> None:
        """Powers off the node, and removes its network."""
        self.off()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.space)


class Nodes:
    """All nodes of a job, which are initially powered off, and two shared folders of limited size.

    Args:
        folder: Folder for the logs and the shared folders.
        slots: Number of ranks that each node can run.
        shared_bytes: Size of each shared folder, in bytes.

    Attributes:
        shared: Shared folder for the job's files.
        traces: Shared folder for the job's traces.
    """

    def __init__(self, folder: Path, slots: Sequence[int], shared_bytes: int) -> None:
        self.shared, self.traces = folder / "shared", folder / "traces"
        self._switch = f"soak{os.getpid()}"
        self.all: list[Node] = []
        self._closing = contextlib.ExitStack()
        try:
            self._make(folder, slots, shared_bytes)
        except BaseException:
            self.close()
            raise

    def _make(self, folder: Path, slots: Sequence[int], shared_bytes: int) -> None:
        size = f"size={shared_bytes}"
        for disk in (self.shared, self.traces):
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "soak", disk], check=True)
            self._closing.callback(subprocess.run, ["umount", "-l", disk], check=False)
        _ip("netns", "add", self._switch)
        self._closing.callback(_ip, "netns", "del", self._switch)
        _ip("-n", self._switch, "link", "add", "net0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self._switch, "address", "add", "10.57.0.1/24", "dev", "net0")
        _ip("-n", self._switch, "link", "set", "net0", "up")
        hosts = ["127.0.0.1 localhost\n"]
        for number, count in enumerate(slots):
            node = Node(number, count, folder, self._switch)
            self._closing.callback(node.close)
            node.plug()
            self.all.append(node)
            hosts.append(f"{node.address} {node.name}\n")
        (folder / "hosts").write_text("".join(hosts))
        (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")

    def close(self) -> None:
        """Removes all nodes, and unmounts the shared folders. Further calls have no effect."""
        self._closing.close()


def fill(path: Path) -> None:
    """Extends the file ``path`` until its file system is full."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file, bytes(size))
    finally:
        os.close(file)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Sends the signal ``number`` to each of ``processes`` that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _is_forkserver(process: psutil.Process | None) -> bool:
    with contextlib.suppress(psutil.Error):
        return process is not None and _FORKSERVER in process.cmdline()
    return False


def _is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.startswith("megatron.adaptive") for word in process.cmdline())
    return False
