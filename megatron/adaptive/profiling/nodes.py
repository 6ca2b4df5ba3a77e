"""Describes the node that a process measures on, for the planner."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.planner.cluster import known_gpu
from megatron.adaptive.profiling.memory import process_bytes, total_host_bytes

HOST_SHARE = 0.35
"""The C library keeps so much of freed activations between those in use. Measured with
``benchmarks/planner.py --part memory`` in runs of the trainer with glibc."""


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
        memory = torch.cuda.get_device_properties(accelerator.device).total_memory
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
