"""Runs a Slurm cluster with several nodes on this machine; requires root and Debian's packages.

    with Lab(folder, [Kind("a10", nodes=1, gpus=2), Kind("v100", nodes=2, gpus=1)]) as lab:
        lab.run(["sbatch", "job.sh"])
        lab.crash("n2")

The login host ``ctl`` and every node ``n1``, ``n2``, ... run in separate network, PID, mount and
UTS namespaces, connected by a bridge, and share the file system. slurmctld, slurmd and munged are
the real programs, with slurmdbd and MariaDB for ``sacct`` if accounting is enabled. GPUs exist only
in the configuration. Each kind of node has a partition with its name, and the partition ``all``
contains every node. The lab does not change this machine, and closing it stops all processes.
"""

from __future__ import annotations

from .lab import Kind, Lab, LabError, why_not

__all__ = ["Kind", "Lab", "LabError", "why_not"]
