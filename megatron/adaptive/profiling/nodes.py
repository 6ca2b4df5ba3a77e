"""What a profile tells of the node that it was measured on."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.environment import Environment
from megatron.adaptive.planner.cluster import known_gpu
from megatron.adaptive.profiling.memory import total_host_bytes

__all__ = ["gpu_name", "node_facts", "workers"]


def gpu_name(accelerator: Accelerator) -> str:
    """Return the name by which profiles and clusters know the device."""
    found = known_gpu(accelerator.name)
    return accelerator.name.lower().replace(" ", "-") if found is None else found.name


def node_facts(accelerator: Accelerator, environment: Environment) -> dict[str, Any]:
    """Return what this process knows of its node, as a profile file holds it.

    Args:
        accelerator: the process's device.
        environment: what the launcher said.
    """
    if accelerator.is_cuda:
        memory = torch.cuda.get_device_properties(accelerator.device).total_memory
    else:
        memory = total_host_bytes() // environment.local_world_size
    return {
        "gpu": gpu_name(accelerator),
        "device": accelerator.name,
        "processes": environment.local_world_size,
        "cores": psutil.cpu_count() or 0,
        "memory_bytes": int(memory),
    }


def workers(accelerator: Accelerator, processes: int) -> int:
    """Return how many of a node's processes compute at full speed at a time.

    Args:
        accelerator: the process's device.
        processes: of this node.

    Returns:
        Cores divided by the threads of a process, or GPUs where processes share them; 0 where
        each has its own.
    """
    if accelerator.is_cuda:
        count = torch.cuda.device_count()
        return count if count < processes else 0
    return max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
