"""Runs one node of a job. Called by ``run_master.sh``, ``run_worker.sh`` and Slurm's scripts.

::

    job node master [conf.sh] [options]   the first pod: waits for the others, then trains
    job node worker [options]             another pod: waits for the master, then trains
    job node slurm CONF RUN_DIR           a node of a Slurm job

Nodes in pods find each other before torchrun starts::

    first node   listens on MASTER_PORT; waits for hellos; numbers the nodes; replies to each node
    worker       tries to connect until the deadline; sends its hello; receives the reply

After both sides have proved that they know the run's secret, each worker describes itself in a
hello message. While nodes are missing, the first node forgets a worker that disconnects or stops
sending heartbeats, so that the worker can join again. When all workers have received their replies,
the first node closes the port, so that torchrun can use it.
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
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, count, number
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
_MASTER_FILE = "master.json"
_PURPOSE = "pods"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Variables that determine which program a node runs. Each node sets them itself, and ignores the
# values in the master's reply.
_NODE_SETTINGS = ("PYTHON", "CONTAINER", "IMAGE", "CONTAINER_MOUNTS")
_LOADED = "LD_"
_REPORT_S = 10.0
_RETRY_S = 0.5
_POLL_S = 0.2
_CONNECT_S = 5.0
_SILENT_S = 5.0
"""Time in seconds without a heartbeat after which a worker counts as disconnected."""


def main(argv: Sequence[str]) -> int:
    """Runs this node's part of a job in the role ``argv[0]``, and returns the exit status.

    Returns:
        Exit status of the node's processes; 75 if the run saved and exited because of SIGUSR1.
    """
    roles = {"master": _master, "worker": _worker, "slurm": _slurm}
    role = argv[0] if argv else ""
    if role in ("-h", "--help"):
        print(_USAGE)
        return 0
    if role not in roles:
        raise ConfigError(f"job node must be master, worker or slurm, got {role}; see --help")
    return roles[role](argv[1:])


_USAGE = f"""\
usage: {PROGRAM} job node master [CONF.SH] [OPTIONS]
       {PROGRAM} job node worker [OPTIONS]
       {PROGRAM} job node slurm SETTINGS FOLDER

