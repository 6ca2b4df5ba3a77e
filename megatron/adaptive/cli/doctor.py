"""Checks whether a node is ready for a run, and suggests fixes for problems.

With ``--probe``, measures all ranks of a job and lists slow ranks::

    python -m megatron.adaptive doctor --probe                        processes on this machine
    job launch --nnodes 2 ... -m megatron.adaptive doctor --probe     all processes of all nodes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from megatron.adaptive import extension
from megatron.adaptive.cli import launch
from megatron.adaptive.cli.common import leave_reason, show
from megatron.adaptive.cluster.connection import Connection, Listener
from megatron.adaptive.cluster.inventory import count_gpus, rdma_ports, resolve, why_no_gpu_use
from megatron.adaptive.cluster.node_processes import check_port
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser, number
from megatron.adaptive.config.core_copies import core_version, shadowed_copies
from megatron.adaptive.config.environment import Environment, job_secret
from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.parallel import ParallelConfig, TransportConfig
from megatron.adaptive.errors import AdaptiveError, ConfigError
from megatron.adaptive.network import interface_of, is_loopback, own_address
from megatron.adaptive.planner.discover_cluster import describe_node
from megatron.adaptive.profiling.probe_layout import ProbeLayout

if TYPE_CHECKING:
    from megatron.adaptive.profiling.probe import JobReport


def main(argv: Sequence[str]) -> int:
    """Checks this node, or all ranks of a job with ``--probe``, and prints the results.

    Returns:
        1 if something that a run requires is missing, or if the probe finds an outlier; otherwise
        0.
    """
    parser = CommandParser(
        prog=f"{PROGRAM} doctor",
        description=(
            "Check this node. With --master-addr, also check the connection between two nodes: "
            "run the command on both nodes with the address of one of them. With --probe, "
            "measure all ranks of a job."
        ),
    )
    add = parser.add_argument
    add("--master-addr", help="address of one of two nodes whose connection to check")
    add(
        "--master-port",
        type=number(int, 1, 65535, "port"),
        default=29500,
        help="port on the node with the address --master-addr (29500)",
    )
    wait_s = number(float, 0, 1e9)
    add("--timeout", type=wait_s, default=60.0, help="seconds to wait for the other node (60)")
    add("--json", action="store_true", help="print the results as JSON")
    _add_probe_arguments(parser)
    options = parser.parse_args(argv)
    if options.probe:
        return _probe(options, argv)
    checks = check_node(options.master_port)
    if options.master_addr is not None:
        address = resolve(options.master_addr)
        secret = job_secret() or _KNOWN_TO_ALL
        if interface_of(address) is not None:
            checks += asyncio.run(answer_peers(options.master_port, options.timeout, secret))
        else:
            checks += check_way(address, options.master_port, options.timeout, secret)
    _print(checks, as_json=options.json)
    return int(any(check.state == "error" for check in checks))


def _print(checks: Sequence[Check], *, as_json: bool) -> None:
    if as_json:
        report = {"node": node_report(), "checks": [asdict(check) for check in checks]}
        print(json.dumps({"host": socket.gethostname(), **report}, indent=2))
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        show(f"{check.state:8} {check.name:{width}}  {check.text}")
        if check.mend:
            show(f"{'':8} {'':{width}}  -> {check.mend}")


_GIB = 1 << 30
_LEAST_SHM = 1 * _GIB
_LEAST_PYTHON = (3, 10)
_MOST_SKEW_S = 0.1
_CONNECT_S = 5.0
_PURPOSE = "doctor"
_MEETING_S = 120.0
_PROBE_S = 0.05
_PIPELINE = "pipeline_model_parallel_size"
_SIZES = (
    "tensor_model_parallel_size",
    _PIPELINE,
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
)
"""Names of the trainer's settings that define the layout of the ranks to probe."""
# Secret that nodes use by default. It may be public, because the check does not start programs or
# change anything. Users therefore need not copy a secret between nodes.
_KNOWN_TO_ALL = "megatron.adaptive doctor"
_OPEN = "open the ports between the nodes; gloo and NCCL use any port above 1023"
_TORCH = (
    "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available(), "
    "torch.cuda.device_count(), torch.version.cuda]))"
)


