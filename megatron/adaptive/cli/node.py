"""Runs one node of a job; ``run_master.sh``, ``run_worker.sh`` and Slurm's scripts call it.

::

    node master [conf.sh] [options]     the first pod: waits for the others, then trains
    node worker [options]               another pod: waits for the master, then trains
    node slurm CONF RUN_DIR             a node of a job of Slurm
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.adaptive.cluster.conf import LaunchConf, load_conf, make_conf
from megatron.adaptive.cluster.host import (
    count_gpus,
    interface_of,
    interface_variables,
    is_loopback,
    own_address,
    rdma_ports,
    rdma_variables,
    resolve,
)
from megatron.adaptive.cluster.node import (
    ROOT,
    NodePlace,
    check_files,
    check_port,
    check_trainer,
    make_folder,
    run_node,
)
from megatron.adaptive.cluster.rendezvous import Hello, gather_nodes, join_master
from megatron.adaptive.config.command_parser import CommandParser
from megatron.adaptive.errors import ConfigError, SetupError

_PORT = 29500
_FOUND_NAME = "master.json"


def main(argv: Sequence[str]) -> int:
    """Takes part in a run as one node.

    Returns:
        The exit status of the node's processes; 75 if the run was stopped early in good order.

    Raises:
        ConfigError: an option or a variable breaks a rule.
        SetupError: the nodes do not meet.
    """
    roles = {"master": _master, "worker": _worker, "slurm": _slurm}
    role = argv[0] if argv else ""
    if role not in roles:
        raise ConfigError(f"node {role}: say master, worker or slurm; see node master --help")
    return roles[role](argv[1:])


def _parser(role: str, description: str) -> CommandParser:
    parser = CommandParser(prog=f"run_{role}.sh", allow_abbrev=False, description=description)
    add = parser.add_argument
    add("--master-addr", help="address of the first node (found; MASTER_ADDR)")
    add("--master-port", type=int, help="its port (29500; MASTER_PORT)")
    add("--ifname", help="network interface (the one towards the other nodes; IFNAME)")
    add("--node-rank", type=int, help="number of this node (by arrival; NODE_RANK)")
    add("--nproc-per-node", type=int, help="processes here, where NPROC_PER_NODE does not say it")
    add("--timeout", type=float, help="seconds to wait for other nodes (MEETING_TIMEOUT_S)")
    return parser


def _master(argv: Sequence[str]) -> int:
    parser = _parser("master", "Start a run on this node and wait for its other nodes.")
    parser.add_argument("conf", nargs="?", type=Path, default=ROOT / "conf.sh", help="(conf.sh)")
    parser.add_argument("--plan", type=Path, help="plan file in place of what conf.sh says")
    parser.add_argument("--nnodes", type=int, help="number of nodes in place of NNODES")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="changes")
    options = parser.read(argv)
    changes = [*options.changes]
    for name, value in (("NNODES", options.nnodes), ("MEETING_TIMEOUT_S", options.timeout)):
        changes += [] if value is None else [f"{name}={value}"]
    conf = load_conf(options.conf, changes, options.plan)
    check_files(conf)
    logs = conf.path("LOG_DIR")
    make_folder(logs, "LOG_DIR")
    _check_alone(logs)
    interface = options.ifname or conf["IFNAME"]
    given = options.master_addr or os.environ.get("MASTER_ADDR") or conf["MASTER_ADDR"]
    address = resolve(given) if given else own_address(interface)
    port = options.master_port or _port(conf)
    _say(
        f"master at {address}:{port}; on the other nodes: "
        f"bash run_worker.sh --master-addr {address}"
    )
    check_port(port)
    with _found(logs / _FOUND_NAME, address, port):
        gathering = gather_nodes(
            conf,
            _hello(options, conf),
            port,
            say=_say,
            make_answer=lambda places: _answer(conf, places, logs, port),
        )
        rank, answer, reached = asyncio.run(gathering)
    if not given and reached is not None:
        address = reached
    place = _place(answer, rank, address)
    own = interface or interface_of(address)
    return _run(conf, place, logs / answer["job"], own)


def _answer(
    conf: LaunchConf, places: list[tuple[int, int]], logs: Path, port: int
) -> dict[str, Any]:
    """Returns what all workers get; checks the trainer's rules now that sizes are known."""
    processes = [count for _, count in sorted(places)]
    whole = {**conf.texts(), "WORLD_SIZE": str(sum(processes))}
    if conf["HOMOGENEOUS_CLUSTER"]:
        whole.pop("NPROC_PER_NODE", None)
    sized = make_conf(whole, conf.folder)
    check_trainer(sized, sum(processes), logs / "job")
    return {
        "conf": conf.texts(),
        "folder": str(conf.folder),
        "processes": processes,
        "job": _new_job(logs),
        "port": port,
    }