Runs one node of a job. run_master.sh starts the master: the first node, which waits for the others
and then trains. run_worker.sh starts a worker, which waits for the master. The batch script of a
Slurm job calls job node slurm. job node master --help and job node worker --help describe the
options."""


def _parser(role: str, description: str) -> CommandParser:
    parser = CommandParser(prog=f"run_{role}.sh", description=description)
    add = parser.add_argument
    add("--master-addr", help="address of the first node (MASTER_ADDR; detected by default)")
    text = "port of the first node (29500; MASTER_PORT)"
    add("--master-port", type=number(int, 1, 65535, "port"), help=text)
    text = "network interface (default: the interface used to reach the other nodes; IFNAME)"
    add("--ifname", help=text)
    text = "rank of this node (default: by arrival; NODE_RANK)"
    add("--node-rank", type=number(int, 0, 1_000_000), help=text)
    text = "number of processes on this node, unless NPROC_PER_NODE is set"
    add("--nproc-per-node", type=count, help=text)
    text = "seconds to wait for other nodes (MEETING_TIMEOUT_S)"
    add("--timeout", type=number(float, 0, 1e9), help=text)
    return parser


def _master(argv: Sequence[str]) -> int:
    parser = _parser("master", "Start a run on this node, and wait for the run's other nodes.")
    parser.add_argument(
        "conf",
        nargs="?",
        type=Path,
        default=WORK_FOLDER / "conf.sh",
        help="settings file of the run (conf.sh)",
    )
    parser.add_argument("--plan", type=Path, help="plan file to use instead of the one in conf.sh")
    parser.add_argument("--nnodes", type=count, help="number of nodes, instead of NNODES")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="changes")
    options = parser.parse_args(argv)
    changes = [*options.changes]
    for name, value in (("NNODES", options.nnodes), ("MEETING_TIMEOUT_S", options.timeout)):
        changes += [] if value is None else [f"{name}={value}"]
    conf = load_conf(options.conf, changes, options.plan)
    check_files(conf)
    logs = conf.path("LOG_DIR")
    # If the world size is unknown, the trainer's flags are checked later, when all nodes have
    # connected and reported their GPUs.
    if conf.world_size is not None:
        check_trainer(conf, conf.world_size, logs / "job")
    make_folder(logs)
    _check_alone(logs)
    interface = options.ifname or conf["IFNAME"]
    named = options.master_addr or os.environ.get("MASTER_ADDR") or conf["MASTER_ADDR"]
    address = resolve(named) if named else own_address(interface)
    port = options.master_port or _port(conf)
    check_port(port)
    user_secret = job_secret()
    secret = user_secret or new_secret()
    host = address if interface or named else ""
    with _master_file(logs / _MASTER_FILE, address, port, secret):
        _print_instructions(address, port, logs, None if user_secret else secret)
        gathering = _gather(conf, _hello(options, conf), secret, host, port)
        rank, answer, reached = asyncio.run(gathering)
    if not named and reached is not None:
        address = reached
    node = _place(answer, rank, address)
    return _run(conf, node, logs / answer["job"], interface or interface_of(address))


def _print_instructions(address: str, port: int, logs: Path, generated_secret: str | None) -> None:
    """Prints the command for the other nodes. Prints a secret only if stderr is a terminal.

    ``generated_secret`` is the secret that this node has created, or ``None`` if the user has set a
    secret.
    """
    start = f"bash run_worker.sh --master-addr {address}"
    _say(f"the master listens at {address}:{port}; on each other node, run: {start}")
    if generated_secret is None:
        _say(f"set {SECRET_VARIABLE} on the other nodes to the same value as on this node")
    elif sys.stderr.isatty():
        _say(
            f"on nodes that do not share the folder {logs}, run: "
            f"{SECRET_VARIABLE}={generated_secret} {start}"
        )
    else:
        _say(
            f"on nodes that do not share {logs}, set {SECRET_VARIABLE} to the secret in "
            f"{logs / _MASTER_FILE}; or set {SECRET_VARIABLE} to your own secret on all nodes, "
            "including this one, and start again"
        )


def _answer(conf: LaunchConf, numbered: list[tuple[int, int]], port: int) -> dict[str, Any]:
    """Validates the trainer's flags for the final world size, and returns the reply to the workers.

    Each worker receives this reply with a few more entries, such as its node rank.

    Args:
        conf: Configuration of the launch.
        numbered: Node rank and number of processes of each node.
        port: Port on which torchrun listens on the first node.
    """
    logs = conf.path("LOG_DIR")
    processes = [count for _, count in sorted(numbered)]
    texts = {**conf.texts(), "WORLD_SIZE": str(sum(processes))}
    if conf["HOMOGENEOUS_CLUSTER"]:
        texts.pop("NPROC_PER_NODE", None)
    sized = make_conf(texts, conf.folder)
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
    text = "the master's log folder, if it is shared between nodes (logs)"
    parser.add_argument("--log-dir", type=Path, default=WORK_FOLDER / "logs", help=text)
    text = f"set a variable of this node ({', '.join(_NODE_SETTINGS)}); the master cannot set it"
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="changes", help=text
    )
    options = parser.parse_args(argv)
    changes = read_changes(options.changes)
    for name in changes:
        if name not in _NODE_SETTINGS:
            raise ConfigError(
                f"--set must be one of {', '.join(_NODE_SETTINGS)}, got {name}; set other "
                "variables in conf.sh"
            )
    named = options.master_addr or os.environ.get("MASTER_ADDR")
    port = options.master_port or _environment_number("MASTER_PORT") or _PORT
    secret = job_secret()

    def find() -> _MasterAddress | None:
        master = _read_master_file(options.log_dir / _MASTER_FILE)
        if not named:
            return master if master is None or secret is None else master._replace(secret=secret)
        address = resolve(named)
        run_secret = secret or (master.secret if master is not None else "")
        if not run_secret:
            raise SetupError(
                f"this node does not know the secret of the run at {address}:{port}; run the "
                f"command that run_master.sh printed, set {SECRET_VARIABLE} to the same value on "
                "all nodes, or pass their shared log folder as --log-dir"
            )
        return _MasterAddress(address, port, run_secret)

    if not named:
        _say(
            f"--master-addr is not set; looking for the address in {options.log_dir / _MASTER_FILE}"
        )
    limit_s = options.timeout or _environment_number("MEETING_TIMEOUT_S") or 600
    joined = asyncio.run(_join_master(find, _hello(options, None), limit_s))
    folder = Path(joined["folder"])
    settings = {**_settings(joined["conf"], changes), **changes}
    conf = make_conf(settings, folder if folder.is_dir() else WORK_FOLDER)
    _say_missing(joined.get("secrets", ()))
    check_files(conf)
    interface = options.ifname or os.environ.get("IFNAME") or interface_of(joined["own_addr"])
    node = _place(joined, joined["node_rank"], joined["master_addr"])
    return _run(conf, node, conf.path("LOG_DIR") / joined["job"], interface)


def _settings(answered: dict[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings in the master's reply that this node accepts.

    Args:
        answered: Settings in the master's reply.
        overrides: Settings from the command line of this node.
    """
    kept = {}
    for name, text in answered.items():
        if name in _NODE_SETTINGS or name.startswith(_LOADED):
            continue
        if name not in SETTINGS and not name.startswith(FROM_CONF):
            raise ConfigError(f"the master's reply sets {name}, which is not a variable of a run")
        kept[name] = str(text)
    container = answered.get("CONTAINER", "none")
    if container != "none" and "CONTAINER" not in overrides:
        raise ConfigError(
            f"the master runs in CONTAINER={container}, but nodes do not accept programs from "
            f"another node; start run_worker.sh with --set CONTAINER={container} and --set "
            "IMAGE=..., or with --set CONTAINER=none"
        )
    return kept


