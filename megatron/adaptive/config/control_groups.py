"""Lists the control groups (cgroups) of this process, which limit its memory and CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
"""Mount point of the proc file system, which contains a folder for each process."""

MOUNTED = Path("/sys/fs/cgroup")
"""Folder with the mounted file systems of control groups."""


def folders(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups, each followed by its parent folders.

    The files of a control group depend on its version, 1 or 2, so a folder may not contain the file
    that the caller needs.

    Args:
        controller: Name of the controller in version 1, for example ``memory`` or ``cpu``.
    """
    for line in lines_of(PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = MOUNTED
        elif controller in controllers.split(","):
            root = MOUNTED / controller
        else:
            continue
        # Inside a container, the kernel may report a path of the host that does not exist in the
        # container. In this case, only the root folder has files, and they belong to the
        # container's control group.
        folder = root / path.strip("/")
        for group in (folder, *folder.parents):
            yield group
            if group == root:
                break


def lines_of(path: Path) -> list[str]:
    """Returns the lines of the kernel file ``path``, or an empty list if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
