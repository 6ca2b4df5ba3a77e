"""Runs one node of a job: connects to the manager, and starts and signals the node's ranks.

A signal (SIGTERM or SIGUSR1) announces that the node will be removed. The agent then notifies
the manager, which makes the ranks save a checkpoint, starts the next layout without this node, and
releases the agent. If the agent exits or loses its connection to the manager, it kills the node's
ranks, because the manager can no longer stop them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.adaptive.checkpoint.snapshot_keeper import Buddy, SnapshotKeeper
from megatron.adaptive.cluster.connection import SILENCE_S, Connection
from megatron.adaptive.cluster.incarnation import NodeProgram, NodeWork
from megatron.adaptive.cluster.inventory import count_gpus, loopback_variables
from megatron.adaptive.cluster.membership import OTHER_VERSION, PROTOCOL, PURPOSE
from megatron.adaptive.config.input_files import say
from megatron.adaptive.errors import AdaptiveError, SetupError
from megatron.adaptive.handshake import StrangerError
from megatron.adaptive.network import is_loopback, own_address

_CONNECT_S = 20.0
_END_S = 20.0
EXIT_REFUSED = 2
"""Exit status that the agent reports for a rank that it refuses to start."""
_NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_START_KEYS = frozenset(("what", "number", "ranks", "copies", "program"))
_DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


class Agent:
    """Runs one node of the job by executing the manager's requests.

    Args:
        name: Name of the node, unique in the job.
        address: Address of the manager.
        port: Port that the manager listens on.
        secret: Secret that agents and the manager use to authenticate each other.
        work: Script and arguments of this node's ranks. The node refuses to run any other script.
        slots: Number of processes on this node, or ``None`` for one per GPU.
        keeper: Object that stores snapshots of the training state, or ``None`` to create a keeper
            whose snapshots are lost when this process exits.
        silence_s: Time in seconds without a message after which the manager is considered lost.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        port: int,
        secret: str,
        work: NodeWork,
        slots: int | None = None,
        keeper: SnapshotKeeper | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._silence_s = silence_s
        self._name = name
        self._address = address
        self._port = port
        self._secret = secret
        self._work = work
        self._slots = slots
        self._keeper = keeper or SnapshotKeeper(own_address(None, address, alone=True))
        self.status: int | None = None
        """Exit status that the manager sent when it released the agent; ``None`` before that."""
        self.why = ""
        """Reason that the manager gave for releasing the agent; may be empty."""
        self.notice: signal.Signals | None = None
        """First signal that announced the removal of this node, or ``None`` if there was none."""
        self._link: Connection | None = None
        self._orders: asyncio.StreamWriter | None = None
        self._asked: dict[str, int] = {}
        # Keys of the device checks that are currently running.
        self._checks: set[str] = set()

    @classmethod
    def from_input(cls) -> Agent:
        """Creates an agent from the line of JSON that the manager writes to standard input.

        Raises:
            SetupError: The line is missing or malformed, for example because a user started the
                program instead of the manager.
        """
        try:
            parameters = json.loads(sys.stdin.readline())
            work = parameters.pop("work")
            work["arguments"] = tuple(work["arguments"])
            return cls(**parameters, work=NodeWork(**work))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise SetupError(
                "--agent is an internal flag, with which the manager of a job starts agents; "
                "remove it"
            ) from None

    async def run(self) -> None:
        """Handles the manager's requests until the agent is released or loses its connection.

        Raises:
            SetupError: The manager cannot be reached or rejects this node.
        """
        self._link = link = await self._join()
        forkserver = await self._start_forkserver()
        loop = asyncio.get_running_loop()
        for number in _NOTICES:
            loop.add_signal_handler(number, self._notice, number)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # Only the manager handles Ctrl-C.
        try:
            await self._serve(link)
        finally:
            # Keep the signal handlers for ``_NOTICES`` until the process exits, because the default
            # action of these signals would kill the process.
            loop.remove_signal_handler(signal.SIGINT)
            assert self._orders is not None
            # When this connection is closed, the forkserver kills the ranks that it started, and
            # exits.
            self._orders.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(forkserver.wait(), _END_S)
            if forkserver.returncode is None:
                forkserver.kill()
                await forkserver.wait()
            await link.close()

    async def _join(self) -> Connection:
        try:
            link = await Connection.connect(
                self._address, self._port, _CONNECT_S, self._secret, PURPOSE
            )
        except StrangerError as error:
            raise SetupError(
                f"node {self._name}: the program at {self._address}:{self._port} is not the "
                f"manager of the job ({error})"
            ) from None
        except OSError as error:
            raise SetupError(
                f"node {self._name} cannot reach the manager of the job at "
                f"{self._address}:{self._port} ({error.strerror or error}); open this port, and "
                "all ports above 1023 between the nodes, in the firewall"
            ) from None
        link.send(
            "join",
            protocol=PROTOCOL,
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=self._slots or count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 1,
            copies_port=self._keeper.port,
            unix_ns=time.time_ns(),
        )
        answer = await link.receive()
        is_welcome = answer is not None and answer["what"] == "welcome"
        if answer is None or not is_welcome or answer.get("protocol") != PROTOCOL:
            await link.close()
            why = "closed the connection without a reply"
            if answer is not None:
                why = OTHER_VERSION if is_welcome else answer.get("why", "refused")
            raise SetupError(f"node {self._name}: the manager at {link.peer} {why}")
        link.beat()
        return link

    async def _start_forkserver(self) -> asyncio.subprocess.Process:
        agent_end, forkserver_end = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        environment.setdefault("OMP_NUM_THREADS", "1")
        # When a rank fails, torch prints a C++ stack trace on each of the other ranks. Hide these
        # traces.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if is_loopback(self._address):  # All nodes of the job are on this machine.
            environment |= loopback_variables(environment)
        module = "megatron.adaptive.cluster.rank_forkserver"
        forkserver = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(forkserver_end.fileno()),
            pass_fds=(forkserver_end.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # The ranks must not receive Ctrl-C.
        )
        forkserver_end.close()
        reader, self._orders = await asyncio.open_connection(sock=agent_end)
        self._reading = asyncio.get_running_loop().create_task(self._read_forkserver(reader))
        return forkserver

    async def _serve(self, link: Connection) -> None:
        while True:
            message = await link.receive(self._silence_s)
            if message is None:
                return
            kind = message["what"]
            if kind == "port":
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    port = int(probe.getsockname()[1])
                link.send("answer", number=message["number"], port=port)
            elif kind == "start":
                self._start(message)
            elif kind == "inventory":
                copies = await asyncio.to_thread(self._keeper.inventory, message["within_s"])
                link.send("answer", number=message["number"], held=copies)
            elif kind == "signal":
                self._order(signal=message["number"])
            elif kind == "leave":
                # A message without a status means that the manager considers this node lost, so the
                # node may join again.
                self.status = message.get("status")
                self.why = message.get("why", "")
                return

    def _prepare(self, copies: Mapping[str, Any] | None) -> dict[str, str]:
        """Prepares the keeper for new ranks, and returns the environment variables of these ranks.

        ``copies`` contains the settings for the snapshots that the keeper stores. If it is
        ``None``, no snapshots are taken, and the result is empty.
        """
        if copies is None:
            return {}
        buddy = None if copies["buddy"] is None else Buddy(**copies["buddy"])
        self._keeper.prepare(copies["run"], self._secret, buddy)
        values = {
            **copies["settings"],
            "address": self._keeper.address,
            "run": copies["run"],
            "buddy": None if buddy is None else buddy.name,
        }
        return {"MEGATRON_ADAPTIVE_COPIES": json.dumps(values)}

    def _start(self, message: Mapping[str, Any]) -> None:
        """Starts the processes that the manager requests in ``message``.

        Rejects the request if it contains unknown entries.
        """
        program = message.get("program", "script")
        unknown = sorted(set(message) - _START_KEYS)
        added = {} if unknown else self._prepare(message.get("copies"))
        if message["ranks"] and program != "restore" and not unknown:
            self._end_checks()
        for rank in message["ranks"]:
            if "number" in message:  # The manager expects the exit status as a reply.
                self._asked[rank["key"]] = message["number"]
            self._start_rank(rank, added, program, unknown)

    def _end_checks(self) -> None:
        """Kills device checks that are still running, because they would slow down new ranks.

        A check that is still running at this point is hanging, and the manager no longer waits for
        its result.
        """
        for key in self._checks:
            self._order(signal=int(signal.SIGKILL), key=key)
        self._checks.clear()

    def _start_rank(
        self,
        rank: Mapping[str, Any],
        added: Mapping[str, str],
        program: NodeProgram,
        unknown: Sequence[str],
    ) -> None:
        try:
            if unknown:
                raise SetupError(
                    f"the manager's request to start {rank['key']} contains {unknown[0]!r}, "
                    "which this node does not support; install the same version on all nodes"
                )
            order = self._work.order(rank, program)
        except AdaptiveError as error:
            say(f"error: node {self._name}: {error}")
            self._ended(rank["key"], EXIT_REFUSED)
            return
        order["variables"] |= added
        if program == "check":
            self._checks.add(rank["key"])
        self._order(start=order)

    def _ended(self, key: str, status: int) -> None:
        assert self._link is not None
        self._checks.discard(key)
        if (number := self._asked.pop(key, None)) is None:
            self._link.send("ended", key=key, status=status)
        else:
            self._link.send("answer", number=number, status=status)

    def _order(self, **order: Any) -> None:
        assert self._orders is not None
        if not self._orders.is_closing():
            self._orders.write(json.dumps(order).encode() + b"\n")

    async def _read_forkserver(self, reader: asyncio.StreamReader) -> None:
        assert self._link is not None
        with contextlib.suppress(OSError):
            async for line in reader:
                values = json.loads(line)
                if "ended" in values:
                    self._ended(values["ended"], values["status"])
                elif "ready" in values:
                    self._link.send("ready")
        # The forkserver has exited, so this node cannot start ranks. Close the connection, so that
        # the manager continues without this node.
        await self._link.close()

    def _notice(self, number: int) -> None:
        assert self._link is not None
        self.notice = self.notice or signal.Signals(number)
        self._link.send("notice", signal=signal.Signals(number).name, unix_ns=time.time_ns())