def _slurm(argv: Sequence[str]) -> int:
    parser = CommandParser(prog=f"{PROGRAM} job node slurm")
    parser.add_argument("conf", type=Path, help='settings file that "job submit" wrote')
    parser.add_argument("run_dir", type=Path, help="folder of the job's logs")
    options = parser.parse_args(argv)
    answer = read_json(options.conf, "pass the settings file that job submit wrote")
    conf = make_conf(answer["conf"], Path(answer["folder"]))
    _say_missing(answer.get("secrets", ()))
    rank = _environment_number("SLURM_PROCID")
    head = os.environ.get("MASTER_ADDR", "")
    if rank is None or not head:
        raise SetupError(
            '"job node slurm" must be started by srun, in a script that "job submit" wrote'
        )
    address = resolve(head)
    if rank == 0 and is_loopback(address):
        address = own_address(conf["IFNAME"])
    elif is_loopback(address) and len(conf.processes or ()) > 1:
        raise SetupError(
            f"MASTER_ADDR={head} is {address} on {socket.gethostname()}, which other nodes "
            f"cannot reach; remove {head} from the line of {address} in /etc/hosts, or set "
            "MASTER_ADDR in conf.sh"
        )
    address_of_node = own_address(conf["IFNAME"], None if rank == 0 else address)
    node = NodePlace(
        node_rank=rank,
        processes=conf.processes or (),
        master_addr=address,
        master_port=_environment_number("MASTER_PORT") or _port(conf),
    )
    interface = conf["IFNAME"] or interface_of(address if rank == 0 else address_of_node)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    return _run(conf, node, options.run_dir, interface, name=name, echo=False)


@dataclass(frozen=True, kw_only=True)
class _Hello:
    """First message of a node to the first node (the master), in which the node describes itself.

    Attributes:
        host: Host name of the node.
        gpus: Number of GPUs on the node.
        processes: Number of processes requested by the node's user, or ``None`` to let the master
            decide.
        node_rank: Node rank requested by the node's user, or ``None`` for any rank.
        address: Address of the node on its connection to the master, or empty for the master
            itself.
    """

    host: str
    gpus: int
    processes: int | None = None
    node_rank: int | None = None
    address: str = ""

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> _Hello:
        """Parses ``message``, the hello message of another node.

        Raises ``ValueError`` if the message is malformed.
        """
        host = message["host"]
        address = message["address"]
        open_ones = [message["processes"], message["node_rank"]]
        numbers = [message["gpus"], *(value for value in open_ones if value is not None)]
        is_text = all(isinstance(value, str) and value.isprintable() for value in (host, address))
        if not (is_text and all(type(value) is int and 0 <= value < 1 << 20 for value in numbers)):
            raise ValueError("not a valid description of a node")
        return cls(**{value.name: message[value.name] for value in fields(cls)})


class _MasterAddress(NamedTuple):
    """Address and port of a master, and the secret of the run."""

    address: str
    port: int
    secret: str