@dataclass(frozen=True)
class Check:
    """Describes the result of one check.

    Attributes:
        name: Name of the checked item.
        state: ``ok``, ``warning`` if a run may still work, or ``error`` if a run cannot work.
        text: Result as a message to the user.
        mend: Suggested fix, or empty if nothing needs to be fixed.
    """

    name: str
    state: Literal["ok", "warning", "error"]
    text: str
    mend: str = ""


def _check(name: str, text: str, mend: str = "", *, is_error: bool = False) -> Check:
    """Returns the result of a check.

    ``mend`` is the suggested fix. If it is empty, the state of the check is ``ok``. Otherwise, the
    state is ``error`` or ``warning``, depending on ``is_error``.
    """
    return Check(name, ("error" if is_error else "warning") if mend else "ok", text, mend)


def check_node(port: int) -> list[Check]:
    """Checks this node, but not its connections to other nodes, and returns the results.

    Args:
        port: Port that a run would use, which must be free.
    """
    steps = (_software, _extension, _shared_memory, _rdma, _names, _clock)
    return [check for step in steps for check in step()] + [_port(port)]


def node_report() -> dict[str, Any]:
    """Returns this node's entry for a cluster file, based on the output of installed tools."""
    texts = []
    for command in (["nvidia-smi", "-q"], ["nvidia-smi", "topo", "-m"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            texts.append("" if done.returncode else done.stdout)
        except (OSError, subprocess.TimeoutExpired):
            texts.append("")
    entry = describe_node(*texts)
    ports = [port for port in rdma_ports() if port.state == "ACTIVE"]
    if rates := [port.gbit_per_s for port in ports if port.gbit_per_s]:
        entry["network"] = {"bandwidth": f"{min(rates):g} Gbit/s", "latency": "5 us"}
        entry["network"] |= {"rails": len(rates)} if len(rates) > 1 else {}
        return entry
    with suppress(AdaptiveError):
        name = interface_of(own_address(None))
        speed = psutil.net_if_stats()[name].speed if name else 0
        if speed > 0:
            entry["network"] = {"bandwidth": f"{speed / 1000:g} Gbit/s", "latency": "30 us"}
    return entry


def _software() -> Iterator[Check]:
    text = f"{sys.version.split()[0]} ({sys.executable})"
    mend = "use Python 3.10 or newer" if sys.version_info[:2] < _LEAST_PYTHON else ""
    yield _check("Python", text, mend, is_error=True)
    yield _core()
    done = subprocess.run(
        [sys.executable, "-c", _TORCH], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        mend = "run bash prerequisite.sh to install what is missing"
        yield _check("torch", why, mend, is_error=True)
        return
    version, available, count, built = json.loads(done.stdout.splitlines()[-1])
    yield _check("torch", version)
    if available:
        yield _check("CUDA", f"{count} GPUs, CUDA {built}")
        missing = why_no_gpu_use()
        text = "the monitor can measure GPU use"
        mend = 'run "pip install -r requirements-gpu.txt", and check nvidia-smi' if missing else ""
        yield _check(
            "GPU use", f"the monitor cannot measure GPU use: {missing}" if mend else text, mend
        )
    elif built is None:
        text = "this torch is built without CUDA"
        yield _check("CUDA", text, "to use GPUs, install torch with CUDA support")
    else:
        text = f"torch is built for CUDA {built}, but finds no usable GPU"
        mend = "check nvidia-smi and CUDA_VISIBLE_DEVICES; on a node without GPUs, set DEVICE=cpu"
        yield _check("CUDA", text, mend)


def _core() -> Check:
    version = core_version()
    if version is None:
        mend = 'run "pip install megatron-core", or add a Megatron-LM checkout to PYTHONPATH'
        return _check("megatron-core", "not installed", mend, is_error=True)
    mend = (
        "keep only one of them: remove the checkout from PYTHONPATH, or run pip uninstall "
        "megatron-core"
    )
    text = shadowed_copies()
    return _check("megatron-core", text or version, mend if text else "")


def _extension() -> Iterator[Check]:
    module = extension.load()
    if module is not None:
        yield _check("extension", str(module.__file__))
        return
    mend = "run bash prerequisite.sh to build it; without it, ranks send messages with gloo or NCCL"
    yield _check("extension", str(extension.why_missing()), mend)


def _shared_memory() -> Iterator[Check]:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError as error:
        yield _check("/dev/shm", str(error.strerror), "mount a tmpfs at /dev/shm", is_error=True)
        return
    size = facts.f_blocks * facts.f_frsize
    free = facts.f_bavail * facts.f_frsize
    mend = "start the container with --shm-size 16g; in Kubernetes, mount an emptyDir volume of"
    mend = f"{mend} medium Memory at /dev/shm" if free < _LEAST_SHM else ""
    yield _check("/dev/shm", f"{size / _GIB:.2f} GiB, {free / _GIB:.2f} GiB free", mend)


def _rdma() -> Iterator[Check]:
    ports = rdma_ports()
    if not ports:
        yield _check("RDMA", "no RDMA device; messages between nodes use TCP")
        return
    for port in ports:
        gid = "no IPv4 GID of RoCE v2" if port.gid_index is None else f"GID {port.gid_index}"
        mend = ""
        if port.state != "ACTIVE":
            mend = "check the cable, and bring the interface up (see ip link and ibstatus)"
        elif port.link == "Ethernet" and port.gid_index is None:
            mend = "assign an IPv4 address to the device's interface"
        yield _check("RDMA", f"{port.device}:{port.port} {port.state}, {port.link}, {gid}", mend)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited"
    mend = ""
    if soft != resource.RLIM_INFINITY:
        text = f"limited to {soft >> 10} KiB, but RDMA must lock more memory"
        mend = (
            "remove the limit with ulimit -l unlimited or in limits.conf, or for a container with "
            "--ulimit memlock=-1"
        )
    yield _check("memlock", text, mend, is_error=True)


def _names() -> Iterator[Check]:
    host = socket.gethostname()
    try:
        address = own_address(None)
        yield _check("network", f"{address} on {interface_of(address)}")
    except AdaptiveError as error:
        mend = "bring a network interface up; a run on a single machine does not need an interface"
        yield _check("network", str(error), mend)
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        mend = f"add a line with this node's address and {host} to /etc/hosts"
        yield _check("host name", f"{host}: {error.strerror}", mend)
        return
    text = f"{host} is {', '.join(addresses)}"
    mend = ""
    if all(is_loopback(address) for address in addresses):
        text += " here, so gloo would listen at an address that other nodes cannot reach"
        mend = (
            f"remove {host} from the loopback line of /etc/hosts, or set GLOO_SOCKET_IFNAME "
            "(run_master.sh, run_worker.sh and job submit set it)"
        )
    yield _check("host name", text, mend)


def _clock() -> Iterator[Check]:
    mend = "set the clock, and run chronyd or ntpd" if time.time() < 1_600_000_000 else ""
    yield _check("clock", time.strftime("%Y-%m-%d %H:%M:%S %z"), mend, is_error=True)


def _port(port: int) -> Check:
    try:
        check_port(port)
    except AdaptiveError as error:
        return _check("port", str(error), "set MASTER_PORT to another port")
    return _check("port", f"{port} is free")


def _ignore(text: str) -> None:
    """Ignores the message ``text``, which reports a rejected connection.

    ``doctor`` only reports accepted connections.
    """


async def answer_peers(port: int, limit_s: float, secret: str = _KNOWN_TO_ALL) -> list[Check]:
    """Waits until another node has checked its connection to this node. Returns the results.

    Args:
        port: Port to listen on.
        limit_s: Timeout in seconds.
        secret: Secret that the other node must know.
    """
    heard: asyncio.Queue[Check] = asyncio.Queue()

    async def attend(link: Connection) -> None:
        """Tries to connect back to the peer of ``link``.

        Replies with the result and the current time.
        """
        message = await link.receive(_CONNECT_S)
        if message is None or type(back := message.get("back")) is not int or not 0 < back < 65536:
            return await link.close()  # The peer is not a ``doctor`` process.
        why = ""
        try:
            link_back = await Connection.connect(link.peer, back, _CONNECT_S, secret, _PURPOSE)
            await link_back.close()
        except OSError as error:
            why = str(error)
        link.send("checked", unix_s=time.time(), back=why)
        await link.close()
        text = f"cannot connect to {link.peer} port {back}: {why}" if why else ""
        text = text or f"{link.peer} and this node can reach each other"
        return heard.put_nowait(_check("other nodes", text, _OPEN if why else "", is_error=True))

    try:
        server = Listener(attend, secret, _PURPOSE, _ignore, port=port)
    except OSError as error:
        why = f"cannot listen on port {port}: {error.strerror}"
        return [_check("other nodes", why, "choose another port", is_error=True)]
    try:
        return [await asyncio.wait_for(heard.get(), limit_s)]
    except asyncio.TimeoutError:
        text = f"no node connected to port {port} within {limit_s:g} s"
    finally:
        server.close()
    mend = (
        "run doctor with the same --master-addr on another node, and open the port in the firewall"
    )
    return [_check("other nodes", text, mend, is_error=True)]


def check_way(address: str, port: int, limit_s: float, secret: str = _KNOWN_TO_ALL) -> list[Check]:
    """Checks the connection to a node that also runs ``doctor``, and returns the results.

    Args:
        address: Address of the other node.
        port: Port of ``doctor`` on the other node.
        limit_s: Timeout in seconds. Failed attempts are repeated until the timeout, because
            ``doctor`` may be started later on the other node.
        secret: Secret that both nodes must know.
    """
    end_s = time.monotonic() + limit_s
    while True:
        try:
            return asyncio.run(_try_way(address, port, secret))
        except OSError as error:
            if time.monotonic() > end_s:
                mend = (
                    "run doctor on that node with the same --master-addr, and open the port in "
                    "firewalls"
                )
                return [_check("to that node", f"{address}:{port}: {error}", mend, is_error=True)]
        time.sleep(0.5)


async def _try_way(address: str, port: int, secret: str) -> list[Check]:
    link = await Connection.connect(address, port, _CONNECT_S, secret, _PURPOSE)
    back = Listener(Connection.close, secret, _PURPOSE, _ignore)
    try:
        begin_s = time.time()
        link.send("check", back=back.port)
        message = await link.receive(3 * _CONNECT_S)
        end_s = time.time()
        if message is None or not isinstance(message.get("unix_s"), float):
            raise ConnectionResetError(
                "the program that listens on this port did not send the expected reply"
            )
    finally:
        back.close()
        await link.close()
    early = begin_s - message["unix_s"]
    late = end_s - message["unix_s"]
    skew_s = 0.0 if early <= 0 <= late else min(abs(early), abs(late))
    text = f"the clocks differ by {skew_s:.3f} s ± {end_s - begin_s:.3f} s"
    mend = "run chronyd or ntpd on both nodes" if skew_s > _MOST_SKEW_S else ""
    why = "".join(letter for letter in str(message.get("back"))[:200] if letter.isprintable())
    return [
        _check(
            "to that node",
            f"{address}:{port} from {link.own_address} on {interface_of(link.own_address)}",
        ),
        _check(
            "from that node",
            why or "the other node can connect to this node",
            _OPEN if why else "",
            is_error=True,
        ),
        _check("clocks", text, mend),
    ]


def _add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--probe`` and the flags that belong to it to ``parser``, the parser of ``doctor``."""
    group = parser.add_argument_group(
        "probe of a job, before training",
        "Measures ranks, links and groups of ranks, and compares them with each other and with "
        "the GPU's data sheet. Start the probe on all nodes in the same way as training, with "
        "job launch or torchrun.",
    )
    add = group.add_argument
    text = "probe all ranks; the exit status is 1 if any rank is an outlier"
    add("--probe", action="store_true", help=text)
    text = "number of processes to start if there is no launcher; default: one per GPU, or 2"
    add("--processes", type=number(int, 1, 4096), help=text)
    add("--save", type=Path, metavar="DIR", help="also measure the speed of this checkpoint folder")
    text = f"seconds per measurement of a rank ({_PROBE_S:g})"
    add("--seconds", type=number(float, 0.001, 60), default=_PROBE_S, help=text)
    for spec in fields_of(ParallelConfig):
        if spec.dest in _SIZES:
            settings = spec.options()
            if spec.dest == _PIPELINE:
                settings["help"] = (
                    f"{spec.help_text} (default: all ranks if no other size is set, otherwise 1)"
                )
            group.add_argument(*spec.names, **settings)
    transport = parser.add_argument_group("transport of the probe, as in training")
    for spec in fields_of(TransportConfig):
        transport.add_argument(*spec.names, **spec.options())


def _probe(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Takes part in the probe as one rank. Rank 0 prints the outliers.

    Args:
        options: Parsed flags of ``doctor``.
        argv: Unparsed flags of ``doctor``, passed on to the processes that this function starts.

    Returns:
        1 if a rank, link or group is an outlier or did not respond; otherwise 0.
    """
    environment = Environment.read()
    if not environment.is_launched:
        count = options.processes or count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 2
        _probe_layout(options, count)  # Report wrong sizes once, before any process is started.
        shape = ["--standalone", "--nproc-per-node", str(count), "-m"]
        return launch.main([*shape, "megatron.adaptive", "doctor", *argv])
    from megatron.adaptive.profiling.probe import ProbeOptions, probe_job

    layout = _probe_layout(options, environment.world_size)
    values = vars(options)
    names = {spec.dest for spec in fields_of(TransportConfig)} & values.keys()
    result = probe_job(
        ProbeOptions(
            layout=layout,
            transport=TransportConfig(**{name: values[name] for name in names}),
            folder=options.save,
            seconds=options.seconds,
            timeout=timedelta(seconds=_MEETING_S),
        ),
        environment,
        show=partial(_print_probe, as_json=options.json),
    )
    if not (count := len(result.report.outliers)):
        return 0
    leave_reason(f"doctor --probe found {_outliers(count)}; see the output of rank 0")
    return 1


def _probe_layout(options: argparse.Namespace, world_size: int) -> ProbeLayout:
    """Returns the layout of the ranks to probe, based on the sizes in ``options``.

    Raises:
        ConfigError: The sizes do not match the number of ranks, or there is only one rank.
    """
    if world_size < 2:
        raise ConfigError(
            "doctor --probe compares ranks, so it requires at least two; start more processes"
        )
    sizes = {name: value for name, value in vars(options).items() if name in _SIZES}
    # If the user has not set any size, probe all ranks as one pipeline, so that at least one link
    # of each rank is measured.
    sizes = sizes or {_PIPELINE: world_size}
    return ProbeLayout(
        world_size=world_size,
        tensor=sizes.get("tensor_model_parallel_size", 1),
        context=sizes.get("context_parallel_size", 1),
        expert=sizes.get("expert_model_parallel_size", 1),
        pipeline=sizes.get(_PIPELINE, 1),
        chunks=sizes.get("num_virtual_stages_per_pipeline_rank", 1),
    )


def _outliers(count: int) -> str:
    return f"{count} outlier{'s' if count > 1 else ''}"


def _print_probe(result: JobReport, *, as_json: bool) -> None:
    report = result.report
    if as_json:
        content = {
            "hosts": result.hosts,
            "seconds": round(report.seconds, 3),
            "figures": [asdict(figure) for figure in report.figures],
            "outliers": [asdict(outlier) for outlier in report.outliers],
        }
        print(json.dumps(content, indent=2))
        return
    for outlier in report.outliers:
        show(f"{outlier.text}: {outlier.remedy}")
    count = len(report.outliers)
    outcome = _outliers(count) if count else "no outlier"
    nodes = len(set(result.hosts))
    show(
        f"{outcome}: {len(report.figures)} measurements of {len(result.hosts)} ranks on {nodes} "
        f"node{'s' if nodes > 1 else ''} in {report.seconds:.1f} s",
        file=sys.stderr if count else None,
    )
