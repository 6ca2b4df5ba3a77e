"""Runs one node of a job; ``run_master.sh``, ``run_worker.sh`` and Slurm's scripts call it.

::

    node master [conf.sh] [options]     the first pod: waits for the others, then trains
    node worker [options]               another pod: waits for the master, then trains
    node slurm CONF RUN_DIR             a node of a job of Slurm

Nodes on pods find each other before torchrun starts::

    first node   listens on MASTER_PORT; waits for hellos; numbers the nodes; sends each its answer
    worker       connects, again and again until the deadline; sends hello; takes the answer

Both have proved the run's secret before. A worker that goes away, or is silent, while others are
missing is forgotten, so that it can come again. When all have taken their answers torchrun has the
port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.adaptive.cluster.conf import SETTINGS, LaunchConf, load_conf, make_conf, read_changes
from megatron.adaptive.cluster.connection import Connection, Listener
from megatron.adaptive.cluster.inventory import (
    count_gpus,
    interface_variables,
    loopback_variables,
    rdma_ports,
    rdma_variables,
    resolve,
)
from megatron.adaptive.cluster.node_processes import (
    NodePlace,
    check_files,
    check_port,
    check_trainer,
    make_folder,
    run_node,
)
from megatron.adaptive.config.command_parser import CommandParser, count, number
from megatron.adaptive.config.environment import FROM_CONF, SECRET_VARIABLE, WORK_FOLDER, job_secret
from megatron.adaptive.config.input_files import (
    natural,
    parse_json,
    printable,
    read_json,
    read_whole,
)
from megatron.adaptive.errors import AdaptiveError, ConfigError, SetupError
from megatron.adaptive.handshake import new_secret, write_private
from megatron.adaptive.network import interface_of, is_loopback, own_address

_PORT = 29500
_FOUND_NAME = "master.json"
_PURPOSE = "pods"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# What decides which program a node runs is for the node itself to say.
_OWN = ("PYTHON", "CONTAINER", "IMAGE", "CONTAINER_MOUNTS")
_LOADED = "LD_"
_REPORT_S = 10.0
_RETRY_S = 0.5
_POLL_S = 0.2
_CONNECT_S = 5.0
_SILENT_S = 5.0
"""A worker that is silent for so long has gone away."""


def main(argv: Sequence[str]) -> int:
    """Takes part in a run as one node.

    Returns:
        The exit status of the node's processes; 75 if the run was stopped early in good order.
    """
    roles = {"master": _master, "worker": _worker, "slurm": _slurm}
    role = argv[0] if argv else ""
    if role in ("-h", "--help"):
        print((__doc__ or "").partition("Nodes on pods")[0].strip())
        return 0
    if role not in roles:
        raise ConfigError(f"node {role}: say master, worker or slurm; see node master --help")
    return roles[role](argv[1:])


def _parser(role: str, description: str) -> CommandParser:
    parser = CommandParser(prog=f"run_{role}.sh", description=description)
    add = parser.add_argument
    add("--master-addr", help="address of the first node (found; MASTER_ADDR)")
    add("--master-port", type=number(int, 1, 65535, "port"), help="its port (29500; MASTER_PORT)")
    add("--ifname", help="network interface (the one towards the other nodes; IFNAME)")
    text = "number of this node (by arrival; NODE_RANK)"
    add("--node-rank", type=number(int, 0, 1_000_000), help=text)
    add("--nproc-per-node", type=count, help="processes here, where NPROC_PER_NODE does not say it")
    text = "seconds to wait for other nodes (MEETING_TIMEOUT_S)"
    add("--timeout", type=number(float, 0, 1e9), help=text)
    return parser


def _master(argv: Sequence[str]) -> int:
    parser = _parser("master", "Start a run on this node and wait for its other nodes.")
    parser.add_argument(
        "conf", nargs="?", type=Path, default=WORK_FOLDER / "conf.sh", help="(conf.sh)"
    )
    parser.add_argument("--plan", type=Path, help="plan file in place of what conf.sh says")
    parser.add_argument("--nnodes", type=count, help="number of nodes in place of NNODES")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="changes")
    options = parser.parse_args(argv)
    changes = [*options.changes]
    for name, value in (("NNODES", options.nnodes), ("MEETING_TIMEOUT_S", options.timeout)):
        changes += [] if value is None else [f"{name}={value}"]
    conf = load_conf(options.conf, changes, options.plan)
    check_files(conf)
    logs = conf.path("LOG_DIR")
    if conf.world_size is not None:  # else once all nodes have counted their GPUs
        check_trainer(conf, conf.world_size, logs / "job")
    make_folder(logs)
    _check_alone(logs)
    interface = options.ifname or conf["IFNAME"]
    given = options.master_addr or os.environ.get("MASTER_ADDR") or conf["MASTER_ADDR"]
    address = resolve(given) if given else own_address(interface)
    port = options.master_port or _port(conf)
    check_port(port)
    own_secret = job_secret()
    secret = own_secret or new_secret()
    host = address if interface or given else ""
    with _found(logs / _FOUND_NAME, address, port, secret):
        _say_how(address, port, logs, None if own_secret else secret)
        met = _gather(conf, _hello(options, conf), secret, host, port)
        rank, answer, reached = asyncio.run(met)
    if not given and reached is not None:
        address = reached
    place = _place(answer, rank, address)
    own = interface or interface_of(address)
    return _run(conf, place, logs / answer["job"], own)


def _say_how(address: str, port: int, logs: Path, made: str | None) -> None:
    """Says what to type on the other nodes; a secret goes to a terminal, never into a log."""
    start = f"bash run_worker.sh --master-addr {address}"
    _say(f"master at {address}:{port}; on the other nodes: {start}")
    if made is None:
        _say(f"they need the same {SECRET_VARIABLE} as this one")
    elif sys.stderr.isatty():
        _say(f"where they do not share {logs}: {SECRET_VARIABLE}={made} {start}")
    else:
        _say(
            f"where they do not share {logs}: with {SECRET_VARIABLE} set to the secret that is in"
            f" {logs / _FOUND_NAME}; or set it on all nodes, here too"
        )


def _answer(conf: LaunchConf, places: list[tuple[int, int]], port: int) -> dict[str, Any]:
    """Returns what all workers get; checks the trainer's rules now that sizes are known."""
    logs = conf.path("LOG_DIR")
    processes = [count for _, count in sorted(places)]
    whole = {**conf.texts(), "WORLD_SIZE": str(sum(processes))}
    if conf["HOMOGENEOUS_CLUSTER"]:
        whole.pop("NPROC_PER_NODE", None)
    sized = make_conf(whole, conf.folder)
    check_trainer(sized, sum(processes), logs / "job")
    return {
        "conf": conf.texts(),
        "folder": str(conf.folder),
        "secrets": [*conf.secrets],
        "processes": processes,
        "job": _new_job(logs),
        "port": port,
    }


