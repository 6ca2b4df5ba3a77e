"""Compiles the kernel of the nodes, once for each combination of the settings in this module."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from . import packages
from .packages import LabError

__all__ = ["prepare", "why_not"]

SOURCE = "linux-source-6.12"
"""Debian package that contains the source code of Debian's current kernel."""
CONFIG = Path(__file__).with_name("kernel.config")

# An arriving packet interrupts the processor of the node, but does not preempt a program that polls
# memory. Such a program would see the data only after the next timer tick. Therefore, the changed
# kernel also preempts programs after interrupts, and has more frequent ticks.
_HANDLED = "_sigio_handler(regs, irqs_suspended);\n"
_TAKE = """\
	if (need_resched() && current->mm)
		os_alarm_process(current->mm->context.id.pid);
"""
# Reserve space for the registers of any processor. On a host with AMX tiles, either all 11,008
# bytes of registers can be restored, or no registers at all. The kernel saves registers on its
# stacks, which kernel.config enlarges.
_REGISTERS = "DEFINE_LONGS(HOST_FP_SIZE, {});\n".format
CHANGES = (
    ("arch/um/kernel/irq.c", _HANDLED, _HANDLED + _TAKE),
    ("arch/um/Kconfig", "default 100\n", "default 1000\n"),
    ("arch/x86/um/user-offsets.c", _REGISTERS(2696), _REGISTERS(12288)),
)
"""Changes of the source code, each as (file, text that occurs once in the file, replacement).
"""


def prepare() -> Path:
    """Returns the path of the kernel. The first call installs packages and compiles the kernel.

    Raises:
        LabError: Nodes cannot run on this machine.
    """
    if reason := why_not():
        raise LabError(reason)
    kernel = _kernel()
    if lacking := _lacking(kernel):
        packages.install(lacking)
    packages.make_once(kernel.parent, _build)
    return kernel


def why_not() -> str | None:
    """Returns the reason why :func:`prepare` would fail, or ``None`` if it would succeed."""
    if reason := packages.why_not_here():
        return reason
    lacking = _lacking(_kernel())
    if lacking and not packages.can_install():
        return (
            f"the RDMA lab needs the packages {' '.join(lacking)}: run bash prerequisite.sh "
            "--lab as a user who can install packages"
        )
    return None


def _lacking(kernel: Path) -> list[str]:
    """Returns the packages that must be installed before nodes can boot ``kernel``."""
    building = () if kernel.exists() else (packages.BUILDING,)
    return packages.missing(packages.RUNNING, *building)


def _kernel() -> Path:
    """Returns the path of the kernel with these settings, even if it is not compiled yet."""
    return packages.cache_path("", (SOURCE, CONFIG.read_text(), CHANGES)) / "linux"


def _build(folder: Path) -> None:
    """Compiles the kernel in a temporary folder, which is then renamed to ``folder``."""
    print(
        f"rdma-lab: compiling the kernel in {folder}, which takes some minutes",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        packages.call("tar", "xf", _archive(work), "-C", work)
        tree = next(work.glob("*/Kconfig")).parent
        for file, old, new in CHANGES:
            text = (tree / file).read_text()
            if text.count(old) != 1:
                raise LabError(
                    f"{SOURCE}: {file} does not contain the text that the RDMA lab replaces"
                )
            (tree / file).write_text(text.replace(old, new))
        make = ["make", "-s", "-C", str(tree), "ARCH=um", f"-j{os.cpu_count()}"]
        packages.call(*make, f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig")
        packages.call(*make, "linux")
        done = work / "done"
        done.mkdir()
        packages.call("strip", "-o", done / "linux", tree / "linux")
        done.rename(folder)


def _archive(work: Path) -> Path:
    """Returns the source archive of the kernel's package.

    Downloads the package to the folder ``work`` if it is not installed.
    """
    installed = Path("/usr/src", f"{SOURCE}.tar.xz")
    if installed.exists():
        return installed
    try:
        packages.call("apt-get", "-qq", "download", SOURCE, cwd=work)
    except (LabError, FileNotFoundError) as error:
        raise LabError(f"the RDMA lab needs the Debian package {SOURCE} ({error})") from None
    packages.call("dpkg", "-x", next(work.glob("*.deb")), work / "package")
    return next(work.glob("package/usr/src/*.tar.xz"))