def _worker(argv: Sequence[str]) -> int:
    parser = _parser("worker", "Join a run that run_master.sh starts on another node.")
    parser.add_argument(
        "--log-dir", type=Path, default=ROOT / "logs", help="of the master, if it is shared (logs)"
    )
    options = parser.read(argv)
    given = options.master_addr or os.environ.get("MASTER_ADDR")
    port = options.master_port or _environment_number("MASTER_PORT") or _PORT

    def find() -> tuple[str, int] | None:
        if given:
            return resolve(given), port
        return _read_found(options.log_dir / _FOUND_NAME)

    if not given:
        _say(f"no --master-addr: looking for it in {options.log_dir / _FOUND_NAME}")
    limit_s = options.timeout or _environment_number("MEETING_TIMEOUT_S") or 600
    joined = asyncio.run(join_master(find, _hello(options, None), limit_s=limit_s, say=_say))
    folder = Path(joined["folder"])
    conf = make_conf(joined["conf"], folder if folder.is_dir() else ROOT)
    check_files(conf)
    interface = options.ifname or os.environ.get("IFNAME") or interface_of(joined["own_addr"])
    place = _place(joined, joined["node_rank"], joined["master_addr"])
    return _run(conf, place, conf.path("LOG_DIR") / joined["job"], interface)


def _slurm(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="node slurm", allow_abbrev=False)
    parser.add_argument("conf", type=Path, help="settings that submit wrote")
    parser.add_argument("run_dir", type=Path, help="folder of the job's logs")
    options = parser.read(argv)
    answer = json.loads(options.conf.read_text())
    conf = make_conf(answer["conf"], Path(answer["folder"]))
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
    reach_s = conf["MEETING_TIMEOUT_S"] if rank else None
    return _run(conf, place, options.run_dir, interface, name=name, echo=False, reach_s=reach_s)


def _run(
    conf: LaunchConf,
    place: NodePlace,
    run_dir: Path,
    interface: str | None,
    *,
    name: str | None = None,
    echo: bool = True,
    reach_s: float | None = None,
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
    if name is None:
        name = f"{place.node_rank}-{socket.gethostname().partition('.')[0]}"
    return run_node(
        conf, place, run_dir, name=name, variables=variables, echo=echo, reach_s=reach_s
    )


def _place(answer: dict[str, Any], rank: int, address: str) -> NodePlace:
    return NodePlace(
        node_rank=rank,
        processes=tuple(answer["processes"]),
        master_addr=address,
        master_port=answer["port"],
    )


def _hello(options: argparse.Namespace, conf: LaunchConf | None) -> Hello:
    rank = options.node_rank
    if rank is None:
        rank = _environment_number("NODE_RANK", "PET_NODE_RANK")
    gpus = 0
    if conf is None or conf["DEVICE"] == "gpu":
        gpus = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Hello(
        host=socket.gethostname(), gpus=gpus, processes=options.nproc_per_node, node_rank=rank
    )


def _check_alone(logs: Path) -> None:
    """Refuses to wait for workers in a folder where another run's master does.

    Raises:
        ConfigError: workers would not know which one is theirs.
    """
    found = _read_found(logs / _FOUND_NAME)
    if found is None:
        return
    with contextlib.suppress(OSError), socket.create_connection(found, timeout=2.0):
        raise ConfigError(
            f"LOG_DIR={logs}: another run waits there for its workers at {found[0]}:{found[1]}; "
            "wait until they are there, or set another LOG_DIR"
        )


def _new_job(logs: Path) -> str:
    """Returns a name that no other job has, its folder made: pods often share time and number."""
    name = f"pods-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
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
            if not text.isdigit():
                raise ConfigError(f"environment variable {name} is {text!r}: write a whole number")
            return int(text)
    return None


def _say(text: str) -> None:
    print(f"[{socket.gethostname()}] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _found(path: Path, address: str, port: int) -> Iterator[None]:
    """Keeps the file by which workers with the same folder of logs find the master."""
    text = json.dumps({"address": address, "port": port, "pid": os.getpid()})
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == text:  # else another master has replaced it
                path.unlink()


def _read_found(path: Path) -> tuple[str, int] | None:
    """Returns the master's address and port, ``None`` if there is no file."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        answer = json.loads(path.read_text())
        return str(answer["address"]), int(answer["port"])
    return None