class _Waiting:
    """Measures the remaining time to wait for other nodes, and regularly prints progress."""

    def __init__(self, limit_s: float, reported_s: float) -> None:
        self._end_s = time.monotonic() + limit_s
        self._reported_s = reported_s

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def say(self, text: str) -> None:
        if time.monotonic() - self._reported_s > _REPORT_S:
            self._reported_s = time.monotonic()
            _say(f"{text}; {self.left_s:.0f} s left")


def _number_nodes(conf: LaunchConf, hellos: Sequence[_Hello]) -> list[tuple[int, int]]:
    """Returns the rank and number of processes of each node, in the order of ``hellos``.

    ``hellos`` contains the messages in which the nodes describe themselves.
    """
    planned = conf.processes
    free = [rank for rank in range(len(hellos)) if rank not in _wanted(hellos)]
    places = []
    for index, hello in enumerate(hellos):
        rank = hello.node_rank
        requested = hello.processes
        if rank is None:
            fitting = [
                free_rank
                for free_rank in free
                if planned and planned[free_rank] == (requested or hello.gpus)
            ]
            rank = 0 if index == 0 and 0 in free else (fitting or free)[0]
            free.remove(rank)
        count = (
            conf["NPROC_PER_NODE"] or requested or (hello.gpus if conf["DEVICE"] == "gpu" else 1)
        )
        if planned is not None:
            count = planned[rank]
        if conf["DEVICE"] == "gpu" and hello.gpus < count:
            raise ConfigError(
                f"NPROC_PER_NODE is {count}, but node {rank} ({hello.host}) has {hello.gpus} "
                "GPUs; set a smaller number, or DEVICE=cpu"
            )
        if count < 1:
            raise ConfigError(
                f"NPROC_PER_NODE is not set, and node {rank} ({hello.host}) has no GPU; set "
                'DEVICE=cpu, or find the reason with "python -m megatron.adaptive doctor"'
            )
        places.append((rank, count))
    return places


def _wanted(hellos: Sequence[_Hello]) -> list[int]:
    host_by_rank: dict[int, str] = {}
    for hello in hellos:
        rank = hello.node_rank
        if rank is None:
            continue
        if rank in host_by_rank:
            raise ConfigError(
                f"--node-rank {rank} is set on {host_by_rank[rank]} and on {hello.host}; set a "
                "different rank on each node, or do not set any"
            )
        if not 0 <= rank < len(hellos):
            raise ConfigError(
                f"--node-rank must be less than {len(hellos)}, got {rank} on {hello.host}"
            )
        host_by_rank[rank] = hello.host
    return list(host_by_rank)


async def _gather(
    conf: LaunchConf, own_hello: _Hello, secret: str, host: str, port: int
) -> tuple[int, dict[str, Any], str | None]:
    """Waits on the first node until all workers have connected, and then replies to each worker.

    Args:
        conf: Configuration of the launch, which sets the number of nodes.
        own_hello: Description of this node.
        secret: Secret of the run, which the workers must know.
        host: Address to listen on, or empty for all addresses of this node.
        port: Port to listen on. It is free again after the function has returned.

    Returns:
        This node's rank, the reply to the workers, and the address at which the workers reached
        this node. The address is ``None`` if there are no workers.
    """
    connected: dict[Connection, _Hello] = {}
    taken: set[Connection] = set()

    async def attend(link: Connection) -> None:
        link.beat()
        hello = await link.receive(_SILENT_S)
        if hello is not None and hello["what"] == "hello":
            connected[link] = _Hello.read(hello)
            if await link.receive(_SILENT_S) is None:
                del connected[link]
            else:
                taken.add(link)

    num_workers = (conf.nodes or 1) - 1
    _say(f"waiting for {num_workers} of {num_workers + 1} nodes to connect to port {port}")
    server = Listener(attend, secret, _PURPOSE, _say, host=host, port=port)
    failure: AdaptiveError | None = None
    try:
        await _wait_for(connected, num_workers, port, conf["MEETING_TIMEOUT_S"])
        guests = dict(list(connected.items())[:num_workers])
        address = own_address(None, next(iter(guests.values())).address) if guests else None
        try:
            places = _number_nodes(conf, [own_hello, *guests.values()])
            answer = await asyncio.to_thread(_answer, conf, places, port)
            parts = [{"node_rank": rank, "master_addr": address} for rank, _ in places[1:]]
        except AdaptiveError as error:
            failure = error
            answer = {"error": str(error)}
            parts = [{}] * num_workers
        for link, part in zip(guests, parts, strict=True):
            link.send("answer", **answer, **part)
        missing = await _wait_for_receipts(guests, taken)
        if failure is not None:
            raise failure
        if missing:
            raise SetupError(
                f"{', '.join(missing)} disconnected at the start of the run; run bash "
                "run_worker.sh on each of them again, and start this node again"
            )
        return places[0][0], answer, address
    finally:
        server.close()
        for link in list(connected):
            await link.close()


