"""Measures the memory that a process may still allocate, for the planner.

::

    host   min(machine's MemAvailable, limit - usage of every control group up to the root),
           divided by the number of ranks on the node
    GPU    free memory of the device (memory of other processes and ranks is not free),
           divided by the number of ranks that share the device;
           plus unused memory in the cache of this rank's allocator

This module does not import torch at import time, because it also measures host memory in processes
that do not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

from megatron.adaptive.config import control_groups
from megatron.adaptive.config.control_groups import lines_of
from megatron.adaptive.planner.cluster import known_gpu
from megatron.adaptive.planner.layer_costs import CHANNELS_BYTES

if TYPE_CHECKING:
    from megatron.adaptive.accelerator import Accelerator

KEPT_FREE = 0.1
"""Fraction of the free memory that a plan must leave unused, as a safety margin."""

HOST_SHARE = 0.35
"""Fraction of freed CPU activation memory that the C library does not return to the system.

This fraction was measured with ``studies/planner.py --part memory`` in runs of the trainer with
glibc.
"""

_LIMIT_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Names of the files with the limit and the usage, in version 2 and version 1 of control groups."""

_V1_UNLIMITED = 1 << 60
"""Smallest value that means "no limit" in version 1 of control groups (cgroups).

The kernel writes a value of almost 2**63 if there is no limit.
"""


def free_memory_bytes(accelerator: Accelerator, ranks_here: int) -> int:
    """Returns the number of bytes that this process may allocate in addition to its tensors.

    Args:
        accelerator: Device of this process.
        ranks_here: Number of ranks on this node. On a CPU, they share the host's memory evenly.
    """
    if not accelerator.is_cuda:
        return available_host_bytes() // max(1, ranks_here)
    import torch

    device = accelerator.device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free // accelerator.shares + cached)


def available_host_bytes() -> int:
    """Returns how many bytes of host memory all ranks of this machine may still allocate.

    The result is the minimum of the machine's available memory and the remaining memory of each
    control group. Page cache that the kernel can reclaim counts as free.
    """
    candidates = [*_meminfo("MemAvailable")]
    for limit, usage, cached in _groups():
        candidates.append(max(0, limit - usage + cached))
    return min(candidates, default=0)


def process_bytes(accelerator: Accelerator) -> int:
    """Returns the number of bytes that this process uses in addition to its tensors.

    On a GPU, this is the CUDA context. It cannot be distinguished from memory of other processes,
    so no other process should use the GPU. On a CPU, it is the resident memory of the process, so
    call this function before tensors are allocated.
    """
    if not accelerator.is_cuda:
        resident: int = psutil.Process().memory_info().rss
        return resident
    import torch

    free, whole = torch.cuda.mem_get_info(accelerator.device)
    return int(whole - free - torch.cuda.memory_reserved(accelerator.device))


def total_host_bytes() -> int:
    """Returns the machine's memory in bytes, or the limit of a control group if that is lower."""
    return min([*_meminfo("MemTotal"), *(limit for limit, _, _ in _groups())], default=0)


def _meminfo(name: str) -> list[int]:
    return [
        int(line.split()[1]) * 1024
        for line in lines_of(control_groups.PROC / "meminfo")
        if line.startswith(f"{name}:")
    ]


def _groups() -> list[tuple[int, int, int]]:
    """Returns limit, usage and reclaimable page cache of this process's control groups, in bytes.

    Groups without a memory limit are omitted.
    """
    groups = []
    for folder in control_groups.folders("memory"):
        for limit, usage in _LIMIT_FILES:
            most = "".join(lines_of(folder / limit))
            used = "".join(lines_of(folder / usage))
            if most.isdecimal() and used.isdecimal() and int(most) < _V1_UNLIMITED:
                stat = dict(line.split()[:2] for line in lines_of(folder / "memory.stat"))
                # Only the total_ fields include descendants in version 1 of control groups.
                cached = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
                groups.append((int(most), int(used), int(cached)))
    return groups


def gpu_name(accelerator: Accelerator) -> str:
    """Returns the name of the device for profile files and cluster descriptions."""
    gpu = known_gpu(accelerator.name)
    return accelerator.name.lower().replace(" ", "-") if gpu is None else gpu.name


def node_facts(accelerator: Accelerator, ranks_here: int) -> dict[str, Any]:
    """Returns the entry of this process's node in ``nodes`` of a profile file.

    Args:
        accelerator: Device of this process.
        ranks_here: Number of ranks on this node. On a CPU, they share the host's memory evenly.
    """
    process: dict[str, float] = {"context_bytes": process_bytes(accelerator)}
    if accelerator.is_cuda:
        import torch

        memory = torch.cuda.get_device_properties(accelerator.device).total_memory
        if accelerator.backend == "nccl":
            # The NCCL channels of a job also need GPU memory. They are not open yet, so their size
            # is added here.
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
