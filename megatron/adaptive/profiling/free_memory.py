"""Measures the memory that a process may still allocate, and describes its node for the planner.

::

    host   min(machine's MemAvailable, limit - usage of every control group up to the root),
           divided by the ranks of the node
    GPU    free memory of the device (memory of other processes and ranks is not free),
           divided by the ranks that share the device; plus unused memory of this rank's allocator

Importing this module does not import torch, because processes without torch need the host's part.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron.adaptive.planner.cluster import known_gpu
from megatron.adaptive.planner.layer_costs import CHANNELS_BYTES

if TYPE_CHECKING:
    from megatron.adaptive.accelerator import Accelerator

KEPT_FREE = 0.1
"""Fraction of free memory that plans do not use."""

HOST_SHARE = 0.35
"""Fraction of freed activations that the C library does not return to the system.

Measured with ``studies/planner.py --part memory`` in runs of the trainer with glibc.
"""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 1 << 60
"""Least value that means "no limit" in control groups of version 1, which write almost 2**63."""


def free_memory_bytes(accelerator: Accelerator, ranks_here: int) -> int:
    """Returns the bytes that this process may allocate in addition to its present tensors.

    Args:
        accelerator: Device of the process.
        ranks_here: Number of ranks on this node, which share its memory, or its GPUs, evenly.
    """
    if not accelerator.is_cuda:
        return available_host_bytes() // max(1, ranks_here)
    import torch

    device = accelerator.device
    free, _ = torch.cuda.mem_get_info(device)
    # accelerator.detect uses the local rank modulo the number of devices.
    sharing = -(-(ranks_here - (device.index or 0)) // max(1, torch.cuda.device_count()))
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free // max(1, sharing) + cached)


def available_host_bytes() -> int:
    """Returns the bytes that this process and its siblings may still allocate on this machine.

    It is the least of the machine's available memory and the rest of each control group's limit;
    page cache that the kernel can reclaim counts as free.
    """
    candidates = [*_meminfo("MemAvailable")]
    for limit, usage, cached in _groups():
        candidates.append(max(0, limit - usage + cached))
    return min(candidates, default=0)


def process_bytes(accelerator: Accelerator) -> int:
    """Returns the bytes of this process other than tensors: its GPU context, or its pages.

    Memory of other processes on the GPU counts as well, so measure on a free GPU; measure on a
    host before there are tensors.
    """
    if not accelerator.is_cuda:
        return psutil.Process().memory_info().rss  # type: ignore[no-any-return]
    import torch

    free, whole = torch.cuda.mem_get_info(accelerator.device)
    return int(whole - free - torch.cuda.memory_reserved(accelerator.device))


def total_host_bytes() -> int:
    """Returns the memory of this machine in bytes, or its control groups' limit if that is less."""
    return min([*_meminfo("MemTotal"), *(limit for limit, _, _ in _groups())], default=0)


def _meminfo(name: str) -> list[int]:
    return [
        int(line.split()[1]) * 1024
        for line in _lines(_PROC / "meminfo")
        if line.startswith(f"{name}:")
    ]


def _groups() -> list[tuple[int, int, int]]:
    """Returns limit, usage and reclaimable page cache of each limited group of this process."""
    groups = []
    for line in _lines(_PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current")
            groups += _up_to_root(_CGROUPS, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            groups += _up_to_root(_CGROUPS / "memory", path, *names)
    return groups


def _up_to_root(root: Path, path: str, limit: str, usage: str) -> list[tuple[int, int, int]]:
    """Returns limit, usage and page cache of a group and all groups above it that have a limit."""
    groups = []
    folder = root / path.strip("/")
    # A container may show the host's path, which does not exist; its root is then its group.
    for group in (folder, *folder.parents):
        most = "".join(_lines(group / limit))
        used = "".join(_lines(group / usage))
        if most.isdecimal() and used.isdecimal() and int(most) < _V1_UNLIMITED:
            stat = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
            # Version 1 includes descendants only in the total_ fields.
            cached = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            groups.append((int(most), int(used), int(cached)))
        if group == root:
            break
    return groups


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def gpu_name(accelerator: Accelerator) -> str:
    """Returns the name of the device in profiles and descriptions of clusters."""
    gpu = known_gpu(accelerator.name)
    return accelerator.name.lower().replace(" ", "-") if gpu is None else gpu.name


def node_facts(accelerator: Accelerator, ranks_here: int) -> dict[str, Any]:
    """Returns the description of this process's node, in the form of ``nodes`` of a profile file.

    Args:
        accelerator: Device of the process.
        ranks_here: Number of ranks on this node, which share the memory of a host evenly.
    """
    process: dict[str, float] = {"context_bytes": process_bytes(accelerator)}
    if accelerator.is_cuda:
        import torch

        memory = torch.cuda.get_device_properties(accelerator.device).total_memory
        if accelerator.backend == "nccl":
            # A job opens NCCL channels, but this measurement does not.
            process["context_bytes"] += CHANNELS_BYTES
    else:
        memory = total_host_bytes() // ranks_here
        process["allocator_share"] = HOST_SHARE
    return {
        "gpu": gpu_name(accelerator),
        "device": accelerator.name,
        "processes": ranks_here,
        "cores": psutil.cpu_count() or 0,
        "memory_bytes": int(memory),
        **process,
    }