async def _wait_for_receipts(
    guests: Mapping[Connection, _Hello], taken: set[Connection]
) -> list[str]:
    """Waits a few seconds for all workers to confirm the reply.

    ``guests`` contains all workers, and ``taken`` contains the connections of workers that have
    confirmed the reply. Returns the host names of workers that have not confirmed it.
    """
    waiting = _Waiting(_SILENT_S, 0.0)
    while set(guests) - taken and waiting.left_s > 0:
        await asyncio.sleep(_POLL_S)
    return [hello.host for link, hello in guests.items() if link not in taken]


async def _wait_for(
    connected: dict[Connection, _Hello], num_workers: int, port: int, limit_s: float
) -> None:
    """Waits until ``num_workers`` workers have connected. Raises an error after the timeout."""
    waiting = _Waiting(limit_s, time.monotonic())
    while len(connected) < num_workers:
        count = f"{len(connected) + 1} of {num_workers + 1} nodes"
        if waiting.left_s < 0:
            names = ", ".join(hello.host for hello in connected.values())
            raise SetupError(
                f"only {count} joined within {limit_s:g} s (workers: {names or 'none'}); "
                'run "bash run_worker.sh" on the other nodes with this node\'s address, open '
                f"port {port} in the firewall, or set NNODES={len(connected) + 1}"
            )
        waiting.say(f"{count} have joined")
        await asyncio.sleep(_POLL_S)


async def _join_master(
    find_master: Callable[[], _MasterAddress | None], hello: _Hello, limit_s: float
) -> dict[str, Any]:
    """Connects to the first node (the master) as a worker, and returns the master's reply.

    Failed attempts are repeated until the timeout, because the master may not have started yet.

    Args:
        find_master: Function that returns the address of the master, or ``None`` if the address is
            not known yet. The function is called before each attempt. It may raise ``SetupError``
            if the host name cannot be resolved, for example before the master's pod is created.
        hello: Description of this node.
        limit_s: Timeout in seconds.

    Returns:
        Reply of the master. Most entries are the same for all workers. ``node_rank`` is the rank of
        this node, ``master_addr`` is the address of the master, and ``own_addr`` is the local
        address of this node's connection to the master.
    """
    waiting = _Waiting(limit_s, 0.0)
    why = "its address is unknown"
    while waiting.left_s > 0:
        master = None
        try:
            master = find_master()
            if master is not None:
                return await _join(master, hello, waiting)
        except SetupError as error:
            why = str(error)
        except OSError as error:
            why = f"{error}" if master is None else f"{master.address}:{master.port}: {error}"
        waiting.say(f"waiting for the master ({why})")
        await asyncio.sleep(_RETRY_S)
    raise SetupError(
        f'the master was not reached within {limit_s:g} s ({why}); run "bash run_master.sh" on the '
        "first node, pass its address as --master-addr, and check the firewall between the nodes"
    )


async def _join(master: _MasterAddress, hello: _Hello, waiting: _Waiting) -> dict[str, Any]:
    link = await Connection.connect(
        master.address, master.port, _CONNECT_S, master.secret, _PURPOSE
    )
    address = link.own_address
    try:
        link.send("hello", **asdict(replace(hello, address=address)))
        link.beat()
        _say(f"reached the master at {master.address}:{master.port}; waiting for the other nodes")
        try:
            answer = await asyncio.wait_for(link.receive(), max(0.0, waiting.left_s))
        except asyncio.TimeoutError:
            raise TimeoutError("the other nodes did not join in time") from None
        if answer is None:
            raise ConnectionResetError(
                "the master closed the connection; perhaps all nodes of its run have already joined"
            )
        link.send("taken")
    finally:
        await link.close()
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    _check_answer(answer)
    return {**answer, "own_addr": address}


