"""Tracks the nodes of a job: starts agents on listed machines, and accepts nodes that join.

The machines file has one host per line, and is read again whenever it changes::

    # comment
    node-a slots=8
    node-b                         one process per GPU, or one process without GPUs
    localhost name=c slots=1       nodes on one machine need different names

Each change of a node's status puts an event into a queue, from which the manager reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron.adaptive.cluster.awake_time import result_within
from megatron.adaptive.cluster.connection import PATIENCE_S, SILENCE_S, Connection, Listener
from megatron.adaptive.cluster.job_state_file import say
from megatron.adaptive.config.environment import OVER_SSH
from megatron.adaptive.config.input_files import natural, printable, read_whole
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.network import interface_of, own_address

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
_KEYS = ("slots", "name")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine that the machines file lists.

    Attributes:
        name: Name of the node, which is unique within the file.
        host: Host name or address, in a form that ssh accepts.
        slots: Number of processes that the node may run, or ``None`` for one per GPU.
    """

    name: str
    host: str
    slots: int | None = None

    @property
    def has_loopback(self) -> bool:
        """Returns whether the host of the machine is ``localhost`` or a loopback address."""
        return self.host.lower() == "localhost" or self.host.startswith("127.")

    @property
    def is_local(self) -> bool:
        """Returns whether the host name or address belongs to this machine."""
        host_name = socket.gethostname().lower()
        is_own = self.has_loopback or self.host.lower() in (host_name, host_name.partition(".")[0])
        return is_own or interface_of(self.host) is not None


