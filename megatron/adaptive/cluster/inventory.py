"""Finds this node's addresses, interfaces, RDMA devices and GPUs, and samples resource usage.

Every few seconds, :class:`ResourceSampler` appends a line of JSON to the file ``<node>.gpu``::

    {"unix_s": ..., "gpus": [{"index": 0, "used_percent": 97, "memory_used_bytes": ...,
     "memory_total_bytes": ..., "pids": [...]}], "processes": [{"pid": ..., "cpu_percent": ...,
     "memory_bytes": ...}]}

GPUs are sampled through NVML (NVIDIA's management library), if it is available. When a node exits
normally, its last line also contains ``"ended": true``. If the samples end without such a line, the
node was lost.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron.adaptive.errors import SetupError
from megatron.adaptive.network import interface_of, is_loopback
from megatron.adaptive.trace.files import BestEffortFile, Outage

_RDMA = Path("/sys/class/infiniband")
_READERS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """Port of an RDMA device.

    Attributes:
        device: Name of the device, such as ``mlx5_0``.
        port: Number of the port, counted from 1.
        state: State of the port, such as ``ACTIVE``.
        link: Link layer, ``Ethernet`` or ``InfiniBand``.
        gid_index: Index of the port's RoCE v2 address (GID), or ``None`` if the port has no such
            address.
        gbit_per_s: Data rate of the port in Gbit/s; 0 if unknown.
    """

    device: str
    port: int
    state: str
    link: str
    gid_index: int | None
    gbit_per_s: float = 0.0


def resolve(host: str) -> str:
    """Resolves ``host`` to an address, and avoids loopback addresses if possible.

    Raises:
        SetupError: The host name cannot be resolved.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(
            f"MASTER_ADDR={host} cannot be resolved on {socket.gethostname()} "
            f"({error.strerror}); use an address, or fix /etc/hosts or DNS"
        ) from error
    addresses = [str(entry[4][0]) for entry in entries]
    return next((address for address in addresses if not is_loopback(address)), addresses[0])


