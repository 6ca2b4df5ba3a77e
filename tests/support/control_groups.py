"""Creates control groups (cgroups) with a resource limit, which the ranks of tests join."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Limit:
    """Resource limit that can be set in versions 1 and 2 of control groups.

    Attributes:
        controller: Name of the controller in version 1 of control groups.
        first: Name and content of the file that sets the limit in version 1.
        second: Name and content of the file that sets the limit in version 2.
    """

    controller: str
    first: tuple[str, str]
    second: tuple[str, str]


def processor_quota(part: float) -> Limit:
    """Returns a limit on processor time. ``part`` is a number of processors, such as 0.5."""
    quota_us = str(round(PERIOD_US * part))
    return Limit("cpu", ("cpu.cfs_quota_us", quota_us), ("cpu.max", f"{quota_us} {PERIOD_US}"))


def disk_speed(path: Path, bytes_per_s: int) -> Limit:
    """Returns a limit on the read speed of the disk that contains ``path``, in bytes per second."""
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return Limit(
        "blkio",
        ("blkio.throttle.read_bps_device", f"{name} {bytes_per_s}"),
        ("io.max", f"{name} rbps={bytes_per_s}"),
    )


def memory_size() -> Limit:
    """Returns a memory limit that is unlimited at first. A process in the group sets it later."""
    return Limit("memory", ("memory.limit_in_bytes", "-1"), ("memory.high", "max"))


@contextlib.contextmanager
def limited_group(limit: Limit) -> Iterator[Path | None]:
    """Creates a control group with ``limit``, and yields its folder, or ``None`` if this fails."""
    name = f"megatron-adaptive-test-{os.getpid()}-{next(_NUMBERS)}"
    for root in (MOUNTED / limit.controller, MOUNTED):
        folder = root / name
        with contextlib.suppress(OSError):
            folder.mkdir()
        try:
            for file_name, content in (limit.first, limit.second):
                if (folder / file_name).exists():
                    (folder / file_name).write_text(content)
                    yield folder
                    return
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
    yield None