def read_machines(path: Path) -> tuple[Machine, ...]:
    """Reads the machines file ``path`` and returns its machines.

    Raises:
        ConfigError: The file is missing or empty, or a line is invalid. The message contains the
            number of the line.
    """
    try:
        text = read_whole(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ConfigError(
            f"--machines {path}: {reason}; pass a file with one host per line"
        ) from None
    machines: dict[str, tuple[int, Machine]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        where = f"--machines {path}, line {number}"
        machine = _machine(fields, where)
        if machine.name in machines:
            raise ConfigError(
                f"{where}: {machine.name} is already in line {machines[machine.name][0]}; remove "
                "one of the lines, or give nodes on the same host different names with name=NAME"
            )
        machines[machine.name] = number, machine
    if not machines:
        raise ConfigError(f"--machines {path} lists no machine; write one host per line")
    return tuple(machine for _, machine in machines.values())


def _machine(fields: list[str], where: str) -> Machine:
    host = fields[0]
    keys = dict[str, str]()
    for option in fields[1:]:
        key, equals, value = option.partition("=")
        if not equals or key not in _KEYS:
            raise ConfigError(
                f"{where}: {option!r} is not allowed; only slots=N and name=NAME may follow the "
                "host"
            )
        keys[key] = value
    for text in (host, keys.get("name", host)):
        if _NAME.fullmatch(text) is None:
            raise ConfigError(f"{where}: {text!r} is not a valid name for a host or node")
    slots = keys.get("slots")
    if slots is not None and not 1 <= (natural(slots) or 0) <= _SLOTS_AT_MOST:
        raise ConfigError(f"{where}: slots must be a positive integer, got {slots}")
    return Machine(
        name=keys.get("name", host), host=host, slots=None if slots is None else int(slots)
    )


_ROOT = Path(__file__).resolve().parents[3]
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# The remote Python interpreter runs this program. It reads environment variables from the first
# line of standard input, and then replaces itself with the requested program.
_BEGIN = (
    'import json,os,sys; os.environ.update(json.loads(open(0, closefd=False, mode="rb",'
    " buffering=0).readline())); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_END_S = 20.0
_AGAIN_S = 1.0
RETRY_S = 10.0
"""Minimum time in seconds between two starts of the agent on the same machine."""
PURPOSE = "manager"
"""Label of connections between agents and the manager, which must be the same on both sides."""
PROTOCOL = 2
"""Version of the message format between agents and the manager. Increase it with each incompatible
change. Up to version 0.2 of this package, messages had no version."""
OTHER_VERSION = "runs a different version than this node; install the same version on all nodes"
_FROM_AGENTS = ("ready", "ended", "notice")
_NODES_AT_MOST = 1 << 16
_SLOTS_AT_MOST = 4096


def over_ssh(
    host: str, arguments: Sequence[str], variables: Mapping[str, str]
) -> tuple[list[str], bytes]:
    """Returns an ssh command that runs Python on ``host``, in the current folder.

    The variables are passed on standard input, because they may be secrets and other users can see
    the command line.

    Args:
        host: Host name or address, in a form that ssh accepts.
        arguments: Arguments for the Python interpreter. The interpreter must have the same path on
            both machines.
        variables: Environment variables to set, in addition to the variables of that machine.

    Returns:
        The command, and the bytes that must first be written to the standard input of the command.
    """
    # Modules in the working directory must not shadow modules that the start-up program imports, so
    # use the isolated mode (-I).
    remote_command = shlex.join([sys.executable, "-I", "-c", _BEGIN, *arguments])
    command = [*_SSH, host, f"cd {shlex.quote(os.getcwd())} && exec {remote_command}"]
    return command, json.dumps(dict(variables)).encode() + b"\n"


Status = Literal["starting", "present", "leaving", "gone", "lost", "unreachable"]


class Event(NamedTuple):
    """Event that the manager handles.

    Events are created when the state of a node changes, when the manager receives a signal
    (``stop``), and when a timer fires (``tick``).

    Attributes:
        kind: Name of the event: ``joined``, ``ready``, ``failed``, ``notice``, ``removed``,
            ``lost``, ``ended``, ``passed`` (a node that failed a probe earlier is fast enough now),
            ``stop`` or ``tick``.
        node: Name of the event's node; empty for ``stop`` and ``tick``.
        message: Message from the node's agent, or a dictionary with the same structure.
    """

    kind: str
    node: str
    message: dict[str, Any]


@dataclass(kw_only=True, eq=False)
class Node:
    """Node that takes part in the job, or that took part earlier.

    Attributes:
        name: Name of the node, which is unique in the job.
        machine: Machine on which the manager starts the node's agent; ``None`` if the node joined
            by itself.
        status: Status of the node, such as ``present``, ``leaving`` or ``lost``.
        why: Reason why the node does not take part; empty if it takes part.
        host: Host name that the node reported when it joined.
        pid: Process ID of the node's agent.
        slots: Number of processes that the node may run.
        is_ready: Whether the node has imported the modules of the ranks, so that ranks start
            without delay.
        copies_port: Port on which the node receives snapshots from other nodes.
        link: Connection to the node's agent, or ``None`` before the agent joins.
        process: Process of the agent, or ``None`` if the manager did not start the agent.
        asked: Futures for the replies that :meth:`Membership.ask` awaits, keyed by message number.
        started_s: Time in seconds, on the clock ``time.monotonic``, when this entry was created.
    """

    name: str
    machine: Machine | None = None
    status: Status = "starting"
    why: str = ""
    host: str = ""
    pid: int = 0
    slots: int = 0
    is_ready: bool = False
    copies_port: int = 0
    link: Connection | None = None
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)
    asked: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict, repr=False)
    started_s: float = field(default_factory=time.monotonic, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry for this node in the job's state file."""
        names = ("name", "status", "why", "host", "pid", "slots")
        return {name: getattr(self, name) for name in names}


class Membership:
    """Tracks which nodes take part in a job, and communicates with their agents.

    Args:
        machines: Path of the machines file, or ``None`` if nodes join by themselves.
        own_machine: Machine of the manager if nodes join by themselves, otherwise ``None``.
        address: Address at which other machines can reach this machine, or ``None`` to detect it.
        secret: Secret that agents and the manager use to authenticate each other.
        work: Script and arguments of the ranks. They are sent to the agents started by this
            process.
    """

    def __init__(
        self,
        machines: Path | None,
        own_machine: Machine | None,
        address: str | None,
        secret: str,
        work: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = machines
        self._address = address
        self._secret = secret
        self._work = work
        self._read = () if machines is None else read_machines(machines)
        self._own_machine = own_machine
        self._stamp = self._file_stamp()
        # Decide only once whether to use the loopback address. Agents store the manager's address,
        # so this address must not change when the machines file changes.
        self._is_alone = machines is not None and all(
            machine.has_loopback for machine in self._read
        )
        self._server: Listener | None = None
        self._is_closing = False
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.nodes: dict[str, Node] = {}
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.port = 0

    @property
    def address(self) -> str:
        """Returns the address at which agents reach the manager."""
        if self._address is not None:
            return self._address
        return "127.0.0.1" if self._is_alone else own_address(None, alone=True)

    async def start(self) -> None:
        """Starts accepting connections, and starts an agent on each listed machine.

        Raises:
            OSError: No port is available.
        """
        allow_files(_NODES_AT_MOST)
        # Watch child processes through file descriptors. Before Python 3.12, asyncio by default
        # starts a thread for each child process instead.
        if sys.version_info < (3, 12):
            watcher = asyncio.PidfdChildWatcher()
            watcher.attach_loop(asyncio.get_running_loop())
            asyncio.set_child_watcher(watcher)
        self._server = Listener(self._attend, self._secret, PURPOSE, say, host=self.address)
        self.port = self._server.port
        for machine in self._read if self._own_machine is None else (self._own_machine,):
            self._start_agent(machine)

    def leaving(self, names: Iterable[str]) -> Node | None:
        """Returns the first node in ``names`` that is leaving the job, or ``None``."""
        nodes = (self.nodes[name] for name in names)
        return next((node for node in nodes if node.status == "leaving"), None)

    def signal(self, names: Iterable[str], number: signal.Signals) -> None:
        """Sends the signal ``number`` to all ranks on the nodes ``names``. Skips absent nodes."""
        for name in names:
            if (link := self.nodes[name].link) is not None:
                link.send("signal", number=int(number))

    async def ask(self, name: str, kind: str, limit_s: float, **values: Any) -> dict[str, Any]:
        """Sends a message to the agent of the node ``name``, and returns the agent's reply.

        Args:
            name: Name of the node.
            kind: Kind of the message, such as ``start`` or ``inventory``.
            limit_s: Timeout for the reply, in seconds.
            values: Additional entries of the message.

        Raises:
            TimeoutError: No reply arrived before the timeout.
            ConnectionError: The node was lost.
        """
        node = self.nodes[name]
        if node.link is None or node.status not in ("present", "leaving"):
            raise ConnectionError(f"node {name} was also lost")
        self._asked += 1
        number = self._asked
        answer = node.asked[number] = asyncio.get_running_loop().create_future()
        node.link.send(kind, number=number, **values)
        try:
            return await result_within(answer, limit_s)
        except asyncio.TimeoutError:
            raise TimeoutError(f"{name} did not reply in time") from None
        finally:
            node.asked.pop(number, None)

    def usable(self) -> list[Node]:
        """Returns the nodes that can run ranks.

        Nodes on listed machines come first, followed by nodes that joined by themselves.
        """
        order = {machine.name: index for index, machine in enumerate(self._read)}
        present = [node for node in self.nodes.values() if node.status == "present"]
        return sorted(present, key=lambda node: order.get(node.name, len(order)))

    @property
    def are_starting(self) -> bool:
        """Returns whether any agent has been started but has not connected yet."""
        return any(node.status == "starting" for node in self.nodes.values())

    def address_of(self, node: Node) -> str:
        """Returns the address at which other nodes can reach ``node``."""
        assert node.link is not None
        peer = node.link.peer
        return self.address if peer in ("127.0.0.1", "::1") else peer

    def reread_file(self) -> None:
        """Rereads the machines file if it has changed.

        Starts agents on new machines, and removes nodes that are no longer listed.
        """
        stamp = self._file_stamp()
        if self._path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            machines = read_machines(self._path)
        except ConfigError as error:
            say(f"warning: {error}; the job continues with the previous machines")
            return
        if (
            self.port
            and self.address == "127.0.0.1"
            and not all(machine.is_local for machine in machines)
        ):
            say(
                "warning: the job was started with only localhost, so other machines cannot reach "
                "its manager; they are left out until the job is restarted"
            )
            machines = tuple(machine for machine in machines if machine.is_local)
        names = {machine.name for machine in machines}
        for node in self.nodes.values():
            if node.machine is not None and node.name not in names and node.status == "present":
                self.events.put_nowait(Event("removed", node.name, {}))
        self._read = machines
        for machine in machines:
            listed_node = self.nodes.get(machine.name)
            if listed_node is None or listed_node.status in ("gone", "lost", "unreachable"):
                self._start_agent(machine)

    def start_lost_again(self) -> bool:
        """Restarts the agents on listed machines that are lost or unreachable.

        On each machine, an agent is started at most once every :data:`RETRY_S` seconds.

        Returns:
            Whether any agent was started.
        """
        before = [self.nodes.get(machine.name) for machine in self._read]
        lost = [
            node.machine
            for node in before
            if node is not None
            and node.machine is not None
            and node.status in ("lost", "unreachable")
            and time.monotonic() - node.started_s >= RETRY_S
        ]
        for machine in lost:
            self._start_agent(machine)
        return bool(lost)

    def release(self, node: Node, why: str, status: int) -> None:
        """Releases ``node`` from the job. The node must not run any ranks.

        Args:
            node: Node to release.
            why: Reason shown to the user.
            status: Exit status for the node's agent.
        """
        node.status = "gone"
        node.why = why
        if node.link is not None:
            node.link.send("leave", status=status, why=why)

    async def close(self, status: int, *, hands_over: bool) -> None:
        """Releases all nodes and waits for the agents that this process started.

        Args:
            status: Exit status for the agents.
            hands_over: Whether another manager continues the job. If so, nodes that joined by
                themselves are not released, so that they look for the new manager.
        """
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for node in self.nodes.values():
            if node.status in ("present", "leaving") and not (hands_over and node.process is None):
                self.release(node, "the job has ended", status)
        for node in self.nodes.values():
            if node.process is not None and node.process.returncode is None:
                # Agents that have not connected yet would report that the manager is lost, so
                # terminate them.
                if node.status == "starting":
                    with contextlib.suppress(ProcessLookupError):
                        node.process.terminate()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(node.process.wait(), _END_S)
                if node.process.returncode is None:
                    node.process.kill()
                    await node.process.wait()
        for node in self.nodes.values():
            if node.link is not None:
                await node.link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _file_stamp(self) -> tuple[int, int] | None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                status = self._path.stat()
                return status.st_mtime_ns, status.st_size
        return None

    def _start_agent(self, machine: Machine) -> None:
        node = self.nodes[machine.name] = Node(name=machine.name, machine=machine)
        task = asyncio.get_running_loop().create_task(self._run_agent(machine, node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_agent(self, machine: Machine, node: Node) -> None:
        """Starts the agent on ``machine``, and waits until the agent exits."""
        arguments = ["-m", "megatron.adaptive", "train", "elastic", "--agent"]
        command = [sys.executable, *arguments]
        stdin_head = b""
        environment = dict(os.environ)
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{_ROOT}:{path}" if path else str(_ROOT)
        if not machine.is_local:
            exported = {n: v for n, v in environment.items() if n.startswith(OVER_SSH)}
            command, stdin_head = over_ssh(machine.host, arguments, exported)
        destination = {"name": machine.name, "address": self.address, "port": self.port}
        spec = {**destination, "secret": self._secret, "slots": machine.slots, "work": self._work}
        spec["silence_s"] = SILENCE_S if machine is self._own_machine else PATIENCE_S
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stderr=None if machine.is_local else asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._failed(node, f"{command[0]}: {error.strerror}")
            return
        node.process = process
        assert process.stdin is not None
        process.stdin.write(stdin_head + json.dumps(spec).encode() + b"\n")
        process.stdin.close()
        last_line = ""
        if process.stderr is not None:
            async for line in process.stderr:
                last_line = printable(line.decode(errors="replace").strip()) or last_line
                if node.status != "starting":
                    print(last_line, file=sys.stderr, flush=True)
        status = await process.wait()
        is_own = machine is self._own_machine
        if node.status == "starting" and not (is_own and status < 0):
            self._failed(node, last_line or f"its agent exited with status {status}")
        elif is_own:
            # The manager's own node must take part, so restart its agent. Wait first, so that the
            # manager can handle the loss of the node.
            await asyncio.sleep(_AGAIN_S)
            if node.status in ("starting", "lost") and not self._is_closing:
                self._start_agent(machine)

    def _failed(self, node: Node, why: str) -> None:
        node.status = "unreachable"
        node.why = why
        self.events.put_nowait(Event("failed", node.name, {"why": why}))

    async def _attend(self, link: Connection) -> None:
        hello = await link.receive()
        name = None if hello is None else hello.get("name")
        is_name = isinstance(name, str) and 0 < len(name) < 256 and name.isprintable()
        if hello is None or hello["what"] != "join" or not is_name:
            link.send("refused", why="rejects this node; install the same version on all nodes")
            await link.close()
            return
        if hello.get("protocol") != PROTOCOL:
            link.send("refused", why=OTHER_VERSION)
            await link.close()
            return
        node = self.nodes.setdefault(hello["name"], Node(name=hello["name"]))
        if node.status in ("present", "leaving"):
            link.send("refused", why=f"already has a node {hello['name']}; choose another --name")
            await link.close()
            return
        node.link = link
        node.host = hello["host"]
        node.pid = hello["pid"]
        node.slots = hello["slots"]
        node.status = "present"
        node.why = ""
        node.is_ready = False
        node.copies_port = hello.get("copies_port", 0)
        link.send("welcome", protocol=PROTOCOL)
        link.beat()
        self.events.put_nowait(Event("joined", node.name, {"unix_ns": time.time_ns()}))
        while (message := await link.receive()) is not None:
            if message["what"] == "answer":
                if (answer := node.asked.get(message["number"])) is not None and not answer.done():
                    answer.set_result(message)
                continue
            if message["what"] not in _FROM_AGENTS:
                continue
            node.is_ready = node.is_ready or message["what"] == "ready"
            self.events.put_nowait(Event(message["what"], node.name, message))
        for answer in node.asked.values():
            if node.link is link and not answer.done():
                answer.set_exception(ConnectionError(f"{node.name} was also lost"))
        await link.close()
        if node.link is link and node.status in ("present", "leaving"):
            node.status = "lost"
            node.why = "its connection was closed unexpectedly"
            self.events.put_nowait(Event("lost", node.name, {}))


def allow_files(count: int) -> None:
    """Raises this process's limit on open files to ``count``, but not above the hard limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY:
        count = min(count, hard_limit)
    if 0 <= soft_limit < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard_limit))
