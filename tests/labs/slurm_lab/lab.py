"""Starts and stops a Slurm cluster, and simulates failures of its nodes."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "mungekey", "ip", "nsenter", "unshare")
ACCOUNTING = ("slurmdbd", "mariadbd")
_HERE = Path(__file__).parent
_UP_S = 90.0
_DEVICE_LOCAL_USE = 240
_PR_SET_PDEATHSIG = 1
_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_libc = ctypes.CDLL(None)

_CONF = """\
ClusterName=lab
SlurmctldHost=ctl(10.66.0.1)
SlurmUser=root
AuthInfo=socket={lab}/munge.sock,cred_expire=5
StateSaveLocation={lab}/state
SlurmctldPidFile={lab}/slurmctld.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdSpoolDir={lab}/spool/%n
SlurmdPidFile={lab}/slurmd.%n.pid
SlurmdLogFile={lab}/log/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=15
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=5
MailProg=/bin/true
"""
_ACCOUNTING_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
AccountingStoragePass={lab}/munge.sock
AccountingStorageTRES=gres/gpu
"""
_DATABASE_CONF = """\
DbdHost=ctl
SlurmUser=root
AuthInfo=socket={lab}/munge.sock
PidFile={lab}/slurmdbd.pid
LogFile={lab}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
"""


class LabError(Exception):
    """Raised if the lab cannot run on this machine. The message contains the reason."""


@dataclass(frozen=True)
class Kind:
    """Group of identical nodes, which form a partition with the name of the group."""

    name: str
    nodes: int
    gpus: int