def _worker(argv: Sequence[str]) -> int:
    parser = _parser("worker", "Join a run that run_master.sh starts on another node.")
    text = "of the master, if it is shared (logs)"
    parser.add_argument("--log-dir", type=Path, default=WORK_FOLDER / "logs", help=text)
    text = f"for this node, as the master cannot say it: {', '.join(_OWN)}"
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="changes", help=text
    )
    options = parser.parse_args(argv)
    changes = read_changes(options.changes)
    for name in changes:
        if name not in _OWN:
            raise ConfigError(
                f"--set {name}: a worker sets {', '.join(_OWN)}; the rest is conf.sh's"
            )
    given = options.master_addr or os.environ.get("MASTER_ADDR")
    port = options.master_port or _environment_number("MASTER_PORT") or _PORT
    secret = job_secret()

    def find() -> _Found | None:
        found = _read_found(options.log_dir / _FOUND_NAME)
        if not given:
            return found if found is None or secret is None else found._replace(secret=secret)
        address = resolve(given)
        known = secret or (found.secret if found is not None else "")
        if not known:
            raise SetupError(
                f"the secret of the run at {address}:{port} is not known: type the line that"
                f" run_master.sh printed, set {SECRET_VARIABLE} to the same on all nodes, or name"
                " the folder of logs that they share with --log-dir"
            )
        return _Found(address, port, known)

    if not given:
        _say(f"no --master-addr: looking for it in {options.log_dir / _FOUND_NAME}")
    limit_s = options.timeout or _environment_number("MEETING_TIMEOUT_S") or 600
    joined = asyncio.run(_join_master(find, _hello(options, None), limit_s))
    folder = Path(joined["folder"])
    settings = {**_settings(joined["conf"], changes), **changes}
    conf = make_conf(settings, folder if folder.is_dir() else WORK_FOLDER)
    _say_missing(joined.get("secrets", ()))
    check_files(conf)
    interface = options.ifname or os.environ.get("IFNAME") or interface_of(joined["own_addr"])
    place = _place(joined, joined["node_rank"], joined["master_addr"])
    return _run(conf, place, conf.path("LOG_DIR") / joined["job"], interface)


