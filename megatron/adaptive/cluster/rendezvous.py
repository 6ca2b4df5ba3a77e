"""Lets the nodes of a run on pods find each other before torchrun starts.

::

    first node   listens on MASTER_PORT; waits for hellos; numbers the nodes; sends each its answer
    worker       connects, again and again until the deadline; sends hello; takes the answer

A worker that goes away, or is silent, while others are missing is forgotten, so that it can come
again. When all have taken their answers torchrun has the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.adaptive.cluster.conf import LaunchConf
from megatron.adaptive.cluster.connection import LONGEST, Connection
from megatron.adaptive.cluster.host import own_address
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError

__all__ = ["Hello", "gather_nodes", "join_master", "number_nodes"]

_REPORT_S = 10.0
_RETRY_S = 0.5
_POLL_S = 0.2
_CONNECT_S = 5.0
_SILENT_S = 5.0
"""A worker that is silent for so long has gone away."""

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
    """Gives every node its rank and number of processes.

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
    """Returns the first free rank whose planned processes are ``count``, else the first free."""
    return next((rank for rank in free if planned and planned[rank] == count), free[0])


async def gather_nodes(
    conf: LaunchConf,
    own: Hello,
    port: int,
    *,
    say: Say,
    make_answer: Callable[[Places], dict[str, Any]],
) -> tuple[int, dict[str, Any], str | None]:
    """Waits as the first node until all others have come, and answers them.

    Args:
        conf: the configuration, which says how many nodes there are.
        own: this node.
        port: where to listen; free again afterwards.
        say: gets lines for the user.
        make_answer: makes what all workers get from the places of all nodes.

    Returns:
        This node's rank, what the workers got, and the address they reached it by (``None``
        without workers).

    Raises:
        SetupError: nodes are missing at the deadline, or went away at the last moment.
        ConfigError: the nodes do not fit the configuration.
    """
    here: dict[Connection, Hello] = {}
    taken: set[Connection] = set()

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Connection(reader, writer)
        link.beat()
        with contextlib.suppress(asyncio.CancelledError):
            hello = await link.receive(_SILENT_S)
            if hello is not None and hello.pop("what") == "hello":
                here[link] = Hello(**hello)
                if await link.receive(_SILENT_S) is None:
                    del here[link]
                else:
                    taken.add(link)

    wanted = (conf.nodes or 1) - 1
    say(f"waiting for {wanted} more of {wanted + 1} nodes on port {port}")
    server = await asyncio.start_server(attend, "", port, limit=LONGEST)
    try:
        await _wait_for(here, wanted, port, limit_s=conf["MEETING_TIMEOUT_S"], say=say)
        guests = dict(list(here.items())[:wanted])
        address = own_address(None, next(iter(guests.values())).address) if guests else None
        try:
            places = number_nodes(conf, [own, *guests.values()])
            answer = await asyncio.to_thread(make_answer, places)
        except AdaptiveError as error:
            for link in guests:
                link.send("answer", error=str(error))
            await _wait_for_all(guests, taken)
            raise
        for link, (rank, _) in zip(guests, places[1:], strict=True):
            link.send("answer", **answer, node_rank=rank, master_addr=address)
        if missing := await _wait_for_all(guests, taken):
            raise SetupError(
                f"{', '.join(missing)} went away as the run began: start bash run_worker.sh there,"
                " and this node, again"
            )
        return places[0][0], answer, address
    finally:
        server.close()
        for link in list(here):
            await link.close()


async def _wait_for(
    here: dict[Connection, Hello], wanted: int, port: int, *, limit_s: float, say: Say
) -> None:
    """Returns once there are enough workers."""
    begin_s = said_s = time.monotonic()
    while len(here) < wanted:
        now_s = time.monotonic()
        if now_s - begin_s > limit_s:
            names = ", ".join(hello.host for hello in here.values())
            raise SetupError(
                f"{len(here) + 1} of {wanted + 1} nodes were there after {limit_s:g} s (besides"
                f" this one {names or 'none'}): start bash run_worker.sh on the others with this"
                f" node's address, let port {port} through the firewall, or set"
                f" NNODES={len(here) + 1}"
            )
        if now_s - said_s > _REPORT_S:
            said_s = now_s
            left_s = limit_s - now_s + begin_s
            say(f"{len(here) + 1} of {wanted + 1} nodes are here; {left_s:.0f} s left")
        await asyncio.sleep(_POLL_S)


async def _wait_for_all(guests: dict[Connection, Hello], taken: set[Connection]) -> list[str]:
    """Returns the hosts of the workers that did not take their answer in time."""
    end_s = time.monotonic() + _SILENT_S
    while missing := [hello.host for link, hello in guests.items() if link not in taken]:
        if time.monotonic() > end_s:
            break
        await asyncio.sleep(_POLL_S)
    return missing


async def join_master(
    find_master: Callable[[], tuple[str, int] | None], hello: Hello, *, limit_s: float, say: Say
) -> dict[str, Any]:
    """Reaches the first node as a worker, which may not be up yet, and waits for its answer.

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
                return await _join(place, hello, end_s, say)
        except SetupError as error:
            why = str(error)
        except OSError as error:
            why = f"{error}" if place is None else f"{place[0]}:{place[1]}: {error}"
        if time.monotonic() - said_s > _REPORT_S:
            said_s = time.monotonic()
            say(f"waiting for the master ({why}); {left_s:.0f} s left")
        await asyncio.sleep(_RETRY_S)
    raise SetupError(
        f"the master was not reached within {limit_s:g} s ({why}): start bash run_master.sh on the "
        "first node, name it with --master-addr, and see that no firewall is between"
    )


async def _join(place: tuple[str, int], hello: Hello, end_s: float, say: Say) -> dict[str, Any]:
    link = await Connection.connect(*place, _CONNECT_S)
    own = link.own_address
    try:
        link.send("hello", **asdict(replace(hello, address=own)))
        link.beat()
        say(f"reached the master at {place[0]}:{place[1]}, waiting for the other nodes")
        left_s = max(0.0, end_s - time.monotonic())
        try:
            answer = await asyncio.wait_for(link.receive(), left_s)
        except asyncio.TimeoutError:
            raise TimeoutError("other nodes did not come") from None
        if answer is None:
            raise ConnectionResetError("it went away, or has all its nodes")
        link.send("taken")
    finally:
        await link.close()
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    return {**answer, "own_addr": own}