def _check_answer(answer: dict[str, Any]) -> None:
    """Checks that ``answer`` is well-formed, and that its job name is not a path."""
    processes = answer.get("processes")
    port = answer.get("port")
    rank = answer.get("node_rank")
    conf = answer.get("conf")
    is_whole = (
        isinstance(processes, list)
        and all(type(count) is int and count > 0 for count in processes)
        and type(rank) is int
        and 0 <= rank < len(processes)
        and type(port) is int
        and isinstance(conf, dict)
        and all(isinstance(answer.get(name), str) for name in ("folder", "job", "master_addr"))
    )
    if not is_whole or _JOB.fullmatch(answer["job"]) is None:
        raise SetupError(
            "the master runs a different version of the program; use the same version on all nodes"
        )


def _run(
    conf: LaunchConf,
    node: NodePlace,
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
        f"node {node.node_rank} of {len(node.processes)} starts "
        f"{node.processes[node.node_rank]} of {sum(node.processes)} processes; interface "
        f"{interface or 'unknown'}; RDMA {rdma or 'none'}; logs in {run_dir}"
    )
    environment = {**os.environ, **conf.environment}
    variables = {
        **interface_variables(interface, environment),
        **rdma_variables(active, environment),
    }
    if len(node.processes) == 1:
        variables |= loopback_variables(environment)
    if name is None:
        name = f"{node.node_rank}-{socket.gethostname().partition('.')[0]}"
    return run_node(conf, node, run_dir, name=name, variables=variables, echo=echo)


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
    """Raises an error if another run with the log folder ``logs`` is waiting for its workers."""
    master = _read_master_file(logs / _MASTER_FILE)
    if master is None:
        return
    with contextlib.suppress(OSError), socket.create_connection(master[:2], timeout=2.0):
        raise ConfigError(
            f"another run with LOG_DIR={logs} is waiting for its workers at "
            f"{master.address}:{master.port}; wait until they have joined, or change LOG_DIR"
        )


def _new_job(logs: Path) -> str:
    """Creates the folder of a new job in ``logs``, and returns the name of the job.

    A number is appended if the name is taken, because pods often have the same start time and
    process ID.
    """
    name = f"pods-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for suffix in ("", *(f"-{attempt}" for attempt in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            (logs / f"{name}{suffix}").mkdir()
            return f"{name}{suffix}"
    raise ConfigError(
        f"LOG_DIR={logs} already contains folders of 99 jobs with the same start time and process "
        "ID as this job; choose another LOG_DIR"
    )


def _port(conf: LaunchConf) -> int:
    port: int = _environment_number("MASTER_PORT") or conf["MASTER_PORT"] or _PORT
    return port


def _environment_number(*names: str) -> int | None:
    for name in names:
        text = os.environ.get(name, "").strip()
        if text:
            if natural(text) is None:
                raise ConfigError(f"environment variable {name} must be an integer, got {text!r}")
            return int(text)
    return None


def _say_missing(secrets: Iterable[str]) -> None:
    """Warns about the variables in ``secrets`` that are missing from this node's environment."""
    if missing := [name for name in secrets if name not in os.environ]:
        _say(
            f"warning: conf.sh sets {', '.join(missing)}, but secrets are neither stored nor "
            "sent to other nodes; set them in this node's environment, or on Slurm remove --export "
            "from SLURM_FLAGS, so that sbatch exports them to all nodes"
        )


def _say(text: str) -> None:
    print(f"[{socket.gethostname()}] {printable(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _master_file(path: Path, address: str, port: int, secret: str) -> Iterator[None]:
    """Writes the master's address and secret to ``path``. Removes the file when the context exits.

    Workers with access to the file read the address and the secret from it.
    """
    facts = {"address": address, "port": port, "pid": os.getpid(), "secret": secret}
    text = json.dumps(facts)
    write_private(path, text)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # If the texts differ, another master has replaced the file, so do not remove it.
            if path.read_text() == text:
                path.unlink()


def _read_master_file(path: Path) -> _MasterAddress | None:
    """Reads the master's address from ``path``, or returns ``None`` if there is no valid file."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        answer = parse_json(read_whole(path))
        return _MasterAddress(str(answer["address"]), int(answer["port"]), str(answer["secret"]))
    return None
