"""Runs nodes as machines that QEMU emulates, which are slow but support sanitizers.

The machines boot Debian's kernel with the few modules that a node needs. QEMU emulates the
processor, so the lab needs neither privileges nor virtualization.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import packages
from .packages import LabError

__all__ = ["PACKAGES", "arguments", "prepare", "why_not"]

PACKAGES: Mapping[str, str] = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "xz": "xz-utils",
}
"""Maps each program that the lab does not install itself to the package that contains it."""

KERNEL = "linux-image-6.12-amd64"
"""Package that depends on the newest kernel. Cloud kernels are unsuitable: they lack soft-RoCE."""
MODULES = (
    *("virtio_pci", "virtio_net", "9p", "9pnet_virtio", "overlay", "sch_netem"),
    # Soft-RoCE requests the first of these modules by name, to compute checksums.
    *("crc32_generic", "rdma_rxe"),
)
INIT = Path(__file__).with_name("init-qemu.sh")
_FOLDERS = ("bin", "modules", "proc", "sys", "dev", "host")


def why_not() -> str | None:
    """Returns the reason why :func:`prepare` would fail, or ``None`` if it would succeed."""
    if reason := packages.why_not_here():
        return reason
    if lacking := packages.missing(packages.RUNNING, PACKAGES):
        return (
            f"nodes under QEMU need the packages {' '.join(lacking)}: run bash prerequisite.sh "
            "--lab as a user who can install packages"
        )
    return None


def prepare() -> Path:
    """Returns the folder with ``vmlinuz`` and ``initrd``. The first call downloads the kernel.

    Raises:
        LabError: Nodes cannot run on this machine.
    """
    if reason := why_not():
        raise LabError(reason)
    kernel = packages.cache_path("qemu-", (KERNEL, MODULES, INIT.read_text()))
    packages.make_once(kernel, _make)
    return kernel


def _make(kernel: Path) -> None:
    """Downloads the kernel to a temporary folder, which is then renamed to ``kernel``."""
    with tempfile.TemporaryDirectory(dir=kernel.parent) as name:
        work = Path(name)
        tree = work / "package"
        _fetch(work, tree)
        version = next((tree / "lib/modules").iterdir()).name
        packages.call("depmod", "-b", tree, version)
        done = work / "done"
        done.mkdir()
        shutil.copy(tree / f"boot/vmlinuz-{version}", done / "vmlinuz")
        root = work / "root"
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True)
        busybox = shutil.which("busybox")
        assert busybox is not None  # The function why_not() has checked that busybox exists.
        shutil.copy(busybox, root / "bin/busybox")
        shutil.copy(INIT, root / "init")
        (root / "init").chmod(0o755)
        _copy_modules(tree, version, root / "modules")
        names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
        archive = packages.call(
            *"cpio --create --format=newc --owner=0:0 --quiet".split(),
            cwd=root,
            stdin="\n".join(names),
        )
        (done / "initrd").write_bytes(archive)
        done.rename(kernel)


def _fetch(work: Path, tree: Path) -> None:
    """Downloads the dependency of :data:`KERNEL` to ``work``, and unpacks it to ``tree``."""
    try:
        listed = packages.call("apt-cache", "depends", "--important", KERNEL).decode().split()
        package = next(word for word in listed if word.startswith("linux-image-6.12."))
        packages.call("apt-get", "-qq", "download", package, cwd=work)
    except (LabError, FileNotFoundError, StopIteration) as error:
        raise LabError(f"the RDMA lab needs the Debian package {KERNEL} ({error})") from None
    packages.call("dpkg", "-x", next(work.glob("*.deb")), tree)


def _copy_modules(tree: Path, version: str, target: Path) -> None:
    """Copies kernel modules to ``target``, with numbered names in the order of loading.

    Modules that are required by these modules are also copied. ``tree`` is the unpacked package of
    the kernel ``version``.
    """
    files: dict[str, None] = {}
    for module in MODULES:
        shown = packages.call(
            "modprobe", "-d", tree, "-S", version, "--show-depends", module
        ).decode()
        files.update(
            (line.split()[1], None) for line in shown.splitlines() if line.startswith("insmod")
        )
    for number, file in enumerate(files):
        copy = target / f"{number:03}-{Path(file).name}"
        shutil.copy(file, copy)
        if copy.suffix == ".xz":
            packages.call("xz", "--decompress", copy)


def arguments(
    kernel: Path,
    rank: int,
    links: Sequence[socket.socket],
    *,
    memory_mib: int,
    folders: Mapping[str, Path],
    variables: Sequence[str],
) -> list[str]:
    """Returns the command that starts node ``rank``.

    Args:
        kernel: Folder that was returned by :func:`prepare`.
        rank: Index of the node.
        links: Sockets of the node's links to other nodes. A hub joins the links if there are
            several.
        memory_mib: Memory of the node, in MiB.
        folders: Folders that the node mounts with write access, keyed by mount tag.
        variables: Environment variables of the node's first process, as ``NAME=VALUE``.
    """
    command = "qemu-system-x86_64 -accel tcg -cpu max -nodefaults -display none -no-reboot".split()
    command += ["-m", str(memory_mib), "-serial", "stdio"]
    command += ["-kernel", str(kernel / "vmlinuz"), "-initrd", str(kernel / "initrd")]
    # Turn off the kernel's timer check, because it would fail on a busy host.
    options = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check"
    command += ["-append", f"{options} {' '.join(variables)}"]
    link = "dgram,id={},local.type=fd,local.str={}".format
    if len(links) == 1:
        command += ["-netdev", link("net", links[0].fileno())]
    else:
        command += ["-netdev", "hubport,id=net,hubid=0"]
        for index, end in enumerate(links):
            command += ["-netdev", link(f"link{index}", end.fileno())]
            command += ["-netdev", f"hubport,id=port{index},hubid=0,netdev=link{index}"]
    command += ["-device", f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:{rank + 1:02x}"]
    for tag, path, more in (
        ("host", Path("/"), ",readonly=on,multidevs=remap"),
        *((tag, path, "") for tag, path in folders.items()),
    ):
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none{more}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return command
