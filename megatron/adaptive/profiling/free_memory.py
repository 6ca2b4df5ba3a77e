"""Measures the memory that a process may still take, and describes its node for the planner.

::

    host   min(machine's MemAvailable, limit - usage of every control group on the way to the root)
           divided by the ranks of the node
    GPU    what the device has free, which leaves out what other processes and ranks hold there,
           divided by the ranks that share the device; and what this rank's allocator keeps unused

Importing this module does not import torch: processes without it ask for the host's part.
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
"""Share of free memory that plans leave alone."""

HOST_SHARE = 0.35
"""The C library keeps so much of freed activations between those in use. Measured with
``studies/planner.py --part memory`` in runs of the trainer with glibc."""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 1 << 60  # version 1 writes a number of pages close to 2**63 for "no limit"


def free_memory_bytes(accelerator: Accelerator, ranks_here: int) -> int:
    """Returns the bytes that this process may allocate beyond what its tensors hold now.

    Args:
        accelerator: the process's device.
        ranks_here: ranks of this node; they share its memory, or its GPUs in turn, evenly.
    """
    if not accelerator.is_cuda:
        return available_host_bytes() // max(1, ranks_here)
    import torch

    device = accelerator.device
    free, _ = torch.cuda.mem_get_info(device)
    # As accelerator.detect deals devices out: local rank modulo their number.
    sharing = -(-(ranks_here - (device.index or 0)) // max(1, torch.cuda.device_count()))
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free // max(1, sharing) + cached)


def available_host_bytes() -> int:
    """Returns the bytes that all processes like this one may still take on this machine.

    The least of what the machine has available and of what each control group leaves; page cache
    that the kernel gives back counts as free.
    """
    found = [*_meminfo("MemAvailable")]
    for limit, usage, cached in _groups():
        found.append(max(0, limit - usage + cached))
    return min(found, default=0)


def process_bytes(accelerator: Accelerator) -> int:
    """Returns the bytes that this process holds beside tensors: its context, or its pages.

    On a GPU what other processes hold there counts as well: measure on a free one, and on a host
    before there are tensors.
    """
    if not accelerator.is_cuda:
        return psutil.Process().memory_info().rss  # type: ignore[no-any-return]
    import torch

    free, whole = torch.cuda.mem_get_info(accelerator.device)
    return int(whole - free - torch.cuda.memory_reserved(accelerator.device))


def total_host_bytes() -> int:
    """Returns the bytes that this machine has, or that its control groups allow if that is less."""
    return min([*_meminfo("MemTotal"), *(limit for limit, _, _ in _groups())], default=0)


def _meminfo(name: str) -> list[int]:
    return [
        int(line.split()[1]) * 1024
        for line in _lines(_PROC / "meminfo")
        if line.startswith(f"{name}:")
    ]


def _groups() -> list[tuple[int, int, int]]:
    """Returns limit, usage and reclaimable page cache of each limited control group above us."""
    found = []
    for line in _lines(_PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current")
            found += _on_the_way(_CGROUPS, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _on_the_way(_CGROUPS / "memory", path, *names)
    return found


def _on_the_way(root: Path, path: str, limit: str, usage: str) -> list[tuple[int, int, int]]:
    found = []
    folder = root / path.strip("/")
    # In a container the path may be the host's: then the root is the container's own group.
    for group in (folder, *folder.parents):
        most, used = "".join(_lines(group / limit)), "".join(_lines(group / usage))
        if most.isdecimal() and used.isdecimal() and int(most) < _V1_UNLIMITED:
            stat = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
            # Version 1 counts descendants in the total_ fields alone.
            cached = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            found.append((int(most), int(used), int(cached)))
        if group == root:
            break
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def gpu_name(accelerator: Accelerator) -> str:
    """Returns the name by which profiles and clusters know the device."""
    found = known_gpu(accelerator.name)
    return accelerator.name.lower().replace(" ", "-") if found is None else found.name


def node_facts(accelerator: Accelerator, ranks_here: int) -> dict[str, Any]:
    """Returns what this process knows of its node, as ``nodes`` of a profile file holds it.

    Args:
        accelerator: the process's device.
        ranks_here: ranks of this node, which share the memory of a host evenly.
    """
    process: dict[str, float] = {"context_bytes": process_bytes(accelerator)}
    if accelerator.is_cuda:
        import torch

        memory = torch.cuda.get_device_properties(accelerator.device).total_memory
        if accelerator.backend == "nccl":
            process["context_bytes"] += CHANNELS_BYTES  # a job opens these; this run does not
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
