"""A Slurm cluster of several nodes on this machine, for tests; needs root and Debian's packages.

    with Lab(folder, [Kind("a10", nodes=1, gpus=2), Kind("v100", nodes=2, gpus=1)]) as lab:
        lab.run(["sbatch", "job.sh"])
        lab.crash("n2")

The login host ``ctl`` and every node ``n1``, ``n2``, ... are namespaces of their own for network,
processes, mounts and host name, joined by a bridge; the file system is shared. slurmctld, slurmd
and munged are the real ones, with slurmdbd and MariaDB for ``sacct`` where accounting is asked for.
GPUs are names only. Each kind of node is a partition of that name; ``all`` has all. Nothing of this
machine is changed, and everything ends with the lab.
"""

from __future__ import annotations

from .lab import Kind, Lab, LabError, why_not

__all__ = ["Kind", "Lab", "LabError", "why_not"]
