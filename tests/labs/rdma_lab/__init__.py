"""Runs a command on small Linux machines inside this machine, connected by software RDMA.

    python -m tests.labs.rdma_lab [--nodes N] [--memory MIB] [--timeout S] [--machine uml|qemu]
                                  -- COMMAND [ARGUMENT ...]

A node is a process: the kernel built for User-mode Linux, which needs neither virtualisation nor
privileges. It boots in a second, runs programs on one processor and has a soft-RoCE device. Links
are socket pairs between those processes, joined by node 0. A node sees the file system of this
machine at the same paths; files that it writes stay in its own memory, except below ``LAB_SHARE``.

The command starts in the caller's directory as root, with the caller's variables and

=============================  ===================================================================
``RANK``, ``WORLD_SIZE``       number of the node, and of all nodes
``MASTER_ADDR, MASTER_PORT``   node 0, as torch.distributed reads them
``LAB_ADDRS``                  addresses of all nodes by rank, separated by commas
``LAB_RDMA_DEV``               name of the RDMA device
``LAB_RDMA_GID``               index of its GID for RoCE v2 over IPv4
``LAB_SHARE``                  directory that this machine and every node can write
=============================  ===================================================================

The exit status is the status of the first node whose command fails, 124 after a timeout, 125 if a
node dies, otherwise 0. The kernel is compiled on first use, which takes minutes, and kept in
``$XDG_CACHE_HOME/megatron-adaptive/rdma-lab`` (``~/.cache`` without that variable).

With ``--machine qemu`` nodes are emulated machines with Debian's own kernel: ten times as slow, but
programs with the address and thread sanitizers run there, whose memory User-mode Linux cannot map.

What differs from a real machine:

* One processor per node: a thread that polls keeps the others of its node waiting, by milliseconds.
* System calls, clocks and first touches of memory take tens of microseconds, ``import torch`` takes
  seconds, registering 16 MiB most of one: reuse buffers, and compare times only with times from the
  same boot.
* Soft-RoCE retries for ever if ``retry_cnt`` is 7. With 6 and ``timeout`` 14 a write to a silent
  peer fails after half a second. A queue pair is not informed that its peer's program ended.
* ``CLOCK_MONOTONIC`` counts from the boot of a node, so it is not the same on two nodes.
* File system, ``/dev/shm`` and page cache of a node are parts of its memory (``--memory``).
* Other nodes are sure to see a whole file only if it is renamed into ``LAB_SHARE``.
* ``python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'`` stands for a loss of power,
  ``tc qdisc replace dev eth0 root netem loss 100%`` for a pulled cable.
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
