"""Runs a command on small virtual Linux machines that are connected by software RDMA.

    python -m tests.labs.rdma_lab [--nodes N] [--memory MIB] [--timeout S] [--machine uml|qemu]
                                  -- COMMAND [ARGUMENT ...]

A node is a User-mode Linux kernel that runs as a process, without virtualization or privileges. It
boots in a second, runs its programs on one processor and has a soft-RoCE device. A socket pair
links node 0 to each other node, and node 0 forwards packets between them. A node sees this
machine's file system at the same paths. Files that a node writes stay in its own memory, except
below ``LAB_SHARE``.

The command starts in the caller's directory as root, with the caller's environment variables and

=============================  ===================================================================
``RANK``, ``WORLD_SIZE``       index of the node, and number of nodes
``MASTER_ADDR, MASTER_PORT``   address of node 0, for torch.distributed
``LAB_ADDRS``                  addresses of all nodes by rank, separated by commas
``LAB_RDMA_DEV``               name of the RDMA device
``LAB_RDMA_GID``               index of its GID for RoCE v2 over IPv4
``LAB_SHARE``                  directory that this machine and every node can write
=============================  ===================================================================

The exit status is the status of the first command that failed, 124 after a timeout, 125 if a node
died, and otherwise 0. The kernel is compiled on first use, which takes minutes, and is cached in
``$XDG_CACHE_HOME/megatron-adaptive/rdma-lab`` (below ``~/.cache`` if the variable is not set).

With ``--machine qemu`` nodes are machines that QEMU emulates, with Debian's kernel. They are ten
times slower, but can run programs with the address and thread sanitizers, whose memory layout
User-mode Linux does not support.

Differences from a real machine:

* A node has one processor, so a thread that polls delays the node's other threads by milliseconds.
* System calls, clock reads and first accesses to memory take tens of microseconds. ``import torch``
  takes seconds, and registering 16 MiB takes almost a second. Therefore, reuse buffers, and compare
  only times from the same boot.
* Soft-RoCE retries forever if ``retry_cnt`` is 7. With 6 and ``timeout`` 14, a write to a silent
  peer fails after half a second. A queue pair is not notified when its peer's program exits.
* ``CLOCK_MONOTONIC`` counts from the boot of a node, so it differs between nodes.
* The file system, ``/dev/shm`` and the page cache of a node use the node's memory (``--memory``).
* A file in ``LAB_SHARE`` may look incomplete to other nodes, unless it is renamed into place.
* ``python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'`` simulates a power loss, and
  ``tc qdisc replace dev eth0 root netem loss 100%`` an unplugged cable.
"""

from __future__ import annotations

from . import qemu
from .kernel import prepare, why_not
from .lab import DIED, MACHINES, TIMED_OUT, Result, run
from .packages import LabError

__all__ = [
    "DIED",
    "MACHINES",
    "TIMED_OUT",
    "LabError",
    "Result",
    "prepare",
    "qemu",
    "run",
    "why_not",
]