def _settings(given: dict[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a master's answer that a worker takes from another node."""
    kept = {}
    for name, text in given.items():
        if name in _OWN or name.startswith(_LOADED):
            continue
        if name not in SETTINGS and not name.startswith(FROM_CONF):
            raise ConfigError(f"the master's answer sets {name}, which is no variable of a run")
        kept[name] = str(text)
    container = given.get("CONTAINER", "none")
    if container != "none" and "CONTAINER" not in own:
        raise ConfigError(
            f"the master runs in CONTAINER={container}, and no node names a program to another:"
            f" give run_worker.sh --set CONTAINER={container} --set IMAGE=..., or CONTAINER=none"
        )
    return kept


def _slurm(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="node slurm")
    parser.add_argument("conf", type=Path, help="settings that submit wrote")
    parser.add_argument("run_dir", type=Path, help="folder of the job's logs")
    options = parser.parse_args(argv)
    answer = read_json(options.conf, "name the settings that submit wrote")
    conf = make_conf(answer["conf"], Path(answer["folder"]))
    _say_missing(answer.get("secrets", ()))
    rank = _environment_number("SLURM_PROCID")
    head = os.environ.get("MASTER_ADDR", "")
    if rank is None or not head:
        raise SetupError("node slurm: it is started by srun, from a script that submit wrote")
    address = resolve(head)
    if rank == 0 and is_loopback(address):
        address = own_address(conf["IFNAME"])
    elif is_loopback(address) and len(conf.processes or ()) > 1:
        raise SetupError(
            f"MASTER_ADDR={head}: on {socket.gethostname()} it is {address}, which reaches nobody "
            "else: take the name off that line of /etc/hosts, or set MASTER_ADDR in conf.sh"
        )
    own = own_address(conf["IFNAME"], None if rank == 0 else address)
    place = NodePlace(
        node_rank=rank,
        processes=conf.processes or (),
        master_addr=address,
        master_port=_environment_number("MASTER_PORT") or _port(conf),
    )
    interface = conf["IFNAME"] or interface_of(address if rank == 0 else own)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    return _run(conf, place, options.run_dir, interface, name=name, echo=False)


@dataclass(frozen=True, kw_only=True)
class _Hello:
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

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> _Hello:
        """Reads a message of another node."""
        host, address = message["host"], message["address"]
        open_ones = [message["processes"], message["node_rank"]]
        numbers = [message["gpus"], *(one for one in open_ones if one is not None)]
        is_text = all(isinstance(one, str) and one.isprintable() for one in (host, address))
        if not (is_text and all(type(one) is int and 0 <= one < 1 << 20 for one in numbers)):
            raise ValueError("it describes no node")
        return cls(**{one.name: message[one.name] for one in fields(cls)})


class _Found(NamedTuple):
    """Says where a master is, and by what it is known."""

    address: str
    port: int
    secret: str


class _Waiting:
    """Limits a wait for other nodes, and says from time to time what is missing."""

    def __init__(self, limit_s: float, said_s: float) -> None:
        self._end_s = time.monotonic() + limit_s
        self._said_s = said_s

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def say(self, text: str) -> None:
        if time.monotonic() - self._said_s > _REPORT_S:
            self._said_s = time.monotonic()
            _say(f"{text}; {self.left_s:.0f} s left")


def _number_nodes(conf: LaunchConf, hellos: Sequence[_Hello]) -> list[tuple[int, int]]:
    """Gives every node its rank and number of processes, in the order of ``hellos``."""
    planned = conf.processes
    free = [rank for rank in range(len(hellos)) if rank not in _wanted(hellos)]
    places = []
    for index, hello in enumerate(hellos):
        rank = hello.node_rank
        own = hello.processes
        if rank is None:
            fitting = [one for one in free if planned and planned[one] == (own or hello.gpus)]
            rank = 0 if index == 0 and 0 in free else (fitting or free)[0]
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


def _wanted(hellos: Sequence[_Hello]) -> list[int]:
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


async def _gather(
    conf: LaunchConf, own: _Hello, secret: str, host: str, port: int
) -> tuple[int, dict[str, Any], str | None]:
    """Waits as the first node until all others have come, and answers them.

    Args:
        conf: the configuration, which says how many nodes there are.
        own: this node.
        secret: of the run.
        host: address to listen at, empty for all.
        port: where to listen; free again afterwards.

    Returns:
        This node's rank, what the workers got, and the address they reached it by (``None``
        without workers).
    """
    here: dict[Connection, _Hello] = {}
    taken: set[Connection] = set()

    async def attend(link: Connection) -> None:
        link.beat()
        hello = await link.receive(_SILENT_S)
        if hello is not None and hello["what"] == "hello":
            here[link] = _Hello.read(hello)
            if await link.receive(_SILENT_S) is None:
                del here[link]
            else:
                taken.add(link)

    wanted = (conf.nodes or 1) - 1
    _say(f"waiting for {wanted} more of {wanted + 1} nodes on port {port}")
    server = Listener(attend, secret, _PURPOSE, _say, host=host, port=port)
    failure: AdaptiveError | None = None
    try:
        await _wait_for(here, wanted, port, conf["MEETING_TIMEOUT_S"])
        guests = dict(list(here.items())[:wanted])
        address = own_address(None, next(iter(guests.values())).address) if guests else None
        try:
            places = _number_nodes(conf, [own, *guests.values()])
            answer = await asyncio.to_thread(_answer, conf, places, port)
            own_parts = [{"node_rank": rank, "master_addr": address} for rank, _ in places[1:]]
        except AdaptiveError as error:
            failure, answer, own_parts = error, {"error": str(error)}, [{}] * wanted
        for link, part in zip(guests, own_parts, strict=True):
            link.send("answer", **answer, **part)
        waiting = _Waiting(_SILENT_S, 0.0)
        while set(guests) - taken and waiting.left_s > 0:
            await asyncio.sleep(_POLL_S)
        if failure is not None:
            raise failure
        if missing := [hello.host for link, hello in guests.items() if link not in taken]:
            raise SetupError(
                f"{', '.join(missing)} went away as the run began: start bash run_worker.sh there,"
                " and this node, again"
            )
        return places[0][0], answer, address
    finally:
        server.close()
        for link in list(here):
            await link.close()


async def _wait_for(here: dict[Connection, _Hello], wanted: int, port: int, limit_s: float) -> None:
    """Returns once there are enough workers."""
    waiting = _Waiting(limit_s, time.monotonic())
    while len(here) < wanted:
        count = f"{len(here) + 1} of {wanted + 1} nodes"
        if waiting.left_s < 0:
            names = ", ".join(hello.host for hello in here.values())
            raise SetupError(
                f"{count} were there after {limit_s:g} s (besides this one {names or 'none'}):"
                " start bash run_worker.sh on the others with this node's address, let port"
                f" {port} through the firewall, or set NNODES={len(here) + 1}"
            )
        waiting.say(f"{count} are here")
        await asyncio.sleep(_POLL_S)


async def _join_master(
    find_master: Callable[[], _Found | None], hello: _Hello, limit_s: float
) -> dict[str, Any]:
    """Reaches the first node as a worker, which may not be up yet, and waits for its answer.

    Args:
        find_master: returns where to try next, ``None`` if it does not know yet; raises SetupError
            while a name does not resolve, as that of a pod that is not up yet.
        hello: this node.
        limit_s: how long to try.

    Returns:
        What the master sends all workers, with ``node_rank`` of this node, ``master_addr`` by which
        the master was reached, and ``own_addr``, this node's address on that way.
    """
    waiting = _Waiting(limit_s, 0.0)
    why = "its address is not known"
    while waiting.left_s > 0:
        place = None
        try:
            place = find_master()
            if place is not None:
                return await _join(place, hello, waiting)
        except SetupError as error:
            why = str(error)
        except OSError as error:
            why = f"{error}" if place is None else f"{place.address}:{place.port}: {error}"
        waiting.say(f"waiting for the master ({why})")
        await asyncio.sleep(_RETRY_S)
    raise SetupError(
        f"the master was not reached within {limit_s:g} s ({why}): start bash run_master.sh on the "
        "first node, name it with --master-addr, and see that no firewall is between"
    )


async def _join(place: _Found, hello: _Hello, waiting: _Waiting) -> dict[str, Any]:
    link = await Connection.connect(place.address, place.port, _CONNECT_S, place.secret, _PURPOSE)
    own = link.own_address
    try:
        link.send("hello", **asdict(replace(hello, address=own)))
        link.beat()
        _say(f"reached the master at {place.address}:{place.port}, waiting for the other nodes")
        try:
            answer = await asyncio.wait_for(link.receive(), max(0.0, waiting.left_s))
        except asyncio.TimeoutError:
            raise TimeoutError("other nodes did not come") from None
        if answer is None:
            raise ConnectionResetError("it went away, or has all its nodes")
        link.send("taken")
    finally:
        await link.close()
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    _check_answer(answer)
    return {**answer, "own_addr": own}


def _check_answer(answer: dict[str, Any]) -> None:
    """Refuses an answer that names more than a master may."""
    processes, port = answer.get("processes"), answer.get("port")
    rank, conf = answer.get("node_rank"), answer.get("conf")
    is_whole = (
        isinstance(processes, list)
        and all(type(one) is int and one > 0 for one in processes)
        and type(rank) is int
        and 0 <= rank < len(processes)
        and type(port) is int
        and isinstance(conf, dict)
        and all(isinstance(answer.get(name), str) for name in ("folder", "job", "master_addr"))
    )
    if not is_whole or _JOB.fullmatch(answer["job"]) is None:
        raise SetupError(
            "the master's answer does not fit this version of the program: use one on all nodes"
        )


def _run(
    conf: LaunchConf,
    place: NodePlace,
    run_dir: Path,
    interface: str | None,
    *,
    name: str | None = None,
    echo: bool = True,
) -> int:
    active = [port for port in rdma_ports() if port.state == "ACTIVE"]
    rdma = ", ".join(
        f"{port.device}:{port.port}" + ("" if port.gid_index is None else f" GID {port.gid_index}")
        for port in active
    )
    _say(
        f"node {place.node_rank} of {len(place.processes)} starts "
        f"{place.processes[place.node_rank]} of {sum(place.processes)} processes; interface "
        f"{interface or 'unknown'}; RDMA {rdma or 'none'}; logs in {run_dir}"
    )
    given = {**os.environ, **conf.environment}
    variables = {**interface_variables(interface, given), **rdma_variables(active, given)}
    if len(place.processes) == 1:
        variables |= loopback_variables(given)
    if name is None:
        name = f"{place.node_rank}-{socket.gethostname().partition('.')[0]}"
    return run_node(conf, place, run_dir, name=name, variables=variables, echo=echo)


def _place(answer: dict[str, Any], rank: int, address: str) -> NodePlace:
    return NodePlace(
        node_rank=rank,
        processes=tuple(answer["processes"]),
        master_addr=address,
        master_port=answer["port"],
    )


def _hello(options: argparse.Namespace, conf: LaunchConf | None) -> _Hello:
    rank = options.node_rank
    if rank is None:
        rank = _environment_number("NODE_RANK", "PET_NODE_RANK")
    gpus = 0
    if conf is None or conf["DEVICE"] == "gpu":
        gpus = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return _Hello(
        host=socket.gethostname(), gpus=gpus, processes=options.nproc_per_node, node_rank=rank
    )


def _check_alone(logs: Path) -> None:
    """Refuses to wait for workers in a folder where another run's master does."""
    found = _read_found(logs / _FOUND_NAME)
    if found is None:
        return
    with contextlib.suppress(OSError), socket.create_connection(found[:2], timeout=2.0):
        raise ConfigError(
            f"LOG_DIR={logs}: another run waits there for its workers at {found[0]}:{found[1]}; "
            "wait until they are there, or set another LOG_DIR"
        )


def _new_job(logs: Path) -> str:
    """Returns a name that no other job has, its folder made: pods often share time and number."""
    name = f"pods-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for suffix in ("", *(f"-{again}" for again in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            (logs / f"{name}{suffix}").mkdir()
            return f"{name}{suffix}"
    raise ConfigError(f"LOG_DIR={logs}: a hundred jobs began there at once; set another LOG_DIR")


def _port(conf: LaunchConf) -> int:
    port: int = _environment_number("MASTER_PORT") or conf["MASTER_PORT"] or _PORT
    return port


def _environment_number(*names: str) -> int | None:
    for name in names:
        text = os.environ.get(name, "").strip()
        if text:
            if natural(text) is None:
                raise ConfigError(f"environment variable {name} is {text!r}: write a whole number")
            return int(text)
    return None


def _say_missing(secrets: Iterable[str]) -> None:
    """Warns of secrets of ``conf.sh`` that this node's own environment lacks."""
    if missing := [name for name in secrets if name not in os.environ]:
        _say(
            f"warning: conf.sh sets {', '.join(missing)}, and secrets are neither written nor sent"
            " to other nodes: set it in this node's environment too (on Slurm: no --export)"
        )


def _say(text: str) -> None:
    print(f"[{socket.gethostname()}] {printable(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _found(path: Path, address: str, port: int, secret: str) -> Iterator[None]:
    """Keeps the file by which workers with the same folder of logs find the master."""
    facts = {"address": address, "port": port, "pid": os.getpid(), "secret": secret}
    text = json.dumps(facts)
    write_private(path, text)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == text:  # else another master has replaced it
                path.unlink()


def _read_found(path: Path) -> _Found | None:
    """Returns where the master is, ``None`` if there is no file."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        answer = parse_json(read_whole(path))
        return _Found(str(answer["address"]), int(answer["port"]), str(answer["secret"]))
    return None
