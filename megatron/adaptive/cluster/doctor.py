"""Checks of a node: what a run needs of it, and how to mend what is missing."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.adaptive import extension
from megatron.adaptive.cluster.host import (
    interface_of,
    is_loopback,
    own_address,
    rdma_ports,
    why_no_gpu_use,
)
from megatron.adaptive.cluster.node import check_port
from megatron.adaptive.errors import AdaptiveError

__all__ = ["Check", "answer_peers", "check_node", "check_way"]

_GIB = 1 << 30
_LEAST_SHM = 1 * _GIB
_LEAST_PYTHON = (3, 10)
_MOST_SKEW_S = 0.1
_CONNECT_S = 5.0
_TORCH = (
    "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available(), "
    "torch.cuda.device_count(), torch.version.cuda]))"
)


@dataclass(frozen=True)
class Check:
    """Holds one finding.

    Attributes:
        name: what was looked at.
        state: ``warning`` where a run may work, ``error`` where it cannot.
        text: what was found.
        mend: what to do; empty if all is well.
    """

    name: str
    state: Literal["ok", "warning", "error"]
    text: str
    mend: str = ""


def check_node(port: int) -> list[Check]:
    """Checks this node alone.

    Args:
        port: the one that a run would use.
    """
    steps = (_python, _torch, _extension, _shared_memory, _rdma, _names, _clock)
    return [check for step in steps for check in step()] + [_port(port)]


def _python() -> Iterator[Check]:
    text = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info[:2] < _LEAST_PYTHON:
        yield Check("Python", "error", text, "use Python 3.10 or newer")
    else:
        yield Check("Python", "ok", text)


def _torch() -> Iterator[Check]:
    done = subprocess.run(
        [sys.executable, "-c", _TORCH], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"status {done.returncode}"
        yield Check("torch", "error", why, "bash prerequisite.sh installs what is missing")
        return
    version, available, count, built = json.loads(done.stdout.splitlines()[-1])
    yield Check("torch", "ok", version)
    if not available:
        text = f"torch is built for CUDA {built}, but there is no GPU that it can use"
        mend = "see nvidia-smi and CUDA_VISIBLE_DEVICES; without GPUs set DEVICE=cpu"
        if built is None:
            text, mend = "this torch is built without CUDA", "for GPUs install a torch with CUDA"
        yield Check("CUDA", "warning", text, mend)
        return
    yield Check("CUDA", "ok", f"{count} GPUs, CUDA {built}")
    missing = why_no_gpu_use()
    if missing is None:
        yield Check("GPU use", "ok", "the monitor can sample it")
    else:
        text = f"the monitor cannot sample it: {missing}"
        mend = "pip install -r requirements-gpu.txt, and see nvidia-smi"
        yield Check("GPU use", "warning", text, mend)


def _extension() -> Iterator[Check]:
    module = extension.load()
    if module is not None:
        yield Check("extension", "ok", str(module.__file__))
        return
    mend = "bash prerequisite.sh builds it; without it messages go through gloo or NCCL"
    yield Check("extension", "warning", str(extension.why_missing()), mend)


def _shared_memory() -> Iterator[Check]:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError as error:
        yield Check("/dev/shm", "error", str(error.strerror), "mount a tmpfs there")
        return
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    text = f"{size / _GIB:.2f} GiB, {free / _GIB:.2f} GiB free"
    if free < _LEAST_SHM:
        mend = "start the container with --shm-size 16g, or in Kubernetes mount an emptyDir of "
        yield Check("/dev/shm", "warning", text, mend + "medium Memory there")
    else:
        yield Check("/dev/shm", "ok", text)


def _rdma() -> Iterator[Check]:
    ports = rdma_ports()
    if not ports:
        yield Check("RDMA", "ok", "no device; messages between nodes go over TCP")
        return
    for port in ports:
        gid = "no IPv4 GID of RoCE v2" if port.gid_index is None else f"GID {port.gid_index}"
        text = f"{port.device}:{port.port} {port.state}, {port.link}, {gid}"
        if port.state != "ACTIVE":
            mend = "bring the cable and the interface up (ip link, ibstatus)"
            yield Check("RDMA", "warning", text, mend)
        elif port.link == "Ethernet" and port.gid_index is None:
            mend = "give the interface of the device an IPv4 address"
            yield Check("RDMA", "warning", text, mend)
        else:
            yield Check("RDMA", "ok", text)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Check("memlock", "ok", "unlimited")
    else:
        mend = "ulimit -l unlimited, --ulimit memlock=-1 for a container, or limits.conf"
        yield Check("memlock", "error", f"{soft >> 10} KiB; RDMA pins more", mend)


def _names() -> Iterator[Check]:
    host = socket.gethostname()
    try:
        address = own_address(None)
        yield Check("network", "ok", f"{address} on {interface_of(address)}")
    except AdaptiveError as error:
        mend = "bring a network interface up; on one machine alone this does not matter"
        yield Check("network", "warning", str(error), mend)
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        mend = f"add a line with this node's address and {host} to /etc/hosts"
        yield Check("host name", "warning", f"{host}: {error.strerror}", mend)
        return
    text = f"{host} is {', '.join(found)}"
    if not all(is_loopback(address) for address in found):
        yield Check("host name", "ok", text)
        return
    mend = (
        f"take {host} off the loopback's line of /etc/hosts; run_master.sh, run_worker.sh and "
        "submit set GLOO_SOCKET_IFNAME, by hand set it yourself"
    )
    text += " here: gloo would listen where nobody else reaches it"
    yield Check("host name", "warning", text, mend)


def _clock() -> Iterator[Check]:
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    if time.time() < 1_600_000_000:
        yield Check("clock", "error", now, "set the clock; run chronyd or ntpd")
    else:
        yield Check("clock", "ok", now)


def _port(port: int) -> Check:
    try:
        check_port(port)
    except AdaptiveError as error:
        return Check("port", "warning", str(error), "set another MASTER_PORT")
    return Check("port", "ok", f"{port} is free")


def answer_peers(port: int, limit_s: float) -> list[Check]:
    """Lets other nodes check their way to this one, until the first has, or the time is over.

    Args:
        port: where to listen.
        limit_s: how long to wait.
    """
    try:
        listener = socket.create_server(("", port))
    except OSError as error:
        return [Check("other nodes", "error", f"port {port}: {error.strerror}", "take another")]
    heard: list[Check] = []
    with listener:
        end_s = time.monotonic() + limit_s
        while not heard and (left_s := end_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                link, (peer, *_) = listener.accept()
            except TimeoutError:
                break
            with link:
                heard += _answer(link, str(peer))
    if heard:
        return heard
    text = f"nobody reached port {port} within {limit_s:g} s"
    mend = "start doctor with the same --master-addr on another node; open the port in the firewall"
    return [Check("other nodes", "error", text, mend)]


def _answer(link: socket.socket, peer: str) -> list[Check]:
    """Answers with the time and tries the way back to the peer."""
    link.settimeout(_CONNECT_S)
    try:
        message = json.loads(link.makefile().readline())
        back = int(message["back"])
    except (OSError, ValueError, TypeError, KeyError):
        return []  # something else that knocked
    why = ""
    try:
        socket.create_connection((peer, back), timeout=_CONNECT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
    link.sendall(json.dumps({"unix_s": time.time(), "back": why}).encode() + b"\n")
    if why:
        mend = "open the ports between the nodes; gloo and NCCL take any above 1023"
        return [Check("other nodes", "error", f"{peer} port {back}: {why}", mend)]
    return [Check("other nodes", "ok", f"{peer} reaches this node and is reached")]


def check_way(address: str, port: int, limit_s: float) -> list[Check]:
    """Checks the way between this node and the one at ``address``, on which doctor runs as well."""
    end_s = time.monotonic() + limit_s
    while True:
        try:
            return _try_way(address, port)
        except (OSError, ValueError) as error:
            if time.monotonic() > end_s:
                why = getattr(error, "strerror", None) or str(error)
                mend = "start doctor there with the same --master-addr; open the port in firewalls"
                return [Check("way there", "error", f"{address}:{port}: {why}", mend)]
        time.sleep(0.5)


def _try_way(address: str, port: int) -> list[Check]:
    with (
        socket.create_server(("", 0)) as back,
        socket.create_connection((address, port), timeout=_CONNECT_S) as link,
    ):
        link.settimeout(3 * _CONNECT_S)
        begin_s = time.time()
        link.sendall(json.dumps({"back": back.getsockname()[1]}).encode() + b"\n")
        message = json.loads(link.makefile().readline())
        end_s = time.time()
        own = str(link.getsockname()[0])
    checks = [Check("way there", "ok", f"{address}:{port} from {own} on {interface_of(own)}")]
    if message["back"]:
        mend = "open the ports between the nodes; gloo and NCCL take any above 1023"
        checks.append(Check("way back", "error", str(message["back"]), mend))
    else:
        checks.append(Check("way back", "ok", "reached from there"))
    early, late = begin_s - message["unix_s"], end_s - message["unix_s"]
    skew_s = 0.0 if early <= 0 <= late else min(abs(early), abs(late))
    text = f"they differ by {skew_s:.3f} s, give or take {end_s - begin_s:.3f} s"
    if skew_s > _MOST_SKEW_S:
        checks.append(Check("clocks", "warning", text, "run chronyd or ntpd on both nodes"))
    else:
        checks.append(Check("clocks", "ok", text))
    return checks
