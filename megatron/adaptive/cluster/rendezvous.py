"""Lets the nodes of a run on pods find each other before torchrun starts, through a ``TCPStore``.

::

    first node   opens the store on MASTER_PORT; waits for hellos; numbers the nodes; sets answer
    worker       connects, again and again until the deadline; sets hello/N; counts beat/N up

    arrivals     how many workers ever came; N is a worker's own number among them
    answer       what all workers get, or the error that they all end with
    taken/N      worker N has read it; when all have, the store closes and torchrun has its port

Values are JSON. A worker whose beat stands still while others are missing is forgotten, so that it
can come again. Torch is imported as the nodes meet: about 1.5 s of processor time, which a worker
that waits for its master spends before the master is there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron.adaptive.cluster.conf import LaunchConf
from megatron.adaptive.cluster.host import own_address
from megatron.adaptive.cluster.node import check_port
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

__all__ = ["Hello", "gather_nodes", "join_master", "number_nodes", "open_store"]

_REPORT_S = 10.0
_RETRY_S = 0.5
_POLL_S = 0.2
_CONNECT_S = 5.0
_SILENT_S = 5.0
"""A worker whose beat stands still for so long has gone away."""

Say = Callable[[str], None]
Places = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Describes a node to the others.

    Attributes:
        host: its name.
        gpus: GPUs that it has.
        processes: number of processes requested for it, ``None`` to leave it to the master.
        node_rank: requested number, ``None`` for any.
        address: its address on the way to the master; empty for the master itself.
    """

    host: str
    gpus: int
    processes: int | None = None
    node_rank: int | None = None
    address: str = ""


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


def open_store(port: int) -> TCPStore:
    """Open the store of the first node.

    Raises:
        SetupError: the port is in use.
    """
    check_port(port)
    return _connect("127.0.0.1", port, is_master=True)


def gather_nodes(
    conf: LaunchConf,
    own: Hello,
    store: TCPStore,
    *,
    say: Say,
    make_answer: Callable[[Places], dict[str, Any]],
) -> tuple[int, dict[str, Any], str | None]:
    """Wait as the first node until all others have come, and answer them.

    Args:
        conf: the configuration, which says how many nodes there are.
        own: this node.
        store: of :func:`open_store`.
        say: gets lines for the user.
        make_answer: makes what all workers get from the places of all nodes.

    Returns:
        This node's rank, what the workers got, and the address they reached it by (``None``
        without workers).

    Raises:
        SetupError: nodes are missing at the deadline, or went away at the last moment.
        ConfigError: the nodes do not fit the configuration.
    """
    wanted = (conf.nodes or 1) - 1
    say(f"waiting for {wanted} more of {wanted + 1} nodes on port {store.port}")
    guests = _wait_for_guests(store, wanted, limit_s=conf["MEETING_TIMEOUT_S"], say=say)
    address = own_address(None, next(iter(guests.values())).address) if guests else None
    try:
        places = number_nodes(conf, [own, *guests.values()])
        answer = make_answer(places)
    except AdaptiveError as error:
        _send_answer(store, guests, {"error": str(error)})
        raise
    ranks = {number: rank for number, (rank, _) in zip(guests, places[1:], strict=True)}
    if missing := _send_answer(store, guests, {**answer, "ranks": ranks, "master_addr": address}):
        raise SetupError(
            f"{', '.join(missing)} went away as the run began: start bash run_worker.sh there, and"
            " this node, again"
        )
    return places[0][0], answer, address


def _wait_for_guests(store: TCPStore, wanted: int, *, limit_s: float, say: Say) -> dict[int, Hello]:
    """Return the workers that are there, by their numbers, once there are enough."""
    begin_s = said_s = time.monotonic()
    hellos: dict[int, Hello] = {}
    beats: dict[int, tuple[int, float]] = {}
    while True:
        now_s = time.monotonic()
        for number in range(1, store.add("arrivals", 0) + 1):
            if number not in hellos and store.check([f"hello/{number}"]):
                hellos[number] = Hello(**json.loads(store.get(f"hello/{number}")))
            count = store.add(f"beat/{number}", 0)
            if beats.get(number, (-1, 0.0))[0] != count:
                beats[number] = count, now_s
        here = {
            number: hello
            for number, hello in sorted(hellos.items())
            if now_s - beats[number][1] < _SILENT_S
        }
        if len(here) >= wanted:
            return dict(list(here.items())[:wanted])
        if now_s - begin_s > limit_s:
            names = ", ".join(hello.host for hello in here.values())
            raise SetupError(
                f"{len(here) + 1} of {wanted + 1} nodes were there after {limit_s:g} s (besides"
                f" this one {names or 'none'}): start bash run_worker.sh on the others with this"
                f" node's address, let port {store.port} through the firewall, or set"
                f" NNODES={len(here) + 1}"
            )
        if now_s - said_s > _REPORT_S:
            said_s = now_s
            left_s = limit_s - now_s + begin_s
            say(f"{len(here) + 1} of {wanted + 1} nodes are here; {left_s:.0f} s left")
        time.sleep(_POLL_S)


