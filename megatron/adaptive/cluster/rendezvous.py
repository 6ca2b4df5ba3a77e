"""How the nodes of a run find each other on pods, before torchrun starts.

::

    first node   listen on MASTER_PORT, hear all workers, number the nodes, answer all, hang up
    worker       connect, again and again until the deadline; say what it has; wait for the answer

One line of JSON each way. The port is then torchrun's own. A worker that goes away while others are
still missing is forgotten, so that it can come again.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.adaptive.cluster.conf import LaunchConf
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError

__all__ = ["Hello", "Joined", "gather_nodes", "join_master", "number_nodes"]

_FORMAT = "megatron-adaptive meeting 1"
_TELL_S = 10.0
_RETRY_S = 0.5
_CONNECT_S = 5.0
_LONGEST = 1 << 20

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a node says of itself.

    Attributes:
        host: its name.
        gpus: GPUs that it has.
        processes: how many processes it was told to start, ``None`` to leave it to the master.
        node_rank: which number it was told to take, ``None`` for any.
    """

    host: str
    gpus: int
    processes: int | None = None
    node_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The answer to a worker.

    Attributes:
        told: what the master sends all workers.
        node_rank: of this node.
        master_addr: the address that the master was reached by.
        own_addr: this node's address on that way.
    """

    told: dict[str, Any]
    node_rank: int
    master_addr: str
    own_addr: str


@dataclass
class _Guest:
    link: socket.socket
    heard: bytes = b""
    hello: Hello | None = None
    since_s: float = field(default_factory=time.monotonic)


def number_nodes(conf: LaunchConf, hellos: Sequence[Hello]) -> list[tuple[int, int]]:
    """Give every node its rank and number of processes.

    Args:
        conf: the configuration; what it leaves open the nodes say.
        hellos: the first node first, then in order of arrival.

    Returns:
        Node rank and processes of each node, in the order of ``hellos``.

    Raises:
        ConfigError: a node has too few GPUs, or two ask for the same number.
    """
    planned = conf.processes
    free = [rank for rank in range(len(hellos)) if rank not in _wanted(hellos)]
    places = []
    for index, hello in enumerate(hellos):
        rank = hello.node_rank
        own = hello.processes
        if rank is None:
            rank = 0 if index == 0 and 0 in free else _fitting(free, planned, own or hello.gpus)
            free.remove(rank)
        count = conf["NPROC_PER_NODE"] or own or (hello.gpus if conf["DEVICE"] == "gpu" else 1)
        if planned is not None:
            count = planned[rank]
        if conf["DEVICE"] == "gpu" and hello.gpus < count:
            raise ConfigError(
                f"NPROC_PER_NODE={count}: node {rank} ({hello.host}) has {hello.gpus} GPUs; set "
                "fewer, or DEVICE=cpu"
            )
        if count < 1:
            raise ConfigError(
                f"NPROC_PER_NODE is not set and node {rank} ({hello.host}) has no GPU; set "
                "DEVICE=cpu, or find out why with python -m megatron.adaptive doctor"
            )
        places.append((rank, count))
    return places


def _wanted(hellos: Sequence[Hello]) -> list[int]:
    wanted: dict[int, str] = {}
    for hello in hellos:
        rank = hello.node_rank
        if rank is None:
            continue
        if rank in wanted:
            raise ConfigError(
                f"--node-rank {rank}: {wanted[rank]} and {hello.host} both have it; give each its "
                "own, or none"
            )
        if not 0 <= rank < len(hellos):
            raise ConfigError(f"--node-rank {rank} on {hello.host}: there are {len(hellos)} nodes")
        wanted[rank] = hello.host
    return list(wanted)


def _fitting(free: Sequence[int], planned: tuple[int, ...] | None, count: int) -> int:
    """Return the first free rank whose planned processes are ``count``, else the first free."""
    return next((rank for rank in free if planned and planned[rank] == count), free[0])


class _Door:
    """The first node's listening socket and those who came."""

    def __init__(self, port: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._guests: dict[int, _Guest] = {}
        try:
            self._listener = socket.create_server(("", port), backlog=256)
        except OSError as error:
            raise SetupError(
                f"MASTER_PORT={port}: {error.strerror} on {socket.gethostname()}; another program "
                "listens there: set another MASTER_PORT"
            ) from error
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def guests(self) -> list[_Guest]:
        """Those who said hello, in order of arrival."""
        known = [guest for guest in self._guests.values() if guest.hello is not None]
        return sorted(known, key=lambda guest: guest.since_s)

    def look(self, seconds: float) -> None:
        """Take in what arrives within ``seconds``."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                link, _ = self._listener.accept()
                self._guests[link.fileno()] = _Guest(link)
                self._selector.register(link, selectors.EVENT_READ)
            else:
                self._hear(self._guests[key.fd])

    def _hear(self, guest: _Guest) -> None:
        try:
            part = guest.link.recv(65536)
        except OSError:
            part = b""
        guest.heard += part
        if not part or len(guest.heard) > _LONGEST:
            self._forget(guest)
        elif guest.heard.endswith(b"\n") and guest.hello is None:
            guest.hello = _read_hello(guest.heard)
            guest.since_s = time.monotonic()
            if guest.hello is None:
                self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.link)
        del self._guests[guest.link.fileno()]
        guest.link.close()

    def close(self) -> None:
        """Close everything."""
        for guest in list(self._guests.values()):
            self._forget(guest)
        self._selector.close()
        self._listener.close()


def _read_hello(line: bytes) -> Hello | None:
    """Read a worker's line; ``None`` for what is none, such as a scan of ports."""
    try:
        told = json.loads(line)
        return Hello(**told["hello"]) if told.get("format") == _FORMAT else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def gather_nodes(
    conf: LaunchConf,
    own: Hello,
    *,
    port: int,
    say: Say,
    make_told: Callable[[list[tuple[int, int]]], dict[str, Any]],
) -> tuple[int, dict[str, Any], str | None]:
    """Wait as the first node until all others have come, and answer them.

    Args:
        conf: the configuration, which says how many nodes there are.
        own: this node.
        port: where to listen.
        say: gets lines for the user.
        make_told: makes what all workers are told of the places of all nodes.

    Returns:
        This node's rank, what the workers were told, and the address they reached it by (``None``
        without workers).

    Raises:
        SetupError: the port is in use, or nodes are missing at the deadline.
        ConfigError: the nodes do not fit the configuration.
    """
    nodes = conf.nodes or 1
    limit_s = conf["MEETING_TIMEOUT_S"]
    begin_s = told_s = time.monotonic()
    door = _Door(port)
    try:
        say(f"waiting for {nodes - 1} more of {nodes} nodes on port {port}")
        while len(door.guests) < nodes - 1:
            door.look(0.2)
            now_s = time.monotonic()
            here = len(door.guests)
            if now_s - begin_s > limit_s:
                names = ", ".join(guest.hello.host for guest in door.guests if guest.hello)
                raise SetupError(
                    f"{here + 1} of {nodes} nodes were there after {limit_s:g} s (besides this one "
                    f"{names or 'none'}): start bash run_worker.sh on the others with this node's "
                    f"address, let port {port} through the firewall, or set NNODES={here + 1}"
                )
            if now_s - told_s > _TELL_S:
                told_s = now_s
                say(f"{here + 1} of {nodes} nodes are here; {limit_s - now_s + begin_s:.0f} s left")
        guests = door.guests[: nodes - 1]
        return _answer(conf, own, guests, make_told)
    finally:
        door.close()


def _answer(
    conf: LaunchConf,
    own: Hello,
    guests: list[_Guest],
    make_told: Callable[[list[tuple[int, int]]], dict[str, Any]],
) -> tuple[int, dict[str, Any], str | None]:
    hellos = [own, *(guest.hello for guest in guests if guest.hello is not None)]
    try:
        places = number_nodes(conf, hellos)
        told = make_told(places)
    except AdaptiveError as error:
        for guest in guests:
            guest.link.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        raise
    address = str(guests[0].link.getsockname()[0]) if guests else None
    for guest, (rank, _) in zip(guests, places[1:], strict=True):
        line = {"node_rank": rank, "master_addr": address, **told}
        guest.link.sendall(json.dumps(line).encode() + b"\n")
    return places[0][0], told, address


def join_master(
    find_master: Callable[[], tuple[str, int] | None], hello: Hello, *, limit_s: float, say: Say
) -> Joined:
    """Reach the first node as a worker, which may not be up yet, and hear this node's part.

    Args:
        find_master: returns address and port to try next, ``None`` if it does not know yet;
            raises SetupError while a name does not resolve, as that of a pod that is not up yet.
        hello: this node.
        limit_s: how long to try.
        say: gets lines for the user.

    Raises:
        SetupError: the master was not there, or the others were not, at the deadline.
        ConfigError: the master found that the nodes do not fit the configuration.
    """
    end_s = time.monotonic() + limit_s
    told_s = 0.0
    why = "nobody has told its address"
    while (left_s := end_s - time.monotonic()) > 0:
        place = None
        try:
            place = find_master()
            if place is not None:
                return _join(place, hello, end_s, say)
        except SetupError as error:
            why = str(error)
        except OSError as error:
            where = "" if place is None else f"{place[0]}:{place[1]}: "
            why = f"{where}{error.strerror or error}"
        if time.monotonic() - told_s > _TELL_S:
            told_s = time.monotonic()
            say(f"waiting for the master ({why}); {left_s:.0f} s left")
        time.sleep(_RETRY_S)
    raise SetupError(
        f"the master was not reached within {limit_s:g} s ({why}): start bash run_master.sh on the "
        "first node, name it with --master-addr, and see that no firewall is between"
    )


def _join(place: tuple[str, int], hello: Hello, end_s: float, say: Say) -> Joined:
    with socket.create_connection(place, timeout=_CONNECT_S) as link:
        link.sendall(json.dumps({"format": _FORMAT, "hello": asdict(hello)}).encode() + b"\n")
        say(f"reached the master at {place[0]}:{place[1]}, waiting for the other nodes")
        own = str(link.getsockname()[0])
        heard = b""
        while not heard.endswith(b"\n"):
            link.settimeout(max(0.1, end_s - time.monotonic()))
            part = link.recv(65536)
            if not part:
                raise ConnectionResetError(0, "the master went away")
            heard += part
        told = json.loads(heard)
        if "error" in told:
            raise ConfigError(str(told["error"]))
        address = str(told.get("master_addr") or place[0])
        return Joined(told=told, node_rank=told["node_rank"], master_addr=address, own_addr=own)