def why_not(*, accounting: bool = False) -> str | None:
    """Returns the reason why the lab cannot run on this machine, or ``None`` if it can run.

    If ``accounting``, the programs for accounting must also be installed.
    """
    if os.geteuid() != 0:
        return "the Slurm lab needs root for its namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    needed = (*PROGRAMS, *(ACCOUNTING if accounting else ()))
    missing = [name for name in needed if shutil.which(name, path=path) is None]
    if missing:
        return f"programs are missing ({', '.join(missing)}): run bash prerequisite.sh --slurm"
    probe = subprocess.run(
        ["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False
    )
    return f"cannot create namespaces here: {probe.stderr.strip()}" if probe.returncode else None


class Lab:
    """Runs a Slurm cluster.

    Args:
        folder: Folder for all files of the cluster. It must not exist yet.
        kinds: Kinds of nodes. Nodes are numbered in this order, starting from ``n1``.
        accounting: Whether to enable accounting (``sacct``).
        settings: Additional lines of ``slurm.conf``.
    """

    def __init__(
        self,
        folder: Path,
        kinds: Sequence[Kind],
        *,
        accounting: bool = False,
        settings: Sequence[str] = (),
    ) -> None:
        if reason := why_not(accounting=accounting):
            raise LabError(reason)
        self.folder = folder
        self.nodes = [
            (f"n{index + 1}", kind)
            for index, kind in enumerate(kind for kind in kinds for _ in range(kind.nodes))
        ]
        self._accounting = accounting
        self._settings = settings
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._booted_s: dict[str, int] = {}
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> Lab:
        try:
            self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def variables(self) -> dict[str, str]:
        """Returns the environment variables of the lab's programs."""
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def run(
        self, command: Sequence[str], *, on: str = "ctl", timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``command`` on the host ``on``, and returns the finished process.

        Raises ``subprocess.TimeoutExpired`` after ``timeout_s`` seconds.
        """
        return subprocess.run(
            [*self.enter(on, str(self.folder)), *command],
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def output(self, *command: str) -> str:
        """Runs ``command`` on the login host, and returns its output. The command must succeed."""
        done = self.run(command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def crash(self, name: str) -> None:
        """Kills all processes of the node ``name``, so that the kernel closes their connections."""
        os.kill(self._init(name), signal.SIGKILL)
        self._hosts.pop(name).wait()

    def poweroff(self, name: str) -> None:
        """Simulates a power loss: the node ``name`` stops without notifying other nodes."""
        self.unplug(name)
        self.crash(name)

    def unplug(self, name: str) -> None:
        """Disconnects the node ``name`` from the network, while its processes continue to run."""
        self._in_ctl("ip", "link", "set", name, "down")

    def plug(self, name: str) -> None:
        """Reconnects the node ``name`` to the network."""
        self._in_ctl("ip", "link", "set", name, "up")

    def boot(self, name: str) -> None:
        """Starts the node ``name``, or restarts it if it is running."""
        if name in self._hosts:
            self.crash(name)
        number = int(name[1:])
        # Keep only whole seconds, because Slurm prints times without fractions.
        self._booted_s[name] = int(time.time())
        inside = [*_NAMESPACES, "bash", str(_HERE / "node.sh"), str(self.folder), name]
        address = f"10.66.0.{10 + number}"
        command = [*self.enter("ctl", str(self.folder)), "unshare", *inside, address]
        self._start(name, command)
        init = str(self._init(name))
        # The kernel may not have removed the previous network interface yet.
        with contextlib.suppress(subprocess.CalledProcessError):
            self._in_ctl("ip", "link", "delete", name)
        self._in_ctl(*f"ip link add {name} type veth peer name eth0 netns {init}".split())
        self._in_ctl("ip", "link", "set", name, "master", "hub", "up")

    def put_back(self, name: str) -> None:
        """Boots the node ``name``, which has lost its processes, and returns the node to service.

        An administrator would do the same. Otherwise, Slurm could assign a job to the node, and
        then cancel the job when the node reports its restart.
        """

        def is_registered() -> bool:
            said = self.run(["scontrol", "show", "node", name]).stdout
            match = re.search(r"SlurmdStartTime=(\S+)", said)
            if match is None or match[1] == "None":
                return False
            return datetime.datetime.fromisoformat(match[1]).timestamp() >= self._booted_s[name]

        update = "scontrol", "update", f"NodeName={name}"
        self.output(*update, "State=DRAIN", "Reason=it starts anew")
        self.boot(name)
        self._wait(f"registration of {name}", is_registered)
        self.output(*update, "State=RESUME")

    def enter(self, name: str, folder: str) -> list[str]:
        """Returns a prefix that makes a command run on the host ``name`` in ``folder``."""
        return [
            *("nsenter", "-t", str(self._init(name)), "-m", "-u", "-n", "-p"),
            *(f"--wdns={folder}", "--", "setpriv", "--pdeathsig", "KILL", "--"),
        ]

    def processes(self, name: str) -> list[psutil.Process]:
        """Returns the processes on the node ``name``, without its first process and Slurm's."""
        init, processes = self._init(name), []
        space = os.readlink(f"/proc/{init}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                is_slurm = process.name() in ("slurmd", "sleep", "slurmstepd")
                if is_here and not is_slurm and process.pid != init:
                    processes.append(process)
        return processes

    def close(self) -> None:
        """Stops all processes of the cluster. It is safe to call this method several times."""
        hosts, self._hosts = self._hosts, {}
        for host in reversed(hosts.values()):
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(host.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            host.kill()
            host.wait()
        while self._logs:
            self._logs.pop().close()

    def _boot(self) -> None:
        for name in ("", "log", "state", "spool", "database", "dev"):
            (self.folder / name).mkdir()
        self._write()
        accounting = "yes" if self._accounting else "no"
        inside = ["bash", str(_HERE / "ctl.sh"), str(self.folder), accounting]
        self._start("ctl", ["unshare", *_NAMESPACES, *inside])
        self._wait("slurmctld", lambda: (self.folder / "ready").exists())
        for name, _ in self.nodes:
            self.boot(name)
        self._wait("idle nodes", self._all_idle)

    def _all_idle(self) -> bool:
        said = self.run(["sinfo", "-h", "-N", "-p", "all", "-t", "idle", "-o", "%N"]).stdout
        return len(said.split()) == len(self.nodes)

    def _wait(self, event: str, is_there: object) -> None:
        assert callable(is_there)
        end_s = time.monotonic() + _UP_S
        while not is_there():
            died = self._hosts["ctl"].poll() is not None
            if died or time.monotonic() > end_s:
                said = (self.folder / "log" / "ctl.txt").read_text(errors="replace")
                raise LabError(f"the Slurm lab failed while waiting for {event}: {said[-2000:]}")
            time.sleep(0.1)

    def _write(self) -> None:
        lab = self.folder
        hosts = "127.0.0.1 localhost\n10.66.0.1 ctl\n"
        conf = _CONF + (_ACCOUNTING_CONF if self._accounting else "")
        gres, members = "", {}
        for name, kind in self.nodes:
            hosts += f"10.66.0.{10 + int(name[1:])} {name}\n"
            members.setdefault(kind.name, []).append(name)
            conf += f"NodeName={name} CPUs=8 RealMemory=8000 Feature={kind.name} State=UNKNOWN"
            if kind.gpus:
                conf += f" Gres=gpu:{kind.name}:{kind.gpus}"
                files = f"{lab}/dev/nvidia[0-{kind.gpus - 1}]"
                gres += f"NodeName={name} Name=gpu Type={kind.name} File={files}\n"
            conf += "\n"
        conf += "PartitionName=all Default=YES MaxTime=INFINITE Nodes=ALL\n"
        for kind_name, names in members.items():
            conf += f"PartitionName={kind_name} MaxTime=INFINITE Nodes={','.join(names)}\n"
        conf += "".join(f"{line}\n" for line in self._settings)
        for index in range(max(kind.gpus for _, kind in self.nodes)):
            device = os.makedev(_DEVICE_LOCAL_USE, index)
            os.mknod(lab / "dev" / f"nvidia{index}", stat.S_IFCHR | 0o666, device)
        (lab / "hosts").write_text(hosts)
        (lab / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        (lab / "slurm.conf").write_text(conf.replace("{lab}", str(lab)))
        (lab / "gres.conf").write_text(gres)
        (lab / "slurmdbd.conf").write_text(_DATABASE_CONF.replace("{lab}", str(lab)))
        (lab / "slurmdbd.conf").chmod(0o600)

    def _start(self, name: str, command: Sequence[str]) -> None:
        log = (self.folder / "log" / f"{name}.txt").open("ab")
        self._logs.append(log)
        self._hosts[name] = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.variables,
            start_new_session=True,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def _init(self, name: str) -> int:
        """Returns the ID of the first process (bash) in the namespaces of the host ``name``."""
        end_s = time.monotonic() + _UP_S
        while time.monotonic() < end_s:
            with contextlib.suppress(psutil.Error):
                line: list[psutil.Process] = [psutil.Process(self._hosts[name].pid)]
                while line and line[0].name() != "bash":
                    line = line[0].children()
                if line:
                    return line[0].pid
            time.sleep(0.05)
        raise LabError(f"{name} of the Slurm lab did not start")

    def _in_ctl(self, *command: str) -> None:
        """Runs ``command`` in the network of the login host, but as a process of this machine."""
        subprocess.run(
            ["nsenter", "-t", str(self._init("ctl")), "-n", "--", *command],
            check=True,
            capture_output=True,
        )
