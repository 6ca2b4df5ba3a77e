"""The other libraries: which are here, and how their processes are started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass

INSTALL = "bash prerequisite.sh --benchmarks"


@dataclass(frozen=True)
class Peer:
    """MPI over one of its ways through shared memory.

    Attributes:
        name: short name.
        launcher: command in front of that of two processes.
        environment: variables that it needs.
    """

    name: str
    launcher: tuple[str, ...]
    environment: dict[str, str]


def find() -> tuple[list[Peer], str]:
    """Return the peers that can run here, and why others cannot."""
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        return [], f"no mpiexec: {INSTALL}"
    if importlib.util.find_spec("mpi4py") is None:
        return [], f"no mpi4py: {INSTALL}"
    said = subprocess.run(
        [mpiexec, "--version"], capture_output=True, text=True, check=False, timeout=30
    ).stdout
    if "Open MPI" not in said and "OpenRTE" not in said:
        # Its two ways through shared memory are chosen with options of its own.
        return [], f"{mpiexec} is not Open MPI, which this benchmark knows: {INSTALL}"
    start = [mpiexec, "--oversubscribe", "--bind-to", "none", "-n", "2"]
    if os.geteuid() == 0:
        start.insert(1, "--allow-run-as-root")
    quiet = {"OMPI_MCA_btl_base_warn_component_unused": "0"}
    # `any`: by itself Open MPI takes UCX only where there is an RDMA device.
    ucx = ["opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any"]
    peers = [
        Peer("mpi", (*start, "--mca", "pml", "ob1", "--mca", "btl", "self,vader"), quiet),
        Peer("ucx", (*start, "--mca", "pml", "ucx", "--mca", *ucx), quiet),
    ]
    return peers, ""