def _send_answer(store: TCPStore, guests: dict[int, Hello], answer: dict[str, Any]) -> list[str]:
    """Give the workers their answer; returns the hosts that did not take it in time."""
    store.set("answer", json.dumps(answer))
    keys = {f"taken/{number}": hello.host for number, hello in guests.items()}
    end_s = time.monotonic() + _SILENT_S
    while missing := [host for key, host in keys.items() if not store.check([key])]:
        if time.monotonic() > end_s:
            break
        time.sleep(_POLL_S)
    return missing


def join_master(
    find_master: Callable[[], tuple[str, int] | None], hello: Hello, *, limit_s: float, say: Say
) -> dict[str, Any]:
    """Reach the first node as a worker, which may not be up yet, and wait for its answer.

    Args:
        find_master: returns address and port to try next, ``None`` if it does not know yet;
            raises SetupError while a name does not resolve, as that of a pod that is not up yet.
        hello: this node.
        limit_s: how long to try.
        say: gets lines for the user.

    Returns:
        What the master sends all workers, with ``node_rank`` of this node, ``master_addr`` by which
        the master was reached, and ``own_addr``, this node's address on that way.

    Raises:
        SetupError: the master was not there, or the others were not, at the deadline.
        ConfigError: the master found that the nodes do not fit the configuration.
    """
    end_s = time.monotonic() + limit_s
    said_s = 0.0
    why = "its address is not known"
    while (left_s := end_s - time.monotonic()) > 0:
        place = None
        try:
            place = find_master()
            if place is not None:
                return _join(place, hello, end_s, say)
        except SetupError as error:
            why = str(error)
        except (OSError, RuntimeError) as error:  # torch's own are of the second kind
            where = "" if place is None else f"{place[0]}:{place[1]}: "
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            why = f"{where}{reason}"
        if time.monotonic() - said_s > _REPORT_S:
            said_s = time.monotonic()
            say(f"waiting for the master ({why}); {left_s:.0f} s left")
        time.sleep(_RETRY_S)
    raise SetupError(
        f"the master was not reached within {limit_s:g} s ({why}): start bash run_master.sh on the "
        "first node, name it with --master-addr, and see that no firewall is between"
    )


def _join(place: tuple[str, int], hello: Hello, end_s: float, say: Say) -> dict[str, Any]:
    # Says why the master is out of reach, which the store does not, and by which way it is reached.
    with socket.create_connection(place, timeout=_CONNECT_S) as link:
        own = str(link.getsockname()[0])
    store = _connect(*place)
    number = store.add("arrivals", 1)
    store.set(f"hello/{number}", json.dumps(asdict(replace(hello, address=own))))
    say(f"reached the master at {place[0]}:{place[1]}, waiting for the other nodes")
    while not store.check(["answer"]):
        store.add(f"beat/{number}", 1)
        if time.monotonic() > end_s:
            raise TimeoutError("other nodes did not come")
        time.sleep(_POLL_S)
    answer = json.loads(store.get("answer"))
    store.set(f"taken/{number}", "")
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    rank = answer["ranks"].get(str(number))
    if rank is None:
        raise ConnectionResetError(0, "it has all its nodes")
    return {**answer, "node_rank": rank, "own_addr": own}


def _connect(host: str, port: int, *, is_master: bool = False) -> TCPStore:
    """Open the store, or connect to it.

    Raises:
        RuntimeError: nobody listens there, or it is no store.
    """
    # A connection that ends would print a stack of C++ as a warning.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
