"""Programs that the lab needs, and the Debian packages that have them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["BUILDING", "RUNNING", "LabError", "can_install", "call", "install", "missing"]

RUNNING: Mapping[str, str] = {
    "ip": "iproute2",
    "rdma": "iproute2",
    "tc": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "ib_write_lat": "perftest",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
}
"""What the nodes run: program or file, and its package."""

BUILDING: Mapping[str, str] = {
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "xz": "xz-utils",
}
"""What the kernel is compiled with."""

_SYSTEM = "/usr/sbin:/sbin"


class LabError(Exception):
    """The lab cannot run here; one line that says why and what to do."""


def missing(*needs: Mapping[str, str]) -> list[str]:
    """Return the packages of what is not there, each once."""
    path = f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM}"
    lacking = {
        package: None
        for need in needs
        for name, package in need.items()
        if not (Path(name).exists() if name.startswith("/") else shutil.which(name, path=path))
    }
    return list(lacking)


def can_install() -> bool:
    """Return whether this process may install packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: list[str]) -> None:
    """Install Debian packages, where :func:`can_install`; waits for other installations to end.

    Raises:
        LabError: it did not work.
    """
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600"]
    call(*apt, "update")
    call(*apt, "install", "-y", "--no-install-recommends", *packages)


def call(*command: str | Path, cwd: Path | None = None, given: str | None = None) -> bytes:
    """Run a program to its end; returns what it wrote to stdout.

    Args:
        command: program and arguments.
        cwd: where it runs.
        given: what it reads from stdin.

    Raises:
        LabError: it failed; holds the last line that it wrote to stderr.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env={
            **os.environ,
            "PATH": f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM}",
            "DEBIAN_FRONTEND": "noninteractive",
        },
        input=(given or "").encode(),
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        lines = said.strip().splitlines() or [f"status {done.returncode}"]
        raise LabError(f"the RDMA lab ran '{' '.join(map(str, command))}': {lines[-1]}")
    return done.stdout