def interface_variables(interface: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that make gloo and NCCL use ``interface``.

    Omits variables that are already set in ``environment``.
    """
    if interface is None:
        return {}
    return {name: interface for name in _READERS if not environment.get(name)}


def loopback_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that make gloo use the loopback interface.

    The result is empty if ``environment`` already sets an interface for gloo.
    """
    loopback = interface_of("127.0.0.1")
    if loopback is None or environment.get(_READERS[0]):
        return {}
    return {_READERS[0]: loopback}


def rdma_variables(ports: Sequence[RdmaPort], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that make NCCL and UCX use working RDMA ports of this node.

    The variables select the active InfiniBand ports or, if there are none, the active Ethernet
    ports with a RoCE v2 address. Without these variables, NCCL and UCX may first try a port that is
    down or has no address, and fail.

    Args:
        ports: RDMA ports of this node.
        environment: Environment variables that are already set. The result omits them.
    """
    active = [port for port in ports if port.state == "ACTIVE"]
    usable = [port for port in active if port.link == "InfiniBand"]
    usable = usable or [port for port in active if port.gid_index is not None]
    if not usable:
        return {}
    names = [f"{port.device}:{port.port}" for port in usable]
    variables = {"NCCL_IB_HCA": f"={','.join(names)}", "UCX_NET_DEVICES": ",".join(names)}
    gids = {port.gid_index for port in usable if port.link == "Ethernet"} - {None}
    if len(gids) == 1:
        index = str(gids.pop())
        variables |= {"NCCL_IB_GID_INDEX": index, "UCX_IB_GID_INDEX": index}
    return {name: value for name, value in variables.items() if not environment.get(name)}


def rdma_ports(root: Path = _RDMA) -> list[RdmaPort]:
    """Returns the RDMA ports of this node, or an empty list if it has no RDMA device."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        if not port.name.isdigit():
            continue
        state = _read(port / "state").rpartition(":")[2].strip()
        ports.append(
            RdmaPort(
                device=port.parent.parent.name,
                port=int(port.name),
                state=state or "unknown",
                link=_read(port / "link_layer") or "unknown",
                gid_index=_gid_index(port),
                gbit_per_s=float((_read(port / "rate").split() or ["0"])[0]),
            )
        )
    return ports


def _gid_index(port: Path) -> int | None:
    """Returns the index of the port's first RoCE v2 address (GID) for IPv4.

    Returns ``None`` if the port has no such address. ``port`` is the port's folder in sysfs.
    """
    for path in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        kind = _read(port / "gid_attrs" / "types" / path.name)
        if kind == "RoCE v2" and _read(path).startswith("0000:0000:0000:0000:0000:ffff:"):
            return int(path.name)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # The kernel creates files for unset entries, but reading them fails.


ENDED = "ended"
"""Key in the last sample of a node that has exited normally."""
_PERIOD_S = 5.0


def why_no_gpu_use() -> str | None:
    """Returns the reason why this node's GPU usage cannot be sampled, or ``None`` if it can."""
    try:
        import pynvml
    except ImportError:
        return "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    # Initialization fails if, for example, no driver is installed or permission is denied.
    except Exception as error:
        return f"NVML cannot be initialized: {error}"
    return None


def _nvml() -> Any:
    """Initializes NVML and returns its Python module, or ``None`` if NVML cannot be used."""
    if why_no_gpu_use() is not None:
        return None
    import pynvml

    return pynvml


def count_gpus(visible: str | None) -> int:
    """Returns the number of GPUs that a process on this node may use.

    Args:
        visible: Value of ``CUDA_VISIBLE_DEVICES``, or ``None`` if it is not set.
    """
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    nvml = _nvml()
    if nvml is not None:
        return int(nvml.nvmlDeviceGetCount())
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


class ResourceSampler:
    """Runs a thread that samples the usage of this node's GPUs and of a process's descendants.

    The sampler must be closed after use.

    Args:
        pid: ID of the process whose descendants are sampled.
        path: Path of the file to append lines to.
    """

    def __init__(self, pid: int, path: Path) -> None:
        self._pid = pid
        self._path = path
        self._known: dict[int, psutil.Process] = {}
        self._nvml = _nvml()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes a last sample and stops the thread. Safe to call more than once."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            file = BestEffortFile(self._path, "samples")
        except OSError as error:
            Outage(self._path, "samples").begins(error)
            return
        over = False
        while not over:
            self._write(file, {})
            over = self._done.wait(_PERIOD_S)
        self._write(file, {ENDED: True})
        file.close()

    def _write(self, file: BestEffortFile, extra: dict[str, Any]) -> None:
        file.append((json.dumps({**self.sample(), **extra}) + "\n").encode())

    def sample(self) -> dict[str, Any]:
        """Takes a sample, and returns it as the dictionary for one line of the file."""
        processes = self._processes()
        return {"unix_s": round(time.time(), 1), "gpus": self._gpus(), "processes": processes}

    def _processes(self) -> list[dict[str, Any]]:
        samples = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._pid).children(recursive=True):
                process = self._known.setdefault(process.pid, process)
                with contextlib.suppress(psutil.Error):
                    samples.append(
                        {
                            "pid": process.pid,
                            "cpu_percent": process.cpu_percent(),
                            "memory_bytes": process.memory_info().rss,
                        }
                    )
        return samples

    def _gpus(self) -> list[dict[str, Any]]:
        nvml = self._nvml
        if nvml is None:
            return []
        samples = []
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(device)
                running = nvml.nvmlDeviceGetComputeRunningProcesses(device)
                samples.append(
                    {
                        "index": index,
                        "used_percent": int(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
                        "memory_used_bytes": int(memory.used),
                        "memory_total_bytes": int(memory.total),
                        "pids": [int(process.pid) for process in running],
                    }
                )
        return samples
