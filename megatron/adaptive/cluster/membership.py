"""Keeps the nodes of a job: starts agents on the machines of a file, takes in those that come.

The machines file has a host per line and is read again whenever it changes::

    # comment
    node-a slots=8
    node-b                         as many processes as it has GPUs, one without
    localhost name=c slots=1       several nodes on this machine have names

Everything that happens becomes an event of one queue; what it means for the job is the manager's.
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
    """Describes one line of the file.

    Attributes:
        name: unique within the file.
        host: where it is, as ssh takes it.
        slots: processes that it may run, ``None`` for one on each GPU.
    """

    name: str
    host: str
    slots: int | None = None

    @property
    def has_loopback(self) -> bool:
        """Returns whether the host's name means this machine on every machine."""
        return self.host.lower() == "localhost" or self.host.startswith("127.")

    @property
    def is_local(self) -> bool:
        """Returns whether this process runs on it, by its name or an address."""
        own = socket.gethostname().lower()
        is_own = self.has_loopback or self.host.lower() in (own, own.partition(".")[0])
        return is_own or interface_of(self.host) is not None


def read_machines(path: Path) -> tuple[Machine, ...]:
    """Reads a machines file.

    Raises:
        ConfigError: it is missing, empty, or a line breaks a rule; names the line.
    """
    try:
        text = read_whole(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"--machines {path}: {reason}; name a file with a host per line"
        ) from None
    found: dict[str, tuple[int, Machine]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--machines {path}, line {number}"
        machine = _machine(words, where)
        if machine.name in found:
            raise ConfigError(
                f"{where}: {machine.name} is in line {found[machine.name][0]} already: remove one,"
                " or give nodes on one host a name=NAME each"
            )
        found[machine.name] = number, machine
    if not found:
        raise ConfigError(f"--machines {path}: it names no machine; write a host per line")
    return tuple(machine for _, machine in found.values())


def _machine(words: list[str], where: str) -> Machine:
    host, keys = words[0], dict[str, str]()
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            raise ConfigError(f"{where}: {word!r}: after the host come slots=N and name=NAME only")
        keys[key] = value
    for what in (host, keys.get("name", host)):
        if _NAME.fullmatch(what) is None:
            raise ConfigError(f"{where}: {what!r} is not a name of a host or node")
    slots = keys.get("slots")
    if slots is not None and not 1 <= (natural(slots) or 0) <= _SLOTS_AT_MOST:
        raise ConfigError(f"{where}: slots={slots}: write a whole number from 1 on")
    return Machine(
        name=keys.get("name", host), host=host, slots=None if slots is None else int(slots)
    )


_ROOT = Path(__file__).resolve().parents[3]
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# Reads the environment that comes first on standard input and becomes the program.
_BEGIN = (
    'import json,os,sys; os.environ.update(json.loads(open(0, closefd=False, mode="rb",'
    " buffering=0).readline())); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_END_S = 20.0
_AGAIN_S = 1.0
RETRY_S = 10.0
"""Seconds from one start of a listed machine's agent to the next."""
PURPOSE = "manager"
"""Of connections between agents and their manager."""
_FROM_AGENTS = ("ready", "ended", "notice")
_NODES_AT_MOST, _SLOTS_AT_MOST = 1 << 16, 4096


def over_ssh(
    host: str, words: Sequence[str], variables: Mapping[str, str]
) -> tuple[list[str], bytes]:
    """Makes the command that runs Python on another machine, in this folder.

    Variables may be secrets: they go by standard input, where no other user sees them.

    Args:
        host: as ssh takes it.
        words: arguments of this Python, which is at the same place there.
        variables: environment besides that machine's own.

    Returns:
        The command, and the bytes that its standard input begins with.
    """
    # Isolated, for modules of this folder are not yet meant.
    begin = shlex.join([sys.executable, "-I", "-c", _BEGIN, *words])
    command = [*_SSH, host, f"cd {shlex.quote(os.getcwd())} && exec {begin}"]
    return command, json.dumps(dict(variables)).encode() + b"\n"


Status = Literal["starting", "present", "leaving", "gone", "lost", "unreachable"]


class Event(NamedTuple):
    """Reports something that happened.

    Attributes:
        kind: ``joined``, ``ready``, ``failed``, ``notice``, ``removed``, ``lost``, ``ended``,
            ``stop`` or ``tick``.
        node: where, the empty text for the manager itself.
        message: what the agent sent.
    """

    kind: str
    node: str
    message: dict[str, Any]


@dataclass(kw_only=True, eq=False)
class Node:
    """Describes a node of the job, past or present.

    Attributes:
        name: of the node.
        machine: its line in the machines file, ``None`` where it came by itself.
        status: what it does.
        why: in words, where it does not take part.
        host: its own name.
        pid: of its agent.
        slots: processes that it may run.
        is_ready: whether a rank would start at once there: what it needs is imported.
        copies_port: at which it takes copies of other nodes' state.
        link: connection with its agent.
        asked: what :meth:`Membership.ask` waits for, by number.
        started_s: Time of ``time.monotonic`` at which this process started the node's agent.
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
        """Returns its entry in the state of the job."""
        names = ("name", "status", "why", "host", "pid", "slots")
        return {name: getattr(self, name) for name in names}


class Membership:
    """Keeps the nodes of a job.

    Args:
        machines: file of machines, ``None`` where nodes come by themselves.
        own: the node of the manager itself where it is not of the file.
        address: at which other machines reach this one, ``None`` to find out.
        secret: of the job.
        work: what ranks of every node run, for the agents that are started here.
    """

    def __init__(
        self,
        machines: Path | None,
        own: Machine | None,
        address: str | None,
        secret: str,
        work: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = machines
        self._address = address
        self._secret = secret
        self._work = work
        self._read = () if machines is None else read_machines(machines)
        self._own = own
        self._stamp = self._file_stamp()
        # Decided once: ranks and agents know the address.
        self._is_alone = machines is not None and all(one.has_loopback for one in self._read)
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
        """Listen, and start the agents of the file.

        Raises:
            OSError: no port can be had.
        """
        allow_files(_NODES_AT_MOST)
        if sys.version_info < (3, 12):  # where a thread would wait for each process
            watcher = asyncio.PidfdChildWatcher()
            watcher.attach_loop(asyncio.get_running_loop())
            asyncio.set_child_watcher(watcher)
        self._server = Listener(self._attend, self._secret, PURPOSE, say, host=self.address)
        self.port = self._server.port
        for machine in self._read if self._own is None else (self._own,):
            self._start_agent(machine)

    def leaving(self, names: Iterable[str]) -> Node | None:
        """Returns the first of these nodes that is about to go."""
        found = (self.nodes[name] for name in names)
        return next((node for node in found if node.status == "leaving"), None)

    def signal(self, names: Iterable[str], number: signal.Signals) -> None:
        """Sends a signal to the ranks of these nodes, as far as they can be reached."""
        for name in names:
            if (link := self.nodes[name].link) is not None:
                link.send("signal", number=int(number))

    async def ask(self, name: str, what: str, limit_s: float, **values: Any) -> dict[str, Any]:
        """Sends a message to a node's agent and waits for its answer.

        Args:
            name: of the node.
            what: the message's kind.
            limit_s: time limit.
            values: of the message.

        Raises:
            TimeoutError: there was none in time; says so.
            ConnectionError: the node was lost; says so.
        """
        node = self.nodes[name]
        if node.link is None or node.status not in ("present", "leaving"):
            raise ConnectionError(f"{name} was lost as well")
        self._asked += 1
        number = self._asked
        answer = node.asked[number] = asyncio.get_running_loop().create_future()
        node.link.send(what, number=number, **values)
        try:
            return await result_within(answer, limit_s)
        except asyncio.TimeoutError:
            raise TimeoutError(f"{name} did not end in time") from None
        finally:
            node.asked.pop(number, None)

    def usable(self) -> list[Node]:
        """Lists nodes that can run ranks, in the order of the file or as they came."""
        order = {machine.name: at for at, machine in enumerate(self._read)}
        found = [node for node in self.nodes.values() if node.status == "present"]
        return sorted(found, key=lambda node: order.get(node.name, len(order)))

    @property
    def are_starting(self) -> bool:
        """Returns whether an agent has not answered yet."""
        return any(node.status == "starting" for node in self.nodes.values())

    def address_of(self, node: Node) -> str:
        """Returns the address at which the other nodes reach a node."""
        assert node.link is not None
        peer = node.link.peer
        return self.address if peer in ("127.0.0.1", "::1") else peer

    def reread_file(self) -> None:
        """Reads the machines file again if it has changed."""
        stamp = self._file_stamp()
        if self._path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            now = read_machines(self._path)
        except ConfigError as error:
            say(f"warning: {error}; the job goes on with the machines it had")
            return
        if self.port and self.address == "127.0.0.1" and not all(one.is_local for one in now):
            say(
                "warning: other machines cannot reach a manager that began with localhost alone;"
                " they are left out until the job is started anew"
            )
            now = tuple(machine for machine in now if machine.is_local)
        names = {machine.name for machine in now}
        for node in self.nodes.values():
            if node.machine is not None and node.name not in names and node.status == "present":
                self.events.put_nowait(Event("removed", node.name, {}))
        self._read = now
        for machine in now:
            known = self.nodes.get(machine.name)
            if known is None or known.status in ("gone", "lost", "unreachable"):
                self._start_agent(machine)

    def start_lost_again(self) -> bool:
        """Restarts agents of listed machines that are lost or did not answer.

        Each is started at most once per :data:`RETRY_S`.

        Returns:
            Whether an agent was started.
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
        """Lets a node go that runs nothing any more.

        Args:
            node: which.
            why: in words.
            status: that its agent ends with.
        """
        node.status, node.why = "gone", why
        if node.link is not None:
            node.link.send("leave", status=status, why=why)

    async def close(self, status: int, *, hands_over: bool) -> None:
        """Lets all nodes go and waits for the agents that were started here.

        Args:
            status: that they end with.
            hands_over: whether nodes that came by themselves look for another manager instead.
        """
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for node in self.nodes.values():
            if node.status in ("present", "leaving") and not (hands_over and node.process is None):
                self.release(node, "the job has ended", status)
        for node in self.nodes.values():
            if node.process is not None and node.process.returncode is None:
                if node.status == "starting":  # it would only report that its manager is gone
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
        """Starts the agent of a machine and sees it end."""
        words = ["-m", "megatron.adaptive", "run", "--agent"]
        command, begin = [sys.executable, *words], b""
        environment = dict(os.environ)
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{_ROOT}:{path}" if path else str(_ROOT)
        if not machine.is_local:
            exported = {n: v for n, v in environment.items() if n.startswith(OVER_SSH)}
            command, begin = over_ssh(machine.host, words, exported)
        place = {"name": machine.name, "address": self.address, "port": self.port}
        spec = {**place, "secret": self._secret, "slots": machine.slots, "work": self._work}
        spec["silence_s"] = SILENCE_S if machine is self._own else PATIENCE_S
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
        process.stdin.write(begin + json.dumps(spec).encode() + b"\n")
        process.stdin.close()
        said = ""
        if process.stderr is not None:
            async for line in process.stderr:
                said = printable(line.decode(errors="replace").strip()) or said
                if node.status != "starting":
                    print(said, file=sys.stderr, flush=True)
        status = await process.wait()
        is_own = machine is self._own
        if node.status == "starting" and not (is_own and status < 0):
            self._failed(node, said or f"its agent ended with status {status}")
        elif is_own:
            # The manager's node is there as long as the manager is; what was lost is known by then.
            await asyncio.sleep(_AGAIN_S)
            if node.status in ("starting", "lost") and not self._is_closing:
                self._start_agent(machine)

    def _failed(self, node: Node, why: str) -> None:
        node.status, node.why = "unreachable", why
        self.events.put_nowait(Event("failed", node.name, {"why": why}))

    async def _attend(self, link: Connection) -> None:
        hello = await link.receive()
        name = None if hello is None else hello.get("name")
        is_name = isinstance(name, str) and 0 < len(name) < 256 and name.isprintable()
        if hello is None or hello["what"] != "join" or not is_name:
            link.send("refused", why="does not take such a node: is it of the same version?")
            await link.close()
            return
        node = self.nodes.setdefault(hello["name"], Node(name=hello["name"]))
        if node.status in ("present", "leaving"):
            link.send("refused", why=f"has a node {hello['name']} already: give it another --name")
            await link.close()
            return
        node.link, node.host, node.pid = link, hello["host"], hello["pid"]
        node.slots, node.status, node.why = hello["slots"], "present", ""
        node.is_ready = False
        node.copies_port = hello.get("copies_port", 0)
        link.send("welcome")
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
                answer.set_exception(ConnectionError(f"{node.name} was lost as well"))
        await link.close()
        if node.link is link and node.status in ("present", "leaving"):
            node.status, node.why = "lost", "its connection ended without a notice"
            self.events.put_nowait(Event("lost", node.name, {}))


def allow_files(count: int) -> None:
    """Lets this process have so many files and connections open, as far as the system does."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        count = min(count, most)
    if 0 <= now < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))
