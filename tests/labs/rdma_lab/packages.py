"""Lists the Debian packages of the programs that the lab needs, and installs them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = [
    "BUILDING",
    "RUNNING",
    "LabError",
    "cache_path",
    "call",
    "can_install",
    "install",
    "make_once",
    "missing",
    "why_not_here",
]

RUNNING: Mapping[str, str] = {
    "ip": "iproute2",
    "rdma": "iproute2",
    "tc": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "ib_write_lat": "perftest",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
}
"""Maps each program and file that nodes need to the package that contains it."""

BUILDING: Mapping[str, str] = {
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "xz": "xz-utils",
}
"""Maps each program and file that is needed to compile the kernel to its package."""

_SYSTEM = "/usr/sbin:/sbin"


class LabError(Exception):
    """Raised if the lab cannot run on this machine. The message states the reason and a remedy."""


def why_not_here() -> str | None:
    """Returns the reason why this machine cannot run nodes, or ``None`` if it can run them."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the RDMA lab needs Linux on x86_64"
    return None


def cache_path(kind: str, choices: object) -> Path:
    """Returns the path in the cache for the settings ``choices``, even if it does not exist yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(repr(choices).encode()).hexdigest()[:16]
    return cache / "megatron-adaptive" / "rdma-lab" / f"{kind}{digest}"


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Calls ``make(folder)`` if ``folder`` is missing. Concurrent callers wait until it exists."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                make(folder)


def missing(*needs: Mapping[str, str]) -> list[str]:
    """Returns the Debian packages that contain the missing programs and files of ``needs``."""
    path = f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM}"
    lacking = {
        package: None
        for need in needs
        for name, package in need.items()
        if not (Path(name).exists() if name.startswith("/") else shutil.which(name, path=path))
    }
    return list(lacking)


def can_install() -> bool:
    """Returns whether this process is able to install Debian packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: list[str]) -> None:
    """Installs the Debian packages ``packages``, which requires that :func:`can_install` is true.

    Raises:
        LabError: The installation failed.
    """
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600"]
    call(*apt, "update")
    call(*apt, "install", "-y", "--no-install-recommends", *packages)


def call(*command: str | Path, cwd: Path | None = None, stdin: str | None = None) -> bytes:
    """Runs the program ``command``, and returns its standard output.

    Args:
        command: Program and its arguments.
        cwd: Working directory of the program.
        stdin: Text that is passed to the program's standard input.

    Raises:
        LabError: The program failed. The message contains the last line of its stderr.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env={
            **os.environ,
            "PATH": f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM}",
            "DEBIAN_FRONTEND": "noninteractive",
        },
        input=(stdin or "").encode(),
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        lines = said.strip().splitlines() or [f"status {done.returncode}"]
        raise LabError(f"the RDMA lab: '{' '.join(map(str, command))}' failed: {lines[-1]}")
    return done.stdout
